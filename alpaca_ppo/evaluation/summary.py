"""From the numbers of each response to the metrics of an evaluation: means, standard errors, pass@k, wins.

Nothing here depends on models or on the order in which responses were sampled.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from alpaca_ppo.evaluation.settings import EvaluationSettings
from alpaca_ppo.evaluation.statistics import Estimate, clustered_mean, pass_at_k


@dataclass
class ResponseRecord:
    """The numbers of one response."""

    prompt_id: int
    """Index of its prompt in the eval set."""
    values: dict[str, float] = field(default_factory=dict)
    """By name (`EvaluationSettings.names`); NaN where a source returned None."""
    win: float | None = None
    """From 0 to 1, against the opponent's answer; None if nobody judged."""
    opponent: str | None = None
    """The opponent's answer."""
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
    wins = [[float(record.win or 0.0) for record in group] for group in judged]
    differences = [[record.length_difference for record in group] for group in judged]
    rate = clustered_mean(wins)
    return {
        "win_rate": rate.mean,
        "win_rate_se": rate.se,
        "length_difference": clustered_mean(differences).mean,
        "unjudged": float(sum(map(len, by_prompt)) - sum(map(len, judged))),
    }
