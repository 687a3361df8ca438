"""Advantages from rewards: with a critic (`gae`, `decoupled_gae`), or without one, from the whole batch
(`reinforce_plus_plus`) or the greedy response (`remax`). Groups of responses are compared in `groups`.

In all of them, `rewards` (B, R) are those of the action at t, `response_mask` (B, R) is True for tokens that the policy
chose, and a rate outside [0, 1] or shapes that do not fit raise a `ValueError`. Whitening is left to the caller, except
in `reinforce_plus_plus`, whose definition contains it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from alpaca_ppo.functional.masked import check_row_values, masked_whiten, zero_outside
from alpaca_ppo.registry import ADV_ESTIMATORS


class Advantages(NamedTuple):
    """Each (B, R) and 0 outside the response mask.

    Attributes:
        returns: targets of the critic; without a critic they are only logged.
    """

    advantages: Tensor
    returns: Tensor


@dataclass(frozen=True)
class AdvantageInputs:
    """One step's rollouts of all ranks as a registered estimator gets them: B responses of R tokens, float32, on the
    CPU.

    Attributes:
        rewards: (B, R), shaped rewards (score and KL penalty), 0 outside the mask except in rows without any True.
        values: (B, R), as `rewards`: the critic's value of the state before each token; None without a critic.
        response_mask: (B, R) bool, True = a token the policy chose, in a row that `failed_rewards` does not leave out.
        scores: (B,), or (B, R) if the reward is given per token: before the KL penalty.
        prompt_ids: (B,) int64, equal for responses to the same prompt.
        baseline_scores: (B,), the score of the greedy response to the same prompt; only with `needs_greedy_baseline`.
        scores_by_source: (B, S), the score of each reward source, without its weight and before any penalty; NaN where
            it gave none.
        critic_pretraining: whether this step trains the critic alone, for which `gae` makes Monte-Carlo returns
            (`lam_critic` 1).
    """

    rewards: Tensor
    values: Tensor | None
    response_mask: Tensor
    scores: Tensor | None = None
    prompt_ids: Tensor | None = None
    baseline_scores: Tensor | None = None
    scores_by_source: Tensor | None = None
    critic_pretraining: bool = False


# From the rollouts and the run's configuration (`PPOConfig`) to advantages and returns.
AdvEstimator = Callable[[AdvantageInputs, Any], Advantages]


def register_adv_estimator(
    name: str,
    *,
    needs_critic: bool = False,
    needs_group: bool = False,
    needs_greedy_baseline: bool = False,
    needs_scores_by_source: bool = False,
    uses_gamma: bool = False,
) -> Callable[[AdvEstimator], AdvEstimator]:
    """A decorator that adds an estimator (`AdvEstimator`) that `adv_estimator: name` selects.

    Args:
        name: without spaces, commas and colons. An estimator that a user has registered under it before is replaced.
        needs_critic: a critic is trained on the returns, and `values` are given.
        needs_group: compares responses to the same prompt, so `num_return_sequences` must be at least 2.
        needs_greedy_baseline: reads `baseline_scores`, for which greedy responses are sampled and scored.
        needs_scores_by_source: reads `scores_by_source`.
        uses_gamma: reads `gamma`; without it and without a critic, a `gamma` other than 1 is refused.

    Raises:
        ValueError: if `name` is built in, is empty, or has a space, comma or colon.
    """
    return ADV_ESTIMATORS.register(
        name,
        needs_critic=needs_critic,
        needs_group=needs_group,
        needs_greedy_baseline=needs_greedy_baseline,
        needs_scores_by_source=needs_scores_by_source,
        uses_gamma=uses_gamma,
    )


def gae(
    rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    *,
    gamma: float,
    lam: float | Tensor,
    turn_gamma: float | None = None,
    turn_lam: float | None = None,
) -> Advantages:
    """Generalized advantage estimates and returns = advantages + values (arXiv:1506.02438, equation 16).

        delta_t = r_t + gamma * V_{t+1} - V_t
        A_t     = delta_t + gamma * lam * A_{t+1}

    where t+1 is the next True column of the row, and V and A after the last True column are 0: a response is an episode
    that ends. lam = 0 is TD(0); lam = gamma = 1 is the return-to-go minus V.

    A hole in the mask (tokens that an environment wrote) ends a turn. It counts as one step, in which `turn_gamma` and
    `turn_lam` take the places of gamma and lam in both equations.

    Args:
        rewards: (B, R).
        values: (B, R), the critic's value of the state before the action at t.
        response_mask: (B, R) bool.
        gamma: discount per token.
        lam: trace decay per token: one number, or (B,) with one for each row.
        turn_gamma: discount from one turn to the next; None = gamma.
        turn_lam: trace decay from one turn to the next; None = lam.
    """
    rows = rewards.size(0)
    turn_gamma = gamma if turn_gamma is None else turn_gamma
    lam_between_turns = lam if turn_lam is None else turn_lam
    for name, rate in (("gamma", gamma), ("turn_gamma", turn_gamma), ("lam", lam), ("turn_lam", lam_between_turns)):
        _check_rate(name, rate, rows=rows)
    rewards = zero_outside(rewards, response_mask)
    values = zero_outside(values, response_mask)
    next_value = next_advantage = (rewards + values).new_zeros(rows)
    # The columns after a response count as a hole too, which changes nothing: V and A are 0 there.
    before_hole = torch.cat([~response_mask[:, 1:], response_mask.new_zeros(rows, 1)], dim=1)[:, : rewards.size(1)]
    discounts = torch.where(before_hole, next_value.new_tensor(turn_gamma), next_value.new_tensor(gamma))
    decays = torch.where(before_hole, _decay(turn_gamma, lam_between_turns, next_value), _decay(gamma, lam, next_value))
    columns: list[Tensor] = []
    for t in reversed(range(rewards.size(1))):
        chosen = response_mask[:, t]
        advantage = rewards[:, t] + discounts[:, t] * next_value - values[:, t] + decays[:, t] * next_advantage
        next_value = torch.where(chosen, values[:, t], next_value)
        next_advantage = torch.where(chosen, advantage, next_advantage)
        columns.append(advantage)
    advantages = torch.stack(columns[::-1], dim=1) if columns else rewards + values
    return Advantages(zero_outside(advantages, response_mask), zero_outside(advantages + values, response_mask))


def decoupled_gae(
    rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    *,
    gamma: float,
    lam_policy: float | Tensor,
    lam_critic: float,
    turn_gamma: float | None = None,
    turn_lam: float | None = None,
) -> Advantages:
    """The advantages of `gae` with `lam_policy` and the returns of `gae` with `lam_critic` (VC-PPO, arXiv:2503.01491):
    the policy may trade bias for variance, while a critic with lambda 1 learns returns that its errors do not bias. If
    the lambdas differ, the returns are not advantages + values. Other arguments are those of `gae`.
    """
    estimate = partial(gae, rewards, values, response_mask, gamma=gamma, turn_gamma=turn_gamma, turn_lam=turn_lam)
    estimated = estimate(lam=lam_policy)
    if not isinstance(lam_policy, Tensor) and lam_policy == lam_critic:
        return estimated
    return estimated._replace(returns=estimate(lam=lam_critic).returns)


def length_adaptive_lam(response_mask: Tensor, *, alpha: float) -> Tensor:
    """A lambda for each response, (B,) float64, with which the trace decays by about the same factor over all of them
    (VAPO, arXiv:2504.05118): 1 - 1 / (alpha * l), at least 0, with l the row's True columns and alpha > 0.
    """
    if not 0.0 < alpha < math.inf:
        raise ValueError(f"alpha is {alpha}; it must be a number above 0, such as 0.05")
    # A row without tokens has 1 / 0, which becomes 0 too.
    return (1 - 1 / (alpha * response_mask.sum(dim=1).double())).clamp_min(0.0)


def reinforce_plus_plus(rewards: Tensor, response_mask: Tensor, *, gamma: float) -> Advantages:
    """Returns-to-go, whitened over all tokens of the batch to give the advantages (REINFORCE++, arXiv:2501.03262).

        G_t = r_t + gamma * G_{t+1}

    where t+1 is the next True column of the row, as in `gae`, and the rewards include any KL penalty. Pass the whole
    rollout batch.
    """
    returns = _returns_to_go(rewards, response_mask, gamma)
    return Advantages(masked_whiten(returns, response_mask), returns)


def remax(rewards: Tensor, baseline_scores: Tensor, response_mask: Tensor) -> Advantages:
    """Undiscounted returns-to-go, minus the score of the greedy response to the same prompt to give the advantages
    (ReMax, arXiv:2310.10505), `baseline_scores` (B,).
    """
    check_row_values("baseline_scores", baseline_scores, response_mask)
    returns = _returns_to_go(rewards, response_mask, gamma=1.0)
    baseline = zero_outside(baseline_scores.unsqueeze(1).expand(response_mask.shape), response_mask)
    return Advantages(returns - baseline, returns)


def _returns_to_go(rewards: Tensor, response_mask: Tensor, gamma: float) -> Tensor:
    # With all values 0 and lam 1, the advantage is the return.
    return gae(rewards, torch.zeros_like(rewards), response_mask, gamma=gamma, lam=1.0).advantages


def _decay(gamma: float, lam: float | Tensor, like: Tensor) -> Tensor:
    """gamma * lam with the dtype and device of `like`: a scalar, or (B, 1) with one for each row."""
    if isinstance(lam, Tensor):
        return gamma * lam.to(like).unsqueeze(1)
    return like.new_tensor(gamma * lam)


def _check_rate(name: str, rate: float | Tensor, *, rows: int) -> None:
    if not isinstance(rate, Tensor):
        if not 0.0 <= rate <= 1.0:
            raise ValueError(f"{name} is {rate}; it must be in [0, 1]")
        return
    if rate.shape != (rows,):
        raise ValueError(f"{name} has shape {tuple(rate.shape)}; pass a float, or one value for each of {rows} rows")
    outside = ~((rate >= 0) & (rate <= 1))
    if bool(outside.any()):
        row = int(outside.nonzero()[0])
        raise ValueError(f"{name} is {float(rate[row])} in row {row}; it must be in [0, 1]")
