"""The key-value cache of the slot loop: a fixed number of rows (slots), each filled from column 0 up to its own length.

Rows of different lengths share one block of memory, so that a step has the same shapes however often rows come and go.
Layers with a sliding window keep all columns; attention masks the old ones. Which slot holds which row is decided in
`generation.slots`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache


class _Pass(NamedTuple):
    """Where the tokens of one forward pass go, and what attention reads."""

    slots: Tensor
    """(N,) int64: the slot of each new token."""
    columns: Tensor
    """(N,) int64: its column."""
    read_slots: Tensor | int | None
    """The slots whose states attention reads: the first k, a selection (k,) int64, or None for the new states alone."""
    read_columns: int
    """Columns of each of them."""


class SlotCache(Cache):
    """Keys and values of `slots` rows of up to `columns` tokens, for every layer of a model.

    It is passed to the model as `past_key_values`. `start_step` or `start_extend` says where the states of the next
    forward pass go. Storage is allocated by the first pass, in the dtype of its states, and zero at first, because a
    masked column must be finite.

    Args:
        slots: S, rows.
        columns: C, the most tokens of a row.
    """

    def __init__(self, slots: int, columns: int) -> None:
        super().__init__(layers=[])
        self.slots, self.columns = slots, columns
        self._storage: dict[int, tuple[Tensor, Tensor]] = {}
        self._pass: _Pass | None = None
        self._indices: dict[int, Tensor] = {}

    def start_step(self, lengths: Tensor, columns: int) -> None:
        """Makes the next pass write one token to each of the first k slots and attend over the first `columns`.

        Args:
            lengths: (k,) int64, the column of each slot's token; < C, beyond `columns` only in idle slots.
            columns: more than the greatest length of a running slot.
        """
        slots = torch.arange(len(lengths), device=lengths.device)
        self._pass, self._indices = _Pass(slots, lengths, len(lengths), columns), {}

    def start_extend(self, slots: Tensor, columns: Tensor, *, read_slots: Tensor | None, read_columns: int) -> None:
        """Makes the next pass write N tokens of several rows, packed as (1, N).

        Args:
            slots: (N,) int64, the slot of each token.
            columns: (N,) int64, its column.
            read_slots: (k,) int64, the slots whose first `read_columns` columns `update` returns; None returns the new
                states alone, for rows that had no tokens before.
            read_columns: see `read_slots`.
        """
        self._pass, self._indices = _Pass(slots, columns, read_slots, read_columns), {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Stores the states of the new tokens and returns those that attention reads.

        After `start_step` the states are (k, kv_heads, 1, d) and the result (k, kv_heads, columns, d), a view; after
        `start_extend` they are (1, kv_heads, N, d) and the result is a copy.
        """
        assert self._pass is not None, "start_step or start_extend comes before a forward pass"
        if layer_idx not in self._storage:
            self._storage[layer_idx] = (_zeros(key_states, self), _zeros(value_states, self))
        keys, values = self._storage[layer_idx]
        index = self._index(key_states.size(1))
        for kept, new in ((keys, key_states), (values, value_states)):
            size = new.size(-1)
            kept.view(-1, size).index_copy_(0, index, new.reshape(-1, size).to(kept.dtype))
        read, columns = self._pass.read_slots, self._pass.read_columns
        if read is None:
            return key_states, value_states
        if isinstance(read, int):
            return keys[:read, :, :columns], values[:read, :, :columns]
        return keys[:, :, :columns].index_select(0, read), values[:, :, :columns].index_select(0, read)

    def _index(self, heads: int) -> Tensor:
        """(N * heads,) int64: the place of each new state among all columns of all heads of all slots."""
        assert self._pass is not None
        if heads not in self._indices:
            each = torch.arange(heads, device=self._pass.slots.device)
            index = (self._pass.slots.unsqueeze(1) * heads + each) * self.columns + self._pass.columns.unsqueeze(1)
            # Packed tokens are the inner dimension of their states, slots the outer one.
            self._indices[heads] = (index if isinstance(self._pass.read_slots, int) else index.T).flatten()
        return self._indices[heads]

    def copy(self, source: int, targets: Sequence[int], columns: int) -> None:
        """Copies the first `columns` columns of slot `source` to the slots `targets`."""
        for kept in (kept for storage in self._storage.values() for kept in storage):
            states = kept[source, :, :columns]
            for target in targets:
                kept[target, :, :columns].copy_(states)

    def swap(self, one: int, other: int, columns: int) -> None:
        """Exchanges the first `columns` columns of two slots."""
        for kept in (kept for storage in self._storage.values() for kept in storage):
            states = kept[one, :, :columns].clone()
            kept[one, :, :columns].copy_(kept[other, :, :columns])
            kept[other, :, :columns].copy_(states)

    def reserve(self, columns: int) -> None:
        """Enlarges the cache to at least `columns` columns; the states are copied."""
        if columns <= self.columns:
            return
        filled, self.columns = self.columns, columns
        for layer, storage in self._storage.items():
            keys, values = (_zeros(kept, self) for kept in storage)
            keys[:, :, :filled], values[:, :, :filled] = storage
            self._storage[layer] = (keys, values)


def _zeros(states: Tensor, cache: SlotCache) -> Tensor:
    return states.new_zeros(cache.slots, states.size(1), cache.columns, states.size(3))


def visible_columns(at: Tensor, columns: int, *, sliding_window: int | None) -> Tensor:
    """Returns (..., columns) bool, True = the token in column `at` (...) of its slot sees this column.

    A token beyond `columns`, of an idle slot or of padding, sees what the last of them sees: no row of the mask is
    empty, since the softmax over nothing may be NaN.
    """
    each, at = torch.arange(columns, device=at.device), at.unsqueeze(-1)
    visible = each <= at
    if sliding_window is not None:
        visible = visible & (each > at.clamp(max=columns - 1) - sliding_window)
    return visible
