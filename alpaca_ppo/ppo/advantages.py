"""The advantage estimators that a configuration can name: which function of `functional` each calls, and how.

The rollouts are those of all ranks, so no estimator needs a collective operation.
"""

import torch
from torch import Tensor

from alpaca_ppo import functional
from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.functional import AdvantageInputs, Advantages
from alpaca_ppo.functional.masked import rounding_error
from alpaca_ppo.registry import ADV_ESTIMATORS

# The input that an estimator with the trait requires.
_NEEDED = {
    "needs_critic": "values",
    "needs_group": "prompt_ids",
    "needs_greedy_baseline": "baseline_scores",
    "needs_scores_by_source": "scores_by_source",
}


def estimate_advantages(inputs: AdvantageInputs, args: PPOConfig) -> Advantages:
    """Advantages and returns (B, R) by the estimator `args.adv_estimator`.

    Raises:
        ValueError: when an input that the estimator needs is missing, or the estimator returns no `Advantages`.
    """
    name = args.adv_estimator
    for trait, field in _NEEDED.items():
        if getattr(inputs, field) is None and ADV_ESTIMATORS.trait(name, trait):
            raise ValueError(f"adv_estimator is {name!r} but `{field}` is missing; rollout() must return them")
    returned = ADV_ESTIMATORS.get(name)(inputs, args)
    if not isinstance(returned, Advantages):
        raise ValueError(f"the adv_estimator {name!r} returned {returned!r:.100}; return functional.Advantages")
    return returned


@ADV_ESTIMATORS.implement("gae")
def _gae(inputs: AdvantageInputs, args: PPOConfig) -> Advantages:
    assert inputs.values is not None
    rewards, mask = inputs.rewards, inputs.response_mask
    if args.whiten_rewards:
        rewards = functional.masked_whiten(rewards, mask, keep_mean=True)
    lam_policy: float | Tensor = args.lam
    if isinstance(args.lam_policy, str):
        lam_policy = functional.length_adaptive_lam(mask, alpha=args.lam_alpha)
    elif args.lam_policy is not None:
        lam_policy = float(args.lam_policy)
    lam_critic = args.lam if args.lam_critic is None else args.lam_critic
    turn_lam = args.turn_lam
    if inputs.critic_pretraining:
        # Monte-Carlo returns: the critic, which is untrained, does not enter its own targets.
        lam_critic, turn_lam = 1.0, None
    estimated = functional.decoupled_gae(
        rewards,
        inputs.values,
        mask,
        gamma=args.gamma,
        lam_policy=lam_policy,
        lam_critic=lam_critic,
        turn_gamma=args.turn_gamma,
        turn_lam=turn_lam,
    )
    if not args.whiten_advantages:
        return estimated
    return estimated._replace(advantages=functional.masked_whiten(estimated.advantages, mask))


@ADV_ESTIMATORS.implement("reinforce_plus_plus")
def _reinforce_plus_plus(inputs: AdvantageInputs, args: PPOConfig) -> Advantages:
    return functional.reinforce_plus_plus(inputs.rewards, inputs.response_mask, gamma=args.gamma)


@ADV_ESTIMATORS.implement("remax")
def _remax(inputs: AdvantageInputs, args: PPOConfig) -> Advantages:
    assert inputs.baseline_scores is not None
    return functional.remax(inputs.rewards, inputs.baseline_scores, inputs.response_mask)


def _group(inputs: AdvantageInputs, args: PPOConfig) -> Advantages:
    """Compares the sums of shaped rewards, so that a KL penalty in the reward counts."""
    assert inputs.prompt_ids is not None
    mask = inputs.response_mask
    scores = torch.where(mask, inputs.rewards, 0).sum(dim=1)
    advantages = functional.group_advantages(scores, inputs.prompt_ids, mask, estimator=args.adv_estimator)
    return Advantages(advantages, torch.where(mask, scores.unsqueeze(1), 0))


for _name in functional.GROUP_ESTIMATORS:
    ADV_ESTIMATORS.implement(_name)(_group)


@ADV_ESTIMATORS.implement("gdpo")
def _gdpo(inputs: AdvantageInputs, args: PPOConfig) -> Advantages:
    """Normalizes the scores of each source separately. The rest of the shaped rewards (KL penalty,
    `penalty_reward_value`, what a subclass adds) is not divided by its standard deviation.
    """
    assert inputs.prompt_ids is not None and inputs.scores_by_source is not None
    mask, dtype = inputs.response_mask, inputs.rewards.dtype
    by_source = inputs.scores_by_source.to(dtype)
    weights = torch.tensor(args.reward_weights or [1.0] * by_source.size(1), dtype=torch.float64)
    shaped = torch.where(mask, inputs.rewards, 0).double()
    weighted = weights * by_source.double().nan_to_num(nan=0.0)
    scores = shaped.sum(dim=1)
    penalties = scores - weighted.sum(dim=1)
    # Scores and rewards were rounded to float32 separately. If a prompt's scores are all equal, whitening would turn
    # that rounding into advantages.
    rounding = rounding_error((shaped.abs().sum(dim=1) + weighted.abs().sum(dim=1)).to(inputs.scores_by_source.dtype))
    penalties = torch.where(penalties.abs() <= rounding, 0.0, penalties).to(dtype)
    advantages = functional.gdpo_advantages(by_source, weights, inputs.prompt_ids, mask, penalties=penalties)
    return Advantages(advantages, torch.where(mask, scores.to(dtype).unsqueeze(1), 0))
