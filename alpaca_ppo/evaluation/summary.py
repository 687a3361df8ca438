"""From the numbers of each response to the metrics of an evaluation: means with standard errors, pass@k, wins.

Responses to one prompt are not independent, so that standard errors count prompts, not responses. Nothing here depends
on models or on the order in which responses were sampled. Leaves out confidence intervals.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import comb
from typing import NamedTuple

from alpaca_ppo.evaluation.settings import EvaluationSettings


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


@dataclass
class ResponseRecord:
    """The numbers of one response."""

    prompt_id: int
    """Index of its prompt in the eval set."""
    values: dict[str, float] = field(default_factory=dict)
    """By name (`EvaluationSettings.names`); NaN where a source returned None."""
    response: str = ""
    win: float | None = None
    """From 0 to 1, against the opponent's answer; None if nobody judged."""
    opponent: str | None = None
    length_difference: float = 0.0
    """Characters more than the opponent's answer has."""


def correctness(record: ResponseRecord, settings: EvaluationSettings) -> float | None:
    """Returns 1 for a correct response and 0 for another; None if nothing counts as correct, or it has no score."""
    value = record.values[settings.success_by]
    return None if settings.success_above is None or math.isnan(value) else float(value > settings.success_above)


def summarize(records: Sequence[ResponseRecord], settings: EvaluationSettings) -> dict[str, float]:
    """Returns the metrics, each with a standard error over prompts under `<name>_se`.

    A prompt of which fewer than k responses are left (`failed_rewards: mask`) or scored is not in pass@k.
    Without any number, mean and standard error are NaN.

    Args:
        records: of all responses to all prompts of one eval set.
        settings: what to compute.
    """
    groups: dict[int, list[ResponseRecord]] = {}
    for record in records:
        groups.setdefault(record.prompt_id, []).append(record)
    by_prompt = [groups[prompt] for prompt in sorted(groups)]
    found = {name: clustered_mean([_scored(group, name) for group in by_prompt]) for name in settings.names}
    if settings.success_above is not None:
        found |= _correctness_estimates(by_prompt, settings)
    stats = {name: value for key, (mean, se) in found.items() for name, value in ((key, mean), (f"{key}_se", se))}
    return stats | (_win_stats(by_prompt) if settings.compares else {})


def _scored(group: Sequence[ResponseRecord], name: str) -> list[float]:
    return [value for record in group if not math.isnan(value := record.values[name])]


def _correctness_estimates(
    by_prompt: Sequence[Sequence[ResponseRecord]], settings: EvaluationSettings
) -> dict[str, Estimate]:
    """pass@k, and with several samples avg@n."""
    correct = [[c for record in group if (c := correctness(record, settings)) is not None] for group in by_prompt]
    n = settings.num_samples
    found = {
        f"pass_at_{k}": clustered_mean([[pass_at_k(len(c), int(sum(c)), k)] for c in correct if len(c) >= k])
        for k in settings.ks
    }
    if n > 1:
        found[f"avg_at_{n}"] = clustered_mean(correct)
    return found


def _win_stats(by_prompt: Sequence[Sequence[ResponseRecord]]) -> dict[str, float]:
    judged = [[record for record in group if record.win is not None] for group in by_prompt]
    rate = clustered_mean([[float(record.win or 0.0) for record in group] for group in judged])
    difference = clustered_mean([[record.length_difference for record in group] for group in judged])
    return {
        "win_rate": rate.mean,
        "win_rate_se": rate.se,
        "length_difference": difference.mean,
        "unjudged": float(sum(map(len, by_prompt)) - sum(map(len, judged))),
    }
