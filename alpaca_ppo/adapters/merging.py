"""Merges the policy's adapter into the base as stored on disk.

A half-precision run holds only a rounded copy of that base.

Writing the merged model to a folder is in `checkpoint.export`.
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
from alpaca_ppo.library_output import has_screen, transformers_bars
from alpaca_ppo.remote_code import has_remote_code, remote_code

_HALF = (torch.float16, torch.bfloat16)


@torch.no_grad()
def merged_weights(adapters: AdapterSet) -> dict[str, Tensor]:
    """State dictionary of the base with the policy's adapter merged in, on the CPU and at least in float32.

    If the run holds the base in half precision, it is read again from `config.name_or_path`, because half precision
    would round small updates away. If it cannot be read or has changed, the rounded base is used, with a warning.
    Layers are merged one at a time and restored bit for bit.
    """
    model = adapters.model
    base, own = _parts(model)
    pointers = _saved_with_adapter(adapters, base)
    stored = {key: tensor for key, tensor in _stored(model, base).items() if base[key].data_ptr() not in pointers}
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
    # The adapter too: DeepSpeed may hold it in bf16, and its product would be rounded before it is added.
    adapter = [parameter for key, parameter in layer.named_parameters() if belongs_to(POLICY, key)]
    saved = [(parameter, parameter.data) for parameter in (inner.weight, *adapter)]
    inner.weight.data = start.to(inner.weight.device, _at_least_float32(start), copy=True)
    for parameter in adapter:
        parameter.data = parameter.data.to(_at_least_float32(parameter))
    layer.merge(adapter_names=[POLICY])
    merged: Tensor = inner.weight.detach().cpu()
    for parameter, data in saved:
        parameter.data = data
    layer.merged_adapters.clear()
    return merged


def _parts(model: PreTrainedModel) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The base's tensors in `model`, and the policy adapter's `modules_to_save`, both under the base's names."""
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


def _saved_with_adapter(adapters: AdapterSet, base: dict[str, Tensor]) -> set[int]:
    """Data pointers of the base's weights that PEFT saves with the adapter: an adapted embedding, and a tied head.

    They are saved in the precision of the run, so merging must start from them and not from the stored base.
    """
    written = get_peft_model_state_dict(adapters.peft, adapter_name=POLICY)
    names = [
        key.removeprefix("base_model.model.").replace(".base_layer", "") for key in written if ".base_layer" in key
    ]
    return {base[name].data_ptr() for name in names}


def _stored(model: PreTrainedModel, base: dict[str, Tensor]) -> dict[str, Tensor]:
    """The stored weights of `base` in float32 if `model` holds some in half precision; else an empty dictionary."""
    name, half = model.config.name_or_path, {tensor.dtype for tensor in base.values()} & set(_HALF)
    # A base that was built in memory has no stored version.
    if not half or not name:
        return {}
    effect = (
        f"the adapter is merged into the base rounded to {' and '.join(sorted(map(str, half)))}, so the merged model "
        "differs from final/policy on the stored base"
    )
    try:
        # Only from this disk, where the run loaded it; a download could be another revision.
        with remote_code(name, trust=has_remote_code(model)), transformers_bars(shown=has_screen()):
            source = type(model).from_pretrained(name, dtype=torch.float32, use_safetensors=True, local_files_only=True)
    except (OSError, ValueError, SafetensorError) as error:
        warnings.warn(f"the base {name!r} cannot be read again ({error}): {effect}", stacklevel=2)
        return {}
    stored = dict(source.state_dict())
    unchanged = stored.keys() == base.keys() and all(
        stored[key].shape == tensor.shape and torch.equal(stored[key].to(tensor.dtype), tensor.cpu())
        for key, tensor in base.items()
    )
    if not unchanged:
        warnings.warn(f"the weights of {name!r} are not those that this run loaded: {effect}", stacklevel=2)
        return {}
    return stored


def _at_least_float32(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32) if tensor.is_floating_point() else tensor.dtype
