"""What ends a response: stop tokens, tokens that truncate it, and how both are found."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase


class StopRule:
    """Whether a token ends its response.

    Args:
        stop_token_ids: end it wherever they stand.
        truncate_token_ids: end it only where at least `truncate_after` tokens of the response stand before them.
        truncate_after: tokens.
        device: of the tokens that will be asked about.
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
        self._early = torch.tensor(stops, dtype=torch.long, device=device)
        self._late = torch.tensor(sorted({*stops, *truncate_token_ids}), dtype=torch.long, device=device)
        self._truncate_after = truncate_after

    def __call__(self, tokens: Tensor, position: int) -> Tensor:
        """True where a token of `tokens` (N,) at response position `position` (from 0) ends its row; (N,) bool."""
        stops = self._late if position >= self._truncate_after else self._early
        return (tokens.unsqueeze(1) == stops).any(dim=1)


def resolve_stop_tokens(
    processing_class: PreTrainedTokenizerBase, generation_config: GenerationConfig | None
) -> tuple[int, ...]:
    """The ids that end a response: the tokenizer's eos and those of the model's generation config, sorted.

    Raises:
        ValueError: when neither has one.
    """
    configured = None if generation_config is None else generation_config.eos_token_id
    found = [configured] if isinstance(configured, int) else list(configured or ())
    if processing_class.eos_token_id is not None:
        found.append(processing_class.eos_token_id)
    if not found:
        raise ValueError(
            "neither the tokenizer nor the model's generation config has an eos_token_id (both None), so no response "
            "would ever stop; set processing_class.eos_token to the token that ends one"
        )
    return tuple(sorted(set(found)))


def resolve_truncate_tokens(
    processing_class: PreTrainedTokenizerBase, truncate_tokens: Sequence[str | int]
) -> tuple[int, ...]:
    """The ids of `truncate_tokens`, sorted; a string is looked up in the vocabulary, then tokenized as text.

    Raises:
        ValueError: when a string is no single token, or an id is outside the vocabulary.
    """
    return tuple(sorted({_truncate_token(processing_class, token) for token in truncate_tokens}))


def _truncate_token(processing_class: PreTrainedTokenizerBase, token: str | int) -> int:
    vocabulary = processing_class.get_vocab()
    if isinstance(token, int):
        if token not in vocabulary.values():
            raise ValueError(
                f"truncate_tokens holds id {token}, which the tokenizer's {len(vocabulary)} tokens do not have; "
                f"give an id of the vocabulary or the token's text"
            )
        return token
    if token in vocabulary:
        return vocabulary[token]
    ids = processing_class.encode(token, add_special_tokens=False)
    if len(ids) != 1 or ids[0] == processing_class.unk_token_id:
        raise ValueError(
            f"truncate_tokens holds {token!r}, which the tokenizer splits into {len(ids)} tokens "
            f"{processing_class.convert_ids_to_tokens(ids)}; give a string that is exactly one known token, or its id"
        )
    return int(ids[0])
