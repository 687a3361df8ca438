"""Results of a run, for the console, the report and the model card: metrics at both ends, tables of answers, the step
of saved weights, and how numbers are written. No torch here, so that reports are made at once.

A step's metrics vary from batch to batch, so each end is a mean over a tenth of the steps. Evaluations have the same
prompts every time, and are compared one by one.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from alpaca_ppo.atomic_io import StrPath, write_text_atomically

Metrics = Mapping[str, float | None]
STEP_FILE = "step.json"


def table_files(run: Path) -> Iterator[tuple[str, int, Path]]:
    """Yields the tables of answers of a run: the folder below the run's, such as eval/math, the step, the file."""
    for top in ("rollouts", "eval", "inspected"):
        for path in (run / top).rglob("step_*.jsonl"):
            if (number := path.stem.removeprefix("step_")).isdigit():
                yield path.parent.relative_to(run).as_posix(), int(number), path


class Ends(NamedTuple):
    """A metric at the start and at the end of a run, and how often it was measured; once makes both the same."""

    start: float
    end: float
    measured: int


def averaged_steps(steps: int) -> int:
    """Returns how many steps are averaged at each end."""
    return max(1, min(10, steps // 10))


def start_and_end(history: Sequence[Metrics], name: str) -> Ends | None:
    """Returns the metric `name` at both ends of a run, by its lines of metrics.jsonl; None if it was never finite."""
    values = [value for line in history if (value := line.get(name)) is not None]
    if not values:
        return None
    count = 1 if name.startswith("eval/") else averaged_steps(len(values))
    return Ends(sum(values[:count]) / count, sum(values[-count:]) / count, len(values))


def means_in_words(history: Sequence[Metrics]) -> str:
    """Returns in words which steps `start_and_end` takes, such as "means of the first and the last 3 steps, before the
    last update", because a step is measured before its update. "" without steps.
    """
    steps = sum(line.get("objective/rewards") is not None for line in history)
    count = averaged_steps(steps)
    ends = f"means of the first and the last {count} steps" if count > 1 else "the first and the last step"
    return f"{ends}, before the last update" if steps else ""


def better_before_training(
    history: Sequence[Metrics], metric: str | None, value: float | None, *, greater_is_better: bool
) -> float | None:
    """Returns `metric` before training if that is better than `value`, or else None."""
    before = next((line.get(metric or "") for line in history if line.get("step") == 0), None)
    if before is None or value is None or before == value or (before > value) != greater_is_better:
        return None
    return before


@dataclass(frozen=True)
class WeightsStep:
    """The step that weights are from, in step.json beside them.

    Attributes:
        step: completed steps when the weights had these values.
        trained_steps: completed steps when they were saved: more than `step` if `load_best_model_at_end` chose earlier
            ones.
        metric: `metric_for_best_model`, if the weights are those of the best checkpoint; `value` is its value there.
        ended_by: what has ended the run before its last step, in words.
    """

    step: int
    trained_steps: int
    metric: str | None = None
    value: float | None = None
    ended_by: str | None = None

    def __str__(self) -> str:
        """Such as "step 20 of 40, the best evaluation by eval/scores (0.93)"."""
        best = "" if self.metric is None else f", the best evaluation by {self.metric} ({self.value:.4g})"
        end = "" if self.ended_by is None else f"; the run ended because {self.ended_by}"
        return f"step {self.step} of {self.trained_steps}{best}{end}"

    def write(self, folder: StrPath) -> None:
        write_text_atomically(Path(folder) / STEP_FILE, json.dumps(asdict(self), indent=2) + "\n")


def read_weights_step(folder: StrPath) -> WeightsStep | None:
    """Returns what step.json in `folder`, such as a run's final/, says; None without it."""
    path = Path(folder) / STEP_FILE
    return WeightsStep(**json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None


def json_line(row: Mapping[str, Any]) -> str:
    """Returns `row` as a line of a .jsonl file."""
    return json.dumps(without_nan(row), ensure_ascii=False, allow_nan=False) + "\n"


def without_nan(value: Any) -> Any:
    """Returns `value` with None in place of floats that are not finite, also inside mappings and lists."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: without_nan(entry) for key, entry in value.items()}
    return [without_nan(entry) for entry in value] if isinstance(value, list | tuple) else value
