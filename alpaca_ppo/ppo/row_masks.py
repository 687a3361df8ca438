"""Which responses give a gradient, and from which ones advantages are estimated.

A response without a reward stays in the rollouts with `rollouts["trained_rows"]` False (`failed_rewards`): it gives no
gradient, and is left out of advantages, groups, denominators and metrics. A truncated response (`mask_truncated`) gives
no gradient, but counts in everything else.
"""

from typing import cast

import torch
from torch import Tensor

from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.types import Rollouts


def trained_rows(rollouts: Rollouts) -> Tensor:
    """(B,) bool, True = the response has a reward."""
    return rollouts.get("trained_rows", torch.ones(len(rollouts["response_mask"]), dtype=torch.bool))


def gradient_rows(rollouts: Rollouts, args: PPOConfig) -> Tensor:
    """(B,) bool, True = the response gives a gradient."""
    rows = trained_rows(rollouts)
    return rows & rollouts["stopped"] if args.mask_truncated else rows


def gradient_mask(rollouts: Rollouts, args: PPOConfig) -> Tensor:
    """(B, R) bool, True = a token that gives a gradient."""
    return rollouts["response_mask"] & gradient_rows(rollouts, args).unsqueeze(1)


def advantage_mask(rollouts: Rollouts) -> Tensor:
    """(B, R) bool, True = a token of which an advantage is estimated; also in truncated responses."""
    return rollouts["response_mask"] & trained_rows(rollouts).unsqueeze(1)


def with_reward(rollouts: Rollouts) -> Rollouts:
    """The rollouts of the responses that have a reward."""
    rows = rollouts.get("trained_rows")
    return rollouts if rows is None else select_rows(rollouts, rows)


def select_rows(rollouts: Rollouts, rows: Tensor | slice | list[int]) -> Rollouts:
    """The rollouts of some rows: a bool mask (B,), a slice or indices."""
    tensors = cast(dict[str, Tensor], rollouts)
    return cast(Rollouts, {name: tensor[rows] for name, tensor in tensors.items()})
