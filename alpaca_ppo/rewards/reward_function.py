"""User-supplied reward functions: finding them by name, calling them, and tracing an exception to its row.

Async functions of one batch run concurrently. Checking the returned scores is the scorer's job.
"""

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from alpaca_ppo.config.modules import NoSuchModule, load_module
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

    Relative paths and modules are looked up as in `config.modules.load_module`.

    Raises:
        ValueError: if `spec` has another form, or the module, file or function does not exist. An exception raised
            inside the module is passed on unchanged.
    """
    target, _, name = spec.rpartition(":")
    if not target or not name.isidentifier():
        raise ValueError(f"reward function {spec!r} must be 'module:function' or 'path/to/file.py:function'")
    try:
        module = load_module(target)
    except NoSuchModule as error:
        raise ValueError(f"reward function {spec!r}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        found = [key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")]
        raise ValueError(f"reward function {spec!r}: {target} has no function {name!r}, only {found}")
    return function


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
