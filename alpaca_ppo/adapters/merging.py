"""Merges the policy's adapter into its base. Writing the merged model to a folder is in `checkpoint.export`."""

from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from torch import Tensor

from alpaca_ppo.adapters.adapter_set import POLICY, AdapterSet
from alpaca_ppo.adapters.checks import belongs_to


@torch.no_grad()
def merged_weights(adapters: AdapterSet) -> dict[str, Tensor]:
    """State dictionary of the base with the policy's adapter merged in, on the CPU, at least in float32.

    Layers are merged one at a time and restored bit for bit. Of a base in half precision, the rounded weights are
    merged; load it in float32 to merge those of its files.
    """
    weights: dict[str, Tensor] = adapters.model.state_dict()
    for name, module in adapters.model.named_modules():
        if isinstance(module, BaseTunerLayer):
            base: Any = module.get_base_layer()
            plain = base.state_dict() | {"weight": _merged_layer(module, base)}
        elif isinstance(module, ModulesToSaveWrapper):
            plain = module.modules_to_save[POLICY].state_dict()
        else:
            continue
        # PEFT put this module in place of a plain one: drop its tensors and add those of the plain one.
        for key in module.state_dict(prefix=f"{name}."):
            del weights[key]
        weights |= {f"{name}.{key}": tensor for key, tensor in plain.items()}
    return {key: tensor.to("cpu", _at_least_float32(tensor)) for key, tensor in weights.items()}


def _merged_layer(layer: Any, base: Any) -> Tensor:
    """The weight of `base`, the plain layer in `layer`, with the adapter added."""
    # DeepSpeed may hold the adapter in bf16, which would round its product.
    adapter = [parameter for key, parameter in layer.named_parameters() if belongs_to(POLICY, key)]
    saved = [(parameter, parameter.data) for parameter in (base.weight, *adapter)]
    for parameter, data in saved:
        parameter.data = data.to(_at_least_float32(data), copy=True)
    layer.merge(adapter_names=[POLICY])
    merged: Tensor = base.weight.detach().cpu()
    for parameter, data in saved:
        parameter.data = data
    layer.merged_adapters.clear()
    return merged


def _at_least_float32(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32) if tensor.is_floating_point() else tensor.dtype
