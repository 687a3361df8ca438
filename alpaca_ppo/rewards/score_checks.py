"""Checks of the scores that a reward source returned."""

from collections.abc import Sequence
from numbers import Real
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from alpaca_ppo.config.fields import shown
from alpaca_ppo.rewards.batch import RewardBatch, RewardError, RowFailure

RowScore = float | list[float] | None

_MAX_FLOAT32 = torch.finfo(torch.float32).max


def score_list(name: str, result: Any, batch: RewardBatch) -> list[Any]:
    """Returns what the source `name` returned for `batch` as a list with one entry per row.

    Raises:
        RewardError: if it is no list (or tuple, tensor, array), or has another length.
    """
    result = _as_python(name, result, batch, None)
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
        RowFailure: if it is not finite in float32.
    """
    if score is None:
        return None
    score = _as_python(name, score, batch, row)
    numbers = score if isinstance(score, (list, tuple)) else [score]
    for number in numbers:
        if not isinstance(number, Real):
            raise RewardError(name, f"returned {shown(number)}, a {type(number).__name__} and not a number", batch, row)
        # Also catches NaN, and numbers that overflow float32.
        if not -_MAX_FLOAT32 <= cast(float, number) <= _MAX_FLOAT32:
            raise RowFailure(name, f"returned {shown(number)}, which is not finite in float32", batch, row)
    if numbers is not score:
        return float(score)
    tokens = len(batch.completion_ids[row])
    if len(numbers) != tokens:
        raise RewardError(name, f"returned {len(numbers)} token scores for {tokens} response tokens", batch, row)
    return [float(number) for number in numbers]


def check_total(names: str, scores: Sequence[RowScore], weights: Sequence[float], batch: RewardBatch, row: int) -> None:
    """Checks that the scores of one row, one entry per source, can be added up.

    Raises:
        RowFailure: if their sum, weighted or not, could overflow float32.
    """
    total = 0.0
    for score, weight in zip(scores, weights, strict=True):
        parts = score if isinstance(score, list) else [score or 0.0]
        total += max(abs(weight), 1.0) * sum(map(abs, parts))
    if total > _MAX_FLOAT32:
        raise RowFailure(names, f"returned scores whose weighted sum, up to {total:.3g}, overflows float32", batch, row)


def _as_python(name: str, value: Any, batch: RewardBatch, row: int | None) -> Any:
    """`value` with tensors, arrays and NumPy's scalars as plain numbers and lists."""
    if not isinstance(value, (Tensor, np.ndarray, np.generic)):
        return value
    try:
        return value.tolist()
    # Of a sparse tensor, or one on the meta device.
    except (RuntimeError, NotImplementedError) as error:
        problem = f"returned a {type(value).__name__} whose numbers cannot be read ({error}); return a dense one"
        raise RewardError(name, problem, batch, row) from error
