"""The advantage estimators that a configuration can name: which function of `functional` each calls, with which of the
configuration's options, and which parts of a rollout it needs.

The rollouts of a step are global here, so no estimator needs a collective operation.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.functional import (
    AdvantageInputs,
    Advantages,
    gae,
    group_advantages,
    masked_whiten,
    reinforce_plus_plus,
    remax,
)
from alpaca_ppo.ppo.rollouts import RolloutPasses
from alpaca_ppo.registry import ADV_ESTIMATORS


def rollout_passes(
    args: PPOConfig, *, with_policy: bool, with_entropies: bool, policy_is_reference: bool = False
) -> RolloutPasses:
    """Which passes a rollout needs for the `adv_estimator` of `args`; the keywords are fields of the result."""
    return RolloutPasses(
        with_policy=with_policy,
        policy_is_reference=policy_is_reference,
        with_entropies=with_entropies,
        with_critic=args.uses_critic,
        greedy_baseline=ADV_ESTIMATORS.trait(args.adv_estimator, "needs_greedy_baseline"),
        compares_group=ADV_ESTIMATORS.trait(args.adv_estimator, "needs_group"),
    )


def estimate_advantages(inputs: AdvantageInputs, args: PPOConfig, *, monte_carlo_returns: bool = False) -> Advantages:
    """Advantages and returns (B, R) by the estimator that `args.adv_estimator` names.

    Args:
        inputs: what the estimator reads.
        args: of the run.
        monte_carlo_returns: whether the returns are sums of discounted rewards, which no value enters: the estimator is
            then given `args` with `lam` 1.

    Raises:
        ValueError: when the values, prompt ids or baseline scores that the estimator needs are missing, and when it
            returns anything other than `Advantages` of the shape of the rewards.
    """
    name = args.adv_estimator
    estimator = ADV_ESTIMATORS.get(name)
    needed = {
        "needs_critic": ("values", inputs.values, "rollout() must return them"),
        "needs_group": ("prompt_ids", inputs.prompt_ids, "pass them to _estimate_advantage()"),
        "needs_greedy_baseline": ("baseline_scores", inputs.baseline_scores, "rollout() must return them"),
    }
    for trait, (field, given, remedy) in needed.items():
        if given is None and ADV_ESTIMATORS.trait(name, trait):
            raise ValueError(f"adv_estimator is {name!r} but `{field}` is missing; {remedy}")
    if monte_carlo_returns:
        args = replace(args, lam=1.0)
    return _checked(name, estimator(inputs, args), inputs.rewards)


def _checked(name: str, returned: Any, rewards: Tensor) -> Advantages:
    if not isinstance(returned, Advantages):
        raise ValueError(
            f"the adv_estimator {name!r} returned a {type(returned).__name__}; it must return "
            "functional.Advantages(advantages, returns)"
        )
    for field, value in returned._asdict().items():
        if not isinstance(value, Tensor) or value.shape != rewards.shape:
            found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"type {type(value).__name__}"
            raise ValueError(
                f"the adv_estimator {name!r} returned {field} of {found}; it must be a tensor of shape "
                f"{tuple(rewards.shape)}, one number for each response token"
            )
    return returned


@ADV_ESTIMATORS.implement("gae")
def _gae(inputs: AdvantageInputs, args: PPOConfig) -> Advantages:
    assert inputs.values is not None
    rewards = inputs.rewards
    if args.whiten_rewards:
        rewards = masked_whiten(rewards, inputs.response_mask, keep_mean=True)
    estimated = gae(rewards, inputs.values, inputs.response_mask, gamma=args.gamma, lam=args.lam)
    if not args.whiten_advantages:
        return estimated
    # The critic learns from the returns, which stay as they are.
    return estimated._replace(advantages=masked_whiten(estimated.advantages, inputs.response_mask))


@ADV_ESTIMATORS.implement("reinforce_plus_plus")
def _reinforce_plus_plus(inputs: AdvantageInputs, args: PPOConfig) -> Advantages:
    return reinforce_plus_plus(inputs.rewards, inputs.response_mask, gamma=args.gamma)


@ADV_ESTIMATORS.implement("remax")
def _remax(inputs: AdvantageInputs, args: PPOConfig) -> Advantages:
    assert inputs.baseline_scores is not None
    return remax(inputs.rewards, inputs.baseline_scores, inputs.response_mask)


@ADV_ESTIMATORS.implement("grpo")
@ADV_ESTIMATORS.implement("grpo_no_std")
@ADV_ESTIMATORS.implement("rloo")
@ADV_ESTIMATORS.implement("opo")
@ADV_ESTIMATORS.implement("reinforce_plus_plus_baseline")
def _group(inputs: AdvantageInputs, args: PPOConfig) -> Advantages:
    """Compares the sums of the shaped rewards of whole responses, so that a KL penalty in the reward counts."""
    assert inputs.prompt_ids is not None
    mask = inputs.response_mask
    scores = torch.where(mask, inputs.rewards, 0).sum(dim=1)
    advantages = group_advantages(scores, inputs.prompt_ids, mask, estimator=args.adv_estimator)
    return Advantages(advantages, torch.where(mask, scores.unsqueeze(1), 0))
