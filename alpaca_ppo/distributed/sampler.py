"""`Sampler`: a copy of a sharded language model, which samples with weights that are gathered for a rollout."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

# Attributes of PEFT's layers.
_ACTIVE_ADAPTER = ("_active_adapter", "_disable_adapters")


class Sampler:
    """A copy of `model` with empty parameters, made before an engine wraps or shards it: without the engine's hooks, a
    rank can make passes without the others.
    """

    def __init__(self, model: PreTrainedModel, device: torch.device) -> None:
        # `deepcopy` uses these instead.
        memo: dict[int, Any] = {}
        for parameter in model.parameters():
            empty = torch.empty(0, dtype=parameter.dtype, device=device)
            memo[id(parameter)] = nn.Parameter(empty, requires_grad=False)
        self._model, self._copy = model, copy.deepcopy(model, memo)
        torch.nn.Module.to(self._copy, device)

    @contextmanager
    def holding(self, weights: Sequence[Tensor]) -> Iterator[PreTrainedModel]:
        """Yields the copy with `weights`, those of the model's parameters, and with the model's active adapter."""
        for copied, module in zip(self._copy.modules(), self._model.modules(), strict=True):
            vars(copied).update({name: vars(module)[name] for name in _ACTIVE_ADAPTER if name in vars(module)})
        for parameter, whole in zip(self._copy.parameters(), weights, strict=True):
            parameter.data = whole
        try:
            yield self._copy
        finally:
            for parameter in self._copy.parameters():
                parameter.data = parameter.data.new_empty(0)
