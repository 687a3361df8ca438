"""From the numbers of each response to the metrics of an evaluation: means with standard errors, pass@k, wins.

Responses to one prompt are not independent, so standard errors count prompts, not responses. The order of responses
does not matter. Leaves out confidence intervals.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from alpaca_ppo.evaluation.settings import EvaluationSettings


class Estimate(NamedTuple):
    """A mean, NaN without numbers, and its standard error, NaN with fewer than two groups."""

    mean: float
    se: float


def clustered_mean(groups: Sequence[Sequence[float]]) -> Estimate:
    """Returns the mean over all numbers and its standard error, where those of a group (a prompt) are not independent.

    With C groups, N numbers and residuals e_ij = x_ij - mean, se = sqrt(C / (C - 1) * sum_i (sum_j e_ij)^2) / N (the
    cluster-robust variance of a mean, arXiv:2411.00640, section 2.2, with the small-sample factor of CR1). With one
    number in each group this is the sample standard deviation over sqrt(N). Empty groups are ignored.
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
    """Returns 1 - C(n - c, k) / C(n, k): the probability that k of n responses, drawn without replacement, include one
    of the c correct ones; an unbiased estimate for k responses of the policy.

    Source: arXiv:2107.03374, equation 1.
    """
    assert 1 <= k <= num_samples and 0 <= num_correct <= num_samples, (num_samples, num_correct, k)
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


@dataclass
class ResponseRecord:
    """The numbers of one response.

    Attributes:
        prompt_id: the index of its prompt in the eval set.
        values: by `EvaluationSettings.names`; NaN where a source returned None.
        win: from 0 to 1, against the opponent's answer; None if undecided.
        length_difference: characters by which the response is longer than the opponent's.
    """

    prompt_id: int
    values: dict[str, float] = field(default_factory=dict)
    response: str = ""
    win: float | None = None
    opponent: str | None = None
    length_difference: float = 0.0


def correctness(record: ResponseRecord, settings: EvaluationSettings) -> float | None:
    """Returns 1 for a correct response, 0 for a wrong one, None without `success_above` or a score."""
    value = record.values[settings.success_by]
    return None if settings.success_above is None or math.isnan(value) else float(value > settings.success_above)


def summarize(records: Sequence[ResponseRecord], settings: EvaluationSettings) -> dict[str, float]:
    """Returns the metrics of one eval set, from its responses that are not masked; NaN without numbers.

    Values, pass@k, avg@n and the win rate have a standard error over prompts under `<name>_se`. `<name>_missing` is the
    number of responses without a value, if there are any. pass@k leaves out prompts with fewer than k scored responses.
    """
    groups: dict[int, list[ResponseRecord]] = {}
    for record in records:
        groups.setdefault(record.prompt_id, []).append(record)
    by_prompt = [groups[prompt] for prompt in sorted(groups)]
    estimates = {name: clustered_mean([_values(group, name) for group in by_prompt]) for name in settings.names}
    if settings.success_above is not None:
        estimates |= _correctness_estimates(by_prompt, settings)
    stats: dict[str, float] = {}
    for name, estimate in estimates.items():
        stats |= {name: estimate.mean, f"{name}_se": estimate.se}
    missing = {name: sum(math.isnan(record.values[name]) for record in records) for name in settings.names}
    stats |= {f"{name}_missing": float(number) for name, number in missing.items() if number}
    return stats | (_win_stats(by_prompt) if settings.compares else {})


def _values(group: Sequence[ResponseRecord], name: str) -> list[float]:
    return [value for record in group if not math.isnan(value := record.values[name])]


def _correctness_estimates(
    by_prompt: Sequence[Sequence[ResponseRecord]], settings: EvaluationSettings
) -> dict[str, Estimate]:
    """Returns pass@k, and with several samples avg@n."""
    correct = [[c for record in group if (c := correctness(record, settings)) is not None] for group in by_prompt]
    estimates = {}
    for k in settings.ks:
        chances = [[pass_at_k(len(group), int(sum(group)), k)] for group in correct if len(group) >= k]
        estimates[f"pass_at_{k}"] = clustered_mean(chances)
    if settings.num_samples > 1:
        estimates[f"avg_at_{settings.num_samples}"] = clustered_mean(correct)
    return estimates


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
