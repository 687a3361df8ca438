"""The return distributions of the demonstration, and the record of what a critic predicts for one of them.

A distribution is given by its cumulative distribution function; draws, quantiles and means follow by inversion. Nothing
is trained here.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from alpaca_ppo.functional import quantile_midpoints

TAIL = 0.1
"""Fraction of the lowest returns whose mean is the CVaR in the table."""
QUARTILES = (0.25, 0.5, 0.75)


class ReturnDistribution(NamedTuple):
    """A distribution of returns."""

    formula: str
    """For the figure."""
    cdf: Callable[[Tensor], Tensor]
    """The cumulative distribution function, elementwise."""

    def quantiles(self, levels: Tensor) -> Tensor:
        """Returns the quantiles at `levels` (...) in (0, 1), by bisection between -50 and 50."""
        low, high = torch.full_like(levels, -50.0), torch.full_like(levels, 50.0)
        for _ in range(60):
            middle = (low + high) / 2
            below = self.cdf(middle) < levels
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return high

    def tail_mean(self, alpha: float) -> float:
        """Returns the mean of the lower `alpha` tail (CVaR), from 20 000 quantiles; alpha = 1 gives the mean."""
        return float(self.quantiles(alpha * quantile_midpoints(20_000, dtype=torch.float64)).mean())

    def deviation(self) -> float:
        """Returns the standard deviation."""
        return float(self.quantiles(quantile_midpoints(20_000, dtype=torch.float64)).std())


def _normal(returns: Tensor, mean: float, deviation: float) -> Tensor:
    return torch.special.ndtr((returns - mean) / deviation)


DISTRIBUTIONS = {
    "steady": ReturnDistribution("N(3, 0.5)", lambda x: _normal(x, 3.0, 0.5)),
    "gamble": ReturnDistribution(
        "20 % N(-1, 0.4), 80 % N(4, 0.6)", lambda x: 0.2 * _normal(x, -1.0, 0.4) + 0.8 * _normal(x, 4.0, 0.6)
    ),
    "costly": ReturnDistribution("-1 - Exp(1)", lambda x: torch.exp((x + 1).clamp(max=0))),
}
"""By the last word of the prompt. The first two have the same mean, 3."""


class Prediction(NamedTuple):
    """What a critic predicts for the first state of a response; None for what its head does not predict."""

    mean: float
    tail_mean: float | None = None
    quartiles: list[float] | None = None
    returns: list[float] | None = None
    """Points of the predicted distribution function, with `levels`."""
    levels: list[float] | None = None
    """The distribution function at `returns`."""


Predictions = dict[tuple[str, str], list[Prediction]]
"""(critic, name of the distribution) to one prediction per seed."""
