"""`History`: the metrics of a run so far, as the rules read them. Reading them from a folder is in `run_folder`."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from statistics import fmean
from typing import Any

_MOST_SOURCES = 6
"""The most reward sources for which `weights_from_metrics` tries every order: 720 of them."""


@dataclass(frozen=True)
class RunFacts:
    """What no metric says about a run. None = not known."""

    source_weights: Mapping[str, float] | None = None
    """The weight of each reward source, by name."""
    model_sources: tuple[str, ...] = ()
    """Names of the sources that are reward models."""
    num_prompts: int | None = None
    """Prompts that were looked at for duplicates."""
    num_distinct_prompts: int | None = None
    """How many different ones there are among them."""
    half_precision: bool | None = None
    """Whether the policy computes in bfloat16 or float16; None = as the options say."""


class History:
    """The metrics of a run, by name and in the order of the steps. Adding a step costs a few list operations.

    Args:
        config: the options of `PPOConfig`, as plain values. A missing one counts as None.
        facts: what else is known of the run.
    """

    def __init__(self, config: Mapping[str, Any], facts: RunFacts | None = None) -> None:
        self.config = config
        self.facts = facts or RunFacts()
        self.step = 0
        """The last step that was added."""
        self._series: dict[str, list[tuple[int, float]]] = {}
        self._best: dict[tuple[str, int], tuple[int, int, float]] = {}

    def add(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Adds what is known of `step`, 0 = before training. More of the same step may follow, and replaces what it
        names again. A number that is missing or not finite is left out.
        """
        self.step = step
        for name, value in metrics.items():
            if name == "step" or value is None or not math.isfinite(float(value)):
                continue
            series = self._series.setdefault(name, [])
            if series and series[-1][0] == step:
                series.pop()
            series.append((step, float(value)))

    @property
    def names(self) -> list[str]:
        """Every metric that has been seen."""
        return list(self._series)

    def series(self, name: str) -> Sequence[tuple[int, float]]:
        """Step and value of each step that has the metric; empty for an unknown one."""
        return self._series.get(name, [])

    def count(self, name: str) -> int:
        """How many steps have the metric."""
        return len(self.series(name))

    def last(self, name: str, count: int) -> list[float]:
        """The last `count` values; empty if there are fewer."""
        series = self.series(name)
        return [value for _, value in series[-count:]] if len(series) >= count else []

    def first(self, name: str, count: int) -> list[float]:
        """The first `count` values; empty if there are fewer."""
        series = self.series(name)
        return [value for _, value in series[:count]] if len(series) >= count else []

    def value_at(self, name: str, step: int) -> float | None:
        """The value of one of the newest steps; None if it has none."""
        return next((value for found, value in reversed(self.series(name)[-64:]) if found == step), None)

    def best_mean(self, name: str, count: int) -> tuple[int, float]:
        """The largest mean of `count` consecutive values, and the step of the last of them. There must be as many."""
        series = self.series(name)
        done, step, best = self._best.get((name, count), (count - 1, 0, -math.inf))
        for end in range(done + 1, len(series) + 1):
            mean = fmean(value for _, value in series[end - count : end])
            if mean > best:
                step, best = series[end - 1][0], mean
        self._best[name, count] = (len(series), step, best)
        return step, best

    def mean_until(self, name: str, step: int, count: int) -> float:
        """The mean of the `count` values up to `step`."""
        values = [value for found, value in self.series(name) if found <= step]
        return fmean(values[-count:])

    @property
    def sources(self) -> list[str]:
        """The names of the reward sources."""
        return [name.removeprefix("objective/scores/") for name in self._series if name.startswith("objective/scores/")]

    @property
    def source_weights(self) -> dict[str, float]:
        """The weight of each reward source, as far as it is known; 1 by default."""
        if self.facts.source_weights is not None:
            return dict(self.facts.source_weights)
        weights = self.config.get("reward_weights")
        if not weights:
            return dict.fromkeys(self.sources, 1.0)
        return weights_from_metrics(self, weights)

    def source_std(self, source: str, count: int, *, at_start: bool) -> float | None:
        """The mean standard deviation of a source's scores in the first or last `count` steps; None if unknown."""
        names = [f"objective/scores_std/{source}"] + (["objective/scores_std"] if len(self.sources) == 1 else [])
        for name in names:
            if values := (self.first if at_start else self.last)(name, count):
                return fmean(values)
        return None

    @property
    def half_precision(self) -> bool:
        """Whether the policy computes in less than 32 bits."""
        if self.facts.half_precision is not None:
            return self.facts.half_precision
        return bool(self.config.get("bf16")) or self.config.get("dtype", "float32") != "float32"

    @property
    def penalizes_kl(self) -> bool:
        """Whether the run holds the KL to a reference back at all."""
        if self.config.get("reference") == "none":
            return False
        in_reward = self.config.get("use_kl_in_reward") and (self.config.get("kl_coef") or 0) > 0
        return bool(in_reward or self.config.get("use_kl_loss"))

    def steps_at_full_rate(self, count: int) -> list[int]:
        """The last `count` steps in which the policy was trained at half of its largest learning rate or more, so that
        neither a warm-up nor the end of a schedule is taken for a fault; empty if there are fewer.
        """
        peak = max((rate for _, rate in self.series("objective/lr")[: 4 * count]), default=0.0)
        if self.config.get("warmup_steps"):
            peak = max(peak, self.config.get("learning_rate") or 0.0)
        rates = dict(self.series("objective/lr")[-4 * count :])
        trained = [step for step, _ in self.series("ppo/policy/clipfrac")[-4 * count :]]
        steps = [step for step in trained if peak > 0 and rates.get(step, 0.0) >= peak / 2]
        return steps[-count:] if len(steps) >= count else []


def weights_from_metrics(history: History, weights: Sequence[float]) -> dict[str, float]:
    """Returns which of `weights` belongs to which source: metrics.jsonl sorts the sources by name, and the score is
    their weighted sum, which only one order explains. Sources whose order cannot be found have no entry.
    """
    sources = history.sources
    if len(sources) != len(weights) or len(weights) > _MOST_SOURCES:
        return {}
    if len(set(weights)) == 1:
        return dict.fromkeys(sources, float(weights[0]))
    rows = [dict(history.series(f"objective/scores/{source}")[:8]) for source in sources]
    totals = history.series("objective/scores")[:8]

    def misfit(order: tuple[float, ...]) -> float:
        return fmean(
            abs(total - math.fsum(w * row.get(step, math.nan) for w, row in zip(order, rows, strict=True)))
            for step, total in totals
        )

    best = min(set(permutations(weights)), key=misfit)
    scale = fmean(abs(total) for _, total in totals)
    return dict(zip(sources, map(float, best), strict=True)) if misfit(best) <= 1e-4 * max(scale, 1e-3) else {}
