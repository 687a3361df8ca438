"""What the value of an argument may be: its type, its range, its choices. Clashes between two are `PPOConfig`'s own."""

import dataclasses
import types
import typing
from collections.abc import Callable
from math import isfinite
from typing import Any

LOSS_AGG_MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
KL_ESTIMATORS = ("k1", "abs", "k2", "k3", "k1_clamped", "k1+", "k3+")
GROUP_ESTIMATORS = ("grpo", "grpo_no_std", "rloo", "opo", "reinforce_plus_plus_baseline")
REFERENCES = ("auto", "adapter_off", "copy", "copy_offloaded", "none")
ADV_ESTIMATORS = ("gae", *GROUP_ESTIMATORS, "reinforce_plus_plus", "remax")

_RANGES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (
        "logging_steps query_len response_len total_epochs total_episodes rollout_batch_size "
        "rollout_per_device_batch_size step_batch_size "
        "step_per_device_batch_size ppo_epochs num_return_sequences logprob_chunk_size save_total_limit eval_top_k "
        "kl_horizon num_quantiles iqn_embedding_dim ddp_timeout",
        lambda v: v >= 1,
        "at least 1",
    ),
    (
        "seed save_steps eval_steps num_logged_rollouts truncate_after warmup_steps critic_warmup_steps "
        "max_skipped_updates",
        lambda v: v >= 0,
        "0 or more",
    ),
    (
        "temperature cliprange cliprange_high cliprange_value target_kl k_beta max_grad_norm adam_epsilon "
        "target_kl_stop max_kl_to_ref quantile_huber_kappa",
        lambda v: isfinite(v) and v > 0,
        "a positive number",
    ),
    ("rollout_correction_threshold", lambda v: v > 0, "a positive number, or .inf"),
    ("num_atoms", lambda v: v >= 2, "at least 2"),
    ("c51_v_min c51_v_max", isfinite, "a finite number"),
    (
        "kl_coef vf_coef learning_rate weight_decay entropy_coef kl_loss_coef critic_learning_rate",
        lambda v: isfinite(v) and v >= 0,
        "0 or more",
    ),
    ("risk_level", lambda v: v == "neutral" or _is_probability(v), "neutral, or a number above 0 and at most 1"),
    ("k_beta", lambda v: v < 5, "below 5, or one step could make kl_coef negative"),
    ("gamma lam", lambda v: 0 <= v <= 1, "between 0 and 1"),
    ("cliprange", lambda v: v < 1, "below 1, or the ratio's lower bound would be negative"),
    ("clip_ratio_c", lambda v: isfinite(v) and v > 1, "above 1, or null"),
    ("eval_top_p", lambda v: 0 < v <= 1, "above 0 and at most 1"),
    ("adam_beta1 adam_beta2", lambda v: 0 <= v < 1, "at least 0 and below 1"),
    ("penalty_reward_value", isfinite, "a finite number, or null"),
    ("reward_weights", lambda v: len(v) > 0 and all(isfinite(w) for w in v), "a list of finite numbers, or null"),
)
_CHOICES: dict[str, tuple[str, ...]] = {
    "overlong_prompts": ("drop", "error"),
    "generation_backend": ("decode", "generate"),
    "loss_agg_mode": LOSS_AGG_MODES,
    "kl_estimator": KL_ESTIMATORS,
    "kl_controller": ("fixed", "proportional", "horizon"),
    "kl_loss_type": KL_ESTIMATORS,
    "adv_estimator": ADV_ESTIMATORS,
    "policy_loss": ("clip", "gspo"),
    "old_policy": ("recompute", "rollout", "correct"),
    "rollout_correction_level": ("token", "sequence"),
    "critic": ("scalar", "c51", "quantile", "iqn"),
    "critic_layout": ("separate", "shared", "adapter"),
    "dtype": ("float32", "bfloat16"),
}


def _is_probability(text: str) -> bool:
    try:
        return 0 < float(text) <= 1
    except ValueError:
        return False


MUTUALLY_EXCLUSIVE = (("total_epochs", "total_episodes"),)
"""Fields that say the same thing in two ways: only one of each group may be set."""


def argument(default: Any, help: str) -> Any:
    """A dataclass field with this default and help text; a default list is copied for each instance."""
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata={"help": help})
    return dataclasses.field(default=default, metadata={"help": help})


def check_types(arguments: Any) -> None:
    """Checks that each field of the dataclass `arguments`, and each entry of a list, is of the declared type.

    Raises:
        ValueError: naming the field, the value and the declared type.
    """
    for name, hint in typing.get_type_hints(type(arguments)).items():
        value, kinds = getattr(arguments, name), members(hint)
        _check_type(name, value, kinds)
        if isinstance(value, list):
            entries = next(typing.get_args(kind) for kind in kinds if typing.get_origin(kind) is list)
            for entry in value:
                _check_type(f"an entry of {name}", entry, members(entries[0]))


def members(hint: Any) -> tuple[Any, ...]:
    """The types that `hint` allows: those of a union, or itself alone."""
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _check_type(what: str, value: Any, kinds: tuple[Any, ...]) -> None:
    accepted = tuple(typing.get_origin(kind) or kind for kind in kinds)
    if float in accepted:
        accepted += (int,)
    # bool is a subclass of int, but `rollout_batch_size: true` is a mistake.
    if not isinstance(value, accepted) or (isinstance(value, bool) and bool not in accepted):
        wanted = " or ".join(kind.__name__ for kind in accepted if kind is not type(None))
        remedy = ", in quotes" if str in accepted and isinstance(value, int | float) else ""
        raise ValueError(f"{what} is {value!r}, a {type(value).__name__}; it must be {wanted}{remedy}")


def check_limits(config: Any) -> None:
    """Checks the fields of a `PPOConfig`, one by one, against `_RANGES` and `_CHOICES`.

    Raises:
        ValueError: naming the field, its value and what it may be.
    """
    for names, holds, remedy in _RANGES:
        for name in names.split():
            value = getattr(config, name)
            if value is not None and not holds(value):
                raise ValueError(f"{name} is {value!r}; it must be {remedy}")
    for name, choices in _CHOICES.items():
        if getattr(config, name) not in choices:
            raise ValueError(f"{name} is {getattr(config, name)!r}; choose one of {', '.join(choices)}")


def check_algorithm(config: Any) -> None:
    """Checks that the algorithm's options of a `PPOConfig` do not contradict one another.

    Raises:
        ValueError: naming both fields, their values and the remedy.
    """
    if config.adv_estimator in GROUP_ESTIMATORS and config.num_return_sequences == 1:
        raise ValueError(
            f"adv_estimator is {config.adv_estimator!r}, which compares the responses to one prompt, but "
            "num_return_sequences is 1; set it to 2 or more, or choose reinforce_plus_plus or remax"
        )
    if config.adv_estimator != "gae":
        _refuse_without_critic(config)
    _check_critic(config)
    if config.policy_loss == "gspo" and config.loss_agg_mode != "seq-mean-token-mean":
        raise ValueError(
            f"policy_loss is 'gspo' but loss_agg_mode is {config.loss_agg_mode!r}; a sequence's ratio has one weight a "
            "sequence: set loss_agg_mode: seq-mean-token-mean"
        )
    if config.policy_loss == "gspo" and config.clip_ratio_c is not None:
        raise ValueError(f"clip_ratio_c is {config.clip_ratio_c}, but policy_loss 'gspo' has no dual clip; null it")
    _check_kl(config)


def _check_critic(config: Any) -> None:
    if config.init_value_with_reward and config.critic_layout != "separate":
        raise ValueError(
            f"init_value_with_reward is True but critic_layout is {config.critic_layout!r}, whose critic has no "
            "backbone to start from a reward model; use critic_layout: separate, or set it to False"
        )
    if config.critic == "scalar" and config.risk_level != "neutral":
        raise ValueError(
            f"risk_level is {config.risk_level!r} but critic is 'scalar', which knows the mean alone; choose c51, "
            "quantile or iqn, or risk_level: neutral"
        )
    if config.c51_v_min >= config.c51_v_max:
        raise ValueError(
            f"c51_v_min ({config.c51_v_min}) is not below c51_v_max ({config.c51_v_max}); the support needs a width"
        )
    if config.load_in_4bit and config.merge_on_save:
        raise ValueError(
            "merge_on_save is True, but load_in_4bit too: merging would round the base again; merge final/policy into "
            "the whole model afterwards"
        )
    copied = (config.uses_critic and config.critic_layout == "separate") or config.reference.startswith("copy")
    if config.load_in_4bit and copied:
        raise ValueError(
            f"load_in_4bit is True, but critic_layout is {config.critic_layout!r} and reference {config.reference!r}: "
            "a 4-bit base cannot be copied; use critic_layout: adapter or shared, and reference: auto"
        )


def _check_kl(config: Any) -> None:
    if config.reference == "none" and config.max_kl_to_ref is not None:
        raise ValueError(f"max_kl_to_ref is {config.max_kl_to_ref} but reference is 'none'; null one of them")
    if config.kl_controller != "fixed" and config.kl_coef == 0:
        raise ValueError(
            f"kl_controller is {config.kl_controller!r} but kl_coef is 0, which no factor moves; start from a positive "
            "kl_coef, or set kl_controller: fixed"
        )
    if config.reference == "none" and (config.use_kl_loss or (config.use_kl_in_reward and config.kl_coef)):
        raise ValueError(
            f"reference is 'none', but use_kl_in_reward is {config.use_kl_in_reward} with kl_coef {config.kl_coef} and "
            f"use_kl_loss is {config.use_kl_loss}; set both to false, or keep a reference"
        )
    if not config.use_kl_in_reward and config.kl_controller != "fixed":
        raise ValueError(
            f"kl_controller is {config.kl_controller!r} but use_kl_in_reward is False, so it would move nothing; set "
            "kl_controller: fixed or use_kl_in_reward: true"
        )


def _refuse_without_critic(config: Any) -> None:
    if config.adv_estimator != "reinforce_plus_plus" and config.gamma != 1.0:
        raise ValueError(
            f"gamma is {config.gamma}, but adv_estimator {config.adv_estimator!r} weighs whole responses; set it to 1.0"
        )
    for name, unset in _CRITIC_ONLY.items():
        if (value := getattr(config, name)) != unset:
            raise ValueError(
                f"{name} is {value!r}, but adv_estimator {config.adv_estimator!r} has no critic; leave {name} at "
                f"{unset!r}, or use adv_estimator: gae"
            )


_CRITIC_ONLY: dict[str, Any] = {
    "critic": "scalar",
    "risk_level": "neutral",
    "critic_warmup_steps": 0,
    "critic_learning_rate": None,
    "init_value_with_reward": False,
    "whiten_rewards": False,
}
"""Without a critic, what each must be."""
