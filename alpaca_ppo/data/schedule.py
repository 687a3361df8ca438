"""The order of prompts: a function of the seed, the step, and how many extra prompts earlier steps have drawn;
independent of the number of processes.
"""

from collections.abc import Collection, Iterator

from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.functional.rng import seeded_permutation


class PromptSchedule:
    """The dataset indices of each step: a seeded permutation per epoch, split into steps, the last of which may be
    smaller.

    The permutations of all epochs are one endless sequence, of which each step takes the next prompts. If earlier steps
    have drawn extra prompts (`dynamic_sampling`), a step begins that much later in the sequence; its size stays, and
    `epoch_at` does not count them.

    Args:
        num_prompts: of the dataset, at least one.
        args: the seed, `rollout_batch_size`, the prompts of a step, and the length of the run: `total_epochs`,
            `total_episodes` (prompts) or `max_steps`, by default one epoch.
    """

    def __init__(self, num_prompts: int, args: PPOConfig) -> None:
        self.num_prompts, self.rollout_batch_size, self.seed = num_prompts, args.rollout_batch_size, args.seed
        self._steps_per_epoch = -(-num_prompts // args.rollout_batch_size)
        self.num_episodes = args.total_episodes or num_prompts * (args.total_epochs or 1)
        if args.max_steps is not None:
            self.num_episodes = self._start_of(args.max_steps)
        epochs, rest = divmod(self.num_episodes, num_prompts)
        self.num_steps = epochs * self._steps_per_epoch + -(-rest // args.rollout_batch_size)

    def epoch_at(self, step: int) -> float:
        """Returns the epochs completed after `step` steps, as a fraction."""
        return min(self._start_of(step), self.num_episodes) / self.num_prompts

    def prompts_of(self, step: int, extra_prompts: int = 0) -> "StepPrompts":
        """Returns the prompts of `step` (from 0), where earlier steps have drawn `extra_prompts`.

        Raises:
            ValueError: if `step` is outside the schedule.
        """
        if not 0 <= step < self.num_steps:
            raise ValueError(f"step {step} is outside the schedule of {self.num_steps} steps; raise max_steps")
        return StepPrompts(self, self._start_of(step) + extra_prompts, self.num_prompts_at(step))

    def sequence(self, place: int) -> Iterator[int]:
        """Yields the endless sequence of prompts from `place` on."""
        epoch, within = divmod(place, self.num_prompts)
        while True:
            yield from seeded_permutation(self.num_prompts, self.seed, epoch)[within:].tolist()
            epoch, within = epoch + 1, 0

    def num_prompts_at(self, step: int) -> int:
        """Returns the number of prompts of `step`."""
        return min(self._start_of(step + 1), self.num_episodes) - self._start_of(step)

    def _start_of(self, step: int) -> int:
        """The place in the sequence at which `step` begins if no earlier step has drawn extra prompts."""
        epoch, within = divmod(step, self._steps_per_epoch)
        return epoch * self.num_prompts + within * self.rollout_batch_size


class StepPrompts:
    """The prompts of one step: those that the schedule gives it, and any number drawn after them.

    Attributes:
        indices: the `count` prompts from the place `start` of the schedule's sequence on.
        extra_prompts: how many further prompts of the sequence the step has drawn or skipped so far.
    """

    def __init__(self, schedule: PromptSchedule, start: int, count: int) -> None:
        self._num_prompts, self._sequence = schedule.num_prompts, schedule.sequence(start)
        self.extra_prompts = -count
        self.indices = self.draw(count)

    def draw(self, count: int, *, without: Collection[int] = ()) -> list[int]:
        """Draws the next `count` different prompts that are not in `without`; fewer if the dataset has no more."""
        excluded, drawn = set(without), list[int]()
        count = min(count, self._num_prompts - len(excluded.intersection(range(self._num_prompts))))
        while len(drawn) < count:
            index = next(self._sequence)
            self.extra_prompts += 1
            if index not in excluded:
                excluded.add(index)
                drawn.append(index)
        return drawn
