"""Where a resumed run continues: after a step, or before its evaluation and logging.

The values are stored in checkpoints (`checkpoint`), besides weights, optimizer and schedule.
"""

from collections.abc import Mapping
from typing import Any

from transformers import TrainerState

from alpaca_ppo.distributed.engine import LearningRates
from alpaca_ppo.distributed.random_states import random_states, set_random_states
from alpaca_ppo.ppo.updates import Updater


class TrainProgress:
    """The point from which the run would resume if it were interrupted now.

    Interrupted rollouts are repeated, and an update is finished before the run ends.

    Args:
        state: of the run; `global_step` counts completed steps.
        updater: counts the optimizer steps of this process.

    Attributes:
        step: completed steps.
        stats: the metrics of the last completed step.
        step_ended: whether it has been evaluated and logged.
        skipped_updates: optimizer steps that were skipped in the whole run.
        saved: whether this point has been saved in a checkpoint of the output folder.
        drawn: prompts that each step (from 0) has drawn beyond the scheduled ones, since the start or resumption.
    """

    def __init__(self, state: TrainerState, updater: Updater) -> None:
        self._state, self._updater = state, updater
        self.step = 0
        self.stats: dict[str, float] = {}
        self.step_ended = True
        self.skipped_updates = 0
        self.saved = False
        self.drawn: dict[int, int] = {}
        self._drawn_before = 0
        self._num_updates = 0
        self._random = random_states()

    def count_step(self, step: int) -> None:
        """Counts `step` (from 0) as completed; may be repeated."""
        self._state.global_step = step + 1

    def advance(self, stats: Mapping[str, float], *, step_ended: bool) -> None:
        """Records that the run is at a point where it can be interrupted."""
        self.step, self._num_updates = self._state.global_step, self._updater.num_updates
        self.stats, self.step_ended = {name: float(value) for name, value in stats.items()}, step_ended
        self.saved, self._random = False, random_states()

    def extra_prompts(self, step: int) -> int:
        """How many prompts the steps before `step` have drawn beyond the scheduled ones."""
        return self._drawn_before + sum(count for earlier, count in self.drawn.items() if earlier < step)

    @property
    def is_current(self) -> bool:
        """Whether no step was completed and no optimizer step taken since the last `advance`."""
        return (self.step, self._num_updates) == (self._state.global_step, self._updater.num_updates)

    def rewind(self) -> None:
        set_random_states(self._random)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs of the completed steps."""
        return {
            "step": self._state.global_step,
            "learning_rates": list(self._updater.learning_rates),
            "stats": self.stats,
            "step_ended": self.step_ended,
            "skipped_updates": self.skipped_updates,
            "extra_prompts": self.extra_prompts(self._state.global_step),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned, including `state.global_step` and the updater's learning rates."""
        self._state.global_step = state["step"]
        self._updater.learning_rates = LearningRates(*state["learning_rates"])
        self.skipped_updates = state["skipped_updates"]
        self.drawn, self._drawn_before = {}, state["extra_prompts"]
        self.advance(state["stats"], step_ended=state["step_ended"])
