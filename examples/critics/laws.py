"""The laws that the scores of the demonstration are drawn from, and what a critic says of one.

A law is known by its distribution function; draws, quantiles and means follow from it by inversion. Nothing here
trains.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from alpaca_ppo.functional import quantile_midpoints

TAIL = 0.1
QUARTILES = (0.25, 0.5, 0.75)


class Law(NamedTuple):
    """A law of the return, given by its distribution function alone."""

    about: str
    cdf: Callable[[Tensor], Tensor]

    def quantiles(self, levels: Tensor) -> Tensor:
        """The returns at `levels` (...) in (0, 1), by bisection between -50 and 50."""
        low, high = torch.full_like(levels, -50.0), torch.full_like(levels, 50.0)
        for _ in range(60):
            middle = (low + high) / 2
            below = self.cdf(middle) < levels
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return high

    def tail_mean(self, alpha: float) -> float:
        """The mean of the lower `alpha` tail, with alpha = 1 the mean: the quantile function's, at 20 000 levels."""
        return float(self.quantiles(alpha * quantile_midpoints(20_000, dtype=torch.float64)).mean())

    def deviation(self) -> float:
        """The standard deviation."""
        return float(self.quantiles(quantile_midpoints(20_000, dtype=torch.float64)).std())


def _normal(returns: Tensor, mean: float, deviation: float) -> Tensor:
    return torch.special.ndtr((returns - mean) / deviation)


LAWS = {
    "steady": Law("N(3, 0.5)", lambda x: _normal(x, 3.0, 0.5)),
    "gamble": Law(
        "20 % N(-1, 0.4), 80 % N(4, 0.6)", lambda x: 0.2 * _normal(x, -1.0, 0.4) + 0.8 * _normal(x, 4.0, 0.6)
    ),
    "costly": Law("-1 - Exp(1)", lambda x: torch.exp((x + 1).clamp(max=0))),
}
"""By the last word of the prompt. The first two have the mean 3."""


class Reading(NamedTuple):
    """What a critic says of a prompt's first state; None where its kind has no say."""

    mean: float
    tail_mean: float | None = None
    quartiles: list[float] | None = None
    returns: list[float] | None = None
    levels: list[float] | None = None
    """Points (returns, levels) of the learned distribution function."""


Readings = dict[tuple[str, str], list[Reading]]
"""(kind of critic, name of the law) to one reading a seed."""
