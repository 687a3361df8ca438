"""How responses are sampled."""

from dataclasses import dataclass

from torch import Tensor

from alpaca_ppo.functional.rng import stream_keys


@dataclass(frozen=True)
class SamplingParams:
    """How responses are sampled; the names are those of `generation.generate`."""

    max_new_tokens: int
    temperature: float
    pad_token_id: int
    stop_token_ids: tuple[int, ...]
    truncate_token_ids: tuple[int, ...] = ()
    truncate_after: int = 0
    num_return_sequences: int = 1
    do_sample: bool = True
    top_k: int | None = None
    top_p: float | None = None
    backend: str = "decode"
    seed: int = 0
    step: int = 0

    def random_keys(self, prompt_ids: Tensor) -> Tensor:
        """(P * num_return_sequences,) int64, prompt-major: the key of each response's stream of random numbers.

        `functional.rng.uniforms(keys, t)` gives the number of each stream that chooses token t, so that a sampler of
        another kind can draw the same tokens.

        Args:
            prompt_ids: (P,) int64, index of each prompt in its dataset.
        """
        return stream_keys(
            seed=self.seed,
            step=self.step,
            prompt_ids=prompt_ids,
            num_return_sequences=self.num_return_sequences,
        )
