"""Where a resumed run goes on: after a step, before the end of a step (its evaluation and its records), or in the
middle of an update.

Plain values and tensors that a checkpoint holds besides weights, optimizer and schedule. How they are written is in
`checkpoint`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from accelerate import Accelerator
from transformers import TrainerState

from alpaca_ppo.checkpoint.serialization import random_states, set_random_states
from alpaca_ppo.distributed.collectives import gather_list
from alpaca_ppo.ppo.metrics import StatsAccumulator
from alpaca_ppo.ppo.updates import Updater
from alpaca_ppo.types import Rollouts


@dataclass
class UpdateProgress:
    """How far the update on one step's rollouts has come, in whole optimizer steps."""

    rollouts: Rollouts
    """Global, with what shaping and estimation added."""
    seconds: dict[str, float]
    """This rank's, of the phases before the update."""
    optimizer_steps: int = 0
    skipped: int = 0
    """Optimizer steps that were refused."""
    kl_stopped: bool = False
    """Whether the approximate KL ended the update: the last batch that `stats` holds was not stepped on."""
    stats: StatsAccumulator = field(default_factory=StatsAccumulator)
    """This rank's, of the optimizer steps."""

    def add(self, stats: StatsAccumulator, *, stepped: bool) -> None:
        """Takes what an optimizer step returned."""
        self.stats.merge(stats)
        self.optimizer_steps += stepped
        self.kl_stopped = not stepped

    @property
    def num_attempted(self) -> int:
        """Optimizer steps that were taken or refused."""
        return self.optimizer_steps + self.skipped

    def rank_state(self) -> dict[str, Any]:
        """What differs between ranks, as plain values."""
        return {"seconds": dict(self.seconds), "stats": vars(self.stats)}

    def state_dict(self, rank_states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """All of it; `rank_states` holds each rank's `rank_state`."""
        return {
            "rollouts": dict(self.rollouts),
            "optimizer_steps": self.optimizer_steps,
            "skipped": self.skipped,
            "kl_stopped": self.kl_stopped,
            "rank_states": [dict(part) for part in rank_states],
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], *, rank: int, num_ranks: int) -> "UpdateProgress":
        """This rank's progress, from `state_dict`; where the number of ranks has changed, rank 0 takes everyone's
        statistics.
        """
        parts = state["rank_states"]
        if len(parts) == num_ranks:
            parts = [parts[rank]]
        elif rank:
            parts = []
        stats = StatsAccumulator()
        for part in parts:
            one = StatsAccumulator()
            vars(one).update(part["stats"])
            stats.merge(one)
        seconds = state["rank_states"][min(rank, len(state["rank_states"]) - 1)]["seconds"]
        return cls(
            state["rollouts"],
            seconds,
            optimizer_steps=state["optimizer_steps"],
            skipped=state["skipped"],
            kl_stopped=state["kl_stopped"],
            stats=stats,
        )


_UNCHANGED: Any = object()


class TrainProgress:
    """How far a run has come, and so where it would go on if it were interrupted now.

    Args:
        accelerator: of the run.
        state: of the run; `global_step` counts whole steps.
        updater: counts the optimizer steps of this process.
    """

    def __init__(self, accelerator: Accelerator, state: TrainerState, updater: Updater) -> None:
        self._accelerator, self._state, self._updater = accelerator, state, updater
        self.step = 0
        """Whole steps done."""
        self.stats: dict[str, float] = {}
        """Metrics of the last whole step."""
        self.step_ended = True
        """Whether that step was evaluated and recorded."""
        self.update: UpdateProgress | None = None
        """Of the next step, once its rollouts exist."""
        self.skipped_updates = 0
        """Optimizer steps that were refused in the whole run."""
        self.saved = False
        """Whether a checkpoint in the output folder holds this point."""
        self._num_updates = 0
        self._resumed = False
        self._random = random_states()

    def advance(
        self,
        *,
        stats: Mapping[str, float] = _UNCHANGED,
        step_ended: bool = _UNCHANGED,
        update: UpdateProgress | None = _UNCHANGED,
    ) -> None:
        """Records that the run is at a point where it can be interrupted; what is left out stays as it was."""
        self.step, self._num_updates = self._state.global_step, self._updater.num_updates
        if stats is not _UNCHANGED:
            self.stats = {name: float(value) for name, value in stats.items()}
        if step_ended is not _UNCHANGED:
            self.step_ended = step_ended
        if update is not _UNCHANGED:
            self.update = update
        self.saved, self._random = False, random_states()

    @property
    def is_current(self) -> bool:
        """Whether this says where the run stands: not where a subclass has trained in its own way since `advance`."""
        return (self.step, self._num_updates) == (self._state.global_step, self._updater.num_updates)

    def take_resumed(self) -> UpdateProgress | None:
        """The update that a resumed run goes on with, the first time this is called: each later step samples its own
        rollouts.
        """
        update, self._resumed = self.update if self._resumed else None, False
        return update

    def update_on(self, rollouts: Rollouts) -> UpdateProgress:
        """How far the update on `rollouts` is. Rollouts that are not the step's, which a subclass may pass, begin anew:
        a resumed run would not find them.
        """
        update = self.update
        return update if update is not None and update.rollouts is rollouts else UpdateProgress(rollouts, {})

    @property
    def at_start(self) -> bool:
        """Whether nothing is done yet: the first evaluation is made again too."""
        return self.step == 0 and self.update is None

    @property
    def last_line(self) -> int:
        """The last step whose line in metrics.jsonl a resumed run keeps."""
        return -1 if self.at_start else self.step - (not self.step_ended)

    def rewind(self) -> None:
        """Puts random states back to what they were at this point."""
        set_random_states(self._random)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs. Every rank calls it. Where this is not current, the whole steps alone."""
        current = self.is_current
        update = self.update if current else None
        return {
            "step": self._state.global_step,
            "last_line": self.last_line if current else self._state.global_step,
            "learning_rate": self._updater.learning_rate,
            "stats": self.stats if current else {},
            "step_ended": self.step_ended if current else True,
            "update": update and update.state_dict(gather_list(update.rank_state(), self._accelerator)),
            "skipped_updates": self.skipped_updates,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Puts back what `state_dict` gave, `state.global_step` and the updater's learning rate too."""
        self._state.global_step = state["step"]
        self._updater.learning_rate = state["learning_rate"]
        self.skipped_updates = state["skipped_updates"]
        rank, num_ranks = self._accelerator.process_index, self._accelerator.num_processes
        update = UpdateProgress.from_state(state["update"], rank=rank, num_ranks=num_ranks) if state["update"] else None
        self.advance(stats=state["stats"], step_ended=state["step_ended"], update=update)
        self._resumed = True
