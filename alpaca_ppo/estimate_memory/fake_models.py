"""The models of a run with fake tensors, which have a shape but no memory.

They are built only from configurations, by the same code that builds a run's models, with few decoder layers. Patches
for what transformers and torch do differently with fake tensors are at the end.
"""

import copy
import math
import re
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from peft import LoraConfig, PeftConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel, masking_utils

from alpaca_ppo.adapters import VALUE
from alpaca_ppo.adapters.adapter_set import REFERENCE, REWARD
from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.models import ActorCritic, AdapterReference, CopiedReference
from alpaca_ppo.models.factory import make_actor_critic, make_reference
from alpaca_ppo.models.loading import names_causal_lm
from alpaca_ppo.remote_code import remote_code

Measurements = dict[str, float]
"""Bytes (or counts) by name, such as `policy/weights`; each depends on the number of layers of the model
named before the "/"."""

_FOUR_BIT = 0.5 + 4 / 64
"""Bytes per weight: half a byte, and a float32 scale for each 64 weights (bitsandbytes' NF4)."""


@dataclass(frozen=True)
class Models:
    """The configurations, of transformers and PEFT, of a run's models. None = built from the policy, or absent."""

    policy: Any
    lora: LoraConfig | None = None
    value: Any = None
    value_lora: LoraConfig | None = None
    """Of a critic's adapter that another run saved; None = as the policy's."""
    reference: Any = None
    reference_adapter: PeftConfig | None = None
    rewards: tuple[Any, ...] = ()
    reward_lora: LoraConfig | None = None
    starts_from_adapter: bool = False
    """Whether training starts from the adapter `lora`, of which a frozen copy is the reference."""

    @property
    def names_layers(self) -> bool:
        """Whether an adapter selects layers by number, which a model with few layers may not have."""
        adapters = (self.lora, self.value_lora, self.reference_adapter, self.reward_lora)
        return any(_names_layers(adapter) for adapter in adapters if isinstance(adapter, LoraConfig))

    def critic(self, args: PPOConfig) -> Any:
        """The configuration of what the critic starts from."""
        of_reward = args.init_value_with_reward and self.rewards
        return self.rewards[0] if of_reward else self.value or self.policy

    def depths(self, args: PPOConfig) -> dict[str, int]:
        """Number of decoder layers of each model, by the first part of its measurements' names."""
        named = {"policy": self.policy, "critic": self.critic(args), "reference": self.reference or self.policy}
        named |= {f"reward{i}": config for i, config in enumerate(self.rewards)}
        return {name: int(config.get_text_config().num_hidden_layers) for name, config in named.items()}


def _names_layers(adapter: LoraConfig) -> bool:
    if adapter.layers_to_transform is not None:
        return True
    for modules in (adapter.target_modules, adapter.exclude_modules):
        # A regular expression can write layer numbers in many ways; any digit counts.
        patterns = [modules] if isinstance(modules, str) else []
        if any(re.search(r"\d", pattern) for pattern in patterns):
            return True
        if any(re.search(r"(^|\.)\d+\.", name) for name in ([] if patterns else modules or [])):
            return True
    return False


@dataclass(frozen=True)
class FakeRun:
    """The models of a run; `reference` is None if it has none."""

    actor_critic: ActorCritic
    reference: AdapterReference | CopiedReference | None
    rewards: Sequence[PreTrainedModel]


def shallow(config: Any, layers: int | None) -> Any:
    """A copy of `config` with `layers` decoder layers; None = all of them."""
    config = copy.deepcopy(config)
    if layers is None:
        return config
    text = config.get_text_config()
    if hasattr(text, "layer_types") and text.layer_types:
        # A model of fewer layers has too few types.
        text.layer_types = (text.layer_types * layers)[:layers]
    text.num_hidden_layers = layers
    return config


def build(models: Models, args: PPOConfig, *, layers: int | None, half: bool = False) -> FakeRun:
    """Builds the models of a run on the meta device (small parts on the CPU).

    Args:
        models: their configurations.
        args: of the run.
        layers: decoder layers of each model; None = all.
        half: cast the trained models and the reference to bfloat16, as DeepSpeed does.

    Raises:
        ValueError: for 4 bits without adapters; and whatever `make_actor_critic` and `make_reference` raise for
            configurations that contradict each other.
    """
    if args.load_in_4bit and models.lora is None:
        raise ValueError("load_in_4bit is True, but all weights are trained: set use_peft, or leave load_in_4bit out")
    rewards = [_classifier(config, layers, args, getattr(torch, args.dtype)) for config in models.rewards]
    value = None if models.value is None or args.init_value_with_reward else _critic_start(models.value, layers, args)
    policy = _language_model(models.policy, layers, args, getattr(torch, args.dtype))
    # These options need real weights: 4 bits are accounted for in `measure_weights`, a reward adapter in
    # `_add_adapters`.
    buildable = replace(args, load_in_4bit=False, reward_adapter=None)
    # DoRA initializes itself from the base's weights, so it must be on their device. Adapters of few layers are small
    # enough for the CPU.
    adapters = (models.lora, models.value_lora, models.reward_lora)
    uses_dora = any(lora is not None and lora.use_dora for lora in adapters)
    device: Any = torch.device("meta") if uses_dora or layers is None else nullcontext()
    with device:
        actor_critic = make_actor_critic(policy, value, rewards, copy.deepcopy(models.lora), buildable)
        _add_adapters(models, actor_critic)
    if models.reference is not None:
        other = _language_model(models.reference, layers, args, getattr(torch, args.dtype))
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
    """Casts parameters, but not buffers, as `DeepSpeedEngine` does; reward models keep their precision."""
    copied = [run.reference.policy] if isinstance(run.reference, CopiedReference) else []
    for module in (run.actor_critic, *copied):
        for parameter in module.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)


def _add_adapters(models: Models, actor_critic: ActorCritic) -> None:
    adapters = actor_critic.policy.adapters
    if models.starts_from_adapter and models.lora is not None and adapters is not None:
        adapters.add(REFERENCE, copy.deepcopy(models.lora), trainable=False)
    has_adapter = actor_critic.critic is not None and actor_critic.critic.has_adapter
    if models.value_lora is not None and adapters is not None and has_adapter:
        adapters.add(VALUE, copy.deepcopy(models.value_lora), trainable=True)
    if models.reward_lora is not None and adapters is not None:
        adapters.add(REWARD, copy.deepcopy(models.reward_lora), trainable=False)


def _critic_start(config: Any, layers: int | None, args: PPOConfig) -> Any:
    if names_causal_lm(config):
        return _language_model(config, layers, args, torch.float32)
    return _classifier(config, layers, args)


def _language_model(config: Any, layers: int | None, args: PPOConfig, dtype: torch.dtype) -> Any:
    if type(config) not in AutoModelForCausalLM._model_mapping and not hasattr(config, "auto_map"):
        raise ValueError(
            f"AutoModelForCausalLM cannot build a model of type {config.model_type!r}; use a language model, such as "
            "the text part of this one"
        )
    with remote_code(config.name_or_path, trust=args.trust_remote_code), torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            shallow(config, layers), dtype=dtype, trust_remote_code=args.trust_remote_code
        )


def _classifier(config: Any, layers: int | None, args: PPOConfig, dtype: torch.dtype = torch.float32) -> Any:
    config = shallow(config, layers)
    config.num_labels, config.pad_token_id = 1, 0
    with remote_code(config.name_or_path, trust=args.trust_remote_code), torch.device("meta"):
        model: Any = AutoModelForSequenceClassification.from_config(
            config, dtype=dtype, trust_remote_code=args.trust_remote_code
        )
    # Not on the meta device: a critic's head is initialized from this weight.
    model.score = nn.Linear(model.score.in_features, 1, bias=False, dtype=dtype)
    return model


def measure_weights(run: FakeRun, args: PPOConfig) -> Measurements:
    """Bytes of all weights and of the gradients of the trainable ones."""
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
        # Layers are dequantized one at a time, to bfloat16.
        found["policy/unpacked"] = max(2.0 * weight.numel() for weight in packed)
    rewards = {f"reward{i}/weights": size_of([*m.parameters(), *m.buffers()]) for i, m in enumerate(run.rewards)}
    return found | rewards


def extrapolate(one: Measurements, two: Measurements, depths: dict[str, int]) -> Measurements:
    """Measurements at full depth from those with one and with two layers, if all layers are like the second."""
    return {name: one[name] + (depths[name.split("/")[0]] - 1) * (two[name] - one[name]) for name in one}


def extrapolate_peaks(
    one: Measurements, two: Measurements, three: Measurements, depths: dict[str, int]
) -> Measurements:
    """Measurements at full depth from those with one and two layers, and of passes without gradients with three.

    Without gradients the first layer is unlike the others in what lives beside it: transformers keeps the embeddings
    to the end of a pass, and they are what the first layer reads.
    """
    deeper = {name: size for name, size in two.items() if name in three and depths[name.split("/")[0]] > 1}
    from_two = extrapolate(deeper, three, {name: depth - 1 for name, depth in depths.items()})
    return extrapolate(one, two, depths) | from_two


def layers_are_alike(models: Models, args: PPOConfig) -> bool:
    """Whether the weights of two layers determine those of all layers.

    They do not if only some layers have experts, or if an adapter's rank differs between layers.
    """
    one, two, full = (measure_weights(build(models, args, layers=layers), args) for layers in (1, 2, None))
    extrapolated = extrapolate(one, two, models.depths(args))
    return all(math.isclose(extrapolated[name], value) for name, value in full.items())


def size_of(tensors: Any) -> float:
    """Bytes of `tensors`, counting shared storage once."""
    return float(sum({id(t.untyped_storage()): t.untyped_storage().nbytes() for t in list(tensors)}.values()))


def make_fake(run: FakeRun, mode: FakeTensorMode) -> None:
    """Replaces all parameters and buffers by fake CPU tensors; shared ones stay shared."""
    reference = [] if run.reference is None else [run.reference.policy]
    known: dict[int, tuple[Tensor, Tensor]] = {}

    def fake(tensor: Tensor) -> Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        if id(tensor) not in known:
            other: Tensor = FakeTensor(mode, tensor.detach().to("meta"), torch.device("cpu"))
            if isinstance(tensor, nn.Parameter):
                other = nn.Parameter(other, tensor.requires_grad)
            # Keep the original alive, so that no new tensor gets its id.
            known[id(tensor)] = tensor, other
        return known[id(tensor)][1]

    for root in (run.actor_critic, *reference, *run.rewards):
        for module in root.modules():
            tables: Any = (module._parameters, module._buffers)
            for table in tables:
                table.update({name: fake(tensor) for name, tensor in table.items() if tensor is not None})


def one_sequence_per_row() -> Any:
    """Inside, transformers treats each row of a batch without a mask as one sequence, as it does in a run.

    It finds packed sequences by the values of the position ids. For fake tensors, which have none, it assumes that rows
    are packed and builds a mask over all pairs of tokens
    (https://github.com/huggingface/transformers/blob/main/src/transformers/masking_utils.py). Remove this when it
    treats fake tensors like unpacked rows.
    """
    return mock.patch.object(masking_utils, "find_packed_sequence_indices", lambda position_ids: None)


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(states, weights)
        return states.new_empty(states.size(0), weights.size(2))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        pairs = zip(ctx.saved_tensors, ctx.needs_input_grad, strict=True)
        return tuple(torch.empty_like(tensor) if needed else None for tensor, needed in pairs)


def grouped_mm_of_any_dtype() -> Any:
    """Inside, `grouped_mm` of states (S, K) with the experts' weights (experts, K, N) works in any dtype.

    For fake tensors, torch implements it in bfloat16 only
    (https://github.com/pytorch/pytorch/blob/main/torch/_meta_registrations.py). Remove this when it supports float32.
    """

    def grouped(states: Tensor, weights: Tensor, *, offs: Tensor) -> Tensor:
        return _GroupedProduct.apply(states, weights)  # type: ignore[no-any-return]

    # `create` because older versions of torch do not have it.
    return mock.patch.object(functional, "grouped_mm", grouped, create=True)
