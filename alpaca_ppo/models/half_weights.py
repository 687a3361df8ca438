"""Copies of linear layers' weights in autocast's dtype, so that a weight is cast once after each change of it.

Autocast casts a float32 weight in every operator that reads it, and keeps the cast (until its outermost block ends)
only of a weight that requires gradients. So frozen weights, of a base under adapters or of a reference, are cast for
every token of a response and in every pass, and trained ones in every micro-batch. The copies are those same casts:
every number stays the same, and gradients of several micro-batches still add up in float32.

Parameters are left as they are, in float32, for everything else that reads them: the optimizer, embeddings that share a
weight with the head, merging of adapters, code outside autocast. Left out are layers with a forward pass of their own
(quantized ones, experts), the bases of DoRA, whose norm is computed from the float32 weight, and weights of other
layers: autocast goes on casting those that it reads.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.pytorch_utils import Conv1D


class _State:
    """Which weights the layers of a model read from copies now."""

    def __init__(self) -> None:
        self.frozen = self.trained = False


class _InPlaceOf(torch.autograd.Function):
    """A copy in half precision whose gradient becomes that of the weight, in the weight's precision."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, copy: Tensor) -> Tensor:
        ctx.dtype = weight.dtype
        return copy.view_as(copy)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.to(ctx.dtype), None


class _LayerCopies:
    """The copies of a layer's weight and bias, made at their first use."""

    def __init__(self, state: _State) -> None:
        self._state = state
        self._copies: dict[str, Tensor] = {}
        self._sources: dict[str, tuple[Any, ...]] = {}

    def stand_in(self, name: str, own: Tensor | None) -> Tensor | None:
        """The copy of the layer's own tensor `name` where it takes its place, else the tensor itself."""
        if own is None or not self._takes_place_of(own):
            return own
        dtype = torch.get_autocast_dtype(own.device.type)
        if name not in self._copies or self._copies[name].dtype != dtype:
            self._copies[name], self._sources[name] = own.detach().to(dtype), _source(own)
        if own.requires_grad and torch.is_grad_enabled():
            differentiable: Tensor = _InPlaceOf.apply(own, self._copies[name])  # type: ignore[no-untyped-call]
            return differentiable
        return self._copies[name]

    def _takes_place_of(self, own: Tensor) -> bool:
        """Whether a copy of the layer's tensor is read now."""
        if own.dtype != torch.float32 or not torch.is_autocast_enabled(own.device.type):
            return False
        return self._state.trained if own.requires_grad else self._state.frozen

    @torch.no_grad()
    def refresh(self, layer: nn.Module) -> None:
        """Overwrites copies of what has changed, at the same addresses."""
        for name, copy in list(self._copies.items()):
            own: Any = getattr(layer, name)
            if own.device != copy.device:
                del self._copies[name]
            elif _source(own) != self._sources[name]:
                copy.copy_(own)
                self._sources[name] = _source(own)

    def invalidate(self, layer: nn.Module, *, frozen: bool) -> None:
        """Makes `refresh` overwrite the copies of trained weights and, if `frozen`, of the others."""
        self._sources |= {name: () for name in self._copies if frozen or getattr(layer, name).requires_grad}

    def release(self, layer: nn.Module, *, frozen: bool) -> None:
        """Drops the copies of trained weights and, if `frozen`, of the others."""
        for name in list(self._copies):
            own: Any = getattr(layer, name)
            if frozen or own.requires_grad:
                del self._copies[name]

    def read(self, layer: nn.Module) -> list[Tensor]:
        """The copies that `layer` reads now, of those that exist."""
        return [copy for name, copy in self._copies.items() if self._takes_place_of(getattr(layer, name))]


def _source(own: Tensor) -> tuple[Any, ...]:
    return own.data_ptr(), own._version


class _CopiedLinear(nn.Linear):
    copies: _LayerCopies

    def forward(self, input: Tensor) -> Tensor:
        weight = self.copies.stand_in("weight", self.weight)
        assert weight is not None
        return F.linear(input, weight, self.copies.stand_in("bias", self.bias))


class _CopiedConv1D(Conv1D):
    copies: _LayerCopies

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = (self.copies.stand_in(name, getattr(self, name)) for name in ("weight", "bias"))
        assert weight is not None and bias is not None
        return torch.addmm(bias, x.view(-1, x.size(-1)), weight).view(*x.shape[:-1], self.nf)


_COPIED: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: _CopiedLinear,
    Conv1D: _CopiedConv1D,
    _CopiedLinear: _CopiedLinear,
    _CopiedConv1D: _CopiedConv1D,
}
"""By the exact class of a layer: a subclass may compute something else."""


def head_weights(head: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """The weight and bias of an output head for a function that computes its product in chunks: frozen ones as `head`
    itself would read them now. Trained ones are the parameters, whose gradient that function adds up in float32.
    """
    if not isinstance(head, _CopiedLinear):
        return head.weight, head.bias
    weight, bias = (
        tensor if tensor is None or tensor.requires_grad else head.copies.stand_in(name, tensor)
        for name, tensor in (("weight", head.weight), ("bias", head.bias))
    )
    assert weight is not None
    return weight, bias


class HalfPrecisionCopies:
    """Lets the linear layers of a model compute with copies of their weights inside `active`, under autocast.

    Changes the class of those layers, in place, to a subclass. A later object for the same model takes over from this
    one, which then does nothing.

    Args:
        model: whose float32 weights are copied.
    """

    def __init__(self, model: nn.Module) -> None:
        self._state = _State()
        # Any: the layers get an attribute that is neither a tensor nor a module.
        self._layers: list[Any] = list(copied_layers(model))
        for layer in self._layers:
            layer.__class__ = _COPIED[type(layer)]
            layer.copies = _LayerCopies(self._state)

    @contextmanager
    def active(self, *, trained: bool) -> Iterator[None]:
        """A block in which frozen weights are read from copies, and with `trained` those that are trained too.

        At the start of the outermost block, copies of weights that have changed are overwritten, at the same addresses.
        Weights must not change inside the block. The copies are kept after it.
        """
        before = self._state.frozen, self._state.trained
        if not any(before):
            for layer in self._layers:
                layer.copies.refresh(layer)
        self._state.frozen, self._state.trained = True, trained or before[1]
        try:
            yield
        finally:
            self._state.frozen, self._state.trained = before

    @torch.no_grad()
    def make(self) -> None:
        """Makes the copies that the block around this call reads, which are otherwise made at their first use."""
        for layer in self._layers:
            for name, parameter in layer.named_parameters(recurse=False):
                layer.copies.stand_in(name, parameter)

    def weights_changed(self) -> None:
        """Has the copies of trained weights overwritten at their next use, also if torch has not seen the change: an
        optimizer's own kernels may write to a weight without counting up its version.
        """
        for layer in self._layers:
            layer.copies.invalidate(layer, frozen=False)

    def release(self, *, frozen: bool) -> None:
        """Frees the memory of the copies of trained weights and, if `frozen`, of the others, until their next use."""
        for layer in self._layers:
            layer.copies.release(layer, frozen=frozen)


def copies_read(model: nn.Module) -> list[Tensor]:
    """The copies that a pass of `model` reads now in place of its weights, of those that exist: none outside autocast
    and `active`. A captured step is bound to their addresses.
    """
    return [tensor for layer in _layers_with_copies(model) for tensor in layer.copies.read(layer)]


def mark_weights_changed(model: nn.Module) -> None:
    """Has all copies of weights of `model` overwritten before they are read again, between two steps of a run.

    To be called after a write that torch does not count, such as `weight.data.copy_(new)` or one through NumPy.
    `weight.copy_(new)` under `torch.no_grad()` is seen without it.

    Args:
        model: a policy, a critic, or any module inside or around them.
    """
    for layer in _layers_with_copies(model):
        layer.copies.invalidate(layer, frozen=True)


def _layers_with_copies(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, _CopiedLinear | _CopiedConv1D)]


def copied_layers(model: nn.Module) -> list[nn.Module]:
    """The layers of `model` whose float32 weights are copied."""
    left_out = {
        id(module.get_base_layer())
        for module in model.modules()
        if isinstance(module, LoraLayer) and len(module.lora_magnitude_vector) > 0
    }
    return [
        module
        for module in model.modules()
        if type(module) in _COPIED and module.weight.dtype == torch.float32 and id(module) not in left_out
    ]


def copied_bytes(model: nn.Module, *, trained: bool) -> int:
    """The memory of the copies of `model`'s trained weights, or of its frozen ones, in a dtype of two bytes."""
    tensors = [p for layer in copied_layers(model) for p in layer.parameters(recurse=False)]
    return sum(2 * tensor.numel() for tensor in tensors if tensor.requires_grad == trained)
