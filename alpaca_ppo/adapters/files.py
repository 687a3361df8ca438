"""Saved adapters, in a folder or on the hub: what kind they are, and whether they fit a base, before a model is loaded.

Reads `adapter_config.json` and the header of the safetensors file; weights in other formats are never opened. `field`
is the option that names an adapter, for errors, and `name` its folder or hub id.
"""

import dataclasses
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, RemoteEntryNotFoundError
from peft import LoraConfig, PeftConfig, PeftType
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from alpaca_ppo.saved_models import loading

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# Names of a sequence classifier's head, which PEFT saves as a whole module beside the adapter.
CLASSIFIER_HEADS = {"score", "classifier"}
# Fields of a LoraConfig that need not have PEFT's default. All others select variants of LoRA, of which some train or
# rewrite the base and some depend on the tokens.
_PLAIN_FIELDS = set(
    "r lora_alpha lora_dropout target_modules exclude_modules layers_to_transform layers_pattern rank_pattern "
    "alpha_pattern use_rslora use_dora modules_to_save fan_in_fan_out init_lora_weights task_type inference_mode "
    "base_model_name_or_path revision peft_type peft_version auto_mapping".split()
)
_NAMES = list | set
Shape: TypeAlias = tuple[int, ...]
# The types of entries of an adapter's configuration, which PEFT does not check.
_ENTRY_TYPES: dict[str, Any] = {
    **dict.fromkeys(("base_model_name_or_path", "task_type"), str),
    **dict.fromkeys(("modules_to_save", "target_parameters"), _NAMES),
    **dict.fromkeys(("target_modules", "exclude_modules"), _NAMES | str),
    **dict.fromkeys(("r", "lora_alpha", "lora_dropout"), int | float),
    **dict.fromkeys(("rank_pattern", "alpha_pattern"), dict),
}


def is_adapter(name: str) -> bool:
    """Whether `name` is an adapter and not a whole model. Offline, the hub's cache decides."""
    if Path(name).exists():
        return (Path(name) / CONFIG).is_file()
    try:
        hf_hub_download(name, CONFIG)
    except (EntryNotFoundError, HfHubHTTPError, HFValidationError):
        # A whole model, unreachable, or not a hub id; loading it as a model will report which.
        return False
    return True


def lora_config(config: Any, field: str = "peft_config") -> LoraConfig:
    """Returns `config` if this package can handle it.

    Raises:
        ValueError: for methods other than LoRA, for unsupported variants of LoRA, and for trained biases.
    """
    # AdaLoRA's configuration is a subclass of LoraConfig.
    if not isinstance(config, LoraConfig) or config.peft_type != PeftType.LORA:
        raise ValueError(f"{field} is a {type(config).__name__}; use a peft.LoraConfig (LoRA, DoRA or rsLoRA)")
    if config.init_lora_weights not in (True, "gaussian"):
        # Training would not start from the base, the reference.
        raise ValueError(f"{field} has init_lora_weights {config.init_lora_weights!r}; set it to True or 'gaussian'")
    plain = LoraConfig()
    for name in sorted({entry.name for entry in dataclasses.fields(config)} - _PLAIN_FIELDS):
        value, default = getattr(config, name), getattr(plain, name, None)
        # Earlier versions of PEFT wrote null where the default now is an empty dictionary, and on a mixture of experts
        # PEFT itself writes an empty set of parameters.
        if value is None or value == default or not (value or default):
            continue
        shown = sorted(value) if name == "target_parameters" else value
        remedy = "name linear layers in target_modules instead" if name == "target_parameters" else "leave it out"
        raise ValueError(f"{field} has {name} {shown!r}, so it cannot be switched off, merged and exported; {remedy}")
    return config


def read_adapter(field: str, name: str) -> PeftConfig:
    """The configuration of an adapter of any kind.

    Raises:
        ValueError: when it is damaged, or an entry does not have the type that this package reads.
    """
    with loading(f"{field}: no adapter can be loaded from {name!r}", name, "save or download the adapter again"):
        config = PeftConfig.from_pretrained(name)
    for entry, allowed in _ENTRY_TYPES.items():
        value = vars(config).get(entry)
        members = value if isinstance(value, list | set) else ()
        if value is None or (isinstance(value, allowed) and all(isinstance(member, str) for member in members)):
            continue
        raise ValueError(f"{field} has {entry} {value!r} in its {CONFIG}, which must be {allowed}; save it again")
    return config


def adapter_base(field: str, config: PeftConfig) -> str:
    """The folder or hub id of the base that the configuration of an adapter names.

    Raises:
        ValueError: when it names none.
    """
    base = config.base_model_name_or_path
    if not base:
        raise ValueError(f"{field} is an adapter without its base; write base_model_name_or_path into its {CONFIG}")
    return base


def read_policy_adapter(name: str) -> LoraConfig:
    """The configuration of the adapter from which a policy starts.

    Raises:
        ValueError: as `read_adapter` and `lora_config`; for an adapter of a classifier, and for one without a base.
    """
    field = f"model_name_or_path {name}"
    config = lora_config(read_adapter(field, name), field)
    if config.task_type == "SEQ_CLS" or CLASSIFIER_HEADS & set(config.modules_to_save or ()):
        raise ValueError(f"{field} is the adapter of a classifier, not of a language model; pass it as reward_adapter")
    adapter_base(field, config)
    return config


def read_reward_adapter(name: str) -> LoraConfig:
    """The configuration of a reward adapter, without its head and dropout, and frozen.

    Raises:
        ValueError: when it is not LoRA with a score head of one label and nothing else, or has no safetensors file.
    """
    if not is_adapter(name):
        raise ValueError(f"reward_adapter is {name!r}, no adapter; pass a whole reward model in reward_funcs")
    config = lora_config(read_adapter(f"reward_adapter {name}", name), f"reward_adapter {name}")
    if saved := sorted(set(config.modules_to_save or ()) - CLASSIFIER_HEADS):
        raise ValueError(f"reward_adapter {name} has modules_to_save {saved} beside its score head; train without them")
    heads = {key: shape for key, shape in weight_shapes("reward_adapter", name).items() if is_head(key)}
    if len(heads) != 1 or any(len(shape) != 2 or shape[0] != 1 for shape in heads.values()):
        problem = f"has no score head with one label (its heads: {heads or 'none'})"
        raise ValueError(f"reward_adapter {name} {problem}; train it with alpaca-ppo reward --use_peft")
    config.modules_to_save = config.task_type = None
    config.inference_mode = True
    config.lora_dropout = 0.0
    return config


def read_value_adapter(name: str) -> LoraConfig:
    """The configuration of the adapter of a saved critic (`final/value`), as training continues it: without dropout,
    and not frozen.

    Raises:
        ValueError: as `read_adapter` and `lora_config`.
    """
    field = f"value_model {name}"
    config = lora_config(read_adapter(field, name), field)
    config.inference_mode, config.lora_dropout = False, 0.0
    return config


def is_head(key: str) -> bool:
    """Whether the tensor `key` of an adapter file is the weight of a classifier's head."""
    return key.endswith(".weight") and bool(CLASSIFIER_HEADS & set(key.split(".")))


def weights_file(field: str, name: str) -> Path:
    """The weights file of the adapter, downloaded if need be.

    Raises:
        ValueError: when there is no safetensors file, or the hub does not give it.
    """
    path = Path(name) / WEIGHTS
    if not Path(name).exists():
        problem = f"{field} {name}: {WEIGHTS} is not in the cache, and cannot be downloaded"
        # A missing file is reported below, as for a folder.
        with loading(problem, name, "connect, log in, or give a folder"), suppress(RemoteEntryNotFoundError):
            path = Path(hf_hub_download(name, WEIGHTS))
    if not path.is_file():
        raise ValueError(f"{field} {name} has no {WEIGHTS}, the only format that is read; save the adapter again")
    return path


def weight_shapes(field: str, name: str) -> dict[str, Shape]:
    """The shape of each tensor of the adapter, from the file's header.

    Raises:
        ValueError: as `weights_file`; when the file is damaged.
    """
    path = weights_file(field, name)
    problem = f"{field} {name}: no weights can be read from {path}"
    with loading(problem, name, "save the adapter again"), safe_open(path, "pt") as file:
        return {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}


def check_adapter_shapes(field: str, name: str, model: PreTrainedModel) -> None:
    """Raises a `ValueError` if the shapes of the adapter do not fit the layers of `model`, which may be on the meta
    device, or its head the hidden size.
    """
    layers = dict(model.named_modules())
    hidden = int(model.config.get_text_config().hidden_size)
    for key, shape in weight_shapes(field, name).items():
        needed = _needed_shape(key, shape, layers, hidden)
        if shape != needed:
            here = "is not there" if needed is None else f"needs {needed}"
            problem = f"does not fit {type(model).__name__}: its {key} has shape {shape}, but the layer {here}"
            raise ValueError(f"{field} {name} {problem}; use an adapter of this base")


def _needed_shape(key: str, shape: Shape, layers: Mapping[str, nn.Module], hidden: int) -> Shape | None:
    """The shape that the tensor `key` of an adapter needs; None if its layer is not there. `shape` is its own: it
    gives the rank, and is accepted where the layer is not linear, such as an embedding.
    """
    layer, _, factor = key.removeprefix("base_model.model.").partition(".lora_")
    if factor and layer not in layers:
        return None
    if is_head(key):
        return *shape[:1], hidden
    sizes = _sizes(layers.get(layer))
    if sizes is not None and factor == "A.weight":
        return *shape[:1], sizes[0]
    if sizes is not None and factor == "B.weight":
        return sizes[1], *shape[-1:]
    return shape


def _sizes(layer: nn.Module | None) -> tuple[int, int] | None:
    """Input and output size of a linear layer; None for other layers."""
    if isinstance(layer, BaseTunerLayer):
        layer = layer.get_base_layer()
    if isinstance(layer, Conv1D):
        return int(layer.nx), int(layer.nf)
    return (layer.in_features, layer.out_features) if isinstance(layer, nn.Linear) else None
