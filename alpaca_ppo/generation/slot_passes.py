"""The forward passes of the slot sampler: `extend` reads new tokens of some slots, `read_next` the next token of each.

New tokens are those of a prompt, of a prompt after a common beginning, or appended to a response. They are packed into
one sequence without padding. `read_next` is the step of decoding; it reads nothing back to the host. Which row sits in
which slot is decided in `generation.slots`.
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


def read_next(
    model: PreTrainedModel,
    cache: SlotCache,
    tokens: Tensor,
    lengths: Tensor,
    *,
    columns: int,
    position_ids: Tensor | None = None,
) -> Tensor:
    """Returns the logits (k, V) after the next token of each of the first k slots, whose states go into the cache.

    Args:
        model: the language model, with the attention of `models.packed_attention`.
        cache: keys and values of the tokens that were read before.
        tokens: (k,) int64.
        lengths: (k,) int64, tokens that each slot holds before.
        columns: how many columns of the cache are read; more than `lengths` of every row that counts.
        position_ids: (k,) int64; None takes `lengths`.
    """
    cache.start_step(lengths, columns)
    output = model(
        input_ids=tokens.unsqueeze(1),
        position_ids=(lengths if position_ids is None else position_ids).unsqueeze(1),
        # `models.packed_attention.DUMMY_MASK`, made on the device: copying it there would wait for the device.
        attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=lengths.device),
        past_key_values=cache,
        use_cache=True,
        packing=StepAttention(lengths, columns),
    )
    logits: Tensor = output.logits[:, -1]
    return logits


class StepAttention:
    """The attention of `read_next`: the new token of each slot sees the tokens of its own slot.

    Given to the model as `packing` (see `models.packed_attention`). Masks are made once per step and kind of layer.

    Args:
        lengths: (slots,) int64, the column of each slot's new token.
        columns: how many columns of the cache are read.
    """

    def __init__(self, lengths: Tensor, columns: int) -> None:
        self._lengths, self._columns = lengths, columns
        self._allowed: dict[int | None, Tensor] = {}
        self._biases: dict[tuple[int | None, torch.dtype], Tensor] = {}

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, settings: AttentionSettings
    ) -> Tensor:
        """Returns (slots, 1, heads, width) for query (slots, heads, 1, d), key (slots, kv_heads, columns, d) and value
        (slots, kv_heads, columns, width).
        """
        window = settings.sliding_window
        plain = settings.softcap is None and settings.sinks is None
        mask = self._bias(window, query.dtype) if plain else self._allow(window)
        return dense_attention(query, key, value, mask, settings).transpose(1, 2)

    def _allow(self, sliding_window: int | None) -> Tensor:
        """(slots, 1, 1, columns) bool, True = the new token of the slot sees this column."""
        if sliding_window not in self._allowed:
            allowed = visible_columns(self._lengths, self._columns, sliding_window=sliding_window)
            self._allowed[sliding_window] = allowed[:, None, None]
        return self._allowed[sliding_window]

    def _bias(self, sliding_window: int | None, dtype: torch.dtype) -> Tensor:
        """The same as numbers that are added to the scores: torch makes these of a boolean mask in every layer."""
        kind = (sliding_window, dtype)
        if kind not in self._biases:
            allowed = self._allow(sliding_window)
            self._biases[kind] = torch.zeros_like(allowed, dtype=dtype).masked_fill(~allowed, float("-inf"))
        return self._biases[kind]
