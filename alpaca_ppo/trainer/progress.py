"""Where a run that is resumed goes on: after a step, before the end of a step (its evaluation and its records), or in
the middle of an update.

Plain values and tensors that a checkpoint holds besides weights, optimizer and schedule. How they are written is in
`checkpointing`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from alpaca_ppo.checkpoint.serialization import random_states, set_random_states
from alpaca_ppo.ppo.metrics import StatsAccumulator
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
    """The approximate KL ended the update: what `stats` took last was not stepped."""
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

    def state_dict(self, of_ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """All of it; `of_ranks` is each rank's `of_rank`."""
        return {
            "rollouts": dict(self.rollouts),
            "optimizer_steps": self.optimizer_steps,
            "skipped": self.skipped,
            "kl_stopped": self.kl_stopped,
            "of_ranks": [dict(part) for part in of_ranks],
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], *, rank: int, num_ranks: int) -> "UpdateProgress":
        """This rank's progress, from `state_dict`. Where the number of ranks has changed, rank 0 takes what all had."""
        parts = state["of_ranks"]
        if len(parts) == num_ranks:
            parts = [parts[rank]]
        elif rank:
            parts = []
        stats = StatsAccumulator()
        for part in parts:
            one = StatsAccumulator()
            vars(one).update(part["stats"])
            stats.merge(one)
        seconds = state["of_ranks"][min(rank, len(state["of_ranks"]) - 1)]["seconds"]
        counts = {name: state[name] for name in ("optimizer_steps", "skipped", "kl_stopped")}
        return cls(state["rollouts"], seconds, stats=stats, **counts)


@dataclass
class TrainProgress:
    """Where a run that is interrupted would go on, besides its weights, optimizer and schedule."""

    step: int = 0
    """Whole steps done."""
    updates: int = 0
    """Optimizer steps that this process has taken: with others the weights are no longer those of this point."""
    stats: dict[str, float] = field(default_factory=dict)
    """Metrics of the last whole step."""
    step_ended: bool = True
    """Whether that step was evaluated and written down."""
    update: UpdateProgress | None = None
    """Of the next step, where its rollouts are there."""
    resumed: bool = False
    """Whether `update` comes from a checkpoint and no step has gone on with it yet."""
    saved: bool = False
    """Whether a checkpoint in the output folder holds this point."""
    random: dict[str, Any] = field(default_factory=random_states)
    """The states of the random number generators at this point."""

    def advance(self, **changes: Any) -> None:
        """Goes on to a new point, now, that differs by `changes` from the last."""
        for name, value in changes.items():
            setattr(self, name, value)
        self.stats = {name: float(value) for name, value in self.stats.items()}
        self.saved, self.random = False, random_states()

    def take_resumed(self) -> UpdateProgress | None:
        """The update that the next step goes on with: once, so that steps made one by one each have their rollouts."""
        update, self.resumed = self.update if self.resumed else None, False
        return update

    @property
    def at_start(self) -> bool:
        """Whether nothing is done yet: the first evaluation is made anew too."""
        return self.step == 0 and self.update is None

    @property
    def last_line(self) -> int:
        """The last step whose line in metrics.jsonl a resumed run keeps."""
        return -1 if self.at_start else self.step - (not self.step_ended)

    def rewind(self) -> None:
        """Puts random states back to what they were at this point."""
        set_random_states(self.random)
