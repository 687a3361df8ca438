"""From a path, a hub id or a model in memory to an `ActorCritic`. Every load names its dtype and takes safetensors
only.
"""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from peft import PeftModel
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedModel,
)

from alpaca_ppo.adapters.adapter_set import POLICY, VALUE, AdapterSet
from alpaca_ppo.models.actor_critic import ActorCritic, Critic
from alpaca_ppo.models.critic_heads import CriticHead, ScalarHead, build_head
from alpaca_ppo.models.policy import Policy, disable_dropout
from alpaca_ppo.models.reference import without_adapters


def load_causal_lm(
    model: str | PreTrainedModel,
    *,
    trust_remote_code: bool = False,
    dtype: torch.dtype = torch.float32,
    load_in_4bit: bool = False,
) -> PreTrainedModel:
    """The causal language model `model` (loaded when a name), dropout off; one in memory keeps its dtype.

    Args:
        model: a folder, a hub id, or the model.
        trust_remote_code: run code that comes with the model.
        dtype: of the weights of a model that is loaded.
        load_in_4bit: quantise a model that is loaded (NF4, arXiv:2305.14314).

    Raises:
        ValueError: when the folder lacks some of the model's weights, such as the language-model head; for 4 bits
            without a CUDA device or bitsandbytes.
    """
    if isinstance(model, str):
        how: dict[str, Any] = {"dtype": dtype}
        if load_in_4bit:
            how["quantization_config"] = _four_bit()
        model = _load_complete(AutoModelForCausalLM, model, trust_remote_code=trust_remote_code, **how)
    disable_dropout(model)
    return model


def _four_bit() -> BitsAndBytesConfig:
    missing = [] if torch.cuda.is_available() else ["a CUDA device"]
    missing += [] if find_spec("bitsandbytes") else ["the package bitsandbytes"]
    if missing:
        are = "is" if len(missing) == 1 else "are"
        raise ValueError(f"load_in_4bit is True but {' and '.join(missing)} {are} missing; use dtype: bfloat16 instead")
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)


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


def _load_complete(auto_class: Any, name: str, *, trust_remote_code: bool, **how: Any) -> PreTrainedModel:
    settings = {"dtype": torch.float32, "use_safetensors": True, "output_loading_info": True, **how}
    try:
        model, info = auto_class.from_pretrained(name, trust_remote_code=trust_remote_code, **settings)
    except OSError as error:
        raise ValueError(
            f"no model can be loaded from {name!r} ({error}); check model_name_or_path, reference and "
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
    policy: PreTrainedModel | AdapterSet,
    *,
    critic_layout: str | None,
    value_model: PreTrainedModel | Critic | None = None,
    head: Callable[[int], CriticHead] = ScalarHead,
) -> ActorCritic:
    """Policy and critic for `critic_layout`.

    Args:
        policy: the causal language model that will be trained, or a frozen one with adapters; not copied.
        critic_layout: `separate` (a backbone of its own: `value_model`'s, else a copy of the policy's without
            adapters), `adapter` (an adapter of its own on the policy's base), `shared` (a head on the policy's hidden
            states), or None for no critic.
        value_model: a sequence classifier with one label, a `Critic`, or None. Its weights become the critic's, not
            copied: all of a Critic's; a classifier's backbone, and its `score` where the head can start from it.
        head: makes the critic's head for a hidden size: a head's class, or a `functools.partial` of one.

    Raises:
        ValueError: when a value model is given where its backbone has no place, or a critic with another head.
    """
    wrapped = Policy(policy.model, policy) if isinstance(policy, AdapterSet) else Policy(policy)
    dtype = wrapped.model.dtype
    if critic_layout != "separate" and value_model is not None:
        raise ValueError(
            f"a value model is given, but {_no_place(critic_layout)}; leave it out, or use critic_layout: separate "
            "with adv_estimator: gae"
        )
    if critic_layout is None:
        return ActorCritic(wrapped, None)
    hidden_size = wrapped.head.weight.size(1)
    if isinstance(value_model, Critic):
        return ActorCritic(wrapped, _matching(value_model, head(value_model.head.hidden_size)))
    if critic_layout == "adapter":
        if wrapped.adapters is None:
            raise ValueError("critic_layout is 'adapter' but the policy has none; give peft_config, or use separate")
        if start := wrapped.adapters.starting_point:
            wrapped.adapters.copy(start, VALUE, trainable=True)
        else:
            wrapped.adapters.add(VALUE, wrapped.adapters.config_of(POLICY), trainable=True)
    if critic_layout != "separate":
        head_alone = build_head(head, hidden_size, dtype)
        return ActorCritic(wrapped, Critic(head_alone, None, has_adapter=critic_layout == "adapter"))
    if value_model is None:
        backbone: Any = without_adapters(wrapped).base_model
        own_head = build_head(head, hidden_size, dtype)
    else:
        backbone, score = value_model.base_model, value_model.get_parameter("score.weight").detach()
        own_head = build_head(head, score.size(1), dtype)
        own_head.load_score_weight(score)
    # All of this backbone trains, whatever the dtype of a frozen base.
    backbone = backbone.to(torch.promote_types(dtype, torch.float32))
    return ActorCritic(wrapped, Critic(own_head, backbone))


def _no_place(critic_layout: str | None) -> str:
    if critic_layout is None:
        return "the adv_estimator needs no critic"
    return f"critic_layout is {critic_layout!r}, whose critic has no backbone of its own"


def _matching(critic: Critic, wanted: CriticHead) -> Critic:
    if critic.head.spec() != wanted.spec():
        raise ValueError(
            f"the value model's head is {critic.head.spec()}, but the critic asked for is {wanted.spec()}; "
            "set critic and its fields to those of the value model"
        )
    critic.head.risk_level = wanted.risk_level
    return critic


def load_processing_class(
    model: str | PreTrainedModel | PeftModel | ActorCritic,
    *,
    trust_remote_code: bool = False,
    field: str = "model_name_or_path",
) -> Any:
    """The tokenizer that belongs to `model`, which `field` of the run names.

    Raises:
        ValueError: when the model in memory does not say where it came from, or there is no tokenizer.
    """
    if isinstance(model, ActorCritic):
        model = model.policy.model
    name = model if isinstance(model, str) else model.config.name_or_path
    if not name:
        raise ValueError(
            "processing_class is None and the model has no name to load a tokenizer from; pass "
            "processing_class=tokenizer"
        )
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"no tokenizer can be loaded from {name!r} ({error}); check {field}: an existing folder with the "
            "tokenizer's files, or a hub id within reach"
        ) from error
