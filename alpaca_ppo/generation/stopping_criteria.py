"""The tokens that end a response: stop tokens, and truncate tokens, which do so only after some length."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase


class StopRule:
    """Decides whether a token ends its response.

    Args:
        stop_token_ids: end a response at any position.
        truncate_token_ids: end a response once at least `truncate_after` of its tokens precede them.
        truncate_after: see `truncate_token_ids`; in tokens.
        device: device of the tokens to check.
    """

    def __init__(
        self,
        stop_token_ids: Sequence[int],
        *,
        truncate_token_ids: Sequence[int] = (),
        truncate_after: int = 0,
        device: torch.device,
    ) -> None:
        stops = sorted(set(stop_token_ids))
        self._stop_ids = torch.tensor(stops, dtype=torch.long, device=device)
        self._stop_or_truncate_ids = torch.tensor(
            sorted({*stops, *truncate_token_ids}), dtype=torch.long, device=device
        )
        self._truncate_after = truncate_after

    def __call__(self, tokens: Tensor, position: int) -> Tensor:
        """Returns (N,) bool: True if a token of `tokens` (N,), at position `position` (from 0), ends its row."""
        ends = self._stop_or_truncate_ids if position >= self._truncate_after else self._stop_ids
        return (tokens.unsqueeze(1) == ends).any(dim=1)


def resolve_stop_tokens(
    processing_class: PreTrainedTokenizerBase, generation_config: GenerationConfig | None
) -> tuple[int, ...]:
    """Returns the ids that end a response, sorted: the eos of the tokenizer and those of the model's generation config.

    Raises:
        ValueError: if neither has one.
    """
    configured = None if generation_config is None else generation_config.eos_token_id
    found = [configured] if isinstance(configured, int) else list(configured or ())
    if processing_class.eos_token_id is not None:
        found.append(processing_class.eos_token_id)
    if not found:
        raise ValueError(
            "eos_token_id is None in both the tokenizer and the model's generation config, so no response would ever "
            "stop; set processing_class.eos_token to the token that ends a response"
        )
    return tuple(sorted(set(found)))


def resolve_truncate_tokens(
    processing_class: PreTrainedTokenizerBase, truncate_tokens: Sequence[str | int]
) -> tuple[int, ...]:
    """Returns the ids of `truncate_tokens`, sorted; a string is looked up in the vocabulary, then tokenized as text.

    Raises:
        ValueError: if a string is not a single token, or an id is outside the vocabulary.
    """
    return tuple(sorted({_truncate_token(processing_class, token) for token in truncate_tokens}))


def _truncate_token(processing_class: PreTrainedTokenizerBase, token: str | int) -> int:
    vocabulary = processing_class.get_vocab()
    if isinstance(token, int):
        if token not in vocabulary.values():
            raise ValueError(
                f"truncate_tokens holds id {token}, which is not in the tokenizer's vocabulary of "
                f"{len(vocabulary)} tokens; use an id of the vocabulary or the token's text"
            )
        return token
    if token in vocabulary:
        return vocabulary[token]
    ids = processing_class.encode(token, add_special_tokens=False)
    if len(ids) != 1 or ids[0] == processing_class.unk_token_id:
        raise ValueError(
            f"truncate_tokens holds {token!r}, which the tokenizer splits into {len(ids)} tokens "
            f"{processing_class.convert_ids_to_tokens(ids)}; use a string that is exactly one known token, or its id"
        )
    return int(ids[0])
