"""The trainer's models, built from the arguments of its constructor and the configuration: policy, critic, reference.

What each argument may be, and which of them exclude each other, is checked here; `loading` does the loading.
"""

from functools import partial
from typing import Any

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from alpaca_ppo.adapters import (
    AdapterSet,
    add_policy_adapter,
    check_adapter_shapes,
    from_peft_model,
    is_adapter,
    load_adapters,
    read_policy_adapter,
)
from alpaca_ppo.config.checks import REFERENCES
from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.models import (
    ActorCritic,
    AdapterReference,
    CopiedReference,
    Critic,
    CriticHead,
    Policy,
    build_actor_critic,
    disable_dropout,
    frozen_copy,
    frozen_initial_policy,
    load_causal_lm,
)
from alpaca_ppo.models.critic_starts import load_value_model, start_on_policy
from alpaca_ppo.models.packing_probe import padding_reason
from alpaca_ppo.models.skeletons import skeleton
from alpaca_ppo.registry import ADV_ESTIMATORS, CRITIC_HEADS


def first_reward_model(reward_funcs: Any) -> str | PreTrainedModel | None:
    """The first reward source that is a model (a path, an id, or a model in memory), or None."""
    sources = reward_funcs if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
    for source in sources:
        if isinstance(source, PreTrainedModel) or (isinstance(source, str) and ":" not in source):
            return source
    return None


def make_actor_critic(
    model: str | PreTrainedModel | PeftModel | ActorCritic,
    value_model: str | PreTrainedModel | None,
    reward_funcs: Any,
    peft_config: Any,
    args: PPOConfig,
) -> ActorCritic:
    """The policy and critic that `args` describe; `model` itself if it is an `ActorCritic`.

    Raises:
        ValueError: when the critic's starting point is given twice, is given without a critic that can use it, or has
            a smaller vocabulary than the policy; when an `ActorCritic` differs from what `args` describe; for adapters
            that this package cannot handle; for options of adapters without adapters, or of loading for a model in
            memory; and for a model that needs padding with `padding_free: true`.
    """
    _check_adapters(model, peft_config, args)
    if isinstance(model, ActorCritic):
        if peft_config is not None:
            raise ValueError("model is an ActorCritic, whose adapters are part of it; leave peft_config out")
        _check_actor_critic(model, value_model, args)
        return _prepared(model, args)
    if value_model is not None and not args.uses_critic:
        raise ValueError(
            f"value_model is given, but adv_estimator {args.adv_estimator!r} uses no critic; leave it out, or set "
            f"adv_estimator to one of {', '.join(ADV_ESTIMATORS.names_with(needs_critic=True))}"
        )
    if args.init_value_with_reward:
        if value_model is not None:
            raise ValueError(
                "value_model is given and init_value_with_reward is True; choose one starting point for the critic"
            )
        value_model = first_reward_model(reward_funcs)
        if value_model is None:
            raise ValueError(
                "init_value_with_reward is True but no reward source is a model; set it to False or add a reward model"
            )
    policy = _load_policy(model, peft_config, args)
    language_model = policy.model if isinstance(policy, AdapterSet) else policy
    critic = None
    if value_model is not None and args.critic_layout == "separate":
        critic = load_value_model(value_model, language_model, args)
    with torch.random.fork_rng():
        # The critic's head and adapter may start from random weights, which must be the same on every rank.
        torch.manual_seed(args.seed)
        built = build_actor_critic(
            policy,
            critic_layout=args.critic_layout if args.uses_critic else None,
            value_model=critic,
            head=partial(_new_head, args),
        )
        if value_model is not None and critic is None:
            start_on_policy(built, value_model, args)
    return _prepared(built, args)


def _new_head(args: PPOConfig, hidden_size: int) -> CriticHead:
    head_class: type[CriticHead] = CRITIC_HEADS.get(args.critic)
    return head_class.from_config(args, hidden_size)


def _prepared(built: ActorCritic, args: PPOConfig) -> ActorCritic:
    """`built` with dropout off, its head configured, without padding where it can be, and, if `args` ask for it, with
    activation checkpointing.
    """
    disable_dropout(built)
    _decide_padding(built.policy, built.policy.model, args)
    backbones: list[Any] = [built.policy.model]
    if built.critic is not None:
        built.critic.head.configure(args)
        backbones.append(built.critic.backbone)
        if isinstance(built.critic.backbone, PreTrainedModel):
            _decide_padding(built.critic, built.critic.backbone, args)
    for backbone in backbones:
        if args.gradient_checkpointing and backbone is not None:
            # Newer transformers also have activation_checkpointing_enable; 5.17, which must work too, has only this.
            backbone.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return built


def _decide_padding(model: Policy | Critic, backbone: PreTrainedModel, args: PPOConfig) -> None:
    if isinstance(model, Policy) and type(model).states is not Policy.states:
        # A subclass that reads the rows itself knows whether it can do without padding.
        return
    model.padding_reason = padding_reason(backbone, args.padding_free)
    model.padding_free = model.padding_reason is None


def _check_adapters(model: Any, peft_config: Any, args: PPOConfig) -> None:
    """Checks the options of `args` that need adapters or a model to load, before anything is loaded."""
    if args.load_in_4bit and not isinstance(model, str):
        raise ValueError(
            f"load_in_4bit is True, but model is a {type(model).__name__} in memory, which is not quantised; give its "
            "folder or hub id, or leave load_in_4bit out"
        )
    if args.loading_arguments and not isinstance(model, str):
        raise ValueError(
            f"attn_implementation ({args.attn_implementation!r}) and model_init_kwargs ({args.model_init_kwargs}) are "
            f"for models that the run loads, but model is a {type(model).__name__} in memory; give its folder or hub "
            "id, or pass them to from_pretrained yourself and leave them out"
        )
    has_adapters, base = peft_config is not None, model
    if isinstance(model, ActorCritic):
        has_adapters, base = model.policy.adapters is not None, model.policy.model
    elif isinstance(model, PeftModel):
        has_adapters, base = True, model.get_base_model()
    elif isinstance(model, str) and is_adapter(model):
        has_adapters, base = True, read_policy_adapter(model).base_model_name_or_path
    if args.reward_adapter is None:
        return
    if not has_adapters:
        raise ValueError(
            f"reward_adapter is {args.reward_adapter!r}, but the policy has no adapters; give peft_config "
            "(--use_peft), or a full reward model in reward_funcs"
        )
    shapes = skeleton(base, args) if isinstance(base, str) else base
    if shapes is not None:
        check_adapter_shapes("reward_adapter", args.reward_adapter, shapes)


def _load_policy(model: Any, peft_config: Any, args: PPOConfig) -> PreTrainedModel | AdapterSet:
    if isinstance(model, str) and is_adapter(model):
        if peft_config is not None:
            raise ValueError(
                f"model {model!r} is an adapter and peft_config asks for another: merge the first into its base and "
                "save that (AutoPeftModelForCausalLM.from_pretrained(...).merge_and_unload().save_pretrained(...)), or "
                "leave peft_config (--use_peft) out to continue training this adapter"
            )
        return load_adapters(_load(str(read_policy_adapter(model).base_model_name_or_path), args), model)
    if isinstance(model, PeftModel):
        if peft_config is not None:
            raise ValueError(
                "model has an adapter and peft_config asks for another: merge the first "
                "(model = model.merge_and_unload()), or leave peft_config out to continue training this adapter"
            )
        return from_peft_model(model)
    language_model = _load(model, args)
    if peft_config is not None:
        with torch.random.fork_rng():
            torch.manual_seed(args.seed)
            return add_policy_adapter(language_model, peft_config)
    if language_model.dtype in (torch.float16, torch.bfloat16) or args.load_in_4bit:
        raise ValueError(
            f"the policy's weights are {'4-bit' if args.load_in_4bit else language_model.dtype} and all of them would "
            "be trained; in this precision small updates are lost to rounding. Use LoRA (peft_config, --use_peft), or "
            "dtype: float32 with bf16: true"
        )
    return language_model


def _load(model: str | PreTrainedModel, args: PPOConfig) -> PreTrainedModel:
    return load_causal_lm(
        model,
        trust_remote_code=args.trust_remote_code,
        dtype=getattr(torch, args.dtype),
        load_in_4bit=args.load_in_4bit,
        arguments=args.loading_arguments,
    )


def _check_actor_critic(model: ActorCritic, value_model: Any, args: PPOConfig) -> None:
    """Checks that an `ActorCritic` that the user built is what `args` describe."""
    if value_model is not None or args.init_value_with_reward:
        raise ValueError(
            "model is an ActorCritic, whose critic is part of it; leave value_model out and init_value_with_reward off"
        )
    critic = model.critic
    if (critic is not None) != args.uses_critic:
        raise ValueError(
            f"model is an ActorCritic {'without' if critic is None else 'with'} a critic, but adv_estimator is "
            f"{args.adv_estimator!r}; build it with build_actor_critic(critic_layout=...), a layout for an estimator "
            f"that uses a critic ({', '.join(ADV_ESTIMATORS.names_with(needs_critic=True))}), None for the others"
        )
    if critic is None:
        return
    if critic.layout != args.critic_layout:
        raise ValueError(
            f"model is an ActorCritic of the layout {critic.layout!r}, but critic_layout is {args.critic_layout!r}; "
            f"set critic_layout: {critic.layout}, or build it with the other layout"
        )
    with torch.random.fork_rng():
        wanted = _new_head(args, critic.head.hidden_size)
    if critic.head.spec() != wanted.spec():
        raise ValueError(
            f"model is an ActorCritic with the head {critic.head.spec()}, but the configuration asks for "
            f"{wanted.spec()}; set critic and its options to those of the model"
        )


def make_reference(
    actor_critic: ActorCritic, ref_model: str | PreTrainedModel | PeftModel | None, args: PPOConfig
) -> Any:
    """The `models.Reference` that `args.reference` names, or None; with `auto`, `ref_model` if it is given.

    Raises:
        ValueError: when `ref_model` and `args.reference` are both given, when the reference has another vocabulary or
            needs padding with `padding_free: true`, and for `adapter_off` with a policy without adapters.
    """
    policy, choice = actor_critic.policy, args.reference
    if ref_model is not None and choice != "auto":
        raise ValueError(f"ref_model is given and reference is {choice!r}; leave one of them out")
    if choice == "none":
        return None
    source: Any = ref_model if choice == "auto" else choice if choice not in REFERENCES else None
    if isinstance(source, PeftModel):
        # The language model; the adapter stays in its layers.
        source = source.get_base_model()
    if source is not None:
        other = load_causal_lm(
            source,
            trust_remote_code=args.trust_remote_code,
            dtype=policy.model.dtype,
            arguments=args.loading_arguments,
        )
        if other.config.vocab_size != policy.model.config.vocab_size:
            raise ValueError(
                f"the reference's vocabulary ({other.config.vocab_size}) differs from the policy's "
                f"({policy.model.config.vocab_size}); the KL penalty compares the two token by token, so choose a "
                "reference with the policy's tokenizer"
            )
        return _copied(Policy(other.eval()) if isinstance(source, str) else frozen_copy(other), args)
    if choice == "adapter_off" and policy.adapters is None:
        raise ValueError("reference is 'adapter_off' but the policy has no adapter; give peft_config, or use copy")
    if policy.adapters is not None and choice in ("auto", "adapter_off"):
        return AdapterReference(policy, policy.adapters.starting_point)
    return _copied(frozen_initial_policy(policy), args, offloaded=choice == "copy_offloaded")


def _copied(policy: Policy, args: PPOConfig, *, offloaded: bool = False) -> CopiedReference:
    _decide_padding(policy, policy.model, args)
    return CopiedReference(policy, offloaded=offloaded)
