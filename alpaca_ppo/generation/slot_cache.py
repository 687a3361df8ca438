"""The key-value cache of the slot loop: a fixed number of rows (slots), each filled from column 0 up to its own length.

Rows of different lengths share one block of memory that is allocated once and never moves, so that a step has the same
shapes however often rows come and go. Layers with a sliding window keep all columns; attention masks the old ones.
Which slot holds which row is decided in `generation.slots`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache


class _Write(NamedTuple):
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
    forward pass go. Storage is allocated by the first pass and zero at first, because a masked column must be finite.

    Args:
        slots: S, rows.
        columns: C, the most tokens of a row.
    """

    def __init__(self, slots: int, columns: int) -> None:
        super().__init__(layers=[])
        self.slots, self.columns = slots, columns
        self._storage: dict[int, tuple[Tensor, Tensor]] = {}
        self._write: _Write | None = None
        self._flat: dict[int, Tensor] = {}

    def start_step(self, lengths: Tensor, columns: int) -> None:
        """Makes the next pass write one token to each of the first k slots and attend over the first `columns`.

        Args:
            lengths: (k,) int64, the column of each slot's token; < C, beyond `columns` only in idle slots.
            columns: more than the greatest length of a running slot.
        """
        slots = torch.arange(len(lengths), device=lengths.device)
        self._start(_Write(slots, lengths, len(lengths), columns))

    def start_extend(self, slots: Tensor, columns: Tensor, *, read_slots: Tensor | None, read_columns: int) -> None:
        """Makes the next pass write N tokens of several rows, packed as (1, N).

        Args:
            slots: (N,) int64, the slot of each token.
            columns: (N,) int64, its column.
            read_slots: (k,) int64, the slots whose first `read_columns` columns `update` returns; None returns the new
                states alone, for rows that had no tokens before.
            read_columns: see `read_slots`.
        """
        self._start(_Write(slots, columns, read_slots, read_columns))

    def _start(self, write: _Write) -> None:
        self._write, self._flat = write, {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Stores the states of the new tokens and returns those that attention reads.

        After `start_step` the states are (k, kv_heads, 1, d) and the result (k, kv_heads, columns, d), a view; after
        `start_extend` they are (1, kv_heads, N, d) and the result is a copy.
        """
        write = self._write
        assert write is not None, "start_step or start_extend comes before a forward pass"
        heads = key_states.size(1)
        if layer_idx not in self._storage:
            self._storage[layer_idx] = (self._zeros(key_states), self._zeros(value_states))
        storage = self._storage[layer_idx]
        if heads not in self._flat:
            each_head = torch.arange(heads, device=key_states.device)
            rows = write.slots.unsqueeze(1) * heads + each_head
            flat = rows * self.columns + write.columns.unsqueeze(1)
            # Packed tokens are the inner dimension of their states, slots the outer one.
            self._flat[heads] = (flat if isinstance(write.read_slots, int) else flat.T).flatten()
        for kept, new in zip(storage, (key_states, value_states), strict=True):
            kept.view(-1, new.size(-1)).index_copy_(0, self._flat[heads], new.reshape(-1, new.size(-1)).to(kept.dtype))
        if write.read_slots is None:
            return key_states, value_states
        if isinstance(write.read_slots, int):
            keys, values = (kept[: write.read_slots, :, : write.read_columns] for kept in storage)
        else:
            keys, values = (kept[:, :, : write.read_columns].index_select(0, write.read_slots) for kept in storage)
        return keys, values

    def _zeros(self, states: Tensor) -> Tensor:
        return states.new_zeros(self.slots, states.size(1), self.columns, states.size(3))

    def copy(self, source: int, targets: Sequence[int], columns: int) -> None:
        """Copies the first `columns` columns of slot `source` to the slots `targets`."""
        for storage in self._storage.values():
            for kept in storage:
                states = kept[source, :, :columns]
                for target in targets:
                    kept[target, :, :columns].copy_(states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The length of no row in particular: models read it only where they get no position ids."""
        return 0
