"""User-supplied reward functions: calling them, again if they raise, and tracing an exception to its row.

Functions are called in the main thread; async ones run together in the process's event loop. The returned scores are
checked in `scorer`.
"""

import inspect
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

from alpaca_ppo.async_calls import await_all, parameters_of
from alpaca_ppo.rewards.batch import RewardBatch, RewardError, RowFailure, copied
from alpaca_ppo.rewards.score_checks import score_list

OFFERED = ("trainer_state", "log_metric")
"""What the trainer gives to functions that name it in their signatures."""
LONGEST_PAUSE = 64.0
"""Seconds. The first pause before a retry takes 1 s, each further one twice as long as the one before, up to this."""


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
        self._parameters = parameters_of(function)

    @property
    def logs_metrics(self) -> bool:
        """Whether the function asks for `log_metric`."""
        return "log_metric" in self._parameters.names

    def missing(self, available: Collection[str]) -> list[str]:
        """The required arguments that are neither `available` nor offered by the trainer."""
        return [name for name in self._parameters.required if name not in available and name not in self.context]

    def keywords(self, batch: RewardBatch) -> dict[str, Any]:
        """Returns the function's arguments for `batch`: copies, which the function may change.

        Raises:
            RewardError: if the function requires a column that the dataset does not have.
        """
        available, objects = batch.arguments(), batch.objects()
        context = {**self.context, **objects}
        accepted, _, takes_any = self._parameters
        offered = {name: context[name] for name in accepted if name in context and name not in available}
        if objects and takes_any:
            offered["environments"] = objects["environments"]
        if missing := self.missing([*available, *objects]):
            problem = f"requires the arguments {missing}, but only {list(available)} are available"
            raise RewardError(self.name, problem, batch, None)
        names = available if takes_any else [name for name in accepted if name in available]
        return {name: copied(name, available[name]) for name in names} | offered


@dataclass(frozen=True)
class FailurePolicy:
    """What happens if a reward function raises."""

    retries: int = 0
    """Times that it is called again, after pauses of 1 s, 2 s, 4 s and so on up to `LONGEST_PAUSE`."""
    mask: bool = False
    """After the last retry: True leaves the rows that fail when scored one by one without a reward, and those that no
    source scores; False ends the run."""


class FunctionScores(NamedTuple):
    """What a source returned for a batch."""

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

    Args:
        sources: functions.
        batch: the rows.
        policy: what happens if a function raises.
        on_source: called with the name of a source before its calls.

    Raises:
        RewardError: chained to the function's own exception, unless `policy` masks rows; names the first row that
            raises. Also if a call for a single row does not return one score.
    """

    def call(source: FunctionReward) -> Callable[[], Any]:
        keywords = source.keywords(batch)
        return lambda: (on_source(source.name), source.function(**keywords))[1]

    outcomes = _call_all([call(source) for source in sources])
    first = list(outcomes)
    for attempt in range(policy.retries):
        failed = [i for i, outcome in enumerate(outcomes) if isinstance(outcome, BaseException)]
        if not failed:
            break
        time.sleep(min(2.0 ** min(attempt, 10), LONGEST_PAUSE))
        for i, outcome in zip(failed, _call_all([call(sources[i]) for i in failed]), strict=True):
            outcomes[i] = outcome
    return [
        _row_by_row(source, batch, (earliest, outcome), policy)
        if isinstance(outcome, BaseException)
        else FunctionScores(outcome, {})
        for source, earliest, outcome in zip(sources, first, outcomes, strict=True)
    ]


def _row_by_row(
    source: FunctionReward, batch: RewardBatch, raised: tuple[BaseException, BaseException], policy: FailurePolicy
) -> FunctionScores:
    """Calls `source` on each row, after the first and the last call with the whole batch have `raised`."""
    rows = [batch.row(i) for i in range(len(batch))]
    by_row = _call_all([partial(source.function, **source.keywords(row)) for row in rows])
    first, last = raised
    if not policy.mask:
        row = next((i for i, result in enumerate(by_row) if isinstance(result, BaseException)), None)
        attempts = f" in each of {policy.retries + 1} attempts" if policy.retries else ""
        if _described(first) != _described(last):
            attempts = f" in the last of {policy.retries + 1} attempts and {_described(first)} in the first"
        raise RewardError(source.name, f"raised {_described(last)}{attempts}", batch, row) from last
    scores: list[Any] = []
    failures: dict[int, RowFailure] = {}
    for i, result in enumerate(by_row):
        if isinstance(result, BaseException):
            # The text of an error may differ from call to call; another type is likely to be a consequence.
            earlier = f", after {_described(first)} on the whole batch" if type(first) is not type(result) else ""
            failures[i] = RowFailure(source.name, f"raised {_described(result)}{earlier}", batch, i)
            failures[i].__cause__ = result
            scores.append(None)
        else:
            scores += score_list(source.name, result, rows[i])
    return FunctionScores(scores, failures)


def _call_all(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Each call's result, or the exception that it raised. What is awaitable is awaited, even if another call fails."""
    outcomes: list[Any] = []
    for call in calls:
        try:
            outcomes.append(call())
        except Exception as error:
            outcomes.append(error)
    pending = [i for i, outcome in enumerate(outcomes) if inspect.isawaitable(outcome)]
    if pending:
        awaited = await_all([cast(Awaitable[Any], outcomes[i]) for i in pending])
        for i, result in zip(pending, awaited, strict=True):
            outcomes[i] = result
    return outcomes


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _name_of(function: Any) -> str:
    while isinstance(function, partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__)).strip("<>")
