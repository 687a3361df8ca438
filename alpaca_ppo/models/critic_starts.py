"""What a critic can start from (`value_model`): the critic that a run saved in `final/value`, a sequence classifier, or
a causal language model of any size.

A saved critic starts with the values that it was saved with, in each layout. A critic without a backbone of its own
needs the policy's base for that (layout `adapter`), or the policy's very states (`shared`), which is checked here. The
form of the folders is in `critic_io`.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from alpaca_ppo.adapters import POLICY, VALUE, AdapterSet, is_adapter, read_value_adapter
from alpaca_ppo.adapters.adapter_set import adapter_tensors, describe, warn_of_other_base
from alpaca_ppo.adapters.files import is_head, weight_shapes, weights_file
from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.models.actor_critic import ActorCritic, Critic
from alpaca_ppo.models.critic_heads import CriticHead
from alpaca_ppo.models.critic_io import (
    is_critic_folder,
    load_critic,
    load_head,
)
from alpaca_ppo.models.loading import check_same_head, is_causal_lm, load_causal_lm, load_sequence_classifier
from alpaca_ppo.models.policy import check_architecture

ValueModel = str | PreTrainedModel | PeftModel


def load_value_model(value_model: ValueModel, policy: PreTrainedModel, args: PPOConfig) -> Any:
    """The `Critic`, sequence classifier or language model that a critic with a backbone starts from, trainable; it
    shares no weights with another model.

    Raises:
        ValueError: for an adapter, for a vocabulary smaller than the policy's, and for a language model without a
            backbone that a critic could use; and whatever loading raises.
    """
    start: Any
    if _is_adapter(value_model):
        raise ValueError(
            f"value_model {_name(value_model)!r} is an adapter, which a critic cannot start from with critic_layout "
            f"{args.critic_layout!r}; merge it into its base and save that, set critic_layout: adapter if it is the "
            "final/value of a run with that layout, or leave value_model out"
        )
    if isinstance(value_model, str) and is_critic_folder(value_model):
        start = load_critic(value_model, trust_remote_code=args.trust_remote_code, arguments=args.loading_arguments)
        config: Any = start.backbone.config
    else:
        # The critic is trained; a reward model or policy that is the same object must not change.
        own: Any = value_model if isinstance(value_model, str) else copy.deepcopy(value_model)
        trust = args.trust_remote_code
        load = load_causal_lm if is_causal_lm(own, trust_remote_code=trust) else load_sequence_classifier
        start = load(own, trust_remote_code=trust, arguments=args.loading_arguments)
        if load is load_causal_lm:
            check_architecture(start, "critic")
        config = start.config
    own_vocabulary, needed = (c.get_text_config().vocab_size for c in (config, policy.config))
    # Rows beyond the policy's vocabulary are never read: models of one tokenizer pad their embeddings differently.
    if own_vocabulary < needed:
        raise ValueError(
            f"the critic's vocabulary ({own_vocabulary}) is smaller than the policy's ({needed}), each of whose tokens "
            "it must read; if both have the same tokenizer, enlarge the critic's embeddings "
            f"(model.resize_token_embeddings({needed})) and save it; else start it from another model, or from the "
            "policy (init_value_with_reward: false, no value_model)"
        )
    start.requires_grad_(True)
    return start


def start_on_policy(built: ActorCritic, value_model: ValueModel, args: PPOConfig) -> None:
    """Starts the critic of `built`, which has no backbone of its own, from `value_model`: its head, and its adapter.

    Raises:
        ValueError: when `value_model` is not a critic of the same layout, has another head, or adapts or reads another
            policy than that of `built`.
    """
    assert built.critic is not None and built.critic.backbone is None
    adapters, head = built.policy.adapters, built.critic.head
    expected = "an adapter with a value head" if adapters is not None else "a whole model"
    if (adapters is not None) != (isinstance(value_model, str) and _is_adapter(value_model)):
        raise ValueError(
            f"value_model {_name(value_model)!r} is not the folder of {expected}, which a critic with critic_layout "
            f"{args.critic_layout!r} on this policy starts from; use the final/value of a run with the same "
            "critic_layout and adapters, or leave value_model out"
        )
    if adapters is None:
        _start_head_on_model(built, head, value_model, args)
        return
    folder = str(value_model)
    _check_adapter_head(folder, head)
    if built.critic.has_adapter:
        score = adapters.load_value(VALUE, folder)
    else:
        _check_same_adapter(folder, adapters)
        score = _score(load_file(weights_file("value_model", folder)))
    if score is None:
        head.load_state_dict(load_head(folder).state_dict())
    else:
        head.load_score_weight(score)


def _is_adapter(value_model: ValueModel) -> bool:
    return isinstance(value_model, PeftModel) or (isinstance(value_model, str) and is_adapter(value_model))


def _name(value_model: ValueModel) -> str:
    return value_model if isinstance(value_model, str) else type(value_model).__name__


def _score(tensors: Mapping[str, Tensor]) -> Tensor | None:
    """The weight (1, H) of a classifier's head among the tensors of an adapter file."""
    return next((tensor for name, tensor in tensors.items() if is_head(name)), None)


def _check_adapter_head(folder: str, head: CriticHead) -> None:
    """Checks that the critic in `folder`, an adapter, has a head that `head` can start from."""
    if is_critic_folder(folder):
        check_same_head(load_head(folder), head)
        return
    heads = {name: shape for name, shape in weight_shapes("value_model", folder).items() if is_head(name)}
    if list(heads.values()) != [(1, head.hidden_size)]:
        raise ValueError(
            f"value_model {folder} has no value head with one label for {head.hidden_size} hidden units (its heads: "
            f"{heads or 'none'}); use the final/value of a run, or leave value_model out"
        )
    _check_takes_score(folder, head)


def _check_takes_score(name: str, head: CriticHead) -> None:
    if head.score_weight() is None:
        raise ValueError(
            f"value_model {name!r} has a scalar value head, but the critic is {head.kind!r}, which cannot start from "
            "it; set critic: scalar, or leave value_model out"
        )


def _start_head_on_model(built: ActorCritic, head: CriticHead, value_model: ValueModel, args: PPOConfig) -> None:
    """Starts the head of a `shared` critic on a policy without adapters, whose weights `value_model` must have too."""
    start = load_value_model(value_model, built.policy.model, args)
    if not isinstance(start, Critic) and is_causal_lm(start):
        raise ValueError(
            f"value_model {_name(value_model)!r} is a language model, which has no value head for a critic on the "
            "policy's states (critic_layout: shared); use the final/value of such a run, set critic_layout: separate, "
            "or leave value_model out"
        )
    if not isinstance(start, Critic):
        _check_takes_score(_name(value_model), head)
    backbone: Any = start.backbone if isinstance(start, Critic) else start.base_model
    _check_same_states(_name(value_model), backbone.state_dict(), built.policy.model.base_model.state_dict())
    if isinstance(start, Critic):
        check_same_head(start.head, head)
        head.load_state_dict(start.head.state_dict())
    else:
        head.load_score_weight(start.get_parameter("score.weight").detach())


def _check_same_adapter(folder: str, adapters: AdapterSet) -> None:
    """Checks that the adapter in `folder` is the policy's, so that the policy's states are those of its critic."""
    config = read_value_adapter(folder)
    warn_of_other_base(folder, config, adapters.model)
    tensors = load_file(weights_file("value_model", folder))
    saved = {name: tensor for name, tensor in tensors.items() if not is_head(name)}
    settings = {} if describe(config) == adapters.describe(POLICY) else {"the adapter's configuration": None}
    _check_same_states(folder, saved, {**adapter_tensors(adapters, POLICY), **settings})


def _check_same_states(name: str, saved: Mapping[str, Tensor], here: Mapping[str, Tensor | None]) -> None:
    different = [key for key in [*here, *saved] if not _equal(saved.get(key), here.get(key))]
    if different:
        raise ValueError(
            f"value_model {name!r} reads the states of another policy than this one ({different[0]} differs), on which "
            "its values are meaningless (critic_layout: shared); start the policy from the weights it was trained "
            "with, such as the final/policy beside it, or leave value_model out"
        )


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two tensors are equal in the narrower of their dtypes, in which the models may have been saved."""
    if one is None or other is None:
        return False
    dtype = min(one.dtype, other.dtype, key=lambda kind: kind.itemsize)
    return torch.equal(one.cpu().to(dtype), other.cpu().to(dtype))
