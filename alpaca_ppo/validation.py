"""What the value of an argument may be: its type, its range, its choices. Clashes between two are `PPOConfig`'s own."""

import dataclasses
import types
import typing
from collections.abc import Callable
from math import isfinite
from typing import Any

LOSS_AGG_MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
KL_ESTIMATORS = ("k1", "abs", "k2", "k3", "k1_clamped")

_RANGES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (
        "logging_steps query_len response_len total_epochs total_episodes rollout_batch_size "
        "rollout_per_device_batch_size step_batch_size "
        "step_per_device_batch_size ppo_epochs num_return_sequences logprob_chunk_size save_total_limit eval_top_k "
        "kl_horizon",
        lambda v: v >= 1,
        "at least 1",
    ),
    ("seed save_steps eval_steps num_logged_rollouts truncate_after warmup_steps", lambda v: v >= 0, "0 or more"),
    (
        "temperature cliprange cliprange_high cliprange_value target_kl k_beta max_grad_norm adam_epsilon",
        lambda v: isfinite(v) and v > 0,
        "a positive number",
    ),
    ("kl_coef vf_coef learning_rate weight_decay", lambda v: isfinite(v) and v >= 0, "0 or more"),
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
    "critic_layout": ("separate", "shared"),
}

RIVALS = (("total_epochs", "total_episodes"),)
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
