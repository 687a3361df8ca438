"""How tokens are chosen, and what ends a response."""

from dataclasses import dataclass

import torch
from torch import Tensor

from alpaca_ppo.functional.rng import stream_keys
from alpaca_ppo.generation.stop_strings import StopStrings


@dataclass(frozen=True)
class SamplingParams:
    """The settings of one call of the sampler; `generate` checks them."""

    max_new_tokens: int
    """R: the most tokens of a response, and the width of the result."""
    temperature: float
    """Divides the logits, for the choice of a token and for its log-prob; > 0."""
    pad_token_id: int
    """Fills the columns after a response's end; may equal a stop token."""
    stop_token_ids: tuple[int, ...]
    """Tokens that end a response at any position."""
    truncate_token_ids: tuple[int, ...] = ()
    """Tokens that end a response once at least `truncate_after` of its tokens precede them."""
    truncate_after: int = 0
    """Tokens before `truncate_token_ids` take effect."""
    stop_strings: StopStrings | None = None
    """Texts of which the first to be completed ends a response; `stop_strings.strings` has them. None = none."""
    num_return_sequences: int = 1
    """n: responses per prompt."""
    do_sample: bool = True
    """True samples from the softmax; False takes the most likely token (greedy decoding)."""
    top_k: int | None = None
    """Sample only from the k most likely tokens; None keeps all. For evaluation: log-probs stay those of the full
    softmax."""
    top_p: float | None = None
    """Sample only from the most likely tokens that together reach this probability, in (0, 1]; None keeps all. For
    evaluation, like `top_k`."""
    seed: int = 0
    """Seed of the run."""
    step: int = 0
    """Step of the rollout; with `seed`, `sampling_round`, prompt id, sample index and position, it determines a token's
    random number."""
    sampling_round: int = 0
    """Round of the step in which the prompts were drawn: 0, or from 1 for those that `dynamic_sampling` draws after it.
    A prompt that is drawn in two rounds gets other responses."""

    sample_ids: tuple[int, ...] | None = None
    """With `num_return_sequences` 1: which of its prompt's samples each row is, where samples are prompts of their own;
    None = the first. It determines random numbers."""

    def random_keys(self, prompt_ids: Tensor) -> Tensor:
        """Returns the key of each response's stream of random numbers, (P * num_return_sequences,) int64, prompt-major.

        `functional.rng.uniforms(keys, t)` returns the numbers that choose the tokens at position t, so that another
        sampler can draw the same tokens.

        Args:
            prompt_ids: (P,) int64, index of each prompt in its dataset.
        """
        return stream_keys(
            seed=self.seed,
            step=self.step,
            sampling_round=self.sampling_round,
            prompt_ids=prompt_ids,
            num_return_sequences=self.num_return_sequences,
            sample_ids=None
            if self.sample_ids is None
            else torch.tensor(self.sample_ids, dtype=torch.int64, device=prompt_ids.device),
        )

    def check(self) -> None:
        """Raises ValueError for a value outside its range."""
        for name in ("max_new_tokens", "num_return_sequences", "top_k"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} ({value}) must be at least 1")
        if self.sample_ids is not None and self.num_return_sequences != 1:
            raise ValueError(f"num_return_sequences ({self.num_return_sequences}) must be 1 where sample_ids are given")
        if not self.temperature > 0:
            raise ValueError(f"temperature ({self.temperature}) must be positive; for greedy decoding: do_sample=False")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p ({self.top_p}) must be in (0, 1]")
