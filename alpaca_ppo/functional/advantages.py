"""Advantages from rewards: with a critic (`gae`), and without one from a group of responses to the same prompt
(`group_advantages`), from the batch (`reinforce_plus_plus`) or from the greedy response (`remax`).

Generating the groups and the greedy responses is left out. Whitening is the caller's, except in the two estimators
that are defined by it, whose functions must therefore see the whole rollout batch.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from alpaca_ppo.functional.masked import at_least_float32, masked_whiten, zero_outside

GROUP_ESTIMATORS: tuple[str, ...] = ("grpo", "grpo_no_std", "rloo", "opo", "reinforce_plus_plus_baseline")

STD_EPSILON = 1e-6


class Advantages(NamedTuple):
    """What the policy and the critic learn from, each (B, R) and 0 outside the response mask."""

    advantages: Tensor
    """Whitened by `reinforce_plus_plus` alone."""
    returns: Tensor
    """Targets of the critic where there is one; returns-to-go otherwise."""


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


def group_advantages(scores: Tensor, group_ids: Tensor, response_mask: Tensor, *, estimator: str) -> Tensor:
    """Advantages (B, R), the same on every masked token of a response and 0 elsewhere, from its score s and those of
    the n responses of its group:

    - `grpo`: (s - mean) / (std + 1e-6), std unbiased (arXiv:2402.03300);
    - `grpo_no_std`: s - mean (Dr. GRPO, arXiv:2503.20783);
    - `rloo`: s - mean of the others = n / (n - 1) * (s - mean) (arXiv:2402.14740);
    - `opo`: s - the group's mean weighted by response length (arXiv:2505.23585);
    - `reinforce_plus_plus_baseline`: s - mean, then whitened over all tokens of the batch (arXiv:2501.03262).

    A response that is alone in its group has nothing to be compared with: its baseline is 0 and, for `grpo`, its std
    1. A row whose mask is empty is no member of its group, whatever its score.

    Args:
        scores: (B,), of whole responses.
        group_ids: (B,) int, equal where two responses belong together; any values in any order.
        response_mask: (B, R) bool, True = a token the policy chose.
        estimator: one of the above.

    Raises:
        ValueError: for an unknown estimator, and when scores or group_ids are not one a row.
    """
    if estimator not in GROUP_ESTIMATORS:
        raise ValueError(f"group estimator is {estimator!r}; it must be one of {', '.join(GROUP_ESTIMATORS)}")
    _check_one_per_row("scores", scores, response_mask)
    _check_one_per_row("group_ids", group_ids, response_mask)
    lengths = response_mask.sum(dim=1)
    member = lengths > 0
    scores = at_least_float32(scores)
    _, group = torch.unique(group_ids, return_inverse=True)
    size = _group_sum(member.to(scores.dtype), group)
    alone = size < 2
    # Counted from the group's least score, equal scores are exactly 0 and not the rounding error of their mean, which
    # a division by their std would turn into an advantage.
    scores = zero_outside(scores - torch.where(alone, 0.0, _group_min(scores.detach(), member, group)), member)
    weights = (lengths if estimator == "opo" else member).to(scores.dtype)
    baseline = _group_sum(weights * scores, group) / _group_sum(weights, group).clamp_min(1)
    advantages = zero_outside(scores - torch.where(alone, 0.0, baseline), member)
    if estimator == "rloo":
        advantages = advantages * size / (size - 1).clamp_min(1)
    elif estimator == "grpo":
        variance = _group_sum(advantages.square(), group) / (size - 1).clamp_min(1)
        # The square root of an exact 0 has no finite gradient.
        std = variance.clamp_min(torch.finfo(variance.dtype).tiny).sqrt()
        advantages = advantages / (torch.where(alone, 1.0, std) + STD_EPSILON)
    per_token = advantages.unsqueeze(1).expand(response_mask.shape)
    if estimator == "reinforce_plus_plus_baseline":
        return masked_whiten(per_token, response_mask)
    return zero_outside(per_token, response_mask)


def reinforce_plus_plus(rewards: Tensor, response_mask: Tensor, *, gamma: float) -> Advantages:
    """Returns-to-go, and as advantages the same whitened over all tokens of the batch (REINFORCE++,
    arXiv:2501.03262).

        G_t = r_t + gamma * G_{t+1}

    where t+1 is the next True column of the row, as in `gae`.

    Args:
        rewards: (B, R), the reward for the action at t, any penalty of KL included.
        response_mask: (B, R) bool, True = a token the policy chose.
        gamma: discount a token, in [0, 1].

    Raises:
        ValueError: when gamma is outside [0, 1], and when shapes differ.
    """
    returns = _returns_to_go(rewards, response_mask, gamma)
    return Advantages(masked_whiten(returns, response_mask), returns)


def remax(rewards: Tensor, baseline_scores: Tensor, response_mask: Tensor) -> Advantages:
    """Undiscounted returns-to-go, and as advantages the same less the score of the greedy response to the same prompt
    (ReMax, arXiv:2310.10505).

    Args:
        rewards: (B, R), the reward for the action at t.
        baseline_scores: (B,), the score of each prompt's greedy response.
        response_mask: (B, R) bool, True = a token the policy chose.

    Raises:
        ValueError: when baseline_scores are not one a row, and when rewards and mask differ in shape.
    """
    _check_one_per_row("baseline_scores", baseline_scores, response_mask)
    returns = _returns_to_go(rewards, response_mask, gamma=1.0)
    baseline = zero_outside(baseline_scores.unsqueeze(1).expand(response_mask.shape), response_mask)
    return Advantages(returns - baseline, returns)


def _returns_to_go(rewards: Tensor, response_mask: Tensor, gamma: float) -> Tensor:
    # Where every value is 0 and lam is 1, the advantage is the return.
    return gae(rewards, torch.zeros_like(rewards), response_mask, gamma=gamma, lam=1.0).advantages


def _group_sum(values: Tensor, group: Tensor) -> Tensor:
    """(B,): for each row, the sum of `values` over its group. There are at most B groups."""
    return torch.zeros_like(values).index_add(0, group, values)[group]


def _group_min(values: Tensor, member: Tensor, group: Tensor) -> Tensor:
    """(B,): for each row, the least of `values` over the members of its group; infinity without any."""
    infinity = torch.full_like(values, torch.inf)
    return infinity.scatter_reduce(0, group, torch.where(member, values, infinity), "amin")[group]


def _check_one_per_row(name: str, values: Tensor, response_mask: Tensor) -> None:
    if response_mask.dim() != 2 or values.shape != response_mask.shape[:1]:
        raise ValueError(
            f"{name} have shape {tuple(values.shape)} but response_mask has {tuple(response_mask.shape)}; "
            "pass a mask (B, R) and one entry for each of its rows"
        )
