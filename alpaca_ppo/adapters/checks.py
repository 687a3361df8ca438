"""Checks on adapters, for mistakes that PEFT accepts silently or reports without naming the run's field."""

import copy
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from torch import nn
from transformers import PreTrainedModel, TrainerCallback
from transformers.pytorch_utils import Conv1D

_WITH_FUSED_KERNELS = "bamba falcon_h1 falcon_mamba granitemoehybrid mamba mamba2 nemotron_h zamba2".split()
_OWNED = "_adapters_made_by_a_run"


def inject_adapter(make: Callable[..., Any], model: PreTrainedModel, config: LoraConfig) -> Any:
    """`make(model, config)`: a PEFT model with the new adapter `default`. `make` is `peft.get_peft_model`, or a PEFT
    model class; `model` is changed in place, `config` is not.

    Raises:
        ValueError: when a name in `target_modules` or `modules_to_save` matches no layer, or PEFT would adapt the
            parameters of experts. `model` is restored then, unless PEFT itself failed.
    """
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    kind = type(model).__name__
    targets = [] if isinstance(config.target_modules, str | None) else sorted(config.target_modules)
    to_save = sorted(config.modules_to_save or ())
    problem = f"target_modules (--lora_target_modules) is {targets or config.target_modules}"
    remedy = f"name linear layers ({_linear(model)})"
    # A copy, because PEFT writes resolved names into the configuration, which the user may reuse.
    config = copy.deepcopy(config)
    if config.target_modules == "all-linear" and config.exclude_modules is None:
        config.exclude_modules = _read_past_adapters(model) or None
    try:
        peft = make(model, config)
    except ValueError as error:
        raise ValueError(f"{problem}, which PEFT cannot adapt on {kind} ({error}); {remedy}") from error
    adapted = [f".{name}" for name, module in peft.named_modules() if isinstance(module, BaseTunerLayer)]
    copied = [name for name, module in peft.named_modules() if isinstance(module, ModulesToSaveWrapper)]
    fault = None
    # On mixtures of experts PEFT maps all-linear, and layer names from before transformers 5, to expert parameters.
    if experts := sorted(peft.peft_config["default"].target_parameters or ()):
        fault = f"{problem}, which adapts the parameters {experts} of experts of {kind} or of their router; {remedy}"
    elif absent := [name for name in targets if not any(layer.endswith(f".{name}") for layer in adapted)]:
        fault = f"{problem}, but {kind} has no layers {absent} that PEFT can adapt; {remedy}"
    elif absent := [name for name in to_save if not any(layer.endswith(name) for layer in copied)]:
        fault = f"modules_to_save is {to_save}, but {kind} has no layers {absent}; correct the names, or leave them out"
    if fault is not None:
        remove_adapter(peft, flags)
        raise ValueError(fault)
    return peft


class UnreachedAdapters(TrainerCallback):
    """Says after the first step that trains the model which layers with an adapter no pass has gone through: those of
    an image encoder, or whose weights a fused kernel takes past the adapter.
    """

    def __init__(self, model: nn.Module, say: Callable[[str], Any]) -> None:
        layers = {name: module for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}
        self._layers, self._say, self._reached = layers, say, set[str]()
        self._hooks: list[Any] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        if not self._hooks:
            self._hooks = [
                layer.register_forward_hook(lambda *_, name=name: self._reached.add(name))
                for name, layer in self._layers.items()
            ]

    def on_step_end(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        # A resumed run may begin with the end of a step, and steps that train the critic alone may do without a pass of
        # the policy.
        if not self._hooks or state.global_step <= getattr(args, "critic_pretraining_steps", 0):
            return
        for hook in self._hooks:
            hook.remove()
        if unreached := [name for name in self._layers if name not in self._reached]:
            kinds = sorted({re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in unreached})
            problem = f"{len(unreached)} of {len(self._layers)} layers with an adapter took no part in this step"
            remedy = "if no step needs them, leave them out of target_modules (--lora_target_modules)"
            self._say(f"warning: {problem} ({', '.join(kinds)}), so it taught them nothing; {remedy}")
        self._hooks, self._layers = [], {}


def remove_adapter(peft: Any, flags: Iterable[tuple[nn.Parameter, bool]]) -> None:
    """Removes a refused adapter from the base of `peft` and restores `requires_grad` from `flags`."""
    base = peft.get_base_model()
    peft.unload()
    # modules_to_save had replaced layers by copies, possibly the embedding that the head is tied to.
    base.tie_weights()
    restore_requires_grad(flags)


def restore_requires_grad(flags: Iterable[tuple[nn.Parameter, bool]]) -> None:
    """Sets each parameter's `requires_grad` to the value beside it."""
    for parameter, required in flags:
        parameter.requires_grad_(required)


def _linear(model: PreTrainedModel) -> list[str]:
    """Last name components of the layers that PEFT can adapt, without the output head."""
    head = model.get_output_embeddings()
    layers = [(name, part) for name, part in model.named_modules() if isinstance(part, nn.Linear | Conv1D)]
    return sorted({name.rpartition(".")[2] for name, part in layers if part is not head} - _read_past_adapters(model))


def _read_past_adapters(model: PreTrainedModel) -> set[str]:
    """Names of linear layers whose weights `model` gives to fused kernels, which skip an adapter. PEFT refuses to adapt
    them in most such models.
    """
    return {"out_proj"} if model.config.model_type in _WITH_FUSED_KERNELS else set()


def mark_as_owned(name: str, peft: PeftModel) -> None:
    """Marks the adapter `name` as added by a run, so that a later run on the same model may replace it."""
    # By its configuration: the user may delete the adapter and add another one of the same name.
    peft.__dict__.setdefault(_OWNED, {})[name] = peft.peft_config[name]


def delete_owned_adapters(names: Iterable[str], peft: PeftModel) -> None:
    """Deletes those of the adapters `names` that an earlier run added to `peft`.

    Raises:
        ValueError: when one of them is the user's.
    """
    owned = vars(peft).get(_OWNED, {})
    present = sorted(set(names) & set(peft.peft_config))
    for name in present:
        if owned.get(name) is not peft.peft_config[name]:
            raise ValueError(f"the model has an adapter {name!r}, which the run adds; call delete_adapter({name!r})")
    for name in present:
        peft.delete_adapter(name)


def check_active_adapter(name: str, peft: PeftModel) -> None:
    """Raises a `ValueError` unless the adapter `name` is trainable, and the only active one in every layer."""
    layers = [layer for layer in peft.modules() if isinstance(layer, BaseTunerLayer)]
    active = sorted({other for layer in layers if not layer.disable_adapters for other in layer.active_adapters})
    if active != [name] or any(layer.disable_adapters for layer in layers):
        problem = f"the model's adapter {name!r} must be the only active one, but the active ones are {active}"
        raise ValueError(f"{problem}: call model.base_model.enable_adapter_layers() and model.set_adapter({name!r})")
    if not any(parameter.requires_grad for key, parameter in peft.named_parameters() if belongs_to(name, key)):
        raise ValueError("the model's adapter is frozen; load it with is_trainable=True")


def check_head(model: PreTrainedModel, config: LoraConfig) -> None:
    """Raises a `ValueError` if the language-model head is adapted."""
    head = model.get_output_embeddings()
    # PEFT's layers have children.
    if not isinstance(head, nn.Linear) or list(head.children()):
        # Logits are computed without an adapter.
        names = f"target_modules {config.target_modules}, modules_to_save {config.modules_to_save}"
        raise ValueError(f"the adapter adapts the language-model head ({names}); leave the head out")


def raise_precision(peft: PeftModel) -> None:
    """Casts trainable adapter weights to float32, because half precision rounds small updates away.

    Raises:
        ValueError: for another trainable parameter in half precision.
    """
    for name, parameter in peft.named_parameters():
        if parameter.requires_grad and parameter.dtype in (torch.float16, torch.bfloat16):
            if "lora_" not in name:
                problem = f"{name} would train in {parameter.dtype}"
                raise ValueError(f"{problem}; leave it out of modules_to_save, or set dtype: float32")
            parameter.data = parameter.data.float()


def belongs_to(adapter: str, key: str) -> bool:
    """Whether the parameter `key` of a PEFT model belongs to `adapter`, whatever the base's layers are called."""
    return re.search(rf"(^|\.)(lora_\w+|modules_to_save)\.{re.escape(adapter)}(\.|$)", key) is not None
