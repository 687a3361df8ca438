"""Saved adapters, in a folder or on the hub: what they are and whether they fit a base, told before any model is
loaded.

Reads `adapter_config.json` and the header of the safetensors file; a file of another format is never opened.
"""

import dataclasses
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError
from peft import LoraConfig, PeftConfig, PeftType
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_HEADS = {"score", "classifier"}
"""What PEFT saves whole beside an adapter of a sequence classifier."""
_PLAIN_FIELDS = set(
    "r lora_alpha lora_dropout target_modules exclude_modules layers_to_transform layers_pattern rank_pattern "
    "alpha_pattern use_rslora use_dora modules_to_save fan_in_fan_out init_lora_weights bias task_type inference_mode "
    "base_model_name_or_path revision peft_type peft_version auto_mapping".split()
)
"""Fields of a LoraConfig that may have other values than PEFT's defaults; two of them are checked by themselves. Every
other one is of a variant of LoRA: some rewrite the base, some depend on the tokens.
"""
_LAYERS_INSTEAD = (
    "name linear layers (of the attention, in a mixture of experts) in target_modules (--lora_target_modules) instead; "
    "to start from an adapter that was trained so, merge it into its base first"
)


def is_adapter(name: str) -> bool:
    """Whether `name` is a folder, or a hub id, of an adapter instead of a whole model. Offline, a hub id is one where
    the cache knows it as one.
    """
    if Path(name).exists():
        return (Path(name) / CONFIG).is_file()
    try:
        hf_hub_download(name, CONFIG)
    except (EntryNotFoundError, HfHubHTTPError, HFValidationError):
        # Of a whole model, out of reach or no id at all: loading it as a model says which.
        return False
    return True


def check_whole_model(field: str, name: str) -> None:
    """Checks that `name`, the value of `field`, is no adapter: transformers would put it on its base, and a new adapter
    would take its place, or its base would be trained and not be saved.

    Raises:
        ValueError: when it is one.
    """
    if is_adapter(name):
        raise ValueError(
            f"{field} {name!r} is an adapter, which this script cannot start from: merge it first "
            "(AutoPeftModelForCausalLM.from_pretrained(...).merge_and_unload().save_pretrained(...), and its "
            "tokenizer), and give that folder"
        )


def lora_config(config: Any, field: str = "peft_config") -> LoraConfig:
    """`config`, if it is one that this package can handle; `field` says in errors where it is from.

    Raises:
        ValueError: for another method than LoRA or a variant of it, and for trained biases.
    """
    # AdaLoRA's configuration is a LoraConfig too.
    if not isinstance(config, LoraConfig) or config.peft_type != PeftType.LORA:
        raise ValueError(
            f"{field} is a {type(config).__name__}; only LoRA (with DoRA and rsLoRA) can be switched off and "
            "joined by other adapters: give a peft.LoraConfig"
        )
    if config.init_lora_weights not in (True, "gaussian"):
        raise ValueError(
            f"{field} has init_lora_weights {config.init_lora_weights!r}: the policy would not start from the base "
            "or would change it, so switching the adapter off would give no reference; set it to True or 'gaussian'"
        )
    plain = LoraConfig()
    for name in sorted({entry.name for entry in dataclasses.fields(config)} - _PLAIN_FIELDS):
        value, default = getattr(config, name), getattr(plain, name, None)
        # Earlier versions of PEFT wrote null where an empty table is the default now. On a mixture of experts PEFT
        # itself writes an empty set of parameters.
        if value is None or value == default or not (value or default):
            continue
        shown, remedy = value, f"leave it out, at its default {default!r}"
        if name == "target_parameters":
            shown, remedy = sorted(value), _LAYERS_INSTEAD
        raise ValueError(
            f"{field} has {name} {shown!r}, which is no part of an adapter that can be switched off, merged and "
            f"exported here; {remedy}"
        )
    if config.bias != "none":
        raise ValueError(
            f"{field} has bias {config.bias!r}: trained biases stay when the adapter is switched off, so the base "
            "would not be the reference; set bias='none'"
        )
    return config


def read_policy_adapter(name: str) -> LoraConfig:
    """The configuration of the adapter `name` that a policy starts from.

    Raises:
        ValueError: as `lora_config`; for an adapter of a classifier, and one that does not name its base.
    """
    field = f"model_name_or_path {name}"
    config = lora_config(PeftConfig.from_pretrained(name), field)
    if config.task_type == "SEQ_CLS" or _HEADS & set(config.modules_to_save or ()):
        raise ValueError(
            f"{field} is an adapter of a sequence classifier (task_type {config.task_type}, modules_to_save "
            f"{config.modules_to_save}), no language model; give it as reward_adapter, and start from one that was "
            "trained with task_type CAUSAL_LM"
        )
    if not config.base_model_name_or_path:
        raise ValueError(
            f"{field} is an adapter that names no base (base_model_name_or_path in its {CONFIG}); write the base's "
            "folder or hub id there"
        )
    return config


def read_reward_adapter(name: str) -> LoraConfig:
    """The configuration of the reward adapter `name`, without its head.

    Raises:
        ValueError: when `name` is no adapter, one of another method than LoRA, or one that saves more than LoRA weights
            and a score head.
    """
    if not is_adapter(name):
        raise ValueError(
            f"reward_adapter is {name!r}, but that is no folder or hub id of an adapter; give one that "
            "train_reward_model.py --use_peft wrote, or a whole reward model in reward_funcs"
        )
    config = lora_config(PeftConfig.from_pretrained(name), f"reward_adapter {name}")
    if whole := sorted(set(config.modules_to_save or ()) - _HEADS):
        raise ValueError(
            f"reward_adapter {name} has the modules_to_save {whole} beside its score head: whole layers of its own, "
            "which no other role of the base could do without; train it without lora_modules_to_save, or merge it and "
            "give the whole model in reward_funcs"
        )
    config.modules_to_save, config.task_type, config.inference_mode = None, None, True
    config.lora_dropout = 0.0
    return config


def check_reward_adapter(name: str) -> None:
    """Checks, without any model, that `name` is an adapter of a reward model.

    Raises:
        ValueError: as `read_reward_adapter`; when it has no safetensors file, or no score head of one label.
    """
    read_reward_adapter(name)
    heads = {key: shape for key, shape in weight_shapes("reward_adapter", name).items() if is_head(key)}
    if len(heads) != 1 or next(iter(heads.values()))[0] != 1:
        raise ValueError(
            f"reward_adapter {name} has no score head of one label (it holds {heads or 'none'}); train it with "
            "examples/train_reward_model.py --use_peft"
        )


def is_head(key: str) -> bool:
    """Whether the tensor `key` of an adapter's file is the weight of a classifier's head."""
    return key.endswith(".weight") and bool(_HEADS & set(key.split(".")))


def weights_file(field: str, name: str) -> Path:
    """The file of the adapter `name`, a folder or a hub id (fetched then), that `field` of the run names.

    Raises:
        ValueError: when there is none in safetensors.
    """
    path = Path(name) / WEIGHTS
    if not Path(name).exists():
        try:
            path = Path(hf_hub_download(name, WEIGHTS))
        except (EntryNotFoundError, HfHubHTTPError):
            # Said below, as of a folder.
            pass
    if not path.is_file():
        raise ValueError(f"{field} {name} has no {WEIGHTS}, the only form that is read; save the adapter again")
    return path


def weight_shapes(field: str, name: str) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of the adapter `name`, from the file's header.

    Raises:
        ValueError: as `weights_file`.
    """
    with safe_open(weights_file(field, name), "pt") as file:
        return {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}


def check_adapter_shapes(field: str, name: str, model: PreTrainedModel) -> None:
    """Checks that the weights of the adapter `name` have the sizes of the layers of `model`, which may be without
    memory, and its head that of the hidden states.

    Raises:
        ValueError: naming the field, the adapter, the layer and both shapes.
    """
    layers = dict(model.named_modules())
    hidden = int(model.config.get_text_config().hidden_size)
    for key, shape in weight_shapes(field, name).items():
        place, _, part = key.removeprefix("base_model.model.").partition(".lora_")
        sizes = _sizes(layers.get(place))
        if is_head(key):
            fits, here = shape[-1] == hidden, (shape[0], hidden)
        elif sizes is not None and part in ("A.weight", "B.weight"):
            fits = shape[1] == sizes[0] if part[0] == "A" else shape[0] == sizes[1]
            here = (shape[0], sizes[0]) if part[0] == "A" else (sizes[1], shape[1])
        elif part and place not in layers:
            raise ValueError(
                f"{field} {name} has weights for {place}, which {type(model).__name__} has not; give an adapter that "
                "was trained on this base model"
            )
        else:
            continue
        if not fits:
            raise ValueError(
                f"{field} {name} does not fit {type(model).__name__}: its {key} is of shape {shape}, and {here} would "
                "fit; give an adapter that was trained on this base model"
            )


def _sizes(layer: nn.Module | None) -> tuple[int, int] | None:
    """Numbers that a linear layer takes and gives; None of another one."""
    if isinstance(layer, BaseTunerLayer):
        layer = layer.get_base_layer()
    if isinstance(layer, Conv1D):
        return int(layer.nx), int(layer.nf)
    return (layer.in_features, layer.out_features) if isinstance(layer, nn.Linear) else None
