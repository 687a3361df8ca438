"""Merges the policy's adapter into its base. Writing the merged model to a folder is in `checkpoint.export`."""

from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor

from alpaca_ppo.adapters.adapter_set import POLICY, AdapterSet
from alpaca_ppo.adapters.checks import belongs_to


@torch.no_grad()
def merged_weights(adapters: AdapterSet) -> dict[str, Tensor]:
    """State dictionary of the base with the policy's adapter merged in, on the CPU and at least in float32.

    Layers are merged one at a time and restored bit for bit. Of a base in half precision, the rounded weights are
    merged: load it in float32 for those that are stored.
    """
    model = adapters.model
    merged: dict[str, Tensor] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, BaseTunerLayer):
            merged[f"{name}.weight"] = _merged_layer(layer, layer.get_base_layer())
    # What the adapter trains as a whole (modules_to_save) replaces the base's.
    base, own = {}, {}
    for key, tensor in model.state_dict().items():
        parts = key.split(".")
        if any(part.startswith("lora_") for part in parts):
            continue
        if "modules_to_save" not in parts:
            base[key.replace(".base_layer", "").replace(".original_module", "")] = tensor
        elif f".modules_to_save.{POLICY}." in key:
            own[key.replace(f".modules_to_save.{POLICY}", "")] = tensor
    whole = {key: tensor for key, tensor in (base | own).items() if key not in merged}
    return merged | {key: tensor.detach().to("cpu", _at_least_float32(tensor)) for key, tensor in whole.items()}


def _merged_layer(layer: Any, inner: Any) -> Tensor:
    # The adapter too: DeepSpeed may hold it in bf16, and its product would be rounded before it is added.
    adapter = [parameter for key, parameter in layer.named_parameters() if belongs_to(POLICY, key)]
    saved = [(parameter, parameter.data) for parameter in (inner.weight, *adapter)]
    for parameter, data in saved:
        parameter.data = data.to(_at_least_float32(data), copy=True)
    layer.merge(adapter_names=[POLICY])
    merged: Tensor = inner.weight.detach().cpu()
    for parameter, data in saved:
        parameter.data = data
    layer.merged_adapters.clear()
    return merged


def _at_least_float32(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32) if tensor.is_floating_point() else tensor.dtype
