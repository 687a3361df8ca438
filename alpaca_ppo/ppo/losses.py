"""The terms of a micro-batch's loss: policy, successes, critic, KL to the reference and entropy, as configured.

The mathematics is in `functional`, the critic's loss in its head. Every term is a part of the optimizer step's loss
(see `types.Rollouts.denominator`), so the terms of the micro-batches add up.
"""

from typing import Any

from torch import Tensor

from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.functional import (
    Loss,
    aggregate_loss,
    kl_penalty,
    masked_mean,
    positive_nll_loss,
    rollout_correction_weights,
)
from alpaca_ppo.models import ActorCriticOutputs, CriticHead
from alpaca_ppo.ppo.metrics import mismatch_stats
from alpaca_ppo.ppo.policy_losses import configured_policy_loss
from alpaca_ppo.ppo.trained_rows import trained_mask
from alpaca_ppo.types import Rollouts

Terms = tuple[Tensor, dict[str, Tensor]]


def correction_weights(rollouts: Rollouts, args: PPOConfig) -> dict[str, Tensor]:
    """`{"loss_weights": (B, R)}` of the global rollouts if `old_policy` is `correct`, otherwise an empty dictionary."""
    if args.old_policy != "correct":
        return {}
    weights = rollout_correction_weights(
        rollouts["logprobs"],
        rollouts["rollout_logprobs"],
        trained_mask(rollouts, args),
        level=args.rollout_correction_level,
        threshold=args.rollout_correction_threshold,
        normalize=args.rollout_correction_normalize,
    )
    return {"loss_weights": weights}


def step_denominators(rollouts: Rollouts, rows: Tensor, args: PPOConfig) -> dict[str, Tensor]:
    """What the losses of the optimizer step on `rows` are divided by, scalars of 1 or more: `denominator`, and with
    `positive_nll_coef`, `positive_tokens` (see `types.Rollouts`).
    """
    mask = rollouts["response_mask"][rows]
    count = mask.sum() if args.loss_agg_mode == "token-mean" else mask.any(dim=1).sum()
    # An optimizer step may have no row that is trained: its losses are 0 then.
    denominators = {"denominator": count.clamp_min(1)}
    if args.positive_nll_coef:
        positive = _succeeded(rollouts["scores"][rows], args)
        denominators["positive_tokens"] = mask[positive].sum().clamp_min(1)
    return denominators


def _succeeded(scores: Tensor, args: PPOConfig) -> Tensor:
    """(B,) bool, from the scores (B,) before any penalty."""
    return scores > args.positive_nll_threshold


def policy_terms(batch: Rollouts, outputs: ActorCriticOutputs, args: PPOConfig) -> Terms:
    """Policy loss, log-likelihood of successes, KL loss and entropy bonus, added up, and their statistics."""
    assert outputs.logprobs is not None
    mask, denominator, weights = batch["response_mask"], batch["denominator"], batch.get("loss_weights")
    policy = _checked(f"policy_loss {args.policy_loss!r}", configured_policy_loss(outputs.logprobs, batch, args))
    stats = {"loss/policy": policy.loss} | {f"policy/{name}": stat for name, stat in policy.stats.items()}
    if outputs.entropies is not None:
        stats["policy/entropy"] = masked_mean(outputs.entropies, mask)
    stats["policy/approxkl"] = 0.5 * masked_mean((outputs.logprobs - batch["logprobs"]).square(), mask)
    loss = policy.loss
    if args.positive_nll_coef:
        # Without importance weights: it imitates these responses, and estimates no expectation over the sampler's.
        nll = positive_nll_loss(
            outputs.logprobs, _succeeded(batch["scores"], args), mask, denominator=batch["positive_tokens"]
        )
        stats |= {"loss/positive_nll": nll.loss, "policy/positive_fraction": nll.stats["positive_fraction"]}
        loss = loss + args.positive_nll_coef * nll.loss
    if args.kl_loss_coef:
        penalty = kl_penalty(outputs.logprobs, batch["ref_logprobs"], args.kl_loss_type)
        stats["loss/kl"] = aggregate_loss(
            _weighted(penalty, weights), mask, args.loss_agg_mode, denominator=denominator
        )
        loss = loss + args.kl_loss_coef * stats["loss/kl"]
    if args.entropy_coef:
        assert outputs.entropies is not None
        stats["loss/entropy"] = aggregate_loss(
            _weighted(outputs.entropies, weights), mask, args.loss_agg_mode, denominator=denominator
        )
        loss = loss - args.entropy_coef * stats["loss/entropy"]
    if args.old_policy in ("auto", "rollout") and "recomputed" not in batch:
        stats |= mismatch_stats(outputs.logprobs, batch["rollout_logprobs"], mask)
    return loss, {name: stat.detach() for name, stat in stats.items()}


def critic_terms(batch: Rollouts, outputs: ActorCriticOutputs, head: CriticHead, args: PPOConfig) -> Terms:
    """The loss of the critic's `head`, weighted by `vf_coef`, and its statistics."""
    assert outputs.predictions is not None
    value = _checked(
        f"loss of the critic {head.kind!r}",
        head.loss(
            outputs.predictions,
            batch["returns"],
            batch["response_mask"],
            old_values=batch["values"],
            taus=batch.get("value_taus"),
            loss_agg_mode=args.loss_agg_mode,
            denominator=batch["denominator"],
        ),
    )
    stats = {"loss/value": value.loss} | {f"val/{name}": stat for name, stat in value.stats.items()}
    return args.vf_coef * value.loss, {name: stat.detach() for name, stat in stats.items()}


def _weighted(losses: Tensor, weights: Tensor | None) -> Tensor:
    """`losses` (B, R) with the importance weights of `old_policy: correct`, if there are any."""
    return losses if weights is None else losses * weights


def _checked(what: str, returned: Any) -> Loss:
    """What a registered loss returned, after checking that it is a `Loss` of scalars."""
    if not isinstance(returned, Loss):
        raise ValueError(
            f"the {what} returned a {type(returned).__name__}; it must return functional.Loss(loss, stats)"
        )
    for name, value in {**returned.stats, "loss": returned.loss}.items():
        if not isinstance(value, Tensor) or value.dim() != 0:
            found = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"as a {type(value).__name__}"
            raise ValueError(f"the {what} returned {name} {found}; it must be a scalar tensor")
    return returned
