"""`History`: the metrics of a run so far, as the rules read them, and the means and trends in them."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

WINDOW = 5
"""Steps that are averaged, so that one unusual batch does not speak for the run."""


class History:
    """The metrics of a run, by name and in the order of the steps. Adding a step costs a few list operations.

    Args:
        config: the options of `PPOConfig`, as plain values. A missing one counts as None.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.step = 0
        """The last step that was added."""
        self._series: dict[str, list[tuple[int, float]]] = {}

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

    def last(self, name: str, count: int = 1) -> list[float]:
        """The last `count` values; empty if there are fewer."""
        series = self.series(name)
        return [value for _, value in series[-count:]] if len(series) >= count else []

    def mean(self, name: str, count: int = WINDOW) -> float | None:
        """The mean of the last `count` values; None if there are fewer."""
        values = self.last(name, count)
        return fmean(values) if values else None

    def start(self, name: str, count: int = WINDOW) -> float | None:
        """The mean of the first `count` values; None if there are fewer."""
        series = self.series(name)
        return fmean(value for _, value in series[:count]) if len(series) >= count else None

    def mean_until(self, name: str, step: int) -> float:
        """The mean of the `WINDOW` values up to `step`, of which there is at least one."""
        return fmean([value for found, value in self.series(name) if found <= step][-WINDOW:])

    def at(self, name: str, steps: Sequence[int]) -> list[float]:
        """The values of some of the newest steps; 0 where there is none."""
        values = dict(self.series(name)[-64:])
        return [values.get(step, 0.0) for step in steps]

    @property
    def half_precision(self) -> bool:
        """Whether the policy computes in less than 32 bits."""
        return bool(self.config.get("bf16")) or (self.config.get("dtype") or "float32") != "float32"

    @property
    def penalizes_kl(self) -> bool:
        """Whether the run holds the KL to a reference back at all."""
        weighs = self.config.get("kl_coef") or self.config.get("kl_loss_coef")
        return self.config.get("reference") != "none" and bool(weighs)

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
