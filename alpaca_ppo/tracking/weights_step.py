"""`WeightsStep`: which step of a run the weights of a saved model are from, in `step.json` beside them.

Nothing here needs torch, so that reports and tools can read it at once.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from alpaca_ppo.atomic_io import StrPath, write_text_atomically

FILE = "step.json"


@dataclass(frozen=True)
class WeightsStep:
    """The step that weights are from."""

    step: int
    """Completed steps of the run when the weights were like this."""
    trained_steps: int
    """Completed steps when they were saved: more than `step` if `load_best_model_at_end` chose an earlier one."""
    metric: str | None = None
    """Name of `metric_for_best_model`, if the weights are those of the best checkpoint."""
    value: float | None = None
    """That metric after `step`."""

    def __str__(self) -> str:
        """In words, such as "step 20 of 40, the best evaluation by eval/scores (0.93)"."""
        if self.metric is None:
            return f"step {self.step} of {self.trained_steps}"
        best = f"the best {'evaluation' if self.metric.startswith('eval/') else 'checkpoint'} by {self.metric}"
        return f"step {self.step} of {self.trained_steps}, {best} ({self.value:.4g})"

    def write(self, folder: StrPath) -> None:
        """Writes step.json into `folder`, beside the folders of the models."""
        write_text_atomically(Path(folder) / FILE, json.dumps(asdict(self), indent=2) + "\n")


def read_weights_step(folder: StrPath) -> WeightsStep | None:
    """What `WeightsStep.write` wrote into `folder`, such as a run's final/; None if there is no such file."""
    path = Path(folder) / FILE
    return WeightsStep(**json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None
