"""Means with standard errors and pass@k, as pure functions of plain numbers.

Every estimator takes the numbers of one prompt's n responses, or of all prompts grouped by prompt. Responses to one
prompt are not independent, so that standard errors count prompts, not responses. Leaves out confidence intervals.
"""

import math
from collections.abc import Sequence
from math import comb
from typing import NamedTuple


class Estimate(NamedTuple):
    """A mean and its standard error."""

    mean: float
    """NaN without any number."""
    se: float
    """NaN with fewer than two prompts."""


def clustered_mean(groups: Sequence[Sequence[float]]) -> Estimate:
    """Returns the mean over all numbers, and its standard error when numbers of one group depend on each other.

    With C groups, N numbers and residuals e_ij = x_ij - mean, se = sqrt(C / (C - 1) * sum_i (sum_j e_ij)^2) / N (the
    cluster-robust variance of a mean, arXiv:2411.00640, section 2.2, with the small-sample factor of CR1). With one
    number in each group this is the sample standard deviation over sqrt(N).

    Args:
        groups: the numbers of each prompt. Empty groups are ignored.
    """
    groups = [group for group in groups if group]
    numbers = [number for group in groups for number in group]
    if not numbers:
        return Estimate(math.nan, math.nan)
    mean = math.fsum(numbers) / len(numbers)
    if len(groups) < 2:
        return Estimate(mean, math.nan)
    between = math.fsum(math.fsum(number - mean for number in group) ** 2 for group in groups)
    return Estimate(mean, math.sqrt(len(groups) / (len(groups) - 1) * between) / len(numbers))


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Returns 1 - C(n - c, k) / C(n, k): the probability that k of the n responses, drawn without replacement, include
    one of the c correct ones. It estimates, without bias, the probability that one of k responses is correct.

    Source: arXiv:2107.03374, equation 1.
    """
    assert 1 <= k <= num_samples and 0 <= num_correct <= num_samples, (num_samples, num_correct, k)
    return 1.0 - comb(num_samples - num_correct, k) / comb(num_samples, k)


def powers_up_to(n: int) -> list[int]:
    """Returns 1, 2, 4 and so on up to `n`, and `n` itself: the k of pass@k by default."""
    return sorted({*(2**i for i in range(n.bit_length())), n})
