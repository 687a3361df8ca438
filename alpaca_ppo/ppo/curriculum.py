"""A curriculum: how often the responses to each prompt have passed lately, and how likely that makes the prompt to be
drawn.

Which prompts come next with given chances is in `data.schedule`. Every rank has the rollouts of all ranks, so all of
them record and draw the same.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.ppo.metrics import RolloutCounts
from alpaca_ppo.types import Rollouts

SMALLEST_CHANCE = 0.01
"""A prompt is never drawn more rarely than this, relative to the most likely one: what is hopeless today may not be
later, and its pass rate is known only from its responses."""


class PassRates:
    """The pass rate of each prompt: a response passes if its raw score is above `curriculum_threshold`.

    Each time that a prompt is sampled, its rate becomes the mean of the share of its responses that passed and of the
    rate before, so what it did n times ago has half the weight of what it did n - 1 times ago.

    Args:
        num_prompts: of the dataset.
        args: of the run.
    """

    def __init__(self, num_prompts: int, args: PPOConfig) -> None:
        self._args = args
        self.rates = torch.full((num_prompts if args.curriculum else 0,), torch.nan, dtype=torch.float64)
        """(N,) from 0 to 1, NaN for a prompt that has not been sampled yet; empty without `curriculum`."""

    def record(self, rollouts: Rollouts, counts: RolloutCounts) -> None:
        """Records the responses of a step, those to prompts that were replaced among them."""
        if not self._args.curriculum:
            return
        prompts = torch.cat([rollouts["prompt_ids"], torch.tensor(counts.discarded_prompts, dtype=torch.int64)])
        scores = torch.cat([rollouts["scores"], torch.tensor(counts.discarded_scores)])
        passed = (scores > self._args.curriculum_threshold).double()
        for prompt in prompts.unique().tolist():
            share, before = passed[prompts == prompt].mean(), self.rates[prompt]
            self.rates[prompt] = share if bool(before.isnan()) else (before + share) / 2

    def chances(self, weights: Any) -> Tensor:
        """(N,) float64, from SMALLEST_CHANCE to 1: how likely each prompt is to be drawn when its turn comes; 1 for all
        if none has any weight, as after one response to each prompt, when every rate is 0 or 1.

        Args:
            weights: (N,), what `_prompt_weights` has returned for the rates.

        Raises:
            ValueError: unless they are N finite numbers of at least 0.
        """
        given = torch.as_tensor(weights, dtype=torch.float64)
        if given.shape != self.rates.shape or not bool((given.isfinite() & (given >= 0)).all()):
            raise ValueError(
                f"_prompt_weights() returned {weights!r}; it must return a tensor of shape {tuple(self.rates.shape)}, "
                "one finite weight of at least 0 for each prompt"
            )
        return (given / given.max()).clamp_min(SMALLEST_CHANCE) if given.any() else torch.ones_like(given)

    def state_dict(self) -> dict[str, Tensor]:
        """The recorded rates."""
        return {"rates": self.rates.clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restores what `state_dict` returned. Rates of another number of prompts (`ignore_data_change`) are those of
        other prompts, and forgotten.
        """
        if state["rates"].shape == self.rates.shape:
            self.rates = state["rates"].clone()


def learnable_weights(pass_rates: Tensor) -> Tensor:
    """(N,): 4 p (1 - p), which is 1 for a pass rate of one half and 0 for prompts that always or never pass; 1 for a
    prompt without a rate (NaN).

    p (1 - p) is the variance of the score of a task that is passed or not: the size of what an estimator that compares
    responses can learn from.

    Args:
        pass_rates: (N,) from 0 to 1, or NaN.
    """
    return (4 * pass_rates * (1 - pass_rates)).nan_to_num(nan=1.0)
