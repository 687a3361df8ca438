"""Advantages and value targets from per-token rewards. Only estimators with a critic are here; whitening is the
caller's.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from alpaca_ppo.functional.masked import zero_outside


class Advantages(NamedTuple):
    """What the policy and the critic learn from, each (B, R) and 0 outside the response mask."""

    advantages: Tensor
    """Not whitened."""
    returns: Tensor
    """Targets of the critic."""


def gae(rewards: Tensor, values: Tensor, response_mask: Tensor, *, gamma: float, lam: float) -> Advantages:
    """Generalized advantage estimates and returns = advantages + values (arXiv:1506.02438, equation 16).

        delta_t = r_t + gamma * V_{t+1} - V_t
        A_t     = delta_t + gamma * lam * A_{t+1}

    where t+1 is the next True column of the row, so a hole in the mask (a token that the policy did not choose) costs
    no discount, and V and A after the last one are 0: a response is an episode that ends. lam = 0 is TD(0); lam =
    gamma = 1 is the return-to-go less V.

    Args:
        rewards: (B, R), the reward for the action at t.
        values: (B, R), the critic's value of the state before the action at t.
        response_mask: (B, R) bool, True = a token the policy chose.
        gamma: discount a token, in [0, 1].
        lam: trace decay a token, in [0, 1].

    Raises:
        ValueError: when gamma or lam is outside [0, 1], and when shapes differ.
    """
    for name, value in (("gamma", gamma), ("lam", lam)):
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"{name} is {value}; it must be in [0, 1]")
    rewards, values = zero_outside(rewards, response_mask), zero_outside(values, response_mask)
    next_value = next_advantage = (rewards + values).new_zeros(rewards.size(0))
    columns: list[Tensor] = []
    for t in reversed(range(rewards.size(1))):
        chosen = response_mask[:, t]
        advantage = rewards[:, t] + gamma * next_value - values[:, t] + gamma * lam * next_advantage
        next_value = torch.where(chosen, values[:, t], next_value)
        next_advantage = torch.where(chosen, advantage, next_advantage)
        columns.append(advantage)
    advantages = torch.stack(columns[::-1], dim=1) if columns else rewards + values
    return Advantages(zero_outside(advantages, response_mask), zero_outside(advantages + values, response_mask))
