"""What a new adapter is checked for, where PEFT takes a wrong setting in silence or names no field of the run's."""

import copy
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

_MADE = "_adapters_made_by_a_run"


def inject_adapter(make: Callable[..., Any], model: PreTrainedModel, config: LoraConfig) -> Any:
    """`make(model, config)`, the PEFT model that has the new adapter `default`; `model` is changed in place, `config`
    is not.

    Args:
        make: `peft.get_peft_model`, or a class of PEFT models.
        model: the base.
        config: of the adapter.

    Raises:
        ValueError: when a name in `target_modules` or `modules_to_save` fits no layer, or PEFT would put adapters on
            parameters of experts; `model` is then as it was, unless PEFT itself failed.
    """
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    remedy = f"give names of its layers (the linear ones are {_linear(model)}), or leave it out for every linear layer"
    try:
        # PEFT puts names of its own into the configuration; the user's may serve for another model.
        peft = make(model, copy.deepcopy(config))
    except ValueError as error:
        raise ValueError(
            f"target_modules (--lora_target_modules) is {_listed(config.target_modules)}, which fits no layers of "
            f"{type(model).__name__} that an adapter can act on: {error} {remedy}"
        ) from error
    try:
        _check_parameters(peft, model, config)
        _check_names(peft, model, config, remedy)
    except ValueError:
        remove_adapter(peft, flags)
        raise
    return peft


def remove_adapter(peft: Any, flags: Iterable[tuple[nn.Parameter, bool]]) -> None:
    """Leaves the base of `peft` as it was before an adapter that is refused; `flags` say what of it trained."""
    base = peft.get_base_model()
    peft.unload()
    # Whole layers that PEFT had copied, an embedding among them.
    base.tie_weights()
    for parameter, required in flags:
        parameter.requires_grad_(required)


def _check_parameters(peft: Any, model: PreTrainedModel, config: LoraConfig) -> None:
    # PEFT reads names that mixtures of experts had before transformers 5, and all-linear, as the experts' parameters.
    made = peft.peft_config["default"]
    if reached := sorted(made.target_parameters or ()):
        wanted = config.target_modules
        gone = set() if isinstance(wanted, str) or wanted is None else set(wanted) - set(made.target_modules)
        names = sorted(made.target_modules) or [name for name in _linear(peft.get_base_model()) if name not in gone]
        raise ValueError(
            f"target_modules (--lora_target_modules) is {_listed(wanted)}, which on {type(model).__name__} reaches the "
            f"parameters {reached} of its experts or their router; adapters there cannot be switched off, merged and "
            f"exported: name linear layers alone, such as {names}"
        )


def _check_names(peft: Any, model: PreTrainedModel, config: LoraConfig, remedy: str) -> None:
    targets, whole = config.target_modules, sorted(config.modules_to_save or ())
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


def _linear(model: PreTrainedModel) -> list[str]:
    """Last names of the layers that an adapter can act on; the output head is none of them."""
    head = model.get_output_embeddings()
    layers = [(name, part) for name, part in model.named_modules() if isinstance(part, nn.Linear | Conv1D)]
    return sorted({name.rpartition(".")[2] for name, part in layers if part is not head})


def _names(model: nn.Module, kind: type) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, kind)]


def _listed(names: Any) -> Any:
    return names if isinstance(names, str) or names is None else sorted(names)


def check_names_are_free(names: Iterable[str], peft: PeftModel) -> None:
    """Checks that no adapter of `peft` has a name in `names`, which a run gives to adapters of its own; those that an
    earlier run made (`mark_as_made`) do not count.

    Raises:
        ValueError: naming the adapter.
    """
    if taken := sorted(set(names) & set(peft.peft_config) - owned_adapters(peft)):
        raise ValueError(
            f"the model has an adapter named {taken[0]!r} already (its adapters are {sorted(peft.peft_config)}), and a "
            f"run gives that name to one of its own; drop it (model.delete_adapter({taken[0]!r})), or load it under "
            "another name"
        )


def mark_as_made(name: str, peft: PeftModel) -> None:
    """Notes on `peft` that its adapter `name` is a run's, which a later run on the same model may replace."""
    # The configuration too: the user may delete the adapter, and add one of the same name.
    vars(peft).setdefault(_MADE, {})[name] = peft.peft_config[name]


def owned_adapters(peft: PeftModel) -> set[str]:
    """Names of the adapters of `peft` that a run made."""
    return {name for name, config in vars(peft).get(_MADE, {}).items() if peft.peft_config.get(name) is config}


def check_no_adapters(model: PreTrainedModel) -> None:
    """Checks that no layer of `model` has an adapter: PEFT would start it anew, without a word.

    Raises:
        ValueError: naming the adapters.
    """
    if any(isinstance(layer, BaseTunerLayer) for layer in model.modules()):
        # PEFT leaves its table of them on the base too.
        names = sorted(vars(model).get("peft_config", ()))
        raise ValueError(
            f"{type(model).__name__} has adapters {names} in its layers already, of a PeftModel or an earlier trainer "
            "(its actor_critic.policy.adapters.peft): a new one would overwrite them. Give that PeftModel, without "
            "peft_config, to train it on; take its adapters out (base = peft.unload()); or load the model again"
        )


def check_active_adapter(name: str, peft: PeftModel) -> None:
    """Checks that every layer of `peft` acts with the adapter `name` and no other, and that it trains.

    Raises:
        ValueError: with what makes it so.
    """
    layers = [layer for layer in peft.modules() if isinstance(layer, BaseTunerLayer)]
    if any(layer.disable_adapters for layer in layers):
        raise ValueError("the model's adapters are switched off: call model.base_model.enable_adapter_layers() first")
    acting = sorted({other for layer in layers for other in layer.active_adapters})
    if acting != [name]:
        raise ValueError(
            f"the model's adapter {name!r} is not the one that acts, or not alone (active are {acting}): call "
            f"model.set_adapter({name!r}) first"
        )
    if not any(parameter.requires_grad for key, parameter in peft.named_parameters() if belongs_to(name, key)):
        raise ValueError("the model's adapter is frozen; load it with is_trainable=True")


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
