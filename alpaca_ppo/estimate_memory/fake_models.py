"""The models of a run with fake tensors, which have a shape but no memory.

They are built only from configurations, by the same code that builds a run's models. Patches for what
transformers and torch do differently with fake tensors are at the end.
"""

import copy
from collections.abc import Sequence
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

    def critic(self, args: PPOConfig) -> Any:
        """The configuration of what the critic starts from."""
        of_reward = args.init_value_with_reward and self.rewards
        return self.rewards[0] if of_reward else self.value or self.policy


@dataclass(frozen=True)
class FakeRun:
    """The models of a run; `reference` is None if it has none."""

    actor_critic: ActorCritic
    reference: AdapterReference | CopiedReference | None
    rewards: Sequence[PreTrainedModel]


def build(models: Models, args: PPOConfig, *, half: bool = False) -> FakeRun:
    """Builds the models of a run on the meta device (small parts on the CPU).

    Args:
        models: their configurations.
        args: of the run.
        half: cast the trained models and the reference to bfloat16, as DeepSpeed does.

    Raises:
        ValueError: for 4 bits without adapters; and whatever `make_actor_critic` and `make_reference` raise for
            configurations that contradict each other.
    """
    if args.load_in_4bit and models.lora is None:
        raise ValueError("load_in_4bit is True, but all weights are trained: set use_peft, or leave load_in_4bit out")
    rewards = [_classifier(config, args, getattr(torch, args.dtype)) for config in models.rewards]
    value = None if models.value is None or args.init_value_with_reward else _critic_start(models.value, args)
    policy = _language_model(models.policy, args, getattr(torch, args.dtype))
    # These options need real weights: 4 bits are accounted for in `passes`, a reward adapter in
    # `_add_adapters`.
    buildable = replace(args, load_in_4bit=False, reward_adapter=None)
    with torch.device("meta"):
        actor_critic = make_actor_critic(policy, value, rewards, copy.deepcopy(models.lora), buildable)
        _add_adapters(models, actor_critic)
    if models.reference is not None:
        other = _language_model(models.reference, args, getattr(torch, args.dtype))
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


def _critic_start(config: Any, args: PPOConfig) -> Any:
    if names_causal_lm(config):
        return _language_model(config, args, torch.float32)
    return _classifier(config, args)


def _language_model(config: Any, args: PPOConfig, dtype: torch.dtype) -> Any:
    if type(config) not in AutoModelForCausalLM._model_mapping and not hasattr(config, "auto_map"):
        raise ValueError(
            f"AutoModelForCausalLM cannot build a model of type {config.model_type!r}; use a language model, such as "
            "the text part of this one"
        )
    with remote_code(config.name_or_path, trust=args.trust_remote_code), torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            copy.deepcopy(config), dtype=dtype, trust_remote_code=args.trust_remote_code
        )


def _classifier(config: Any, args: PPOConfig, dtype: torch.dtype = torch.float32) -> Any:
    config = copy.deepcopy(config)
    config.num_labels, config.pad_token_id = 1, 0
    with remote_code(config.name_or_path, trust=args.trust_remote_code), torch.device("meta"):
        model: Any = AutoModelForSequenceClassification.from_config(
            config, dtype=dtype, trust_remote_code=args.trust_remote_code
        )
    # Not on the meta device: a critic's head is initialized from this weight.
    model.score = nn.Linear(model.score.in_features, 1, bias=False, dtype=dtype)
    return model


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
