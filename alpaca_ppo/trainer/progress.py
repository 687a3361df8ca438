"""Where a resumed run continues: after a step, before the end of a step (its evaluation and logging), or in the middle
of an update.

The classes hold plain values and tensors that a checkpoint stores besides weights, optimizer and schedule. How they are
written is in `checkpoint`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from accelerate import Accelerator
from transformers import TrainerState

from alpaca_ppo.distributed.collectives import gather_list
from alpaca_ppo.distributed.engine import LearningRates
from alpaca_ppo.distributed.random_states import random_states, set_random_states
from alpaca_ppo.distributed.schedules import Part
from alpaca_ppo.ppo.metrics import RolloutCounts, StatsAccumulator, update_stats
from alpaca_ppo.ppo.updates import Updater
from alpaca_ppo.types import Rollouts


@dataclass
class UpdateProgress:
    """How far the update on one step's rollouts has come, in whole optimizer steps."""

    rollouts: Rollouts
    """The global rollouts, including shaped rewards and advantages."""
    seconds: dict[str, float]
    """This rank's seconds in each phase before the update."""
    counts: RolloutCounts = field(default_factory=RolloutCounts)
    """What was sampled and is not in the rollouts."""
    steps: dict[Part, int] = field(default_factory=dict)
    """Optimizer steps taken, by what they trained."""
    skipped: int = 0
    """Optimizer steps that were skipped."""
    kl_stopped: bool = False
    """Whether the approximate KL ended the update: no optimizer step was taken on the last batch counted in `stats`."""
    stats: dict[Part, StatsAccumulator] = field(default_factory=dict)
    """This rank's statistics of the optimizer steps so far, by what they trained."""

    def add(self, part: Part, stats: StatsAccumulator, *, stepped: bool) -> None:
        """Adds the result of an `Updater.step` that trained `part`."""
        self.stats.setdefault(part, StatsAccumulator()).merge(stats)
        self.steps[part] = self.steps.get(part, 0) + stepped
        self.kl_stopped = not stepped

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps that were taken."""
        return sum(self.steps.values())

    @property
    def policy_steps(self) -> int:
        """Those of them that trained the policy."""
        return self.optimizer_steps - self.steps.get("critic", 0)

    @property
    def critic_steps(self) -> int:
        """Those of them that trained the critic."""
        return self.optimizer_steps - self.steps.get("policy", 0)

    @property
    def num_attempted(self) -> int:
        """Optimizer steps that were taken or skipped."""
        return self.optimizer_steps + self.skipped

    def train_stats(self, accelerator: Accelerator, *, with_critic: bool) -> dict[str, float]:
        """The statistics of all ranks, and the optimizer steps. Every rank must call it."""
        whole: dict[Part, StatsAccumulator] = {}
        # A rank that joined the run in the middle of the update may lack the steps before.
        for of_rank in gather_list(self.stats, accelerator):
            for part, stats in of_rank.items():
                whole.setdefault(part, StatsAccumulator()).merge(stats)
        # The last batch of the policy is in `stats` without a step if its KL ended the update.
        kinds = [(whole[p], self.steps[p] + (self.kl_stopped and p != "critic")) for p in sorted(whole)]
        counts: dict[str, float] = {"policy/optimizer_steps": self.policy_steps}
        counts |= {"policy/skipped_updates": self.skipped, "policy/kl_stopped": self.kl_stopped}
        if with_critic:
            counts["val/optimizer_steps"] = self.critic_steps
        return {**update_stats(kinds), **{name: float(count) for name, count in counts.items()}}

    def rank_state(self) -> dict[str, Any]:
        """What differs between ranks, as plain values."""
        return {"seconds": dict(self.seconds), "stats": {part: vars(stats) for part, stats in self.stats.items()}}

    def state_dict(self, rank_states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The complete state; `rank_states` holds the `rank_state` of each rank."""
        return {
            "rollouts": dict(self.rollouts),
            "counts": asdict(self.counts),
            "steps": dict(self.steps),
            "skipped": self.skipped,
            "kl_stopped": self.kl_stopped,
            "rank_states": [dict(part) for part in rank_states],
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], *, rank: int, num_ranks: int) -> "UpdateProgress":
        """This rank's progress, from `state_dict`; if the number of ranks has changed, rank 0 gets the statistics of
        all ranks.
        """
        parts = state["rank_states"]
        if len(parts) == num_ranks:
            parts = [parts[rank]]
        elif rank:
            parts = []
        merged: dict[Part, StatsAccumulator] = {}
        for state_of_rank in parts:
            for part, stats in state_of_rank["stats"].items():
                one = StatsAccumulator()
                vars(one).update(stats)
                merged.setdefault(part, StatsAccumulator()).merge(one)
        seconds = state["rank_states"][min(rank, len(state["rank_states"]) - 1)]["seconds"]
        return cls(
            state["rollouts"],
            seconds,
            RolloutCounts(**state["counts"]),
            steps=dict(state["steps"]),
            skipped=state["skipped"],
            kl_stopped=state["kl_stopped"],
            stats=merged,
        )


_UNCHANGED: Any = object()


class TrainProgress:
    """How far the run has come: the point from which it would resume if it were interrupted now.

    Args:
        accelerator: of the run.
        state: of the run; `global_step` counts completed steps.
        updater: counts the optimizer steps of this process.
    """

    def __init__(self, accelerator: Accelerator, state: TrainerState, updater: Updater) -> None:
        self._accelerator, self._state, self._updater = accelerator, state, updater
        self.step = 0
        """Completed steps."""
        self.stats: dict[str, float] = {}
        """Metrics of the last completed step."""
        self.step_ended = True
        """Whether that step has been evaluated and logged."""
        self.update: UpdateProgress | None = None
        """Progress of the next step's update; None until its rollouts exist."""
        self.skipped_updates = 0
        """Optimizer steps that were skipped in the whole run."""
        self.saved = False
        """Whether this point has been saved in a checkpoint of the output folder."""
        self._num_updates = self._extra_prompts = 0
        self._resumed = False
        self._random = random_states()
        # `saved` and the random states before the rollouts of `update`; None if this process did not make them.
        self._before_rollouts: tuple[bool, Any] | None = None

    def advance(
        self,
        *,
        stats: Mapping[str, float] = _UNCHANGED,
        step_ended: bool = _UNCHANGED,
        update: UpdateProgress | None = _UNCHANGED,
    ) -> None:
        """Records that the run is at a point where it can be interrupted; omitted arguments keep their values."""
        self.step, self._num_updates = self._state.global_step, self._updater.num_updates
        if stats is not _UNCHANGED:
            self.stats = {name: float(value) for name, value in stats.items()}
        if step_ended is not _UNCHANGED:
            self.step_ended = step_ended
        if update is not _UNCHANGED:
            if self.update is not None:
                self._extra_prompts += self.update.counts.extra_prompts
            self.update = update
            self._before_rollouts = (self.saved, self._random)
        self.saved, self._random = False, random_states()

    def extra_prompts(self, step: int) -> int:
        """How many prompts the steps before `step` have drawn beyond those that the schedule gives them.

        Args:
            step: the one that is under way or next.
        """
        # An update stays recorded until the step's end, or the next update, is.
        ended = self.update if step > self.step else None
        return self._extra_prompts + (0 if ended is None else ended.counts.extra_prompts)

    def discard_rollouts(self) -> None:
        """Goes back to before the rollouts of an update that has taken no optimizer step of the policy, so that a
        resumed run makes new ones. What the critic has learned from them stays.
        """
        if self.update is not None and not self.update.policy_steps:
            self.skipped_updates -= self.update.skipped
            self.update = None
            # Rollouts that came from a checkpoint are still in it.
            self.saved, self._random = self._before_rollouts or (False, self._random)

    @property
    def is_current(self) -> bool:
        """Whether the recorded point is up to date.

        False if a step was completed or an optimizer step taken since the last `advance`, for example by a subclass
        with its own training loop.
        """
        return (self.step, self._num_updates) == (self._state.global_step, self._updater.num_updates)

    def pop_resumed_update(self) -> UpdateProgress | None:
        """The interrupted update of a resumed run, once; None afterwards, because later steps sample new rollouts."""
        update, self._resumed = self.update if self._resumed else None, False
        return update

    def update_for(self, rollouts: Rollouts) -> UpdateProgress:
        """The progress of the update on `rollouts`.

        Rollouts other than the step's own, which a subclass may pass, get a new progress that is not saved.
        """
        update = self.update
        return update if update is not None and update.rollouts is rollouts else UpdateProgress(rollouts, {})

    @property
    def at_start(self) -> bool:
        """Whether nothing has been trained yet, so that a resumed run also repeats the initial evaluation."""
        return self.step == 0 and self.update is None

    @property
    def last_line(self) -> int:
        """The last step whose line in metrics.jsonl a resumed run keeps."""
        if not self.is_current:
            return self._state.global_step
        return -1 if self.at_start else self.step - (not self.step_ended)

    def rewind(self) -> None:
        """Restores the random states recorded at this point."""
        set_random_states(self._random)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs. Every rank must call it. If not `is_current`, only completed steps are included."""
        current = self.is_current
        update = self.update if current else None
        return {
            "step": self._state.global_step,
            "last_line": self.last_line,
            "learning_rates": list(self._updater.learning_rates),
            "stats": self.stats if current else {},
            "step_ended": self.step_ended if current else True,
            "update": update and update.state_dict(gather_list(update.rank_state(), self._accelerator)),
            "skipped_updates": self.skipped_updates,
            "extra_prompts": self.extra_prompts(self._state.global_step),
            **self._updater.budget.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned, including `state.global_step` and the updater's learning rates."""
        self._state.global_step = state["step"]
        self._updater.learning_rates = LearningRates(*state["learning_rates"])
        self.skipped_updates = state["skipped_updates"]
        self._updater.budget.load_state_dict(state)
        rank, num_ranks = self._accelerator.process_index, self._accelerator.num_processes
        update = UpdateProgress.from_state(state["update"], rank=rank, num_ranks=num_ranks) if state["update"] else None
        self.advance(stats=state["stats"], step_ended=state["step_ended"], update=update)
        self._extra_prompts = state["extra_prompts"]
        self._before_rollouts, self._resumed = None, True
