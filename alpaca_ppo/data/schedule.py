"""Which prompts each step takes: a function of the seed and the step, never of the number of processes."""

from alpaca_ppo.functional.rng import seeded_permutation


class PromptSchedule:
    """Which dataset indices each step takes: one seeded permutation an epoch, cut into steps, the ragged last one
    included.

    Args:
        num_prompts: prompts in the dataset.
        rollout_batch_size: prompts a step.
        total_epochs: passes over the dataset; or
        total_episodes: prompts in all (exactly one of the two).
        seed: of the permutations.

    Raises:
        ValueError: when the dataset is empty, or not exactly one of the two totals is given.
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
                "train_dataset has no prompt left to train on (0 rows); check query_len and the file's columns"
            )
        if (total_epochs is None) == (total_episodes is None):
            raise ValueError(
                f"set exactly one of total_epochs ({total_epochs}) and total_episodes ({total_episodes}); null the "
                f"other"
            )
        self.num_prompts, self.rollout_batch_size, self.seed = num_prompts, rollout_batch_size, seed
        self.num_episodes = total_episodes if total_episodes is not None else num_prompts * (total_epochs or 0)
        self._steps_per_epoch = -(-num_prompts // rollout_batch_size)
        epochs, rest = divmod(self.num_episodes, num_prompts)
        self.num_steps = epochs * self._steps_per_epoch + -(-rest // rollout_batch_size)

    def epoch_at(self, step: int) -> float:
        """Passes over the dataset completed when `step` steps are done."""
        epoch, within = divmod(step, self._steps_per_epoch)
        done = epoch * self.num_prompts + min(within * self.rollout_batch_size, self.num_prompts)
        return min(done, self.num_episodes) / self.num_prompts

    def indices(self, step: int) -> list[int]:
        """Dataset indices of `step` (from 0): `rollout_batch_size` of them, fewer in the last step of an epoch.

        Raises:
            ValueError: for a step that the schedule does not have.
        """
        if not 0 <= step < self.num_steps:
            raise ValueError(f"step {step} is not one of the schedule's {self.num_steps}; raise total_epochs")
        epoch, within = divmod(step, self._steps_per_epoch)
        start = within * self.rollout_batch_size
        stop = min(start + self.rollout_batch_size, self.num_prompts, self.num_episodes - epoch * self.num_prompts)
        indices: list[int] = seeded_permutation(self.num_prompts, self.seed, epoch)[start:stop].tolist()
        return indices

    def rows(self, step: int) -> int:
        """Number of prompts of `step`, without building the permutation."""
        epoch, within = divmod(step, self._steps_per_epoch)
        start = within * self.rollout_batch_size
        return min(
            self.rollout_batch_size, self.num_prompts - start, self.num_episodes - epoch * self.num_prompts - start
        )
