"""The terms of a micro-batch's loss: policy, critic, KL to the reference, entropy; each by the configuration.

The mathematics is in `functional`; this module chooses, and names the statistics. Every term is a part of the optimizer
step's loss (see `types.Rollouts.denominator`), so parts add up.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.functional import (
    aggregate_loss,
    c51_loss,
    gspo_policy_loss,
    kl_penalty,
    masked_mean,
    policy_loss,
    quantile_huber_loss,
    quantile_midpoints,
    rollout_correction_weights,
    value_loss,
)
from alpaca_ppo.models import ActorCriticOutputs
from alpaca_ppo.ppo.metrics import mismatch_stats
from alpaca_ppo.types import Rollouts

Terms = tuple[Tensor, dict[str, Tensor]]


def correction_weights(rollouts: Rollouts, args: PPOConfig) -> dict[str, Tensor]:
    """`loss_weights` (B, R) of the global rollouts where `old_policy` is `correct`, else nothing."""
    if args.old_policy != "correct":
        return {}
    weights = rollout_correction_weights(
        rollouts["logprobs"],
        rollouts["rollout_logprobs"],
        rollouts["response_mask"],
        level=args.rollout_correction_level,
        threshold=args.rollout_correction_threshold,
        normalize=args.rollout_correction_normalize,
    )
    return {"loss_weights": weights}


def loss_terms(
    forward: Callable[..., ActorCriticOutputs],
    batch: Rollouts,
    args: PPOConfig,
    *,
    with_policy: bool,
    apart: Callable[[], AbstractContextManager[Callable[[Terms], Terms]]] | None,
) -> list[Terms]:
    """The terms of a micro-batch's loss and their statistics.

    Args:
        forward: a pass over the micro-batch; takes `with_policy` and `with_critic`.
        batch: the micro-batch.
        args: the run's configuration.
        with_policy: False leaves the policy out.
        apart: lets the critic run by itself, backward pass included, before the policy's forward pass.
    """
    if with_policy and args.uses_critic and apart is not None:
        with apart() as backward:
            critic = backward(critic_terms(forward(with_policy=False, with_critic=True), batch, args))
        return [policy_terms(forward(with_policy=True, with_critic=False), batch, args), critic]
    outputs = forward(with_policy=with_policy, with_critic=args.uses_critic)
    terms = [policy_terms(outputs, batch, args)] if with_policy else []
    return [*terms, critic_terms(outputs, batch, args)] if args.uses_critic else terms


def policy_terms(outputs: ActorCriticOutputs, batch: Rollouts, args: PPOConfig) -> Terms:
    """Policy loss, KL loss and entropy bonus, added up, and their statistics."""
    assert outputs.logprobs is not None and outputs.entropies is not None
    mask, aggregation = batch["response_mask"], _aggregation(batch, args)
    settings: dict[str, Any] = {
        "old_logprobs": batch["logprobs"],
        "advantages": batch["advantages"],
        "response_mask": mask,
        "cliprange_low": args.cliprange,
        "cliprange_high": args.cliprange_high or args.cliprange,
        "weights": batch.get("loss_weights"),
        **aggregation,
    }
    if args.policy_loss == "gspo":
        policy = gspo_policy_loss(outputs.logprobs, **settings)
    else:
        policy = policy_loss(outputs.logprobs, **settings, clip_ratio_c=args.clip_ratio_c)
    stats = {"loss/policy": policy.loss} | {f"policy/{name}": stat for name, stat in policy.stats.items()}
    stats["policy/entropy"] = masked_mean(outputs.entropies, mask)
    stats["policy/approxkl"] = 0.5 * masked_mean((outputs.logprobs - batch["logprobs"]).square(), mask)
    loss = policy.loss
    if args.use_kl_loss:
        penalty = kl_penalty(outputs.logprobs, batch["ref_logprobs"], args.kl_loss_type)
        stats["loss/kl"] = aggregate_loss(_weighted(penalty, batch), mask, **_mode(aggregation))
        loss = loss + args.kl_loss_coef * stats["loss/kl"]
    if args.entropy_coef:
        stats["loss/entropy"] = aggregate_loss(_weighted(outputs.entropies, batch), mask, **_mode(aggregation))
        loss = loss - args.entropy_coef * stats["loss/entropy"]
    if args.old_policy == "rollout":
        stats |= mismatch_stats(outputs.logprobs, batch["rollout_logprobs"], mask)
    return loss, stats


def critic_terms(outputs: ActorCriticOutputs, batch: Rollouts, args: PPOConfig) -> Terms:
    """The critic's loss, weighted by `vf_coef`, and its statistics."""
    assert outputs.values is not None and outputs.predictions is not None
    aggregation, said = _aggregation(batch, args), outputs.predictions
    target = (batch["returns"], batch["response_mask"])
    if args.critic == "c51":
        value = c51_loss(said, *target, v_min=args.c51_v_min, v_max=args.c51_v_max, **aggregation)
    elif args.critic == "scalar":
        clip = args.cliprange_value
        value = value_loss(said, batch["values"], *target, cliprange_value=clip, **aggregation)
    else:
        taus = batch.get("value_taus")
        if taus is None:
            taus = quantile_midpoints(args.num_quantiles, dtype=said.dtype, device=said.device)
        kappa = args.quantile_huber_kappa
        value = quantile_huber_loss(said, target[0], taus.to(said.dtype), target[1], kappa=kappa, **aggregation)
    stats = {"loss/value": value.loss} | {f"val/{name}": stat for name, stat in value.stats.items()}
    return args.vf_coef * value.loss, stats


def _weighted(losses: Tensor, batch: Rollouts) -> Tensor:
    """`losses` (B, R) as the policy's responses would give them: with the weights of `old_policy: correct`."""
    weights = batch.get("loss_weights")
    return losses if weights is None else losses * weights


def _aggregation(batch: Rollouts, args: PPOConfig) -> dict[str, Any]:
    return {"loss_agg_mode": args.loss_agg_mode, "denominator": batch["denominator"]}


def _mode(aggregation: dict[str, Any]) -> dict[str, Any]:
    return {"mode": aggregation["loss_agg_mode"], "denominator": aggregation["denominator"]}
