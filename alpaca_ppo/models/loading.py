"""From a path, a hub id or a model in memory to an `ActorCritic`. Every load names its dtype and takes safetensors
only.
"""

import copy
import warnings
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from alpaca_ppo.models.actor_critic import ActorCritic
from alpaca_ppo.models.critic_heads import Critic, ScalarHead
from alpaca_ppo.models.policy import Policy, disable_dropout


def load_causal_lm(model: str | PreTrainedModel, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """The causal language model `model` (loaded in float32 when a name), dropout off.

    A half-precision model in memory is taken as it is, with a warning: AdamW's small steps vanish in bfloat16 weights.

    Raises:
        ValueError: when the folder lacks some of the model's weights, such as the language-model head.
    """
    if isinstance(model, str):
        model = _load_complete(AutoModelForCausalLM, model, trust_remote_code=trust_remote_code)
    elif model.dtype in (torch.float16, torch.bfloat16):
        warnings.warn(
            f"the model's weights are {model.dtype}: small updates will be rounded away. Load it with "
            f"dtype=torch.float32 and set bf16: true",
            stacklevel=2,
        )
    disable_dropout(model)
    return model


def load_sequence_classifier(model: str | PreTrainedModel, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """The sequence classifier `model` (loaded in float32 when a name), dropout off.

    Raises:
        ValueError: when it has not exactly one label, no linear head named `score`, or a folder without its weights.
    """
    classifier: PreTrainedModel = model  # type: ignore[assignment]
    if isinstance(model, str):
        classifier = _load_complete(AutoModelForSequenceClassification, model, trust_remote_code=trust_remote_code)
    if classifier.config.num_labels != 1:
        raise ValueError(
            f"{classifier.config.name_or_path or type(classifier).__name__} has num_labels "
            f"{classifier.config.num_labels}; "
            "a critic needs a sequence classifier with num_labels=1"
        )
    if not isinstance(dict(classifier.named_children()).get("score"), torch.nn.Linear):
        raise ValueError(
            f"{type(classifier).__name__} keeps its head elsewhere than in a linear layer named `score`; "
            "use a decoder-only AutoModelForSequenceClassification"
        )
    disable_dropout(classifier)
    return classifier


def _load_complete(auto_class: Any, name: str, *, trust_remote_code: bool) -> PreTrainedModel:
    model, info = auto_class.from_pretrained(
        name,
        dtype=torch.float32,
        use_safetensors=True,
        trust_remote_code=trust_remote_code,
        output_loading_info=True,
    )
    if info["missing_keys"]:
        raise ValueError(
            f"{name} has no weights for {', '.join(sorted(info['missing_keys'])[:3])} of {type(model).__name__}: it "
            "was saved as another kind of model, and these would start at random"
        )
    loaded: PreTrainedModel = model
    return loaded


def build_actor_critic(
    policy: PreTrainedModel, *, critic_layout: str, value_model: PreTrainedModel | None = None
) -> ActorCritic:
    """Policy and critic for `critic_layout`.

    Args:
        policy: the causal language model that will be trained; not copied.
        critic_layout: `separate` (a backbone of its own: `value_model`'s, else a copy of the policy's with a zero
            head) or `shared` (a zero head on the policy's hidden states).
        value_model: a sequence classifier with one label, or None. Its weights become the critic's, not copied.

    Raises:
        ValueError: when a value model is given for the shared layout.
    """
    wrapped = Policy(policy)
    hidden_size = wrapped.head.weight.size(1)
    if critic_layout == "shared":
        if value_model is not None:
            raise ValueError(
                "critic_layout is 'shared' but a value model is given; use critic_layout: separate to start from its "
                "weights"
            )
        return ActorCritic(wrapped, Critic(ScalarHead(hidden_size, dtype=policy.dtype), None))
    if value_model is not None:
        weight = value_model.get_parameter("score.weight")
        head = ScalarHead(weight.size(1), weight=weight, dtype=policy.dtype)
        return ActorCritic(wrapped, Critic(head, value_model.base_model))
    backbone = copy.deepcopy(wrapped.model.base_model)
    return ActorCritic(wrapped, Critic(ScalarHead(hidden_size, dtype=policy.dtype), backbone))


def frozen_copy(policy: PreTrainedModel) -> Policy:
    """A reference policy: a copy that no optimizer and no later update of `policy` touches."""
    reference = Policy(copy.deepcopy(policy).eval())
    return reference.requires_grad_(False)
