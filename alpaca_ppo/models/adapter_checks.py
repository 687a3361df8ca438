"""What a new adapter is checked for, where PEFT takes a wrong setting in silence or names no field of the run's."""

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D


def put_adapter(make: Callable[..., Any], model: PreTrainedModel, config: LoraConfig) -> Any:
    """`make(model, config)`, the PEFT model that has the new adapter `default`; `model` is changed in place.

    Args:
        make: `peft.get_peft_model`, or a class of PEFT models.
        model: the base.
        config: of the adapter.

    Raises:
        ValueError: when a name in `target_modules` or `modules_to_save` fits no layer.
    """
    # As the user gave them: PEFT puts names of its own into the configuration.
    targets, whole = config.target_modules, sorted(config.modules_to_save or ())
    linear = {name.rpartition(".")[2] for name, part in model.named_modules() if isinstance(part, nn.Linear | Conv1D)}
    remedy = f"give names of its layers (the linear ones are {sorted(linear)}), or leave it out for every linear layer"
    try:
        peft = make(model, config)
    except ValueError as error:
        raise ValueError(
            f"target_modules (--lora_target_modules) is {_listed(targets)}, which fits no layers of "
            f"{type(model).__name__} that an adapter can act on: {error} {remedy}"
        ) from error
    adapted = _names(peft, BaseTunerLayer)
    wanted = [] if isinstance(targets, str) or targets is None else sorted(targets)
    if lost := [name for name in wanted if not any(f".{key}".endswith(f".{name}") for key in adapted)]:
        raise ValueError(
            f"target_modules (--lora_target_modules) is {wanted}, but {type(model).__name__} has no layers {lost} for "
            f"it to act on; {remedy}"
        )
    saved = _names(peft, ModulesToSaveWrapper)
    if lost := [name for name in whole if not any(key.endswith(name) for key in saved)]:
        raise ValueError(
            f"modules_to_save (--lora_modules_to_save) is {whole}, but {type(model).__name__} has no layers {lost}, "
            "which would stay frozen; correct the names, or leave them out"
        )
    return peft


def _names(model: nn.Module, kind: type) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, kind)]


def _listed(names: Any) -> Any:
    return names if isinstance(names, str) or names is None else sorted(names)


def check_names_are_free(names: Iterable[str], peft: PeftModel) -> None:
    """Checks that no adapter of `peft` has a name in `names`, which a run gives to adapters of its own.

    Raises:
        ValueError: naming the adapter.
    """
    if taken := sorted(set(names) & set(peft.peft_config)):
        raise ValueError(
            f"the model has an adapter named {taken[0]!r} already (its adapters are {sorted(peft.peft_config)}), and a "
            f"run gives that name to one of its own; drop it (model.delete_adapter({taken[0]!r})), or load it under "
            "another name"
        )


def check_head(model: PreTrainedModel, config: LoraConfig) -> None:
    """Checks that no adapter is in the language-model head.

    Raises:
        ValueError: naming the modules that the configuration lists.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or any(True for _ in head.named_children()):
        raise ValueError(
            f"the adapter acts on the language-model head (target_modules {config.target_modules}, modules_to_save "
            f"{config.modules_to_save}), whose logits are computed in chunks of its weight; leave the head out"
        )


def raise_precision(peft: PeftModel) -> None:
    """Small updates vanish in half precision: adapters are raised to float32, what else trains is refused.

    Raises:
        ValueError: naming the parameter that would train in half precision.
    """
    for name, parameter in peft.named_parameters():
        if parameter.requires_grad and parameter.dtype in (torch.float16, torch.bfloat16):
            if "lora_" not in name:
                raise ValueError(
                    f"{name} would train in {parameter.dtype}, where small updates are rounded away; leave it out of "
                    "modules_to_save, or load the base with dtype: float32"
                )
            parameter.data = parameter.data.float()


def belongs_to(adapter: str, key: str) -> bool:
    """Whether the parameter `key` of a PEFT model is one of `adapter`, whatever the base's own layers are called."""
    return re.search(rf"(^|\.)(lora_\w+|modules_to_save)\.{re.escape(adapter)}(\.|$)", key) is not None
