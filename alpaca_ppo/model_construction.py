"""The models that the trainer's constructor assembles: policy, critic and reference, from what the user gave."""

import copy
from typing import Any

import torch
from transformers import PreTrainedModel

from alpaca_ppo.config import PPOConfig
from alpaca_ppo.models import (
    ActorCritic,
    Critic,
    Policy,
    build_actor_critic,
    disable_dropout,
    frozen_copy,
    is_critic_folder,
    load_causal_lm,
    load_critic,
    load_sequence_classifier,
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
    model: str | PreTrainedModel | ActorCritic,
    value_model: str | PreTrainedModel | None,
    reward_funcs: Any,
    args: PPOConfig,
) -> ActorCritic:
    """Policy and critic as `args` says; `model` itself when it is an `ActorCritic`.

    Raises:
        ValueError: when the critic's starting point is given twice, has no place, or has another vocabulary, and when
            an `ActorCritic` is not what `args` describes.
    """
    if isinstance(model, ActorCritic):
        return _checked(model, value_model, args)
    if args.init_value_with_reward:
        if value_model is not None:
            raise ValueError("value_model is given and init_value_with_reward is True; choose one start for the critic")
        value_model = first_reward_model(reward_funcs)
        if value_model is None:
            raise ValueError(
                "init_value_with_reward is True but no reward source is a model; set it to False or add a reward model"
            )
    policy = load_causal_lm(model, trust_remote_code=args.trust_remote_code)
    critic = None if value_model is None else _critic_start(value_model, policy, args)
    _checkpoint_activations(args, policy, critic.backbone if isinstance(critic, Critic) else critic)
    with torch.random.fork_rng():
        # A critic's head may start at random: alike on every rank and in every run of this seed.
        torch.manual_seed(args.seed)
        return build_actor_critic(
            policy,
            critic_layout=args.critic_layout if args.uses_critic else None,
            value_model=critic,
            head=head_settings(args),
        )


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
    if critic is not None and (critic.backbone is None) != (layout == "shared"):
        other = "shared" if critic.backbone is None else "separate"
        raise ValueError(
            f"model is an ActorCritic of the layout {other!r}, but critic_layout is {layout!r}; make them agree"
        )
    if critic is not None and critic.head.kind != args.critic:
        raise ValueError(
            f"model is an ActorCritic with a {critic.head.kind!r} head, but critic is {args.critic!r}; make them agree"
        )
    disable_dropout(model)
    _checkpoint_activations(args, model.policy.model, None if critic is None else critic.backbone)
    return model


def _critic_start(value_model: str | PreTrainedModel, policy: PreTrainedModel, args: PPOConfig) -> Any:
    """The `Critic` or sequence classifier that the critic starts from, its weights its own."""
    start: Any
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


def _checkpoint_activations(args: PPOConfig, *backbones: Any) -> None:
    for backbone in backbones:
        if args.gradient_checkpointing and backbone is not None:
            # Newer transformers say activation_checkpointing_enable; 5.17, which must work too, has only this.
            backbone.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def make_reference(
    actor_critic: ActorCritic, ref_model: str | PreTrainedModel | None, *, trust_remote_code: bool = False
) -> Policy:
    """The frozen reference policy: `ref_model`, or a copy of the policy as it is now.

    Raises:
        ValueError: when `ref_model` has another vocabulary.
    """
    policy = actor_critic.policy.model
    source = policy if ref_model is None else load_causal_lm(ref_model, trust_remote_code=trust_remote_code)
    if source.config.vocab_size != policy.config.vocab_size:
        raise ValueError(
            f"ref_model's vocabulary ({source.config.vocab_size}) is not the policy's ({policy.config.vocab_size}); "
            "the KL penalty compares token by token, so both must share a tokenizer"
        )
    return frozen_copy(source)
