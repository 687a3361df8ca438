"""Reward functions of users: calls and retries, checks of what they return, and the metrics that they log.

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

from alpaca_ppo.async_calls import await_all, name_of, parameters_of
from alpaca_ppo.config.fields import shown
from alpaca_ppo.rewards.batch import RewardBatch, RewardError, RowFailure, copied

# Arguments that the trainer gives to functions that name them in their signatures.
OFFERED = ("trainer_state", "log_metric")
RowScore = float | list[float] | None
MAX_FLOAT32 = torch.finfo(torch.float32).max
# In seconds; pauses before retries take 1 s, 2 s, 4 s and so on, up to this.
LONGEST_PAUSE = 64.0


class FunctionReward:
    """A Python function with TRL's signature, `f(prompts, completions, **columns) -> list[float | None]`; it may be
    async.

    Its keyword arguments are `prompts`, `completions`, `completion_ids` and every other dataset column, each a list of
    B entries; with environments, `environments`, each as its row's episode left it; and if it names them, `log_metric`
    and `trainer_state`, unless a column has that name. Without `**kwargs` it gets only those in its signature. For each
    row it returns a number, None to leave the row to other sources, or a list with one number for each token of
    `completion_ids`.

    Attributes:
        context: the values of `OFFERED`; empty without a trainer.
    """

    def __init__(self, function: Callable[..., Any], *, name: str | None = None) -> None:
        self.function = function
        self.name = name or name_of(function).strip("<>")
        self.context: dict[str, Any] = {}
        self.parameters = parameters_of(function)

    def keywords(self, batch: RewardBatch) -> dict[str, Any]:
        """Returns the function's arguments for `batch`, with copies (`copied`) of prompts, completions and columns."""
        names = ("prompts", "completions", "completion_ids")
        shared = {name: getattr(batch, name) for name in names} | batch.columns
        of_run = dict(self.context)
        if episodes := batch.episodes:
            of_run |= {"environments": [episode.environment for episode in episodes], "episodes": list(episodes)}
        accepted, _, takes_any = self.parameters
        wanted = {*accepted, "environments", *shared} if takes_any else {*accepted}
        uncopied = {name: value for name, value in of_run.items() if name in wanted}
        return uncopied | {name: [copied(v) for v in values] for name, values in shared.items() if name in wanted}


@dataclass(frozen=True)
class FailureHandling:
    """What happens if a reward function raises.

    Attributes:
        retries: further calls of the function, with pauses (`LONGEST_PAUSE`).
        mask_rows: after the last retry, True masks the rows that fail when scored one by one, and those without any
            score; False ends the run.
    """

    retries: int = 0
    mask_rows: bool = False


def call_functions(
    sources: Sequence[FunctionReward], batch: RewardBatch, failure_handling: FailureHandling
) -> list[Any]:
    """Returns what each function returned for `batch`, unchecked.

    Functions that raise are called again. If a function still raises in the last attempt, it is called for each row
    separately to find the rows at fault. With `mask_rows`, a `RowFailure` then takes the place of their scores.

    Raises:
        RewardError: without `mask_rows`, if a function raises in all attempts; it is chained to the exception and names
            the first row for which the function raises. Also if a call for a single row does not return one score.
    """
    outcomes: list[Any] = [None] * len(sources)
    pending = list(range(len(sources)))
    for attempt in range(failure_handling.retries + 1):
        if attempt:
            # The inner minimum keeps the power finite.
            time.sleep(min(2.0 ** min(attempt - 1, 10), LONGEST_PAUSE))
        calls = [partial(sources[i].function, **sources[i].keywords(batch)) for i in pending]
        for i, outcome in zip(pending, _call_all(calls), strict=True):
            outcomes[i] = outcome
        pending = [i for i in pending if isinstance(outcomes[i], BaseException)]
        if not pending:
            break
    for i in pending:
        outcomes[i] = _call_on_rows(sources[i], batch, outcomes[i], failure_handling)
    return outcomes


def _call_on_rows(
    source: FunctionReward, batch: RewardBatch, error: BaseException, failure_handling: FailureHandling
) -> list[Any]:
    """Calls `source` for each row, after its last call with the whole batch has raised `error`; returns a score or a
    `RowFailure` for each row. Without `mask_rows` it always raises, after it has found the first row at fault.
    """
    rows = [batch.row(i) for i in range(len(batch))]
    outcomes = _call_all([partial(source.function, **source.keywords(row)) for row in rows])
    if not failure_handling.mask_rows:
        first = next((i for i, outcome in enumerate(outcomes) if isinstance(outcome, BaseException)), None)
        attempts = f" in the last of {failure_handling.retries + 1} attempts" if failure_handling.retries else ""
        raise RewardError(source.name, f"raised {type(error).__name__}: {error}{attempts}", batch, first) from error
    scores: list[Any] = []
    for i, outcome in enumerate(outcomes):
        if isinstance(outcome, BaseException):
            failure = RowFailure(source.name, f"raised {type(outcome).__name__}: {outcome}", batch, i)
            failure.__cause__ = outcome
            scores.append(failure)
        else:
            scores += score_list(source.name, outcome, rows[i])
    return scores


def _call_all(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Returns each call's result or exception. Awaitables are awaited, even if another call fails."""
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


def score_list(name: str, result: Any, batch: RewardBatch) -> list[Any]:
    """Returns `result`, of the source `name` for `batch`, as a list with one entry per row.

    Raises:
        RewardError: if it is not a list, tuple, tensor or array of that length.
    """
    result = _as_python(result)
    if not isinstance(result, (list, tuple)):
        raise RewardError(name, f"returned a {type(result).__name__} instead of a list of {len(batch)} numbers", batch)
    if len(result) != len(batch):
        raise RewardError(name, f"returned {len(result)} scores for {len(batch)} responses", batch)
    return list(result)


def check_row(name: str, score: Any, batch: RewardBatch, row: int) -> RowScore:
    """Returns the score of one row as a float, a list with a float for each token, or None.

    Raises:
        RewardError: if it is not a number, or a list without one number for each token.
        RowFailure: if it is not finite in float32, or itself a `RowFailure`.
    """
    if isinstance(score, RowFailure):
        raise score
    if score is None:
        return None
    score = _as_python(score)
    is_per_token = isinstance(score, (list, tuple))
    numbers = score if is_per_token else [score]
    for number in numbers:
        if not isinstance(number, Real):
            raise RewardError(name, f"returned {shown(number)}, a {type(number).__name__} and not a number", batch, row)
        # Also catches NaN, and numbers that overflow float32.
        if not -MAX_FLOAT32 <= cast(float, number) <= MAX_FLOAT32:
            raise RowFailure(name, f"returned {shown(number)}, which is not finite in float32", batch, row)
    if not is_per_token:
        return float(score)
    tokens = len(batch.completion_ids[row])
    if len(numbers) != tokens:
        raise RewardError(name, f"returned {len(numbers)} token scores for {tokens} response tokens", batch, row)
    return [float(number) for number in numbers]


def _as_python(value: Any) -> Any:
    return value.tolist() if isinstance(value, (Tensor, np.ndarray, np.generic)) else value


class LoggedMetrics:
    """What reward functions have logged on this rank. Several threads may call `log`."""

    def __init__(self) -> None:
        self._values: list[tuple[str, float]] = []

    def log(self, name: str, value: float) -> None:
        """Adds a value to the metric `name`, of which the run logs the mean over a step.

        Raises:
            ValueError: if the name is empty or has spaces, or the value is not finite.
        """
        if name.split() != [name] or not math.isfinite(value):
            raise ValueError(f"log_metric({name!r}, {value!r}): give a word without spaces and a finite number")
        self._values.append((name, float(value)))

    def pop(self) -> dict[str, list[float]]:
        """Returns [sum, number] of the values of each name, and clears them."""
        values, self._values = self._values, []
        return merged([{name: [value, 1]} for name, value in values])


def merged(parts: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """Adds up [sum, number] of each name over `parts`, such as those of all ranks."""
    totals = {}
    for name in sorted({name for part in parts for name in part}):
        pairs = [part[name] for part in parts if name in part]
        totals[name] = [math.fsum(total for total, _ in pairs), sum(number for _, number in pairs)]
    return totals
