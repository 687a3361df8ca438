"""LoRA adapters on one frozen base: the policy's, the critic's, a reward model's, and the base without any of them.

PEFT puts the adapters into the base's own layers, so a forward pass of the base is one of the active adapter; which one
that is, is chosen here. PEFT's own switches change which parameters require gradients: here they stay as they were.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import load_peft_weights
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput

POLICY, VALUE, REWARD, REFERENCE = "default", "value", "reward", "reference"
"""Names of the adapters; the policy's is PEFT's default, whose folder needs no sub-folder."""


class AdapterSet:
    """The adapters of one base model, of which one is active at a time: the policy's, unless `active` says otherwise.

    Args:
        peft: the PEFT model; its adapter `default` is the policy's.
    """

    def __init__(self, peft: PeftModel) -> None:
        self.peft = peft

    @property
    def model(self) -> PreTrainedModel:
        """The language model with the adapters in its layers."""
        model: Any = self.peft.get_base_model()
        language_model: PreTrainedModel = model
        return language_model

    @property
    def starting_point(self) -> str | None:
        """The adapter that training started from; None = the base without any."""
        return REFERENCE if REFERENCE in self.peft.peft_config else None

    @contextmanager
    def active(self, name: str | None) -> Iterator[None]:
        """Inside, the model is the base with the adapter `name`, or (None) the base alone.

        Which parameters require gradients is the same inside and afterwards as before.
        """
        flags = [(parameter, parameter.requires_grad) for parameter in self.peft.parameters()]
        before = self.peft.active_adapter
        try:
            if name is None:
                with self.peft.disable_adapter():
                    _restore(flags)
                    yield
            else:
                self.peft.set_adapter(name)
                _restore(flags)
                yield
        finally:
            self.peft.set_adapter(before)
            _restore(flags)

    def add(self, name: str, config: LoraConfig, *, trainable: bool) -> None:
        """A new adapter `name`, at PEFT's start (its product is zero)."""
        flags = [(parameter, parameter.requires_grad) for parameter in self.peft.parameters()]
        self.peft.add_adapter(name, config)
        self.peft.set_adapter(POLICY)
        _restore(flags)
        for parameter in self.parameters_of(name):
            parameter.requires_grad_(trainable)

    def load(self, name: str, folder: str) -> dict[str, Tensor]:
        """A frozen adapter `name` from `folder`; returns tensors of the folder that are no part of the adapter, such as
        a score head.

        Raises:
            ValueError: when the folder's adapter does not fit the base.
        """
        config = lora_config(PeftConfig.from_pretrained(folder))
        extra = set(config.modules_to_save or ())
        config.modules_to_save, config.task_type, config.inference_mode = None, None, True
        self.add(name, config, trainable=False)
        tensors = load_peft_weights(folder, device="cpu")
        heads = {key: value for key, value in tensors.items() if extra & set(key.split("."))}
        expected = set(get_peft_model_state_dict(self.peft, adapter_name=name))
        given = {key: value for key, value in tensors.items() if key not in heads}
        if different := sorted(expected ^ set(given)):
            raise ValueError(
                f"the adapter in {folder} does not fit {type(self.model).__name__}: they differ in "
                f"{', '.join(different[:3])}; give an adapter that was trained on this base model"
            )
        set_peft_model_state_dict(self.peft, given, adapter_name=name)
        return heads

    def parameters_of(self, name: str) -> list[nn.Parameter]:
        """The parameters of the adapter `name`."""
        return [p for key, p in self.peft.named_parameters() if name in key.split(".")]

    def copy(self, source: str, name: str) -> None:
        """A frozen adapter `name` with the weights that the adapter `source` has now."""
        self.add(name, lora_config(self.peft.peft_config[source]), trainable=False)
        weights = get_peft_model_state_dict(self.peft, adapter_name=source)
        set_peft_model_state_dict(self.peft, weights, adapter_name=name)


def attach(model: PreTrainedModel, config: Any) -> AdapterSet:
    """`model`, frozen, with a new policy adapter.

    Args:
        model: the base; changed in place.
        config: a `peft.LoraConfig`.

    Raises:
        ValueError: for a configuration that cannot be switched off without a trace, or that wraps the output head.
    """
    config = lora_config(config)
    adapters = AdapterSet(PeftModel(model, config, adapter_name=POLICY))
    _check_head(adapters.model, config)
    return adapters


def load_adapters(model: PreTrainedModel, folder: str) -> AdapterSet:
    """`model` with the adapter of `folder` as the policy's, which trains on, and a frozen copy as the reference."""
    return adapters_in(PeftModel.from_pretrained(model, folder, adapter_name=POLICY, is_trainable=True))


def adapters_in(peft: PeftModel) -> AdapterSet:
    """The adapters of a model that has a policy's already, with a frozen copy of it as the reference.

    Raises:
        ValueError: for adapters that this package cannot handle, or without one that trains.
    """
    if POLICY not in peft.peft_config:
        raise ValueError(f"the model's adapters are {sorted(peft.peft_config)}; the policy's must be named {POLICY!r}")
    config = lora_config(peft.peft_config[POLICY])
    adapters = AdapterSet(peft)
    _check_head(adapters.model, config)
    if not any(parameter.requires_grad for parameter in adapters.parameters_of(POLICY)):
        raise ValueError("the model's adapter is frozen; load it with is_trainable=True")
    # Switched off, it would leave the raw base, not the model that training starts from.
    adapters.copy(POLICY, REFERENCE)
    return adapters


def is_adapter_folder(name: str) -> bool:
    """Whether `name` is a folder with an adapter instead of a whole model."""
    return (Path(name) / "adapter_config.json").is_file()


def lora_config(config: Any) -> LoraConfig:
    """`config`, if it is one that this package can handle.

    Raises:
        ValueError: for another method than LoRA, and for trained biases.
    """
    if not isinstance(config, LoraConfig):
        raise ValueError(
            f"peft_config is a {type(config).__name__}; only LoRA (with DoRA and rsLoRA) can be switched off and "
            "joined by other adapters: give a peft.LoraConfig"
        )
    if config.bias != "none":
        raise ValueError(
            f"peft_config has bias {config.bias!r}: trained biases stay when the adapter is switched off, so the base "
            "would not be the reference; set bias='none'"
        )
    return config


def _check_head(model: PreTrainedModel, config: LoraConfig) -> None:
    if not isinstance(model.get_output_embeddings(), nn.Linear) or _is_wrapped(model.get_output_embeddings()):
        raise ValueError(
            f"the adapter acts on the language-model head (target_modules {config.target_modules}, modules_to_save "
            f"{config.modules_to_save}), whose logits are computed in chunks of its weight; leave the head out"
        )


def _is_wrapped(module: nn.Module) -> bool:
    return any(name for name, _ in module.named_children())


def _restore(flags: list[tuple[nn.Parameter, bool]]) -> None:
    for parameter, requires_grad in flags:
        parameter.requires_grad_(requires_grad)


def adapter_tensors(adapters: AdapterSet, name: str) -> dict[str, Tensor]:
    """The weights of the adapter `name` as an adapter folder holds them, dense and on the CPU."""
    weights = get_peft_model_state_dict(adapters.peft, adapter_name=name)
    return {key: tensor.detach().cpu().contiguous() for key, tensor in weights.items()}


@torch.no_grad()
def merged_weights(adapters: AdapterSet) -> dict[str, Tensor]:
    """The state dictionary, in host memory, of the base with the policy's adapter merged into it.

    One layer is merged at a time and put back as it was, to the last bit.
    """
    merged: dict[str, Tensor] = {}
    model = adapters.model
    layers = {name: module for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}
    for name, layer in layers.items():
        base: Any = layer.get_base_layer()
        kept = base.weight.detach().clone()
        layer.merge(adapter_names=[POLICY])
        merged[f"{name}.weight"] = base.weight.detach().cpu().clone()
        base.weight.copy_(kept)
        layer.merged_adapters.clear()
    for key, tensor in model.state_dict().items():
        parts = key.split(".")
        if any(part.startswith("lora_") for part in parts) or "original_module" in parts:
            continue
        plain = key.replace(".base_layer", "").replace(f".modules_to_save.{POLICY}", "")
        if "modules_to_save" not in plain and plain not in merged:
            merged[plain] = tensor.detach().cpu()
    return merged


class AdapterClassifier(nn.Module):
    """A sequence classifier with one label made of a policy's base, a reward adapter on it, and a score head.

    It shares the base's parameters and owns the head alone. Numbers are those of the classifier that the adapter was
    trained in: the score at a row's last real token.

    Args:
        adapters: of the policy.
        folder: of the adapter, as `examples/train_reward_model.py --use_peft` writes it.

    Raises:
        ValueError: when the folder has no score head, or an adapter of another base.
    """

    def __init__(self, adapters: AdapterSet, folder: str) -> None:
        super().__init__()
        heads = adapters.load(REWARD, folder)
        weights = [value for key, value in heads.items() if key.split(".")[-1] == "weight"]
        if len(weights) != 1 or weights[0].size(0) != 1:
            raise ValueError(
                f"reward_adapter {folder} has no score head of one label (it holds {sorted(heads)}); train it with "
                "examples/train_reward_model.py --use_peft"
            )
        self.adapters = adapters
        self.score = nn.Parameter(weights[0].to(torch.float32), requires_grad=False)
        self.config: Any = adapters.model.config.__class__(**{**adapters.model.config.to_dict(), "num_labels": 1})
        self.config.name_or_path = folder

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> SequenceClassifierOutput:
        """`logits` (B, 1) float32 of right-padded `input_ids` (B, T) with `attention_mask` (B, T), 1 = real."""
        with self.adapters.active(REWARD):
            hidden = self.adapters.model.base_model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
        last = attention_mask.sum(dim=1) - 1
        states = hidden.last_hidden_state[torch.arange(len(last), device=last.device), last]
        return SequenceClassifierOutput(logits=nn.functional.linear(states.float(), self.score.to(states.device)))
