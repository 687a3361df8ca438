"""User-supplied reward functions: calling them, again if they raise, and tracing an exception to its row.

Async functions of one batch run concurrently. The returned scores are checked in `score_checks`.
"""

import asyncio
import inspect
import re
import time
from collections.abc import Awaitable, Callable, Collection, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch

from alpaca_ppo.rewards.batch import RewardBatch, RewardError, RowFailure, copied
from alpaca_ppo.rewards.score_checks import score_list

OFFERED = ("trainer_state", "log_metric")
"""What the trainer gives to functions that name it in their signatures."""
MAX_PAUSE = 86400.0
"""Seconds of the longest pause before a retry: a day."""

T = TypeVar("T")


class Pending(NamedTuple):
    """What is to be awaited before the next calls."""

    awaitables: Sequence[Awaitable[Any]]
    has_failed: bool
    """Whether a call that was made together with these has raised already, so that more calls follow for certain."""


Calls = Generator[Pending, list[Any] | None, T]
"""Calls of functions of which some are async; see `function_calls`."""


class FunctionReward:
    """A Python function with TRL's signature, `f(prompts, completions, **columns) -> list[float | None]`.

    It may be async. It is called with keyword arguments: `prompts`, `completions`, `completion_ids` and every other
    dataset column, each a list of B entries. A function without `**kwargs` gets only the arguments in its signature.
    One that names `log_metric` or `trainer_state` in its signature gets these from the trainer (`context`); a column of
    that name comes first.
    For each row it returns a number, None to leave the row to other sources, or a list with one number for each token
    of `completion_ids`.
    Where there are environments, `environments` is a list of them, in the state in which each row's episode ended.
    """

    def __init__(self, function: Callable[..., Any], *, name: str | None = None) -> None:
        self.function = function
        self.name = name or _name_of(function)
        self.context: Mapping[str, Any] = {}
        """What the trainer offers besides the columns, by the names under which functions ask for it."""
        parameters = inspect.signature(function).parameters.values()
        self._takes_any_keyword = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self._accepted = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self._required = [p.name for p in parameters if p.name in self._accepted and p.default is p.empty]

    @property
    def logs_metrics(self) -> bool:
        """Whether the function asks for `log_metric`."""
        return "log_metric" in self._accepted

    def missing(self, available: Collection[str]) -> list[str]:
        """The required arguments that are neither `available` nor offered by the trainer."""
        return [name for name in self._required if name not in available and name not in self.context]

    def keywords(self, batch: RewardBatch) -> dict[str, Any]:
        """Returns the function's arguments for `batch`: copies, which the function may change.

        Raises:
            RewardError: if the function requires a column that the dataset does not have.
        """
        available, objects = batch.arguments(), batch.objects()
        context = {**self.context, **objects}
        offered = {name: context[name] for name in self._accepted if name in context and name not in available}
        if objects and self._takes_any_keyword:
            offered["environments"] = objects["environments"]
        if missing := self.missing([*available, *objects]):
            problem = f"requires the arguments {missing}, but only {list(available)} are available"
            raise RewardError(self.name, problem, batch, None)
        names = available if self._takes_any_keyword else [name for name in self._accepted if name in available]
        return {name: copied(name, available[name]) for name in names} | offered


@dataclass(frozen=True)
class FailurePolicy:
    """What happens if a reward function raises."""

    retries: int = 0
    """Times that it is called again."""
    pause: float = 1.0
    """Seconds before the first of these calls; each further pause is twice as long as the one before, up to a day."""
    mask: bool = False
    """After the last retry: True leaves the rows that fail when scored one by one without a reward, and those that no
    source scores; False ends the run."""


class FunctionScores(NamedTuple):
    """What a function returned for a batch."""

    scores: Any
    """Unchecked. After a call for each row, a list of B entries, None for a row that failed."""
    failures: dict[int, RowFailure]
    """The error of each row that failed."""


def call_functions(
    sources: Sequence[FunctionReward],
    batch: RewardBatch,
    policy: FailurePolicy,
    on_source: Callable[[str], Any] = lambda name: None,
) -> list[FunctionScores]:
    """Returns the result of each function for `batch`; async functions run concurrently.

    A function that raises is called again as `policy` says; functions that have returned are not. If it still raises,
    it is called on each row separately, to find the rows at fault.

    Raises:
        RewardError: chained to the function's own exception, unless `policy` masks rows; names the first row that
            raises. Also if a call for a single row does not return one score.
    """
    calls, outcomes = function_calls(sources, batch, policy, pause=time.sleep, on_source=on_source), None
    with _EventLoop() as loop:
        while True:
            try:
                pending = calls.send(outcomes)
            except StopIteration as finished:
                scores: list[FunctionScores] = finished.value
                return scores
            outcomes = loop.run(pending.awaitables)


def function_calls(
    sources: Sequence[FunctionReward],
    batch: RewardBatch,
    policy: FailurePolicy,
    *,
    pause: Callable[[float], Any],
    on_source: Callable[[str], Any] = lambda name: None,
) -> Calls[list[FunctionScores]]:
    """Makes the calls of `call_functions`, and leaves it to the caller how to await: a generator that yields what is
    pending, to be sent the result of each awaitable or the exception that it raised.

    Args:
        sources: functions.
        batch: the rows.
        policy: what happens if a function raises.
        pause: called with the seconds between two attempts.
        on_source: called with the name of a source before its calls.
    """
    outcomes = yield from _call_all([_call(source, batch, on_source) for source in sources])
    first = list(outcomes)
    for attempt in range(policy.retries):
        failed = [i for i, outcome in enumerate(outcomes) if isinstance(outcome, BaseException)]
        if not failed:
            break
        pause(_pause_before(attempt, policy))
        again = yield from _call_all([_call(sources[i], batch, on_source) for i in failed])
        for i, outcome in zip(failed, again, strict=True):
            outcomes[i] = outcome
    results = []
    for source, earliest, outcome in zip(sources, first, outcomes, strict=True):
        if isinstance(outcome, BaseException):
            results.append((yield from _row_by_row(source, batch, (earliest, outcome), policy)))
        else:
            results.append(FunctionScores(outcome, {}))
    return results


def _pause_before(attempt: int, policy: FailurePolicy) -> float:
    # The exponent is limited because a large power overflows.
    return min(policy.pause * 2.0 ** min(attempt, 64), MAX_PAUSE)


def _row_by_row(
    source: FunctionReward, batch: RewardBatch, raised: tuple[BaseException, BaseException], policy: FailurePolicy
) -> Calls[FunctionScores]:
    """Calls `source` on each row, after the first and the last call with the whole batch have `raised`."""
    by_row = yield from _call_all([_call(source, batch.row(i)) for i in range(len(batch))])
    first, last = raised
    if not policy.mask:
        row = next((i for i, result in enumerate(by_row) if isinstance(result, BaseException)), None)
        attempts = f" in each of {policy.retries + 1} attempts" if policy.retries else ""
        if _described(first) != _described(last):
            attempts = f" in the last of {policy.retries + 1} attempts and {_described(first)} in the first"
        raise RewardError(
            source.name, f"raised {_described(last)}{attempts}{_kind_hint(last, batch)}", batch, row
        ) from last
    scores: list[Any] = []
    failures: dict[int, RowFailure] = {}
    for i, result in enumerate(by_row):
        if isinstance(result, BaseException):
            # The text of an error may differ from call to call; another type is likely to be a consequence.
            earlier = f", after {_described(first)} on the whole batch" if type(first) is not type(result) else ""
            problem = f"raised {_described(result)}{earlier}{_kind_hint(result, batch)}"
            failures[i] = RowFailure(source.name, problem, batch, i)
            failures[i].__cause__ = result
            scores.append(None)
        else:
            scores += score_list(source.name, result, batch.row(i))
    return FunctionScores(scores, failures)


def _call(
    source: FunctionReward, batch: RewardBatch, on_source: Callable[[str], Any] = lambda name: None
) -> Callable[[], Any]:
    call = partial(source.function, **source.keywords(batch))

    def announced() -> Any:
        on_source(source.name)
        return call()

    return announced


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _kind_hint(error: BaseException, batch: RewardBatch) -> str:
    """What may have been mistaken, if `error` looks as if a function took text for messages, or the reverse."""
    if isinstance(batch.completions[0], str):
        if isinstance(error, TypeError) and "string indices must be integers" in str(error):
            return "; completions are text here, because the prompts are text, not messages with a role and content"
    elif isinstance(error, TypeError | AttributeError) and re.search(r"'(list|dict)'", str(error)):
        return "; completions are messages here, because the prompts are: the text is completion[0]['content']"
    return ""


def _name_of(function: Any) -> str:
    while isinstance(function, partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__)).strip("<>")


def _call_all(calls: Sequence[Callable[[], Any]]) -> Calls[list[Any]]:
    """Returns each call's result, or the exception that it raised. All awaitables are yielded, even if a call fails."""
    outcomes: list[Any] = []
    for call in calls:
        try:
            outcomes.append(call())
        except Exception as error:
            outcomes.append(error)
    pending = [i for i, outcome in enumerate(outcomes) if inspect.isawaitable(outcome)]
    if pending:
        has_failed = any(isinstance(outcome, BaseException) for outcome in outcomes)
        results = yield Pending([outcomes[i] for i in pending], has_failed)
        assert results is not None, "whoever drives the calls sends the outcomes of what was yielded"
        for i, result in zip(pending, results, strict=True):
            outcomes[i] = result
    return outcomes


async def _gather(awaitables: Sequence[Awaitable[Any]]) -> list[Any]:
    return await asyncio.gather(*awaitables, return_exceptions=True)


class _EventLoop:
    """One event loop for all calls of a batch, so that what a function keeps between its attempts (a client, a lock)
    still belongs to a running loop. The thread is free between the calls, and a signal can interrupt a pause.
    """

    def __enter__(self) -> "_EventLoop":
        self._runner = asyncio.Runner()
        self._pool: ThreadPoolExecutor | None = None
        return self

    def run(self, awaitables: Sequence[Awaitable[Any]]) -> list[Any]:
        """Returns each result, or the exception that was raised."""
        if self._pool is None and _runs_a_loop():
            self._pool = ThreadPoolExecutor(max_workers=1, initializer=same_device())
        return self._here(lambda: self._runner.run(_gather(awaitables)))

    def _here(self, call: Callable[[], Any]) -> Any:
        # In a notebook, this thread already runs an event loop, and a thread can run only one.
        return call() if self._pool is None else self._pool.submit(call).result()

    def __exit__(self, *exception: object) -> None:
        try:
            self._here(self._runner.close)
        finally:
            if self._pool is not None:
                self._pool.shutdown()


def same_device() -> Callable[[], None]:
    """Returns a function that gives another thread the CUDA device of this one; a new thread's is cuda:0."""
    # Where CUDA is not in use, there is nothing to pass on, and to ask for the device would start it.
    return partial(torch.cuda.set_device, torch.cuda.current_device()) if torch.cuda.is_initialized() else _no_device


def _no_device() -> None:
    """Does nothing: what a thread needs where CUDA is not in use."""


def _runs_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
