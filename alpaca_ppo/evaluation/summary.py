"""From the numbers of each response to the metrics of an evaluation: means, standard errors, pass@k, votes, wins.

Nothing here depends on models or on the order in which responses were sampled.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from alpaca_ppo.evaluation.settings import EvaluationSettings
from alpaca_ppo.evaluation.statistics import Estimate, best_of_k, clustered_mean, majority_vote, pass_at_k
from alpaca_ppo.evaluation.win_rates import length_controlled


@dataclass
class ResponseRecord:
    """The numbers of one response."""

    prompt_id: int
    """Index of its prompt in the eval set."""
    values: dict[str, float] = field(default_factory=dict)
    """By name (`EvaluationSettings.names`); NaN where a source returned None."""
    answer: Hashable | None = None
    """What the answer function returned."""
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

    A prompt of which fewer than k responses are left (`failed_rewards: mask`) or scored is not in pass@k and
    best-of-k. Without any number, mean and standard error are NaN.

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
    if settings.best_of_by is not None:
        found |= _best_of_estimates(by_prompt, settings)
    stats = {name: value for key, (mean, se) in found.items() for name, value in ((key, mean), (f"{key}_se", se))}
    return stats | (_win_stats(by_prompt) if settings.compares else {})


def _scored(group: Sequence[ResponseRecord], name: str) -> list[float]:
    return [value for record in group if not math.isnan(value := record.values[name])]


def _correctness_estimates(
    by_prompt: Sequence[Sequence[ResponseRecord]], settings: EvaluationSettings
) -> dict[str, Estimate]:
    """pass@k, and with several samples avg@n and the majority vote."""
    correct = [[c for record in group if (c := correctness(record, settings)) is not None] for group in by_prompt]
    n = settings.num_samples
    found = {
        f"pass_at_{k}": clustered_mean([[pass_at_k(len(c), int(sum(c)), k)] for c in correct if len(c) >= k])
        for k in settings.ks
    }
    if n > 1:
        found[f"avg_at_{n}"] = clustered_mean(correct)
    if settings.votes:
        votes = []
        for group in by_prompt:
            scored = [(record.answer, c) for record in group if (c := correctness(record, settings)) is not None]
            votes += [[majority_vote([a for a, _ in scored], [c for _, c in scored])]] if scored else []
        found[f"maj_at_{n}"] = clustered_mean(votes)
    return found


def _best_of_estimates(
    by_prompt: Sequence[Sequence[ResponseRecord]], settings: EvaluationSettings
) -> dict[str, Estimate]:
    """Every value of the best of k, and whether it is correct."""
    measures: dict[str, Callable[[ResponseRecord], float | None]] = {
        name: lambda record, name=name: None if math.isnan(v := record.values[name]) else v  # type: ignore[misc]
        for name in settings.names
        if name != "rewards"
    }
    if settings.success_above is not None:
        measures["correct"] = lambda record: correctness(record, settings)
    found, chooses = {}, str(settings.best_of_by)
    for k in settings.ks:
        for name, measure in measures.items() if k > 1 else ():
            pairs = [
                [(c, v) for r in group if not math.isnan(c := r.values[chooses]) and (v := measure(r)) is not None]
                for group in by_prompt
            ]
            best = [[best_of_k([c for c, _ in pair], [v for _, v in pair], k)] for pair in pairs if len(pair) >= k]
            found[f"best_of_{k}/{name}"] = clustered_mean(best)
    return found


def _win_stats(by_prompt: Sequence[Sequence[ResponseRecord]]) -> dict[str, float]:
    judged = [[record for record in group if record.win is not None] for group in by_prompt]
    wins = [[float(record.win or 0.0) for record in group] for group in judged]
    differences = [[record.length_difference for record in group] for group in judged]
    rate, controlled = clustered_mean(wins), length_controlled(wins, differences)
    return {
        "win_rate": rate.mean,
        "win_rate_se": rate.se,
        "lc_win_rate": controlled.mean,
        "lc_win_rate_se": controlled.se,
        "length_difference": clustered_mean(differences).mean,
        "unjudged": float(sum(map(len, by_prompt)) - sum(map(len, judged))),
    }
