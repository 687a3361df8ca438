"""User-supplied reward functions: calling them, again if they raise, tracing an exception to its row, checks of what
they return, and the metrics that they log themselves.

Functions are called in the main thread; async ones run together in the process's event loop.
"""

import inspect
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from alpaca_ppo.async_calls import await_all, parameters_of
from alpaca_ppo.config.fields import shown
from alpaca_ppo.rewards.batch import RewardBatch, RewardError, RowFailure, copied

OFFERED = ("trainer_state", "log_metric")
"""What the trainer gives to functions that name it in their signatures."""
RowScore = float | list[float] | None
MAX_FLOAT32 = torch.finfo(torch.float32).max
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
        self.context: dict[str, Any] = {}
        """What the trainer offers besides the columns, by the names under which functions ask for it."""
        self.parameters = parameters_of(function)

    def keywords(self, batch: RewardBatch) -> dict[str, Any]:
        """Returns the function's arguments for `batch`: copies, which the function may change."""
        columns, objects = batch.arguments(), batch.objects()
        accepted, _, takes_any = self.parameters
        asked = {*accepted, "environments", *columns} if takes_any else {*accepted}
        given = {name: value for name, value in (self.context | objects).items() if name in asked}
        return given | {name: [copied(v) for v in values] for name, values in columns.items() if name in asked}


@dataclass(frozen=True)
class FailurePolicy:
    """What happens if a reward function raises."""

    retries: int = 0
    """Times that it is called again, after pauses of 1 s, 2 s, 4 s and so on up to `LONGEST_PAUSE`."""
    mask: bool = False
    """After the last retry: True leaves the rows that fail when scored one by one without a reward, and those that no
    source scores; False ends the run."""


def call_functions(
    sources: Sequence[FunctionReward],
    batch: RewardBatch,
    policy: FailurePolicy,
    on_source: Callable[[str], Any] = lambda name: None,
) -> list[Any]:
    """Returns what each function returned for `batch`, unchecked; async functions run concurrently.

    A function that raises is called again as `policy` says; functions that have returned are not. If it still raises,
    it is called on each row separately, to find the rows at fault; where `policy` masks these, a `RowFailure` stands
    in place of each one's score.

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
    for attempt in range(policy.retries):
        failed = [i for i, outcome in enumerate(outcomes) if isinstance(outcome, BaseException)]
        if not failed:
            break
        time.sleep(min(2.0 ** min(attempt, 10), LONGEST_PAUSE))
        for i, outcome in zip(failed, _call_all([call(sources[i]) for i in failed]), strict=True):
            outcomes[i] = outcome
    return [
        _row_by_row(source, batch, outcome, policy) if isinstance(outcome, BaseException) else outcome
        for source, outcome in zip(sources, outcomes, strict=True)
    ]


def _row_by_row(source: FunctionReward, batch: RewardBatch, raised: BaseException, policy: FailurePolicy) -> list[Any]:
    """Calls `source` on each row, after the last call with the whole batch has `raised`."""
    rows = [batch.row(i) for i in range(len(batch))]
    scores = _call_all([partial(source.function, **source.keywords(row)) for row in rows])
    if not policy.mask:
        row = next((i for i, result in enumerate(scores) if isinstance(result, BaseException)), None)
        attempts = f" in the last of {policy.retries + 1} attempts" if policy.retries else ""
        problem = f"raised {type(raised).__name__}: {raised}{attempts}"
        raise RewardError(source.name, problem, batch, row) from raised
    for i, result in enumerate(scores):
        if isinstance(result, BaseException):
            scores[i] = RowFailure(source.name, f"raised {type(result).__name__}: {result}", batch, i)
            scores[i].__cause__ = result
        else:
            (scores[i],) = score_list(source.name, result, rows[i])
    return scores


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
        for i, result in zip(pending, await_all([outcomes[i] for i in pending]), strict=True):
            outcomes[i] = result
    return outcomes


def _name_of(function: Any) -> str:
    while isinstance(function, partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__)).strip("<>")


def score_list(name: str, result: Any, batch: RewardBatch) -> list[Any]:
    """Returns what the source `name` returned for `batch` as a list with one entry per row.

    Raises:
        RewardError: if it is no list (or tuple, tensor, array), or has another length.
    """
    result = _as_python(result)
    if not isinstance(result, (list, tuple)):
        raise RewardError(
            name, f"returned a {type(result).__name__} instead of a list of {len(batch)} numbers", batch, None
        )
    if len(result) != len(batch):
        raise RewardError(name, f"returned {len(result)} scores for {len(batch)} responses", batch, None)
    return list(result)


def check_row(name: str, score: Any, batch: RewardBatch, row: int) -> RowScore:
    """Returns the score of one row as a float, a list with a float for each token, or None.

    Raises:
        RewardError: if it is not a number, or its list has not one entry for each token.
        RowFailure: if it is not finite in float32, or one stands in its place.
    """
    if isinstance(score, RowFailure):
        raise score
    if score is None:
        return None
    score = _as_python(score)
    numbers = score if isinstance(score, (list, tuple)) else [score]
    for number in numbers:
        if not isinstance(number, Real):
            raise RewardError(name, f"returned {shown(number)}, a {type(number).__name__} and not a number", batch, row)
        # Also catches NaN, and numbers that overflow float32.
        if not -MAX_FLOAT32 <= cast(float, number) <= MAX_FLOAT32:
            raise RowFailure(name, f"returned {shown(number)}, which is not finite in float32", batch, row)
    if numbers is not score:
        return float(score)
    tokens = len(batch.completion_ids[row])
    if len(numbers) != tokens:
        raise RewardError(name, f"returned {len(numbers)} token scores for {tokens} response tokens", batch, row)
    return [float(number) for number in numbers]


def _as_python(value: Any) -> Any:
    """`value` with tensors, arrays and NumPy's scalars as plain numbers and lists."""
    return value.tolist() if isinstance(value, (Tensor, np.ndarray, np.generic)) else value


class LoggedMetrics:
    """What reward functions have logged on this rank since `pop`: sum and number of the values by name.

    Functions may call it from several threads; a value is added at once.
    """

    def __init__(self) -> None:
        self._values: list[tuple[str, float]] = []

    def log(self, name: str, value: float) -> None:
        """Adds one value to the metric `name`; the run logs the mean of all calls in a step.

        Raises:
            ValueError: if the name is no word, or the value no finite number.
        """
        if name.split() != [name] or not math.isfinite(value):
            raise ValueError(f"log_metric({name!r}, {value!r}): give a word without spaces and a finite number")
        self._values.append((name, float(value)))

    def pop(self) -> dict[str, list[float]]:
        """Returns [sum, number] of the values of each name, and forgets them."""
        values, self._values = self._values, []
        return merged([{name: [value, 1]} for name, value in values])


def merged(parts: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """Returns [sum, number] of each name over `parts`, such as those of all ranks."""
    names = sorted({name for part in parts for name in part})
    of_names = {name: [part[name] for part in parts if name in part] for name in names}
    return {name: [math.fsum(v[0] for v in found), sum(v[1] for v in found)] for name, found in of_names.items()}
