"""What a metric was at the start and at the end of a run: one rule for the console, the report and the model card.

Metrics of the steps vary from batch to batch, so that each end is a mean over a tenth of the steps. Evaluations, whose
prompts are always the same, are compared one by one.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

Metrics = Mapping[str, float | None]


class Ends(NamedTuple):
    """A metric at the start and at the end of a run."""

    start: float
    end: float
    measured: int
    """How often it was measured; once, and `start` is `end`."""


def averaged_steps(steps: int) -> int:
    """Returns how many of so many steps are averaged at each end: a tenth, from 1 to 10."""
    return max(1, min(10, steps // 10))


def start_and_end(history: Sequence[Metrics], name: str) -> Ends | None:
    """Returns the metric `name` at both ends of a run; None if it was never finite.

    Args:
        history: the lines of metrics.jsonl.
        name: of a metric; one that begins with `eval/` is that of the first and the last evaluation.
    """
    values = [value for line in history if (value := line.get(name)) is not None]
    if not values:
        return None
    count = 1 if name.startswith("eval/") else averaged_steps(len(values))
    return Ends(sum(values[:count]) / count, sum(values[-count:]) / count, len(values))


def means_in_words(history: Sequence[Metrics]) -> str:
    """Returns over how many steps `start_and_end` averages, such as "means of the first and the last 3 steps"; "" if
    over one.
    """
    count = averaged_steps(sum(line.get("objective/rewards") is not None for line in history))
    return f"means of the first and the last {count} steps" if count > 1 else ""


def better_before_training(
    history: Sequence[Metrics], metric: str, value: float, *, greater_is_better: bool
) -> float | None:
    """Returns `metric` before training if that is better than `value`; else, or if it was not measured, None."""
    before = next((line.get(metric) for line in history if line.get("step") == 0), None)
    if before is None or before == value or (before > value) != greater_is_better:
        return None
    return before
