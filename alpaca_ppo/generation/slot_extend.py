"""One forward pass over new tokens of several slots, each row after the tokens that its slot holds already.

It serves the first tokens of a prompt, a prompt after a common prefix, and tokens that are appended to a response. The
new tokens are packed into one sequence without padding.
"""

import inspect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from alpaca_ppo.functional.packing import Span
from alpaca_ppo.generation.slot_cache import SlotCache, visible_columns
from alpaca_ppo.models.packed_attention import DUMMY_MASK, AttentionSettings, dense_attention
from alpaca_ppo.models.packed_sequences import PackedSequences


@dataclass(frozen=True)
class NewTokens:
    """Tokens that a slot reads in one pass."""

    slot: int
    """Where they go."""
    past: int
    """Tokens that the slot holds before them."""
    tokens: Sequence[int]
    """At least one token id."""


def extend(model: PreTrainedModel, cache: SlotCache, new: Sequence[NewTokens]) -> Tensor:
    """Returns the logits (k, V) after the last of each row's new tokens, whose states are then in `cache`."""
    device = model.device
    # Rows of equal length are neighbours, so that attention can take them together.
    order = sorted(range(len(new)), key=lambda i: len(new[i].tokens))
    packed = [new[i] for i in order]
    flat = [(token, entry.slot, entry.past + i) for entry in packed for i, token in enumerate(entry.tokens)]
    tokens, slots, columns = torch.tensor(flat, device=device).T.contiguous()
    counts = [len(entry.tokens) for entry in packed]
    ends = list(itertools.accumulate(counts))
    last = torch.tensor([end - 1 for _, end in sorted(zip(order, ends, strict=True))], device=device)
    attention: PackedSequences | ExtendAttention
    if any(entry.past for entry in new):
        attention = ExtendAttention([entry.past for entry in packed], counts, device)
        read_slots = torch.tensor([entry.slot for entry in packed], device=device)
        cache.start_extend(slots, columns, read_slots=read_slots, read_columns=attention.columns)
    else:
        attention = PackedSequences([Span(end - count, count) for count, end in zip(counts, ends, strict=True)])
        cache.start_extend(slots, columns, read_slots=None, read_columns=0)
    # The signature of the class, because the forward of the instance may be wrapped.
    selects = "logits_to_keep" in inspect.signature(type(model).forward).parameters
    output = model(
        input_ids=tokens.unsqueeze(0),
        position_ids=columns.unsqueeze(0),
        attention_mask=DUMMY_MASK.to(device),
        past_key_values=cache,
        use_cache=True,
        packing=attention,
        **({"logits_to_keep": last} if selects else {}),
    )
    logits: Tensor = output.logits[0]
    return logits if selects else logits[last]


class ExtendAttention:
    """The attention of `extend`: a new token sees its slot's earlier tokens, and the new ones up to itself.

    Queries are padded to the row with the most new tokens. Given to the model as `packing` (see
    `models.packed_attention`).

    Args:
        past: for each of k rows, the tokens that its slot held before.
        counts: for each row, its new tokens.
        device: of the model.
    """

    def __init__(self, past: Sequence[int], counts: Sequence[int], device: torch.device) -> None:
        self._past = torch.tensor(past, device=device)
        sizes = torch.tensor(counts, device=device)
        starts = sizes.cumsum(0) - sizes
        self.columns = max(p + c for p, c in zip(past, counts, strict=True))
        """Columns of the cache that the rows fill."""
        self._offsets = torch.arange(max(counts), device=device)
        # Padded queries repeat the row's last token.
        self._tokens = starts.unsqueeze(1) + torch.minimum(self._offsets, sizes.unsqueeze(1) - 1)
        rows = torch.arange(len(counts), device=device).repeat_interleave(sizes, output_size=sum(counts))
        self._cells = rows * max(counts) + torch.arange(len(rows), device=device) - starts[rows]
        self._allowed: dict[int | None, Tensor] = {}

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, settings: AttentionSettings
    ) -> Tensor:
        """Returns (1, N, heads, width) for query (1, heads, N, d), key and value (k, kv_heads, columns, d)."""
        padded = query[0][:, self._tokens].transpose(0, 1)
        attended = dense_attention(padded, key, value, self._mask(settings.sliding_window), settings)
        return attended.transpose(1, 2).flatten(0, 1)[self._cells].unsqueeze(0)

    def _mask(self, sliding_window: int | None) -> Tensor:
        """(k, 1, padded, columns) bool, True = the query sees the column."""
        if sliding_window not in self._allowed:
            at = self._past.unsqueeze(1) + self._offsets
            allowed = visible_columns(at, self.columns, sliding_window=sliding_window)
            self._allowed[sliding_window] = allowed.unsqueeze(1)
        return self._allowed[sliding_window]
