"""The models of a run as fake tensors, which have a size and no memory.

Built by the code that builds a run's models, from their configurations alone, and with few decoder layers.
"""

import copy
import math
import re
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from alpaca_ppo.adapters import VALUE
from alpaca_ppo.adapters.adapter_set import REFERENCE, REWARD
from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.models import ActorCritic, AdapterReference, CopiedReference
from alpaca_ppo.models.factory import make_actor_critic, make_reference

Figures = dict[str, float]
"""Bytes by name; the part before the slash is the model whose number of layers they grow with."""

_FOUR_BIT = 0.5 + 4 / 64
"""Bytes a weight: half a byte, and a float32 scale for 64 of them (bitsandbytes' NF4)."""


@dataclass(frozen=True)
class Models:
    """What a run is made of: configurations of transformers and PEFT. None stands for what is built from the policy."""

    policy: Any
    lora: LoraConfig | None = None
    value: Any = None
    reference: Any = None
    reference_adapter: PeftConfig | None = None
    rewards: tuple[Any, ...] = ()
    reward_lora: LoraConfig | None = None
    starts_from_adapter: bool = False
    """Whether `lora` is an adapter that training starts from: a frozen copy of it is the reference."""

    @property
    def names_layers(self) -> bool:
        """Whether an adapter chooses layers by their numbers: a model of few layers may have none of them."""
        adapters = (self.lora, self.reference_adapter, self.reward_lora)
        return any(_names_layers(adapter) for adapter in adapters if isinstance(adapter, LoraConfig))

    def depths(self, args: PPOConfig) -> dict[str, int]:
        """Decoder layers of each model, by the first part of its figures' names."""
        critic = self.rewards[0] if args.init_value_with_reward else self.value or self.policy
        named = {"policy": self.policy, "critic": critic, "reference": self.reference or self.policy}
        named |= {f"reward{i}": config for i, config in enumerate(self.rewards)}
        return {name: int(config.get_text_config().num_hidden_layers) for name, config in named.items()}


def _names_layers(adapter: LoraConfig) -> bool:
    if adapter.layers_to_transform is not None:
        return True
    for modules in (adapter.target_modules, adapter.exclude_modules):
        # A pattern may write the numbers in many ways.
        patterns = [modules] if isinstance(modules, str) else []
        if any(re.search(r"\d", pattern) for pattern in patterns):
            return True
        if any(re.search(r"(^|\.)\d+\.", name) for name in ([] if patterns else modules or [])):
            return True
    return False


@dataclass(frozen=True)
class FakeRun:
    """The models of a run; `reference` is None where there is none."""

    actor_critic: ActorCritic
    reference: AdapterReference | CopiedReference | None
    rewards: Sequence[PreTrainedModel]


def shallow(config: Any, layers: int | None) -> Any:
    """A copy of `config` with `layers` decoder layers; None = all that it has."""
    config = copy.deepcopy(config)
    if layers is None:
        return config
    text = config.get_text_config()
    if hasattr(text, "layer_types") and text.layer_types:
        text.layer_types = text.layer_types[:layers]
    text.num_hidden_layers = layers
    return config


def build(models: Models, args: PPOConfig, *, layers: int | None, half: bool = False) -> FakeRun:
    """The models of a run with `layers` decoder layers each (None = all), on the meta device (small parts on the CPU);
    with `half`, parameters that train and those of the reference are in bfloat16.

    Raises:
        ValueError: what `make_actor_critic` and `make_reference` raise of configurations that do not go together; for
            4 bits without adapters.
    """
    if args.load_in_4bit and models.lora is None:
        raise ValueError("load_in_4bit is True, but all weights would train: set use_peft, or leave load_in_4bit out")
    rewards = [_classifier(config, layers, getattr(torch, args.dtype)) for config in models.rewards]
    value = None if models.value is None or args.init_value_with_reward else _classifier(models.value, layers)
    policy = _language_model(models.policy, layers, args)
    # What acts on real weights alone: 4 bits are arithmetic here, and a reward adapter has more layers than this model.
    made = replace(args, load_in_4bit=False, reward_adapter=None, merge_on_save=False)
    # DoRA reads the base's weights as it starts: it has to be where they are. Adapters of all layers are no small part.
    reads = any(lora is not None and lora.use_dora for lora in (models.lora, models.reward_lora))
    where: Any = torch.device("meta") if reads or layers is None else nullcontext()
    with where:
        actor_critic = make_actor_critic(policy, value, rewards, copy.deepcopy(models.lora), made)
        _add_frozen(models, actor_critic)
    if models.reference is not None:
        other = _language_model(models.reference, layers, args)
        if models.reference_adapter is not None:
            with torch.device("meta"):
                other = inject_adapter_in_model(copy.deepcopy(models.reference_adapter), other)
        reference = make_reference(actor_critic, other, replace(args, reference="auto"))
    else:
        reference = make_reference(actor_critic, None, args)
    run = FakeRun(actor_critic.train(), reference, rewards)
    if half:
        _halve(run)
    return run


def _halve(run: FakeRun) -> None:
    """Casts as DeepSpeed and `DeepSpeedEngine.shard` do: parameters, not buffers; reward models stay as they are."""
    copied = [run.reference.policy] if isinstance(run.reference, CopiedReference) else []
    for module in (run.actor_critic, *copied):
        for parameter in module.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)


def _add_frozen(models: Models, actor_critic: ActorCritic) -> None:
    adapters = actor_critic.policy.adapters
    if models.starts_from_adapter and models.lora is not None and adapters is not None:
        adapters.add(REFERENCE, copy.deepcopy(models.lora), trainable=False)
    if models.reward_lora is not None and adapters is not None:
        adapters.add(REWARD, copy.deepcopy(models.reward_lora), trainable=False)


def _language_model(config: Any, layers: int | None, args: PPOConfig) -> Any:
    how: dict[str, Any] = {"dtype": getattr(torch, args.dtype), "trust_remote_code": args.trust_remote_code}
    if type(config) not in AutoModelForCausalLM._model_mapping and not hasattr(config, "auto_map"):
        raise ValueError(
            f"a model of type {config.model_type!r} is no language model that AutoModelForCausalLM builds; give a text "
            "model, such as the text part of this one"
        )
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(shallow(config, layers), **how)


def _classifier(config: Any, layers: int | None, dtype: torch.dtype = torch.float32) -> Any:
    config = shallow(config, layers)
    config.num_labels, config.pad_token_id = 1, 0
    with torch.device("meta"):
        model: Any = AutoModelForSequenceClassification.from_config(config, dtype=dtype)
    # A critic's head takes its start from this weight, which needs values.
    model.score = nn.Linear(model.score.in_features, 1, bias=False, dtype=dtype)
    return model


def weight_figures(run: FakeRun, args: PPOConfig) -> Figures:
    """Bytes of the weights, and of the gradients of what trains."""
    policy, critic = run.actor_critic.policy, run.actor_critic.critic
    of_critic = [] if critic is None else list(critic.parameters())
    if critic is not None and critic.has_adapter and policy.adapters is not None:
        of_critic += policy.adapters.parameters_of(VALUE)
    its_own = {id(parameter) for parameter in of_critic}
    of_policy = [parameter for parameter in policy.parameters() if id(parameter) not in its_own]
    trained = [parameter for parameter in (*of_policy, *of_critic) if parameter.requires_grad]
    found = {
        "policy/weights": size_of([*policy.parameters(), *policy.buffers()]),
        "critic/weights": 0.0 if critic is None else size_of([*critic.parameters(), *critic.buffers()]),
        "reference/weights": 0.0,
        "policy/gradients": size_of(parameter for parameter in of_policy if parameter.requires_grad),
        "critic/gradients": size_of(parameter for parameter in of_critic if parameter.requires_grad),
        "policy/elements": float(sum(p.numel() for p in of_policy if p.requires_grad)),
        "critic/elements": float(sum(p.numel() for p in of_critic if p.requires_grad)),
        "policy/hidden": float(policy.model.config.get_text_config().hidden_size),
        "policy/largest": max((size_of([parameter]) for parameter in trained), default=0.0),
        "policy/unpacked": 0.0,
    }
    if isinstance(run.reference, CopiedReference):
        found["reference/weights"] = size_of([*run.reference.policy.parameters(), *run.reference.policy.buffers()])
    if args.load_in_4bit:
        layers = [m for key, m in policy.named_modules() if isinstance(m, nn.Linear) and "lora_" not in key]
        packed = [layer.weight for layer in layers if layer is not policy.head]
        found["policy/weights"] -= sum(w.numel() * (w.element_size() - _FOUR_BIT) for w in packed)
        # One layer's weights are unpacked at a time, to bfloat16.
        found["policy/unpacked"] = max(2.0 * weight.numel() for weight in packed)
    rewards = {f"reward{i}/weights": size_of([*m.parameters(), *m.buffers()]) for i, m in enumerate(run.rewards)}
    return found | rewards


def extrapolated(one: Figures, two: Figures, depths: dict[str, int]) -> Figures:
    """Figures at `depths`, of those with one and two layers, where all layers are like the second."""
    return {name: one[name] + (depths[name.split("/")[0]] - 1) * (two[name] - one[name]) for name in one}


def layers_are_alike(models: Models, args: PPOConfig) -> bool:
    """Whether two layers tell the weights of all: not where some have experts and others none, or an adapter has
    another rank in some.
    """
    one, two, whole = (weight_figures(build(models, args, layers=layers), args) for layers in (1, 2, None))
    told = extrapolated(one, two, models.depths(args))
    return all(math.isclose(told[name], figure) for name, figure in whole.items())


def size_of(tensors: Any) -> float:
    """Bytes of `tensors`, shared ones once."""
    return float(sum({id(t.untyped_storage()): t.untyped_storage().nbytes() for t in list(tensors)}.values()))


def make_fake(run: FakeRun, mode: FakeTensorMode) -> None:
    """Puts fake tensors, on the CPU, in the place of all parameters and buffers; shared ones stay shared."""
    reference = [] if run.reference is None else [run.reference.policy]
    known: dict[int, tuple[Tensor, Tensor]] = {}

    def fake(tensor: Tensor) -> Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        if id(tensor) not in known:
            other: Tensor = FakeTensor(mode, tensor.detach().to("meta"), torch.device("cpu"))
            if isinstance(tensor, nn.Parameter):
                other = nn.Parameter(other, tensor.requires_grad)
            # The first of the two is kept, so that no other tensor takes its id.
            known[id(tensor)] = tensor, other
        return known[id(tensor)][1]

    for root in (run.actor_critic, *reference, *run.rewards):
        for module in root.modules():
            tables: Any = (module._parameters, module._buffers)
            for table in tables:
                table.update({name: fake(tensor) for name, tensor in table.items() if tensor is not None})
