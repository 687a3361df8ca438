"""From a path, a hub id or a model in memory to an `ActorCritic`. Every load names its dtype and takes safetensors
only.
"""

import copy
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from alpaca_ppo.models.actor_critic import ActorCritic
from alpaca_ppo.models.critic_heads import Critic, CriticHead, make_head
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
    try:
        model, info = auto_class.from_pretrained(
            name,
            dtype=torch.float32,
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
    except OSError as error:
        raise ValueError(
            f"no model can be loaded from {name!r} ({error}); check model_name_or_path, ref_model_name_or_path and "
            "value_model_name_or_path: each an existing folder with safetensors weights, or a hub id within reach"
        ) from error
    if info["missing_keys"]:
        raise ValueError(
            f"{name} has no weights for {', '.join(sorted(info['missing_keys'])[:3])} of {type(model).__name__}: it "
            "was saved as another kind of model, and these would start at random"
        )
    loaded: PreTrainedModel = model
    return loaded


def build_actor_critic(
    policy: PreTrainedModel,
    *,
    critic_layout: str | None,
    value_model: PreTrainedModel | Critic | None = None,
    head: Mapping[str, Any] | None = None,
) -> ActorCritic:
    """Policy and critic for `critic_layout`.

    Args:
        policy: the causal language model that will be trained; not copied.
        critic_layout: `separate` (a backbone of its own: `value_model`'s, else a copy of the policy's), `shared` (a
            head on the policy's hidden states), or None for no critic.
        value_model: a sequence classifier with one label, a `Critic`, or None. Its weights become the critic's, not
            copied: all of a Critic's; a classifier's backbone, and its `score` where the head is scalar.
        head: `kind` and further arguments of `make_head`; a scalar head by default. New heads start at the value 0.

    Raises:
        ValueError: when a value model is given where its backbone has no place, or a critic with another head.
    """
    wrapped = Policy(policy)
    if critic_layout != "separate" and value_model is not None:
        raise ValueError(
            f"a value model is given, but {_no_place(critic_layout)}; leave it out, or use critic_layout: separate "
            "with adv_estimator: gae"
        )
    if critic_layout is None:
        return ActorCritic(wrapped, None)
    settings = dict(head or {"kind": "scalar"})
    hidden_size = wrapped.head.weight.size(1)
    if isinstance(value_model, Critic):
        return ActorCritic(wrapped, _matching(value_model, make_head(**settings, hidden_size=1)))
    if critic_layout == "shared":
        return ActorCritic(wrapped, Critic(make_head(**settings, hidden_size=hidden_size, dtype=policy.dtype), None))
    backbone: Any = copy.deepcopy(wrapped.model.base_model)
    if value_model is not None:
        weight = value_model.get_parameter("score.weight")
        backbone, hidden_size = value_model.base_model, weight.size(1)
        if settings["kind"] == "scalar":
            settings["weight"] = weight
    return ActorCritic(wrapped, Critic(make_head(**settings, hidden_size=hidden_size, dtype=policy.dtype), backbone))


def _no_place(critic_layout: str | None) -> str:
    if critic_layout is None:
        return "the adv_estimator needs no critic"
    return f"critic_layout is {critic_layout!r}, whose critic has no backbone of its own"


def _matching(critic: Critic, wanted: CriticHead) -> Critic:
    if critic.head.settings() != wanted.settings():
        raise ValueError(
            f"the value model's head is {critic.head.settings()}, but the critic asked for is {wanted.settings()}; "
            "set critic and its fields to those of the value model"
        )
    critic.head.risk_level = wanted.risk_level
    return critic


def frozen_copy(policy: PreTrainedModel) -> Policy:
    """A reference policy: a copy that no optimizer and no later update of `policy` touches."""
    reference = Policy(copy.deepcopy(policy).eval())
    return reference.requires_grad_(False)
