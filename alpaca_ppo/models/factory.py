"""The models that the trainer's constructor assembles: policy, critic and reference, from what the user gave."""

import copy
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

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
    Policy,
    build_actor_critic,
    disable_dropout,
    frozen_copy,
    frozen_initial_policy,
    is_critic_folder,
    load_causal_lm,
    load_critic,
    load_sequence_classifier,
    make_head,
)


def first_reward_model(reward_funcs: Any) -> str | PreTrainedModel | None:
    """The first reward source that is a model (a path, an id, or a model in memory), or None."""
    sources = reward_funcs if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
    for source in sources:
        if isinstance(source, PreTrainedModel) or (isinstance(source, str) and ":" not in source):
            return source
    return None


def head_settings(args: PPOConfig) -> dict[str, Any]:
    """`kind` and further arguments of `models.make_head`."""
    settings: dict[str, dict[str, Any]] = {
        "scalar": {},
        "c51": {"num_atoms": args.num_atoms, "v_min": float(args.c51_v_min), "v_max": float(args.c51_v_max)},
        "quantile": {"num_quantiles": args.num_quantiles},
        "iqn": {"num_quantiles": args.num_quantiles, "embedding_dim": args.iqn_embedding_dim},
    }
    risk = {} if args.critic == "scalar" else {"risk_level": args.risk_alpha}
    return {"kind": args.critic, **settings[args.critic], **risk}


def make_actor_critic(
    model: str | PreTrainedModel | PeftModel | ActorCritic,
    value_model: str | PreTrainedModel | None,
    reward_funcs: Any,
    peft_config: Any,
    args: PPOConfig,
) -> ActorCritic:
    """Policy and critic as `args` says; `model` itself when it is an `ActorCritic`.

    Raises:
        ValueError: when the critic's starting point is given twice, has no place, or has another vocabulary; when an
            `ActorCritic` is not what `args` describes; for adapters that this package cannot handle, and settings of
            adapters or of loading without any.
    """
    _check_adapters(model, peft_config, args)
    if isinstance(model, ActorCritic):
        if peft_config is not None:
            raise ValueError("model is an ActorCritic, which brings its adapters; leave peft_config out")
        return _checked(model, value_model, args)
    if value_model is not None and not args.uses_critic:
        raise ValueError(
            f"value_model is given, but adv_estimator {args.adv_estimator!r} has no critic; leave it out, or use gae"
        )
    if args.init_value_with_reward:
        if value_model is not None:
            raise ValueError("value_model is given and init_value_with_reward is True; choose one start for the critic")
        value_model = first_reward_model(reward_funcs)
        if value_model is None:
            raise ValueError(
                "init_value_with_reward is True but no reward source is a model; set it to False or add a reward model"
            )
    policy = _load_policy(model, peft_config, args)
    language_model = policy.model if isinstance(policy, AdapterSet) else policy
    critic = None if value_model is None else _critic_start(value_model, language_model, args)
    with torch.random.fork_rng():
        # A critic's head and adapter may start at random: alike on every rank and in every run of this seed.
        torch.manual_seed(args.seed)
        built = build_actor_critic(
            policy,
            critic_layout=args.critic_layout if args.uses_critic else None,
            value_model=critic,
            head=head_settings(args),
        )
    disable_dropout(built)
    _checkpoint_activations(args, built)
    return built


def _check_adapters(model: Any, peft_config: Any, args: PPOConfig) -> None:
    """Checks, before anything is loaded, what `args` ask of adapters or of a model that is to be loaded."""
    if args.load_in_4bit and not isinstance(model, str):
        raise ValueError(
            f"load_in_4bit is True, but model is a {type(model).__name__} in memory, which stays as it is; give its "
            "folder or hub id, or leave load_in_4bit out"
        )
    has_adapters, base = peft_config is not None, model
    if isinstance(model, ActorCritic):
        has_adapters, base = model.policy.adapters is not None, model.policy.model
    elif isinstance(model, PeftModel):
        has_adapters, base = True, model.get_base_model()
    elif isinstance(model, str) and is_adapter(model):
        has_adapters, base = True, read_policy_adapter(model).base_model_name_or_path
    check_merge(args, has_adapters=has_adapters)
    if args.reward_adapter is None:
        return
    if not has_adapters:
        raise ValueError(
            f"reward_adapter is {args.reward_adapter!r}, but the policy has no adapters; give peft_config "
            "(--use_peft), or a whole reward model in reward_funcs"
        )
    skeleton = _skeleton(base, args) if isinstance(base, str) else base
    if skeleton is not None:
        check_adapter_shapes("reward_adapter", args.reward_adapter, skeleton)


def check_merge(args: PPOConfig, *, has_adapters: bool) -> None:
    """Checks that there is something to merge where `args` ask for it.

    Raises:
        ValueError: when the policy has no adapters.
    """
    if args.merge_on_save and not has_adapters:
        raise ValueError(
            "merge_on_save is True, but the policy has no adapter to merge; give peft_config (--use_peft), or leave it "
            "out: final/policy is a whole model"
        )


def _skeleton(name: str, args: PPOConfig) -> Any:
    """The model `name` without memory for its weights; None where there is no such model, as loading it will say."""
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=args.trust_remote_code)
    except (OSError, ValueError):
        return None
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=args.trust_remote_code)


def _load_policy(model: Any, peft_config: Any, args: PPOConfig) -> PreTrainedModel | AdapterSet:
    how: dict[str, Any] = {"trust_remote_code": args.trust_remote_code, "load_in_4bit": args.load_in_4bit}
    how["dtype"] = getattr(torch, args.dtype)
    if isinstance(model, str) and is_adapter(model):
        if peft_config is not None:
            raise ValueError(
                f"model {model!r} is an adapter and peft_config asks for another: merge the first into its base and "
                "save that (AutoPeftModelForCausalLM.from_pretrained(...).merge_and_unload().save_pretrained(...)), or "
                "leave peft_config (--use_peft) out to train it on"
            )
        return load_adapters(load_causal_lm(str(read_policy_adapter(model).base_model_name_or_path), **how), model)
    if isinstance(model, PeftModel):
        if peft_config is not None:
            raise ValueError(
                "model has an adapter and peft_config asks for another: merge the first "
                "(model = model.merge_and_unload()), or leave peft_config out to train it on"
            )
        return from_peft_model(model)
    language_model = load_causal_lm(model, **how)
    if peft_config is not None:
        return _attached(language_model, peft_config, args)
    if language_model.dtype in (torch.float16, torch.bfloat16) or args.load_in_4bit:
        raise ValueError(
            f"the policy's weights are {'4-bit' if args.load_in_4bit else language_model.dtype} and all of them would "
            "train: small updates would be rounded away. Use LoRA (peft_config, --use_peft), or dtype: float32 with "
            "bf16: true"
        )
    return language_model


def _attached(model: PreTrainedModel, peft_config: Any, args: PPOConfig) -> AdapterSet:
    with torch.random.fork_rng():
        torch.manual_seed(args.seed)
        return add_policy_adapter(model, peft_config)


def _checked(model: ActorCritic, value_model: Any, args: PPOConfig) -> ActorCritic:
    if value_model is not None or args.init_value_with_reward:
        raise ValueError(
            "model is an ActorCritic, which brings its critic; leave value_model out and init_value_with_reward off"
        )
    critic, layout = model.critic, args.critic_layout
    if (critic is not None) != args.uses_critic:
        has = "has no critic" if critic is None else "has a critic"
        raise ValueError(
            f"model is an ActorCritic that {has}, but adv_estimator is {args.adv_estimator!r}; "
            "build it with build_actor_critic(critic_layout='separate' or 'shared' for gae, None for the others)"
        )
    other = "" if critic is None else "separate" if critic.backbone else "adapter" if critic.has_adapter else "shared"
    if critic is not None and other != layout:
        raise ValueError(
            f"model is an ActorCritic of the layout {other!r}, but critic_layout is {layout!r}; make them agree"
        )
    if critic is not None:
        wanted = make_head(**head_settings(args), hidden_size=1)
        if critic.head.settings() != wanted.settings():
            raise ValueError(
                f"model is an ActorCritic with the head {critic.head.settings()}, but args say {wanted.settings()}; "
                "make critic and its fields agree"
            )
        critic.head.risk_level = wanted.risk_level
    disable_dropout(model)
    _checkpoint_activations(args, model)
    return model


def _critic_start(value_model: str | PreTrainedModel | PeftModel, policy: PreTrainedModel, args: PPOConfig) -> Any:
    """The `Critic` or sequence classifier that the critic starts from, its weights its own."""
    start: Any
    if isinstance(value_model, PeftModel) or (isinstance(value_model, str) and is_adapter(value_model)):
        name = value_model if isinstance(value_model, str) else type(value_model).__name__
        raise ValueError(
            f"value_model {name!r} is an adapter, which a critic cannot start from; merge it into its base and "
            "save that, or start anew"
        )
    if isinstance(value_model, str) and is_critic_folder(value_model):
        start = load_critic(value_model, trust_remote_code=args.trust_remote_code)
        config: Any = start.backbone.config
    else:
        # The critic trains; a reward model that is the same object must not.
        own = value_model if isinstance(value_model, str) else copy.deepcopy(value_model)
        start = load_sequence_classifier(own, trust_remote_code=args.trust_remote_code)
        config = start.config
    if config.vocab_size != policy.config.vocab_size:
        raise ValueError(
            f"the critic's vocabulary ({config.vocab_size}) is not the policy's ({policy.config.vocab_size}): a critic "
            "reads the policy's tokens; start it from the policy (init_value_with_reward: false, no value_model)"
        )
    start.requires_grad_(True)
    return start


def _checkpoint_activations(args: PPOConfig, built: ActorCritic) -> None:
    backbones: list[Any] = [built.policy.model, built.critic and built.critic.backbone]
    for backbone in backbones:
        if args.gradient_checkpointing and backbone is not None:
            # Newer transformers say activation_checkpointing_enable; 5.17, which must work too, has only this.
            backbone.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def make_reference(
    actor_critic: ActorCritic, ref_model: str | PreTrainedModel | PeftModel | None, args: PPOConfig
) -> Any:
    """The `models.Reference` that `args.reference` names, or None; a `ref_model` takes the place of `auto`.

    Raises:
        ValueError: when `ref_model` and `args.reference` are both given, the reference has another vocabulary, or
            `adapter_off` meets a policy without adapters.
    """
    policy, choice = actor_critic.policy, args.reference
    if ref_model is not None and choice != "auto":
        raise ValueError(f"ref_model is given and reference is {choice!r}; leave one of them out")
    if choice == "none":
        return None
    source: Any = ref_model if choice == "auto" else choice if choice not in REFERENCES else None
    if isinstance(source, PeftModel):
        # The language model, with the adapter in its layers.
        source = source.get_base_model()
    if source is not None:
        how: dict[str, Any] = {"trust_remote_code": args.trust_remote_code, "dtype": policy.model.dtype}
        other = load_causal_lm(source, **how)
        if other.config.vocab_size != policy.model.config.vocab_size:
            raise ValueError(
                f"the reference's vocabulary ({other.config.vocab_size}) is not the policy's "
                f"({policy.model.config.vocab_size}); the KL penalty compares token by token, so both must share a "
                "tokenizer"
            )
        return CopiedReference(Policy(other.eval()) if isinstance(source, str) else frozen_copy(other))
    if choice == "adapter_off" and policy.adapters is None:
        raise ValueError("reference is 'adapter_off' but the policy has no adapter; give peft_config, or use copy")
    if policy.adapters is not None and choice in ("auto", "adapter_off"):
        return AdapterReference(policy, policy.adapters.starting_point)
    return CopiedReference(frozen_initial_policy(policy), offloaded=choice == "copy_offloaded")
