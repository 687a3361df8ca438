"""Which responses count, and for what.

A response without a usable reward stays in the rollouts with `rollouts["trained_rows"]` False (`failed_rewards`): it
gives no gradient, and is left out of advantages, groups, denominators and metrics. A response that was cut off
(`mask_truncated`) gives no gradient either, but counts in everything else.
"""

import torch
from torch import Tensor

from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.types import Rollouts


def gradient_rows(rollouts: Rollouts, args: PPOConfig) -> Tensor:
    """(B,) bool, True = the response gives a gradient."""
    rows = rollouts.get("trained_rows")
    if rows is None:
        rows = torch.ones(len(rollouts["response_mask"]), dtype=torch.bool)
    return rows & rollouts["stopped"] if args.mask_truncated else rows


def gradient_mask(rollouts: Rollouts, args: PPOConfig) -> Tensor:
    """(B, R) bool, True = a token that gives a gradient."""
    return rollouts["response_mask"] & gradient_rows(rollouts, args).unsqueeze(1)


def compared_mask(rollouts: Rollouts) -> Tensor:
    """(B, R) bool: the tokens from which advantages are estimated, those of responses that were cut off among them."""
    mask, rows = rollouts["response_mask"], rollouts.get("trained_rows")
    return mask if rows is None else mask & rows.unsqueeze(1)


def with_reward(rollouts: Rollouts) -> Rollouts:
    """The rollouts without the responses that `trained_rows` leaves out."""
    rows = rollouts.get("trained_rows")
    return rollouts if rows is None else {key: value[rows] for key, value in rollouts.items()}  # type: ignore
