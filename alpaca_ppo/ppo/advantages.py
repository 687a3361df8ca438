"""Which advantages the configuration names: from shaped rewards to what the policy and the critic learn from.

The mathematics is in `functional`; this module chooses. A step's rollouts are global here, so no estimator needs a
collective.
"""

import torch
from torch import Tensor

from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.functional import gae, group_advantages, masked_whiten, reinforce_plus_plus, remax
from alpaca_ppo.functional.rng import seeded_generator
from alpaca_ppo.ppo.rollouts import RolloutParts


def estimate_advantages(
    rewards: Tensor,
    values: Tensor | None,
    response_mask: Tensor,
    *,
    prompt_ids: Tensor | None,
    baseline_scores: Tensor | None,
    args: PPOConfig,
) -> dict[str, Tensor]:
    """`advantages` and `returns` (B, R) by `args.adv_estimator`.

    The group estimators compare whole sequences: the score of one is the sum of its shaped rewards, so that a KL
    penalty in the reward counts. `whiten_rewards` and `whiten_advantages` act on gae; the others normalise as their
    papers say.

    Args:
        rewards: (B, R) shaped rewards.
        values: (B, R) of the critic; gae only.
        response_mask: (B, R) bool.
        prompt_ids: (B,), equal for the responses to one prompt; group estimators only.
        baseline_scores: (B,), the score of the prompt's greedy response; remax only.
        args: the run's configuration.

    Raises:
        ValueError: when the estimator lacks its values, prompt ids or baseline scores.
    """
    name = args.adv_estimator
    if name == "gae":
        if values is None:
            raise ValueError("adv_estimator is 'gae' but `values` is missing; rollout() must return them")
        if args.whiten_rewards:
            rewards = masked_whiten(rewards, response_mask, keep_mean=True)
        advantages, returns = gae(rewards, values, response_mask, gamma=args.gamma, lam=args.lam)
        if args.whiten_advantages:
            advantages = masked_whiten(advantages, response_mask)
        return {"advantages": advantages, "returns": returns}
    if name == "reinforce_plus_plus":
        return reinforce_plus_plus(rewards, response_mask, gamma=args.gamma)._asdict()
    if name == "remax":
        if baseline_scores is None:
            raise ValueError("adv_estimator is 'remax' but `baseline_scores` is missing; rollout() must return them")
        return remax(rewards, baseline_scores, response_mask)._asdict()
    if prompt_ids is None:
        raise ValueError(f"adv_estimator is {name!r} but `prompt_ids` is missing; pass it to _estimate_advantage()")
    scores = torch.where(response_mask, rewards, 0).sum(dim=1)
    advantages = group_advantages(scores, prompt_ids, response_mask, estimator=name)
    returns = torch.where(response_mask, scores.unsqueeze(1), 0)
    return {"advantages": advantages, "returns": returns}


def rollout_parts(args: PPOConfig) -> RolloutParts:
    """Which passes a rollout needs: the policy's own log-probs, the critic's values, greedy responses as a baseline."""
    return RolloutParts(
        with_policy=args.old_policy != "rollout",
        with_critic=args.uses_critic,
        greedy_baseline=args.adv_estimator == "remax",
    )


def quantile_levels(args: PPOConfig, *key: int) -> Tensor | None:
    """(K,) uniform levels for an iqn critic's loss, a function of the integers in `key`; None for other critics."""
    if args.critic != "iqn" or not args.uses_critic:
        return None
    return torch.rand(args.num_quantiles, generator=seeded_generator(*key), dtype=torch.float64)
