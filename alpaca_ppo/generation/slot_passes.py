"""The forward passes of the slot sampler, and the cache of keys and values that they fill.

`extend` reads new tokens of some slots, a prompt or tokens appended to a row, packed into one sequence without padding.
`read_next` reads the next token of each slot, without a synchronization with the host.

`SlotCache` has a fixed number of rows (slots), each filled from column 0 up to its own length, in one block of memory,
so that steps have the same shapes however often rows come and go.
"""

import inspect
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from alpaca_ppo.functional.packing import Span
from alpaca_ppo.models.packed_attention import (
    AttentionSettings,
    PackedSequences,
    Packing,
    cache_argument,
    dense_attention,
)
from alpaca_ppo.models.state_reader import captured_outputs


class Pass(NamedTuple):
    """Where the tokens of one forward pass go, and what attention reads.

    Attributes:
        slots: (N,) int64, the slot of each new token. In a step these are the first k slots (N = k); tokens packed as
            (1, N) may be in any slots.
        columns: (N,) int64, its column.
        read_slots: the slots whose states attention reads: k for the first k, or a selection (k,) int64. With None
            attention reads only the new states.
        read_columns: how many columns of these slots it reads; only idle slots have tokens beyond these.
    """

    slots: Tensor
    columns: Tensor
    read_slots: Tensor | int | None = None
    read_columns: int = 0


class SlotCache(Cache):
    """Keys and values of `slots` rows of up to `columns` tokens, for every layer of a model.

    The model gets it as its `cache_argument`, after `start`. The first pass allocates the storage, in the dtype of its
    states, with zeros, because masked columns must be finite. Layers with a sliding window keep all columns.

    Attributes:
        outputs: (slots, layers, H), the outputs of `output_layers` for the last token that each slot has read; None
            before the first pass, and without such layers.
    """

    def __init__(self, slots: int, columns: int, output_layers: Sequence[nn.Module] = ()) -> None:
        super().__init__(layers=[])
        self.slots, self.columns, self.output_layers = slots, columns, output_layers
        self.outputs: Tensor | None = None
        self._storage: dict[int, list[Tensor]] = {}
        # `start` sets it.
        self._pass: Pass
        self._indices: dict[int, Tensor] = {}

    def start(self, new: Pass) -> None:
        """Sets where the states of the next forward pass go."""
        self._pass, self._indices = new, {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Stores the states of the new tokens and returns those that attention reads.

        A step's states are (k, kv_heads, 1, d); it reads a view (k, kv_heads, columns, d). Those of packed tokens are
        (1, kv_heads, N, d); they read a copy (k, kv_heads, columns, d), or only themselves.
        """
        new = (key_states, value_states)
        if layer_idx not in self._storage:
            self._storage[layer_idx] = [s.new_zeros(self.slots, s.size(1), self.columns, s.size(-1)) for s in new]
        keys, values = self._storage[layer_idx]
        index = self._index(key_states.size(1))
        for stored, states in zip((keys, values), new, strict=True):
            size = states.size(-1)
            stored.view(-1, size).index_copy_(0, index, states.reshape(-1, size).to(stored.dtype))
        read, columns = self._pass.read_slots, self._pass.read_columns
        if read is None:
            return key_states, value_states
        if isinstance(read, int):
            return keys[:read, :, :columns], values[:read, :, :columns]
        return keys[:, :, :columns].index_select(0, read), values[:, :, :columns].index_select(0, read)

    def _index(self, heads: int) -> Tensor:
        """(N * heads,) int64: where each new state goes in the storage, flattened to (slots * heads * columns, d)."""
        if heads not in self._indices:
            head = torch.arange(heads, device=self._pass.slots.device)
            index = (self._pass.slots.unsqueeze(1) * heads + head) * self.columns + self._pass.columns.unsqueeze(1)
            # Packed tokens are the inner dimension of their states, slots the outer one.
            self._indices[heads] = (index if isinstance(self._pass.read_slots, int) else index.T).flatten()
        return self._indices[heads]

    def keep_outputs(self, slots: Tensor, outputs: Sequence[Tensor]) -> None:
        """Sets `outputs` of the `slots` (k,) int64 to those of each layer, (k, H)."""
        if outputs:
            found = torch.stack(list(outputs), dim=1)
            if self.outputs is None:
                self.outputs = found.new_zeros(self.slots, *found.shape[1:])
            self.outputs[slots] = found

    def copy(self, source: int, targets: Sequence[int], columns: int) -> None:
        """Copies the first `columns` columns of slot `source`, and its outputs, to the slots `targets`."""
        if self.outputs is not None:
            for target in targets:
                self.outputs[target] = self.outputs[source]
        for stored in (stored for storage in self._storage.values() for stored in storage):
            states = stored[source, :, :columns]
            for target in targets:
                stored[target, :, :columns].copy_(states)

    def swap(self, one: int, other: int, columns: int) -> None:
        """Exchanges the first `columns` columns of two slots, whose outputs are invalid until they read on."""
        for stored in (stored for storage in self._storage.values() for stored in storage):
            states = stored[one, :, :columns].clone()
            stored[one, :, :columns].copy_(stored[other, :, :columns])
            stored[other, :, :columns].copy_(states)


def visible_columns(at: Tensor, columns: int, *, sliding_window: int | None) -> Tensor:
    """Returns (..., columns) bool, True = the token in column `at` (...) of its slot sees this column.

    A token beyond `columns` is that of an idle slot or padding. It sees what the token in the last column sees, because
    the softmax may be NaN if the mask has an empty row.
    """
    column, at = torch.arange(columns, device=at.device), at.unsqueeze(-1)
    visible = column <= at
    if sliding_window is not None:
        visible = visible & (column > at.clamp(max=columns - 1) - sliding_window)
    return visible


class NewTokens(NamedTuple):
    """Tokens, at least one, that a slot reads in one pass after the `past` tokens that it holds."""

    slot: int
    past: int
    tokens: Sequence[int]


def extend(model: PreTrainedModel, cache: SlotCache, new: Sequence[NewTokens]) -> dict[int, Tensor]:
    """Returns the logits (V,) after the last of each slot's new tokens, whose states are then in `cache`."""
    if not new:
        return {}
    device = model.device
    # Sorted, because attention can compute neighbours of equal length together.
    order = sorted(range(len(new)), key=lambda i: len(new[i].tokens))
    packed = [new[i] for i in order]
    # One tensor, so that a device is written to once.
    numbers = [(token, entry.slot, entry.past + i) for entry in packed for i, token in enumerate(entry.tokens)]
    tokens, slots, columns = torch.tensor(numbers, device=device).T.contiguous()
    counts = [len(entry.tokens) for entry in packed]
    ends = list(itertools.accumulate(counts))
    last_of = {i: end - 1 for i, end in zip(order, ends, strict=True)}
    last = torch.tensor([last_of[i] for i in range(len(new))], device=device)
    attention: Packing
    if any(entry.past for entry in new):
        filled = max(entry.past + len(entry.tokens) for entry in new)
        attention = ExtendAttention([entry.past for entry in packed], counts, filled, device)
        read_slots = torch.tensor([entry.slot for entry in packed], device=device)
        cache.start(Pass(slots, columns, read_slots, filled))
    else:
        attention = PackedSequences([Span(end - count, count) for count, end in zip(counts, ends, strict=True)])
        cache.start(Pass(slots, columns))
    # The class's signature, because the instance's forward may be wrapped.
    selects = "logits_to_keep" in inspect.signature(type(model).forward).parameters
    selection = {"logits_to_keep": last} if selects else {}
    with captured_outputs(cache.output_layers) as outputs:
        logits = _forward(model, cache, tokens.unsqueeze(0), columns.unsqueeze(0), attention, **selection)[0]
    cache.keep_outputs(slots[last], [output[0, last] for output in outputs])
    logits = logits if selects else logits[last]
    return {entry.slot: logits[i] for i, entry in enumerate(new)}


def _forward(
    model: PreTrainedModel, cache: SlotCache, tokens: Tensor, position_ids: Tensor, attention: Packing, **keywords: Any
) -> Tensor:
    """Returns the logits of a pass after `SlotCache.start`; `tokens` and `position_ids` are (1, N) or (k, 1)."""
    logits: Tensor = model(
        input_ids=tokens,
        position_ids=position_ids,
        # `models.packed_attention.DUMMY_MASK`, made on the device: copying it there would wait for the device.
        attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=tokens.device),
        **{cache_argument(model): cache},
        use_cache=True,
        packing=attention,
        **keywords,
    ).logits
    return logits


class _SlotAttention:
    """Attention over the columns of slots, whose masks are made once for all layers of a pass.

    Args:
        at: (k, N) int64, the columns of the N new tokens in each of k slots.
        columns: how many columns of the slots are read.
    """

    def __init__(self, at: Tensor, columns: int) -> None:
        self._at, self._columns = at, columns
        self._masks: dict[tuple[int | None, torch.dtype], Tensor] = {}

    def _mask(self, sliding_window: int | None, dtype: torch.dtype = torch.bool) -> Tensor:
        """(k, 1, N, columns) bool, True = the new token sees this column; in another dtype 0 or -inf, which is added to
        the scores: torch would convert a boolean mask in every layer.
        """
        kind = (sliding_window, dtype)
        if kind not in self._masks:
            mask = visible_columns(self._at, self._columns, sliding_window=sliding_window).unsqueeze(1)
            if dtype != torch.bool:
                mask = torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, float("-inf"))
            self._masks[kind] = mask
        return self._masks[kind]


class ExtendAttention(_SlotAttention):
    """The attention of `extend`: a new token sees its slot's earlier tokens, and the new ones up to itself. Queries are
    padded to the row with the most new tokens.

    Args:
        past: tokens that the slot of each of k rows held before.
        counts: new tokens of each row.
        columns: how many columns of the slots are read.
    """

    def __init__(self, past: Sequence[int], counts: Sequence[int], columns: int, device: torch.device) -> None:
        offsets = torch.arange(max(counts), device=device)
        super().__init__(torch.tensor(past, device=device).unsqueeze(1) + offsets, columns)
        sizes = torch.tensor(counts, device=device)
        starts = sizes.cumsum(0) - sizes
        # Padded queries repeat the row's last token.
        self._tokens = starts.unsqueeze(1) + torch.minimum(offsets, sizes.unsqueeze(1) - 1)
        rows = torch.arange(len(counts), device=device).repeat_interleave(sizes, output_size=sum(counts))
        # Where each new token is among the padded queries.
        self._cells = rows * max(counts) + torch.arange(len(rows), device=device) - starts[rows]

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, settings: AttentionSettings
    ) -> Tensor:
        """Returns (1, N, heads, width) for query (1, heads, N, d), key and value (k, kv_heads, columns, d or width)."""
        padded = query[0][:, self._tokens].transpose(0, 1)
        attended = dense_attention(padded, key, value, self._mask(settings.sliding_window), settings)
        return attended.transpose(1, 2).flatten(0, 1)[self._cells].unsqueeze(0)


def read_next(
    model: PreTrainedModel, cache: SlotCache, tokens: Tensor, lengths: Tensor, position_ids: Tensor, *, columns: int
) -> Tensor:
    """Returns the logits (k, V) after the next token of each of the first k slots, whose states go into the cache.

    Args:
        model: with the attention of `models.packed_attention`.
        tokens: (k,) int64.
        lengths: (k,) int64, tokens that each slot holds before.
        position_ids: (k,) int64, `lengths` for running rows.
        columns: columns of the cache that are read; more than `lengths` of every running row.
    """
    first_slots = torch.arange(len(lengths), device=lengths.device)
    cache.start(Pass(first_slots, lengths, len(lengths), columns))
    attention = StepAttention(lengths.unsqueeze(1), columns)
    with captured_outputs(cache.output_layers) as outputs:
        logits = _forward(model, cache, tokens.unsqueeze(1), position_ids.unsqueeze(1), attention)[:, -1]
    cache.keep_outputs(first_slots, [output[:, -1] for output in outputs])
    return logits


class StepAttention(_SlotAttention):
    """The attention of `read_next`: the new token of each slot sees the tokens of its slot."""

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, settings: AttentionSettings
    ) -> Tensor:
        """Returns (slots, 1, heads, width) for query (slots, heads, 1, d), key (slots, kv_heads, columns, d) and value
        (slots, kv_heads, columns, width).
        """
        plain = settings.softcap is None and settings.sinks is None
        mask = self._mask(settings.sliding_window, query.dtype if plain else torch.bool)
        return dense_attention(query, key, value, mask, settings).transpose(1, 2)
