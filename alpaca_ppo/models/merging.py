"""The policy's adapter merged into the base as it is stored, which a run in half precision has rounded.

Writing the folder is not here (`export`).
"""

import warnings
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor
from transformers import PreTrainedModel

from alpaca_ppo.models.adapters import POLICY, AdapterSet

_HALF = (torch.float16, torch.bfloat16)


@torch.no_grad()
def merged_weights(adapters: AdapterSet) -> dict[str, Tensor]:
    """The state dictionary, in host memory and at least float32, of the base with the policy's adapter merged into it.

    The base is the one that `config.name_or_path` stores, so that the merged model is the adapter on that base, where
    half precision holds it rounded here. Where it is not there any more, or another, it is the rounded one, and a
    warning says so. One layer is merged at a time and put back as it was, to the last bit; half precision would round
    small updates away.
    """
    model = adapters.model
    base, own = _parts(model)
    stored = _stored(model, base)
    merged: dict[str, Tensor] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, BaseTunerLayer):
            key, inner = f"{name}.weight", layer.get_base_layer()
            merged[key] = _merged_layer(layer, inner, stored.pop(key, base[key]))
    for key, tensor in (base | stored | own).items():
        if key not in merged:
            merged[key] = tensor.detach().to("cpu", _at_least_float32(tensor))
    return merged


def _merged_layer(layer: Any, inner: Any, start: Tensor) -> Tensor:
    kept = inner.weight.data
    inner.weight.data = start.to(kept.device, _at_least_float32(start), copy=True)
    layer.merge(adapter_names=[POLICY])
    merged: Tensor = inner.weight.detach().cpu()
    inner.weight.data = kept
    layer.merged_adapters.clear()
    return merged


def _parts(model: PreTrainedModel) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What `model` holds of the base, and the policy adapter's own whole layers, both by the base's names."""
    base, own = {}, {}
    for key, tensor in model.state_dict().items():
        parts = key.split(".")
        if any(part.startswith("lora_") for part in parts):
            continue
        if "modules_to_save" not in parts:
            base[key.replace(".base_layer", "").replace(".original_module", "")] = tensor
        elif f".modules_to_save.{POLICY}." in key:
            own[key.replace(f".modules_to_save.{POLICY}", "")] = tensor
    return base, own


def _stored(model: PreTrainedModel, base: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of `base` in float32 as they are stored, where `model` holds some of them in half precision; else
    none.
    """
    name, half = model.config.name_or_path, {tensor.dtype for tensor in base.values()} & set(_HALF)
    if not half or not name:
        return {}
    what = (
        "the merged model is the adapter on the base rounded to "
        f"{' and '.join(sorted(map(str, half)))}, and differs from final/policy on the stored base"
    )
    try:
        # What the run has loaded lies on this disk; another revision of it would not be this base.
        source = type(model).from_pretrained(name, dtype=torch.float32, use_safetensors=True, local_files_only=True)
    except OSError as error:
        warnings.warn(f"the base {name!r} cannot be read again ({error}): {what}", stacklevel=2)
        return {}
    stored = dict(source.state_dict())
    alike = stored.keys() == base.keys() and all(
        stored[key].shape == tensor.shape and torch.equal(stored[key].to(tensor.dtype), tensor.cpu())
        for key, tensor in base.items()
    )
    if not alike:
        warnings.warn(f"the weights of {name!r} are not those that this run loaded: {what}", stacklevel=2)
        return {}
    return stored


def _at_least_float32(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32) if tensor.is_floating_point() else tensor.dtype
