"""Tokenization for reward models: one call of the tokenizer for all texts that are new, and a cache of the others."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

MAX_CACHED_BYTES = 2**25
"""Memory for texts and their ids: of 500 tokens each, about 2600 texts."""

_BYTES_PER_TEXT = 640
"""Of a tensor and the other objects that hold one text, besides its ids and characters."""


class Text(NamedTuple):
    """What a tokenizer reads."""

    text: str
    rendered: bool
    """Whether it comes from a chat template, which has written the special tokens already."""


class TextTokens:
    """Returns the token ids of texts.

    A tokenizer is a function of its text, so what it returned is kept, the texts used last for longest. A prompt alone
    is not kept, because its last characters may form a token with the first ones of a completion.

    Args:
        tokenizer: must not be changed afterwards.
        max_cached_bytes: upper bound of the memory for what is kept.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, max_cached_bytes: int = MAX_CACHED_BYTES) -> None:
        self.tokenizer = tokenizer
        self._max_cached_bytes = max_cached_bytes
        self._kept: dict[Text, Tensor] = {}
        self._num_bytes = 0

    def __call__(self, texts: Sequence[Text]) -> list[Tensor]:
        """Returns (length,) int64 for each text."""
        found: dict[Text, Tensor] = {}
        for text in dict.fromkeys(texts):
            if (ids := self._kept.pop(text, None)) is not None:
                found[text] = ids
                self._num_bytes -= _num_bytes(text, ids)
        for rendered in (False, True):
            new = [text for text in dict.fromkeys(texts) if text not in found and text.rendered == rendered]
            if new:
                words = [text.text for text in new]
                # Not add_special_tokens=True: some tokenizers have a default of their own.
                encoded = self.tokenizer(words, add_special_tokens=False) if rendered else self.tokenizer(words)
                tensors = [torch.tensor(ids, dtype=torch.long) for ids in encoded["input_ids"]]
                found |= dict(zip(new, tensors, strict=True))
        self._keep(found)
        return [found[text] for text in texts]

    def _keep(self, found: dict[Text, Tensor]) -> None:
        self._kept |= found
        self._num_bytes += sum(_num_bytes(text, ids) for text, ids in found.items())
        while self._num_bytes > self._max_cached_bytes:
            oldest = next(iter(self._kept))
            self._num_bytes -= _num_bytes(oldest, self._kept.pop(oldest))


def _num_bytes(text: Text, ids: Tensor) -> int:
    # A character takes at most four bytes.
    return 8 * len(ids) + 4 * len(text.text) + _BYTES_PER_TEXT
