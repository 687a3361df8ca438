"""Reward functions of the user's: how they are found, called (async ones together), and how their errors find their
row."""

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from alpaca_ppo.config.modules import NoSuchModule, load_module
from alpaca_ppo.rewards.batch import RewardBatch, RewardError


class FunctionReward:
    """A python function with TRL's signature, `f(prompts, completions, **columns) -> list[float | None]`, sync or
    async.

    It is called with keywords: `prompts`, `completions`, `completion_ids` and every other dataset column, each a list
    of B entries. A function without `**kwargs` gets those that it names. It returns B numbers, or None for a row that
    it has no opinion on, or a list of numbers for a row, one for each token of its `completion_ids`.
    """

    def __init__(self, function: Callable[..., Any], *, name: str | None = None) -> None:
        self.function = function
        self.name = name or _name_of(function)
        parameters = inspect.signature(function).parameters.values()
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self._named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self._required = [p.name for p in parameters if p.name in self._named and p.default is p.empty]

    def keywords(self, batch: RewardBatch) -> dict[str, Any]:
        """The function's arguments for `batch`.

        Raises:
            RewardError: where the function requires a column that the dataset does not have.
        """
        given: dict[str, Any] = {
            "prompts": batch.prompts,
            "completions": batch.completions,
            "completion_ids": batch.completion_ids,
            **batch.columns,
        }
        missing = [name for name in self._required if name not in given]
        if missing:
            problem = f"requires {missing}, which the dataset does not have (it gives {list(given)})"
            raise RewardError(self.name, problem, batch, None)
        return given if self._takes_all else {name: given[name] for name in self._named if name in given}


def call_functions(sources: Sequence[FunctionReward], batch: RewardBatch) -> list[Any]:
    """What each function returned for `batch`; async functions wait together.

    Raises:
        RewardError: from the function's own exception, with the first row that raises on its own: the function is
            called again, row by row.
    """
    outcomes = _outcomes([functools.partial(source.function, **source.keywords(batch)) for source in sources])
    for source, outcome in zip(sources, outcomes, strict=True):
        if isinstance(outcome, BaseException):
            alone = _outcomes(
                [functools.partial(source.function, **source.keywords(batch.row(i))) for i in range(len(batch))]
            )
            row = next((i for i, result in enumerate(alone) if isinstance(result, BaseException)), None)
            raise RewardError(source.name, f"raised {type(outcome).__name__}: {outcome}", batch, row) from outcome
    return outcomes


def load_reward_function(spec: str) -> Callable[..., Any]:
    """The function that `spec` names: "package.module:function" or "path/to/file.py:function".

    Relative paths and modules are looked up as in `config.modules.load_module`.

    Raises:
        ValueError: where `spec` has no such form, or the module, file or function does not exist. An error inside the
            module stays as it is.
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
        raise ValueError(f"reward function {spec!r}: {target} has no function {name!r}; it has {found}")
    return function


def _name_of(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__)).strip("<>")


def _outcomes(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """The result of each call, or the exception it raised. Every awaitable is awaited, also beside a failure."""
    outcomes: list[Any] = []
    for call in calls:
        try:
            outcomes.append(call())
        except Exception as error:
            outcomes.append(error)
    waiting = [i for i, outcome in enumerate(outcomes) if inspect.isawaitable(outcome)]
    if waiting:
        for i, result in zip(waiting, _run([outcomes[i] for i in waiting]), strict=True):
            outcomes[i] = result
    return outcomes


async def _gather(awaitables: Sequence[Awaitable[Any]]) -> list[Any]:
    return await asyncio.gather(*awaitables, return_exceptions=True)


def _run(awaitables: Sequence[Awaitable[Any]]) -> list[Any]:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(_gather(awaitables))
    # A notebook's loop already runs in this thread, and one thread runs one loop.
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(lambda: asyncio.run(_gather(awaitables))).result()
