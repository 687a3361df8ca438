"""The terms of a micro-batch's losses, and the policy losses that a configuration can name.

The mathematics is in `functional`, the critic's loss in its head. Every term is a part of the optimizer step's loss
(see `types.Rollouts.denominator`), so the terms of the micro-batches add up.
"""

from functools import partial
from typing import Any

from torch import Tensor

from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.functional import (
    Loss,
    aggregate_loss,
    cispo_policy_loss,
    dppo_policy_loss,
    gmpo_policy_loss,
    gspo_policy_loss,
    kl_penalty,
    masked_mean,
    policy_loss,
    positive_nll_loss,
    rollout_correction_weights,
    sapo_policy_loss,
)
from alpaca_ppo.models import ActorCriticOutputs, CriticHead
from alpaca_ppo.ppo.metrics import mismatch_stats
from alpaca_ppo.ppo.minibatches import trained_mask
from alpaca_ppo.registry import POLICY_LOSSES, DppoDivergence
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
    tensors = outputs.logprobs, batch["logprobs"], batch["advantages"], mask
    returned = POLICY_LOSSES.get(args.policy_loss)(*tensors, args=args, weights=weights, denominator=denominator)
    policy = _checked(f"policy_loss {args.policy_loss!r}", returned)
    # One KL of the update is logged: k3, which estimates what k1 does with less noise.
    logged = {f"policy/{name}": stat for name, stat in policy.stats.items() if name != "approx_kl_k1"}
    stats = {"loss/policy": policy.loss} | logged
    if outputs.entropies is not None:
        stats["policy/entropy"] = masked_mean(outputs.entropies, mask)

    def aggregated(losses: Tensor) -> Tensor:
        weighted = losses if weights is None else losses * weights
        return aggregate_loss(weighted, mask, args.loss_agg_mode, denominator=denominator)

    loss = policy.loss
    if args.positive_nll_coef:
        # Without importance weights: it imitates these responses, and estimates no expectation over the sampler's.
        nll = positive_nll_loss(
            outputs.logprobs, _succeeded(batch["scores"], args), mask, denominator=batch["positive_tokens"]
        )
        stats |= {"loss/positive_nll": nll.loss, "policy/positive_fraction": nll.stats["positive_fraction"]}
        loss = loss + args.positive_nll_coef * nll.loss
    if args.kl_loss_coef:
        stats["loss/kl"] = aggregated(kl_penalty(outputs.logprobs, batch["ref_logprobs"], args.kl_loss_type))
        loss = loss + args.kl_loss_coef * stats["loss/kl"]
    if args.entropy_coef:
        assert outputs.entropies is not None
        stats["loss/entropy"] = aggregated(outputs.entropies)
        loss = loss - args.entropy_coef * stats["loss/entropy"]
    if args.old_policy in ("auto", "rollout") and "recomputed" not in batch:
        stats |= mismatch_stats(outputs.logprobs, batch["rollout_logprobs"], mask)
    return loss, {name: stat.detach() for name, stat in stats.items()}


def critic_terms(batch: Rollouts, outputs: ActorCriticOutputs, head: CriticHead, args: PPOConfig) -> Terms:
    """The loss of the critic's `head`, weighted by `vf_coef`, and its statistics."""
    assert outputs.predictions is not None
    value = _checked(f"loss of the critic {head.kind!r}", head.loss(outputs.predictions, batch, args))
    stats = {"loss/value": value.loss} | {f"val/{name}": stat for name, stat in value.stats.items()}
    return args.vf_coef * value.loss, {name: stat.detach() for name, stat in stats.items()}


def _checked(what: str, returned: Any) -> Loss:
    if not isinstance(returned, Loss):
        raise ValueError(f"the {what} returned {returned!r:.100}; return functional.Loss(loss, stats)")
    return returned


_DPPO_RATIO_BOUND = 20.0


def _ranges(args: PPOConfig) -> dict[str, Any]:
    return {"cliprange_low": args.cliprange, "cliprange_high": args.cliprange_high or args.cliprange}


@POLICY_LOSSES.implement("clip")
def _clip(*batch: Tensor, args: PPOConfig, **how: Any) -> Loss:
    ratio_c = args.clip_ratio_c
    return policy_loss(*batch, clip_ratio_c=ratio_c, loss_agg_mode=args.loss_agg_mode, **_ranges(args) | how)


@POLICY_LOSSES.implement("gspo")
def _gspo(*batch: Tensor, args: PPOConfig, **how: Any) -> Loss:
    return gspo_policy_loss(*batch, loss_agg_mode=args.loss_agg_mode, **_ranges(args) | how)


@POLICY_LOSSES.implement("cispo")
def _cispo(*batch: Tensor, args: PPOConfig, **how: Any) -> Loss:
    return cispo_policy_loss(*batch, loss_agg_mode=args.loss_agg_mode, **_ranges(args) | how)


@POLICY_LOSSES.implement("sapo")
def _sapo(*batch: Tensor, args: PPOConfig, **how: Any) -> Loss:
    return sapo_policy_loss(*batch, tau_pos=1.0, tau_neg=1.05, loss_agg_mode=args.loss_agg_mode, **how)


@POLICY_LOSSES.implement("gmpo")
def _gmpo(*batch: Tensor, args: PPOConfig, **how: Any) -> Loss:
    return gmpo_policy_loss(*batch, **_ranges(args) | how)


@POLICY_LOSSES.implement("dppo")
def _dppo(*batch: Tensor, divergence: DppoDivergence = "tv", args: PPOConfig, **how: Any) -> Loss:
    return dppo_policy_loss(
        *batch,
        divergence=divergence,
        clip_ratio_c=args.clip_ratio_c or _DPPO_RATIO_BOUND,
        loss_agg_mode=args.loss_agg_mode,
        **_ranges(args) | how,
    )


POLICY_LOSSES.implement("dppo_kl")(partial(_dppo, divergence="kl"))
