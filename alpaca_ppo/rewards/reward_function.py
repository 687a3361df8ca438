"""User-supplied reward functions: finding them by name, calling them, and tracing an exception to its row.

Async functions of one batch run concurrently. Checking the returned scores is the scorer's job.
"""

import asyncio
import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from alpaca_ppo.rewards.batch import RewardBatch, RewardError


class FunctionReward:
    """A Python function with TRL's signature, `f(prompts, completions, **columns) -> list[float | None]`.

    It may be async. It is called with keyword arguments: `prompts`, `completions`, `completion_ids` and every other
    dataset column, each a list of B entries. A function without `**kwargs` gets only the arguments in its signature.
    For each row it returns a number, None to leave the row to other sources, or a list with one number for each token
    of `completion_ids`.
    """

    def __init__(self, function: Callable[..., Any], *, name: str | None = None) -> None:
        self.function = function
        self.name = name or _name_of(function)
        parameters = inspect.signature(function).parameters.values()
        self._takes_any_keyword = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self._accepted = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self._required = [p.name for p in parameters if p.name in self._accepted and p.default is p.empty]

    def keywords(self, batch: RewardBatch) -> dict[str, Any]:
        """Returns the function's arguments for `batch`.

        Raises:
            RewardError: if the function requires a column that the dataset does not have.
        """
        available: dict[str, Any] = {
            "prompts": batch.prompts,
            "completions": batch.completions,
            "completion_ids": batch.completion_ids,
            **batch.columns,
        }
        missing = [name for name in self._required if name not in available]
        if missing:
            problem = f"requires the arguments {missing}, but only {list(available)} are available"
            raise RewardError(self.name, problem, batch, None)
        if self._takes_any_keyword:
            return available
        return {name: available[name] for name in self._accepted if name in available}


def call_functions(sources: Sequence[FunctionReward], batch: RewardBatch) -> list[Any]:
    """Returns the result of each function for `batch`; async functions run concurrently.

    Raises:
        RewardError: chained to the function's own exception. To find the row at fault, the function is called again on
            each row separately; the error names the first row that raises.
    """
    outcomes = _call_all([functools.partial(source.function, **source.keywords(batch)) for source in sources])
    for source, outcome in zip(sources, outcomes, strict=True):
        if isinstance(outcome, BaseException):
            by_row = _call_all(
                [functools.partial(source.function, **source.keywords(batch.row(i))) for i in range(len(batch))]
            )
            row = next((i for i, result in enumerate(by_row) if isinstance(result, BaseException)), None)
            raise RewardError(source.name, f"raised {type(outcome).__name__}: {outcome}", batch, row) from outcome
    return outcomes


def load_reward_function(spec: str) -> Callable[..., Any]:
    """Returns the function that `spec` names: "package.module:function" or "path/to/file.py:function".

    A module is looked up in the working directory first, then on Python's path. While a file is loaded, modules in its
    folder can be imported.

    Raises:
        ValueError: if `spec` has another form, or the module, file or function does not exist. An exception raised
            inside the module is passed on unchanged.
    """
    target, _, name = spec.rpartition(":")
    if not target or not name.isidentifier():
        raise ValueError(f"reward function {spec!r} must be 'module:function' or 'path/to/file.py:function'")
    module = _module_from_file(target, spec) if target.endswith(".py") else _module_by_name(target, spec)
    function = getattr(module, name, None)
    if not callable(function):
        found = [key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")]
        raise ValueError(f"reward function {spec!r}: {target} has no function {name!r}, only {found}")
    return function


def _module_from_file(target: str, spec: str) -> ModuleType:
    path = Path(target).resolve()
    if not path.is_file():
        raise ValueError(f"reward function {spec!r}: the file {path} does not exist")
    # A file is loaded once, so that two functions from it share the module's state. With the prefix, it cannot replace
    # an imported module of the same name.
    module_name = f"_reward_file_{path.stem}_{abs(hash(path)):x}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    found = importlib.util.spec_from_file_location(module_name, path)
    assert found is not None and found.loader is not None, path
    module = importlib.util.module_from_spec(found)
    sys.modules[module_name] = module
    try:
        with _importable(path.parent):
            found.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module


def _module_by_name(target: str, spec: str) -> ModuleType:
    try:
        with _importable(Path.cwd()):
            return importlib.import_module(target)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if target != missing and not target.startswith(f"{missing}."):
            raise
        raise ValueError(
            f"reward function {spec!r}: there is no module {missing!r} in {Path.cwd()} or on Python's path; "
            "use the file's path instead: path/to/file.py:function"
        ) from error


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Puts `folder` first on Python's path: `python script.py` adds the script's folder, not the working directory."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def _name_of(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__)).strip("<>")


def _call_all(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Returns each call's result, or the exception that it raised. All awaitables are awaited, even if a call fails."""
    outcomes: list[Any] = []
    for call in calls:
        try:
            outcomes.append(call())
        except Exception as error:
            outcomes.append(error)
    pending = [i for i, outcome in enumerate(outcomes) if inspect.isawaitable(outcome)]
    if pending:
        for i, result in zip(pending, _run([outcomes[i] for i in pending]), strict=True):
            outcomes[i] = result
    return outcomes


async def _gather(awaitables: Sequence[Awaitable[Any]]) -> list[Any]:
    return await asyncio.gather(*awaitables, return_exceptions=True)


def _run(awaitables: Sequence[Awaitable[Any]]) -> list[Any]:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(_gather(awaitables))
    # In a notebook, this thread already runs an event loop, and a thread can run only one.
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(lambda: asyncio.run(_gather(awaitables))).result()
