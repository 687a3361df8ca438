"""The key-value cache of the decode loop: rows can be dropped, and a step writes into preallocated columns.

Does not support static caches, which `torch.compile` would need, or recurrent states, from which rows cannot
be dropped.
"""

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, LinearAttentionCacheLayerMixin

# The cache is copied once every GROWTH tokens, and holds up to GROWTH unused columns.
GROWTH = 64

REMEDY = "set generation_backend: generate"


class PreallocatedLayer(DynamicLayer):
    """A full-attention layer that grows by `GROWTH` columns at a time; transformers' layer is copied at each token.

    `keys` and `values` are views of the filled columns.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._storage: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Appends the states of new tokens, (rows, heads, tokens, size), and returns all states."""
        if not self.is_initialized:
            return super().update(key_states, value_states, *args, **kwargs)
        assert self.keys is not None and self.values is not None, "an initialized layer has states"
        filled, new = self.keys.size(-2), key_states.size(-2)
        if self._storage is None or filled + new > self._storage[0].size(-2):
            self._storage = (_enlarged(self.keys, new + GROWTH), _enlarged(self.values, new + GROWTH))
        for storage, states in zip(self._storage, (key_states, value_states), strict=True):
            storage.narrow(-2, filled, new).copy_(states)
        self.keys, self.values = (storage.narrow(-2, 0, filled + new) for storage in self._storage)
        return self.keys, self.values

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row `repeats` times."""
        super().batch_repeat_interleave(repeats)
        self._storage = None

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps only the rows `indices`; unused columns stay allocated."""
        if self._storage is None:
            super().batch_select_indices(indices)
            return
        filled = self.get_seq_length()
        self._storage = (self._storage[0][indices], self._storage[1][indices])
        self.keys, self.values = (storage.narrow(-2, 0, filled) for storage in self._storage)


def _enlarged(states: Tensor, columns: int) -> Tensor:
    """Returns a copy of `states` (rows, heads, tokens, size) followed by `columns` uninitialized columns."""
    shape = list(states.shape)
    shape[-2] += columns
    storage = states.new_empty(shape)
    storage.narrow(-2, 0, states.size(-2)).copy_(states)
    return storage


def decode_cache(model: PreTrainedModel, accepted: Mapping[str, inspect.Parameter]) -> DynamicCache:
    """Returns an empty cache for `model` from which rows can be dropped.

    Args:
        model: the language model.
        accepted: the parameters of the model's forward, by name.

    Raises:
        ValueError: if rows cannot be dropped from the model's cache.
    """
    name = type(model).__name__
    if "past_key_values" not in accepted:
        raise ValueError(f"{name}.forward takes no past_key_values, so it cannot be decoded step by step; {REMEDY}")
    cache = DynamicCache(config=model.config)
    for layer in cache.layers:
        # The methods that a model's own layer class inherits may not drop everything that it stores.
        is_custom = type(layer).__module__ != DynamicCache.__module__
        if is_custom or isinstance(layer, LinearAttentionCacheLayerMixin):
            raise ValueError(f"{name} caches in {type(layer).__name__}, which cannot drop rows; {REMEDY}")
    cache.layers = [PreallocatedLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache
