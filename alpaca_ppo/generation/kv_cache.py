"""The key-value cache of the decode loop: rows can leave it, and a step writes into room kept free for it.

Left out: caches of fixed size, which `torch.compile` would want, and recurrent states, which have no way to drop rows.
"""

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, LinearAttentionCacheLayerMixin

# Columns of room: one copy of the cache each so many tokens, at the price of so many columns of memory.
_GROWTH = 64

REMEDY = "set generation_backend: generate"


class PreallocatedLayer(DynamicLayer):
    """A layer of full attention that grows by `_GROWTH` tokens at a time: transformers' own is copied at each token.

    `keys` and `values` are views of the filled part.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._stores: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Appends the states of new tokens, (rows, heads, tokens, size), and returns all of them."""
        if not self.is_initialized:
            return super().update(key_states, value_states, *args, **kwargs)
        assert self.keys is not None and self.values is not None, "an initialised layer has states"
        filled, new = self.keys.size(-2), key_states.size(-2)
        if self._stores is None or filled + new > self._stores[0].size(-2):
            self._stores = (_with_room(self.keys, new + _GROWTH), _with_room(self.values, new + _GROWTH))
        for store, states in zip(self._stores, (key_states, value_states), strict=True):
            store.narrow(-2, filled, new).copy_(states)
        self.keys, self.values = (store.narrow(-2, 0, filled + new) for store in self._stores)
        return self.keys, self.values

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times."""
        super().batch_repeat_interleave(repeats)
        self._stores = None

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the rows `indices`, and the room."""
        if self._stores is None:
            super().batch_select_indices(indices)
            return
        filled = self.get_seq_length()
        self._stores = (self._stores[0][indices], self._stores[1][indices])
        self.keys, self.values = (store.narrow(-2, 0, filled) for store in self._stores)


def _with_room(states: Tensor, room: int) -> Tensor:
    shape = list(states.shape)
    shape[-2] += room
    store = states.new_empty(shape)
    store.narrow(-2, 0, states.size(-2)).copy_(states)
    return store


def decode_cache(model: PreTrainedModel, accepted: Mapping[str, inspect.Parameter]) -> DynamicCache:
    """An empty cache for `model`, which rows can leave; `accepted` are the parameters of the model's forward.

    Raises:
        ValueError: when the model keeps its state in something that rows cannot leave.
    """
    name = type(model).__name__
    if "past_key_values" not in accepted:
        raise ValueError(f"{name}.forward takes no past_key_values, so rows cannot leave its cache; {REMEDY}")
    cache = DynamicCache(config=model.config)
    for layer in cache.layers:
        # A model's own kind of layer may hold more than the method that it inherits drops.
        own = type(layer).__module__ != DynamicCache.__module__
        if own or isinstance(layer, LinearAttentionCacheLayerMixin):
            raise ValueError(f"{name} caches in {type(layer).__name__}, which rows cannot leave; {REMEDY}")
    cache.layers = [PreallocatedLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache
