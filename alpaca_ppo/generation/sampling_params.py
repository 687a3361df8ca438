"""How responses are sampled."""

from dataclasses import dataclass


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
