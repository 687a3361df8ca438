"""The policy's adapter merged into the base as it is stored, which a run in half precision has rounded.

Writing the folder is not here (`export`).
"""

import warnings
from typing import Any

import torch
from peft import get_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel

from alpaca_ppo.adapters.adapter_set import POLICY, AdapterSet
from alpaca_ppo.adapters.checks import belongs_to

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
    held = _in_adapter_folder(adapters, base)
    stored = {key: tensor for key, tensor in _stored(model, base).items() if base[key].data_ptr() not in held}
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
    # The adapter too: DeepSpeed holds it in bf16, and its product would be rounded before it is added.
    adapter = [parameter for key, parameter in layer.named_parameters() if belongs_to(POLICY, key)]
    kept = [(parameter, parameter.data) for parameter in (inner.weight, *adapter)]
    inner.weight.data = start.to(inner.weight.device, _at_least_float32(start), copy=True)
    for parameter in adapter:
        parameter.data = parameter.data.to(_at_least_float32(parameter))
    layer.merge(adapter_names=[POLICY])
    merged: Tensor = inner.weight.detach().cpu()
    for parameter, data in kept:
        parameter.data = data
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


def _in_adapter_folder(adapters: AdapterSet, base: dict[str, Tensor]) -> set[int]:
    """Where the base's weights lie that PEFT writes into the adapter's folder, as they are held here: an embedding that
    has an adapter, and a head that is tied to it.
    """
    written = get_peft_model_state_dict(adapters.peft, adapter_name=POLICY)
    names = [
        key.removeprefix("base_model.model.").replace(".base_layer", "") for key in written if ".base_layer" in key
    ]
    return {base[name].data_ptr() for name in names}


def _stored(model: PreTrainedModel, base: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of `base` in float32 as they are stored, where `model` holds some of them in half precision; else
    none.
    """
    name, half = model.config.name_or_path, {tensor.dtype for tensor in base.values()} & set(_HALF)
    # A base in memory that names no other is itself the stored one.
    if not half or not name:
        return {}
    what = (
        "the merged model is the adapter on the base rounded to "
        f"{' and '.join(sorted(map(str, half)))}, and differs from final/policy on the stored base"
    )
    try:
        # What the run has loaded lies on this disk; another revision of it would not be this base.
        source = type(model).from_pretrained(name, dtype=torch.float32, use_safetensors=True, local_files_only=True)
    except (OSError, ValueError, SafetensorError) as error:
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
