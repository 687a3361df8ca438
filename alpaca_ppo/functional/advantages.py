"""Advantages from rewards: with a critic (`gae`), or without one from a group of responses to the same prompt
(`group_advantages`), from the whole batch (`reinforce_plus_plus`) or from the greedy response (`remax`).

`register_adv_estimator` adds an estimator that a configuration can name. Whitening is left to the caller, except in the
two estimators whose definition contains it; those two must see the whole rollout batch. Sampling the groups and the
greedy responses happens elsewhere.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from alpaca_ppo.functional.masked import at_least_float32, masked_whiten, rounding_error, zero_outside
from alpaca_ppo.registry import ADV_ESTIMATORS

GROUP_ESTIMATORS: tuple[str, ...] = tuple(n for n in ADV_ESTIMATORS.built_in if ADV_ESTIMATORS.trait(n, "needs_group"))
"""The estimators of `group_advantages`."""

STD_EPSILON = 1e-6


class Advantages(NamedTuple):
    """What the policy and the critic learn from, each (B, R) and 0 outside the response mask."""

    advantages: Tensor
    """Weights of the policy's log-probabilities in its loss."""
    returns: Tensor
    """Targets of the critic if there is one; returns-to-go otherwise."""


@dataclass(frozen=True)
class AdvantageInputs:
    """What a registered estimator gets of one step's rollouts of all ranks, on the CPU: B responses of R tokens."""

    rewards: Tensor
    """(B, R) float32: shaped rewards (score and KL penalty), 0 outside the mask."""
    values: Tensor | None
    """(B, R) float32: the critic's value of the state before each token, 0 outside the mask; None without a critic."""
    response_mask: Tensor
    """(B, R) bool, True = a token the policy chose."""
    scores: Tensor | None = None
    """(B,) float32: the reward of each response before the KL penalty; (B, R) if the reward is given per token."""
    prompt_ids: Tensor | None = None
    """(B,) int64: the index of the prompt in its dataset, equal for responses to the same prompt."""
    baseline_scores: Tensor | None = None
    """(B,) float32: the score of the greedy response to the same prompt; only with `needs_greedy_baseline`."""


AdvEstimator = Callable[[AdvantageInputs, Any], Advantages]
"""From the rollouts and the run's configuration (`PPOConfig`) to advantages and returns."""


def register_adv_estimator(
    name: str,
    *,
    needs_critic: bool = False,
    needs_group: bool = False,
    needs_greedy_baseline: bool = False,
    uses_gamma: bool = False,
) -> Callable[[AdvEstimator], AdvEstimator]:
    """A decorator that adds the advantage estimator `name`, a function of `AdvantageInputs` and the run's `PPOConfig`.

    Args:
        name: the value of `adv_estimator` that selects it.
        needs_critic: a critic is trained on the returns, and `values` are given.
        needs_group: responses to the same prompt are compared, so `num_return_sequences` must be at least 2.
        needs_greedy_baseline: a greedy response to each prompt is sampled and scored for `baseline_scores`.
        uses_gamma: reads `gamma`; without it and without a critic, a `gamma` other than 1 is refused.

    Raises:
        ValueError: when the name is taken, or holds a space, comma or colon.
    """
    return ADV_ESTIMATORS.register(
        name,
        needs_critic=needs_critic,
        needs_group=needs_group,
        needs_greedy_baseline=needs_greedy_baseline,
        uses_gamma=uses_gamma,
    )


def gae(rewards: Tensor, values: Tensor, response_mask: Tensor, *, gamma: float, lam: float | Tensor) -> Advantages:
    """Generalized advantage estimates and returns = advantages + values (arXiv:1506.02438, equation 16).

        delta_t = r_t + gamma * V_{t+1} - V_t
        A_t     = delta_t + gamma * lam * A_{t+1}

    where t+1 is the next True column of the row, so a hole in the mask (a token that the policy did not choose) is not
    discounted, and V and A after the last True column are 0: a response is an episode that ends. lam = 0 is TD(0);
    lam = gamma = 1 is the return-to-go minus V.

    Args:
        rewards: (B, R), the reward for the action at t.
        values: (B, R), the critic's value of the state before the action at t.
        response_mask: (B, R) bool, True = a token the policy chose.
        gamma: discount per token, in [0, 1].
        lam: trace decay per token, in [0, 1]: one number, or (B,) with one for each row.

    Raises:
        ValueError: when gamma or lam is outside [0, 1], when shapes differ, and when a tensor `lam` is not (B,).
    """
    if not 0.0 <= gamma <= 1.0:
        raise ValueError(f"gamma is {gamma}; it must be in [0, 1]")
    _check_lam(lam, rows=rewards.size(0))
    rewards, values = zero_outside(rewards, response_mask), zero_outside(values, response_mask)
    next_value = next_advantage = (rewards + values).new_zeros(rewards.size(0))
    decay = gamma * (lam.to(next_advantage) if isinstance(lam, Tensor) else lam)
    columns: list[Tensor] = []
    for t in reversed(range(rewards.size(1))):
        chosen = response_mask[:, t]
        advantage = rewards[:, t] + gamma * next_value - values[:, t] + decay * next_advantage
        next_value = torch.where(chosen, values[:, t], next_value)
        next_advantage = torch.where(chosen, advantage, next_advantage)
        columns.append(advantage)
    advantages = torch.stack(columns[::-1], dim=1) if columns else rewards + values
    return Advantages(zero_outside(advantages, response_mask), zero_outside(advantages + values, response_mask))


def group_advantages(scores: Tensor, group_ids: Tensor, response_mask: Tensor, *, estimator: str) -> Tensor:
    """Advantages (B, R), equal on all masked tokens of a response and 0 elsewhere, from its score s and the scores of
    the n responses in its group:

    - `grpo`: (s - mean) / (std + 1e-6), std unbiased (arXiv:2402.03300);
    - `grpo_no_std`: s - mean (Dr. GRPO, arXiv:2503.20783);
    - `rloo`: s - mean of the others = n / (n - 1) * (s - mean) (arXiv:2402.14740);
    - `opo`: s - the group's mean weighted by response length (arXiv:2505.23585);
    - `reinforce_plus_plus_baseline`: s - mean, then whitened over all tokens of the batch (arXiv:2501.03262).

    A response that is alone in its group has baseline 0 and, for `grpo`, std 1. A row with an empty mask does not
    count in its group. Scores of a group that are equal up to rounding (`rounding_error`) count as equal.

    Args:
        scores: (B,), one for each response.
        group_ids: (B,) int, equal within a group; any values in any order.
        response_mask: (B, R) bool, True = a token the policy chose.
        estimator: one of the above.

    Raises:
        ValueError: for an unknown estimator, and when scores or group_ids do not have one entry for each row.
    """
    if estimator not in GROUP_ESTIMATORS:
        raise ValueError(f"the group estimator is {estimator!r}; it must be one of {', '.join(GROUP_ESTIMATORS)}")
    _check_one_per_row("scores", scores, response_mask)
    _check_one_per_row("group_ids", group_ids, response_mask)
    lengths = response_mask.sum(dim=1)
    member = lengths > 0
    scores = at_least_float32(scores)
    _, group = torch.unique(group_ids, return_inverse=True)
    size = _group_sum(member.to(scores.dtype), group)
    alone = size < 2
    # Relative to the group's lowest score, equal scores are exactly 0. The rounding error of their mean would become an
    # advantage when it is divided by their std.
    lowest, highest = (_group_extreme(scores.detach(), member, group, kind) for kind in ("amin", "amax"))
    equal = highest - lowest <= rounding_error(torch.maximum(lowest.abs(), highest.abs()))
    relative = torch.where(alone, scores, torch.where(equal, 0.0, scores - lowest))
    scores = zero_outside(relative, member)
    weights = (lengths if estimator == "opo" else member).to(scores.dtype)
    baseline = _group_sum(weights * scores, group) / _group_sum(weights, group).clamp_min(1)
    advantages = zero_outside(scores - torch.where(alone, 0.0, baseline), member)
    if estimator == "rloo":
        advantages = advantages * size / (size - 1).clamp_min(1)
    elif estimator == "grpo":
        # In a unit of the group's own size, since the squares of scores above 1e19 overflow float32.
        unit = _group_extreme(advantages.detach().abs(), member, group, "amax").clamp_min(1)
        variance = _group_sum((advantages / unit).square(), group) / (size - 1).clamp_min(1)
        # The gradient of the square root at 0 is infinite.
        std = unit * variance.clamp_min(torch.finfo(variance.dtype).tiny).sqrt()
        advantages = advantages / (torch.where(alone, 1.0, std) + STD_EPSILON)
    per_token = advantages.unsqueeze(1).expand(response_mask.shape)
    if estimator == "reinforce_plus_plus_baseline":
        return masked_whiten(per_token, response_mask)
    return zero_outside(per_token, response_mask)


def reinforce_plus_plus(rewards: Tensor, response_mask: Tensor, *, gamma: float) -> Advantages:
    """Returns-to-go, whitened over all tokens of the batch to give the advantages (REINFORCE++, arXiv:2501.03262).

        G_t = r_t + gamma * G_{t+1}

    where t+1 is the next True column of the row, as in `gae`.

    Args:
        rewards: (B, R), the reward for the action at t, including any KL penalty.
        response_mask: (B, R) bool, True = a token the policy chose.
        gamma: discount per token, in [0, 1].

    Raises:
        ValueError: when gamma is outside [0, 1], and when shapes differ.
    """
    returns = _returns_to_go(rewards, response_mask, gamma)
    return Advantages(masked_whiten(returns, response_mask), returns)


def remax(rewards: Tensor, baseline_scores: Tensor, response_mask: Tensor) -> Advantages:
    """Undiscounted returns-to-go, minus the score of the greedy response to the same prompt to give the advantages
    (ReMax, arXiv:2310.10505).

    Args:
        rewards: (B, R), the reward for the action at t.
        baseline_scores: (B,), the score of each prompt's greedy response.
        response_mask: (B, R) bool, True = a token the policy chose.

    Raises:
        ValueError: when baseline_scores does not have one entry for each row, and when rewards and mask differ in
            shape.
    """
    _check_one_per_row("baseline_scores", baseline_scores, response_mask)
    returns = _returns_to_go(rewards, response_mask, gamma=1.0)
    baseline = zero_outside(baseline_scores.unsqueeze(1).expand(response_mask.shape), response_mask)
    return Advantages(returns - baseline, returns)


def _returns_to_go(rewards: Tensor, response_mask: Tensor, gamma: float) -> Tensor:
    # With all values 0 and lam 1, the advantage is the return.
    return gae(rewards, torch.zeros_like(rewards), response_mask, gamma=gamma, lam=1.0).advantages


def _group_sum(values: Tensor, group: Tensor) -> Tensor:
    """(B,): for each row, the sum of `values` over its group."""
    return torch.zeros_like(values).index_add(0, group, values)[group]


def _group_extreme(values: Tensor, member: Tensor, group: Tensor, kind: Literal["amin", "amax"]) -> Tensor:
    """(B,): for each row, the smallest or largest of `values` over the members of its group; an infinity if it has
    none.
    """
    none = torch.full_like(values, torch.inf if kind == "amin" else -torch.inf)
    return none.scatter_reduce(0, group, torch.where(member, values, none), kind)[group]


def _check_one_per_row(name: str, values: Tensor, response_mask: Tensor) -> None:
    if response_mask.dim() != 2 or values.shape != response_mask.shape[:1]:
        raise ValueError(
            f"{name} has shape {tuple(values.shape)} but response_mask has {tuple(response_mask.shape)}; "
            "pass a mask (B, R) and one entry for each of its rows"
        )


def _check_lam(lam: float | Tensor, *, rows: int) -> None:
    if not isinstance(lam, Tensor):
        if not 0.0 <= lam <= 1.0:
            raise ValueError(f"lam is {lam}; it must be in [0, 1]")
        return
    if lam.shape != (rows,):
        raise ValueError(f"lam has shape {tuple(lam.shape)}; pass a float, or one value for each of the {rows} rows")
    outside = ~((lam >= 0) & (lam <= 1))
    if bool(outside.any()):
        row = int(outside.nonzero()[0])
        raise ValueError(f"lam is {float(lam[row])} in row {row}; it must be in [0, 1]")
