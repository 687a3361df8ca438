"""The order of prompts: a function of the seed and the step, independent of the number of processes."""

from alpaca_ppo.functional.rng import seeded_permutation


class PromptSchedule:
    """The dataset indices of each step: a seeded permutation per epoch, split into steps.

    The last step of an epoch may be smaller.

    Args:
        num_prompts: prompts in the dataset.
        rollout_batch_size: prompts per step.
        seed: seed of the permutations.
        total_epochs: passes over the dataset. Give either this or `total_episodes`.
        total_episodes: prompts in total.

    Raises:
        ValueError: if the dataset is empty, or not exactly one of the two totals is given.
    """

    def __init__(
        self,
        num_prompts: int,
        rollout_batch_size: int,
        *,
        seed: int,
        total_epochs: int | None = None,
        total_episodes: int | None = None,
    ) -> None:
        if num_prompts < 1:
            raise ValueError(
                "train_dataset has no prompt left to train on (0 rows); check query_len and the dataset's columns"
            )
        if (total_epochs is None) == (total_episodes is None):
            raise ValueError(
                f"set exactly one of total_epochs ({total_epochs}) and total_episodes ({total_episodes}), and the "
                "other to null"
            )
        self.num_prompts, self.rollout_batch_size, self.seed = num_prompts, rollout_batch_size, seed
        self.num_episodes = total_episodes if total_episodes is not None else num_prompts * (total_epochs or 0)
        self._steps_per_epoch = -(-num_prompts // rollout_batch_size)
        epochs, rest = divmod(self.num_episodes, num_prompts)
        self.num_steps = epochs * self._steps_per_epoch + -(-rest // rollout_batch_size)

    def epoch_at(self, step: int) -> float:
        """Returns how many passes over the dataset, with their fraction, are complete after `step` steps."""
        epoch, within = divmod(step, self._steps_per_epoch)
        done = epoch * self.num_prompts + min(within * self.rollout_batch_size, self.num_prompts)
        return min(done, self.num_episodes) / self.num_prompts

    def indices(self, step: int) -> list[int]:
        """Returns the dataset indices of `step` (from 0): `rollout_batch_size`, or fewer in the last step of an epoch.

        Raises:
            ValueError: if `step` is outside the schedule.
        """
        if not 0 <= step < self.num_steps:
            raise ValueError(
                f"step {step} is outside the schedule of {self.num_steps} steps; raise total_epochs or total_episodes"
            )
        epoch, within = divmod(step, self._steps_per_epoch)
        start = within * self.rollout_batch_size
        stop = min(start + self.rollout_batch_size, self.num_prompts, self.num_episodes - epoch * self.num_prompts)
        indices: list[int] = seeded_permutation(self.num_prompts, self.seed, epoch)[start:stop].tolist()
        return indices

    def num_prompts_at(self, step: int) -> int:
        """Returns the number of prompts of `step` without building the permutation."""
        epoch, within = divmod(step, self._steps_per_epoch)
        start = within * self.rollout_batch_size
        return min(
            self.rollout_batch_size, self.num_prompts - start, self.num_episodes - epoch * self.num_prompts - start
        )
