"""The terms of the policy's loss in a micro-batch, and the policy losses that a configuration can name.

The mathematics is in `functional`, the critic's loss in `models.critic_heads`. Every term is divided by a denominator
of the whole optimizer step (`types.Rollouts.denominator`), so the terms of its micro-batches add up.
"""

from typing import Any, TypedDict

from torch import Tensor

from alpaca_ppo import functional
from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.functional import Loss
from alpaca_ppo.models import ActorCriticOutputs
from alpaca_ppo.ppo.metrics import mismatch_stats
from alpaca_ppo.ppo.row_masks import gradient_mask
from alpaca_ppo.registry import POLICY_LOSSES
from alpaca_ppo.types import Rollouts

Terms = tuple[Tensor, dict[str, Tensor]]


def correction_weights(rollouts: Rollouts, args: PPOConfig) -> dict[str, Tensor]:
    """`loss_weights` (B, R) of the global rollouts if `old_policy` is `correct`; otherwise empty."""
    if args.old_policy != "correct":
        return {}
    logprobs, sampled, mask = rollouts["logprobs"], rollouts["rollout_logprobs"], gradient_mask(rollouts, args)
    level, threshold = args.rollout_correction_level, args.rollout_correction_threshold
    weights = functional.rollout_correction_weights(logprobs, sampled, mask, level=level, threshold=threshold)
    return {"loss_weights": weights}


def step_denominators(rollouts: Rollouts, rows: Tensor, args: PPOConfig) -> dict[str, Tensor]:
    """The losses' `denominator` in the optimizer step on `rows`, and `positive_tokens` with `positive_nll_coef` (see
    `types.Rollouts`): scalars of 1 or more.
    """
    mask = rollouts["response_mask"][rows]
    count = mask.sum() if args.loss_agg_mode == "token-mean" else mask.any(dim=1).sum()
    # Without a row that gives a gradient, the losses are 0.
    denominators = {"denominator": count.clamp_min(1)}
    if args.positive_nll_coef:
        positive = _succeeded(rollouts["scores"][rows], args)
        denominators["positive_tokens"] = mask[positive].sum().clamp_min(1)
    return denominators


def _succeeded(scores: Tensor, args: PPOConfig) -> Tensor:
    """(B,) bool, of the scores (B,) before any penalty."""
    return scores > args.positive_nll_threshold


def policy_terms(batch: Rollouts, outputs: ActorCriticOutputs, args: PPOConfig) -> Terms:
    """The sum of policy loss, negative log-likelihood of successes, KL loss and entropy bonus, and their statistics."""
    logprobs, entropies = outputs.logprobs, outputs.entropies
    assert logprobs is not None
    mask, denominator = batch["response_mask"], batch["denominator"]
    weights = batch.get("loss_weights")
    returned = POLICY_LOSSES.get(args.policy_loss)(
        logprobs, batch["logprobs"], batch["advantages"], mask, args=args, weights=weights, denominator=denominator
    )
    policy = checked_loss(f"policy_loss {args.policy_loss!r}", returned)
    stats = {"loss/policy": policy.loss, **{f"policy/{name}": stat for name, stat in policy.stats.items()}}
    # k3, which is kept, estimates the same KL with less noise.
    stats.pop("policy/approx_kl_k1", None)
    if entropies is not None:
        stats["policy/entropy"] = functional.masked_mean(entropies, mask)

    def aggregated(losses: Tensor) -> Tensor:
        weighted = losses if weights is None else losses * weights
        return functional.aggregate_loss(weighted, mask, args.loss_agg_mode, denominator=denominator)

    loss = policy.loss
    if args.positive_nll_coef:
        # Without importance weights: this term imitates, and estimates no expectation under the old policy.
        positive = _succeeded(batch["scores"], args)
        nll = functional.positive_nll_loss(logprobs, positive, mask, denominator=batch["positive_tokens"])
        stats |= {"loss/positive_nll": nll.loss, "policy/positive_fraction": nll.stats["positive_fraction"]}
        loss = loss + args.positive_nll_coef * nll.loss
    if args.kl_loss_coef:
        stats["loss/kl"] = aggregated(functional.kl_penalty(logprobs, batch["ref_logprobs"], args.kl_loss_type))
        loss = loss + args.kl_loss_coef * stats["loss/kl"]
    if args.entropy_coef:
        assert entropies is not None
        stats["loss/entropy"] = aggregated(entropies)
        loss = loss - args.entropy_coef * stats["loss/entropy"]
    sampler_is_old_policy = args.old_policy in ("auto", "rollout") and "recomputed" not in batch
    if sampler_is_old_policy:
        # With log-probs that the trainer has recomputed, `ppo.metrics` compares the sampler's.
        stats |= mismatch_stats(logprobs, batch["rollout_logprobs"], mask)
    return loss, {name: stat.detach() for name, stat in stats.items()}


def checked_loss(what: str, returned: Any) -> Loss:
    """The result of a registered loss or a critic's head, which must be a `Loss`."""
    if not isinstance(returned, Loss):
        raise ValueError(f"the {what} returned {returned!r:.100}; return functional.Loss(loss, stats)")
    return returned


class _ClipRanges(TypedDict):
    cliprange_low: float
    cliprange_high: float


def _ranges(args: PPOConfig) -> _ClipRanges:
    return {"cliprange_low": args.cliprange, "cliprange_high": args.cliprange_high or args.cliprange}


_DPPO_RATIO_BOUND = 20.0

# `inputs` are logprobs, old_logprobs, advantages and response_mask; `scale` are weights and denominator.


@POLICY_LOSSES.implement("clip")
def _clip(*inputs: Tensor, args: PPOConfig, **scale: Any) -> Loss:
    return functional.policy_loss(
        *inputs, clip_ratio_c=args.clip_ratio_c, loss_agg_mode=args.loss_agg_mode, **_ranges(args), **scale
    )


@POLICY_LOSSES.implement("gspo")
def _gspo(*inputs: Tensor, args: PPOConfig, **scale: Any) -> Loss:
    return functional.gspo_policy_loss(*inputs, loss_agg_mode=args.loss_agg_mode, **_ranges(args), **scale)


@POLICY_LOSSES.implement("cispo")
def _cispo(*inputs: Tensor, args: PPOConfig, **scale: Any) -> Loss:
    return functional.cispo_policy_loss(*inputs, loss_agg_mode=args.loss_agg_mode, **_ranges(args), **scale)


@POLICY_LOSSES.implement("sapo")
def _sapo(*inputs: Tensor, args: PPOConfig, **scale: Any) -> Loss:
    return functional.sapo_policy_loss(*inputs, tau_pos=1.0, tau_neg=1.05, loss_agg_mode=args.loss_agg_mode, **scale)


@POLICY_LOSSES.implement("gmpo")
def _gmpo(*inputs: Tensor, args: PPOConfig, **scale: Any) -> Loss:
    return functional.gmpo_policy_loss(*inputs, **_ranges(args), **scale)


@POLICY_LOSSES.implement("dppo")
@POLICY_LOSSES.implement("dppo_kl")
def _dppo(*inputs: Tensor, args: PPOConfig, **scale: Any) -> Loss:
    divergence = "kl" if args.policy_loss == "dppo_kl" else "tv"
    bound, mode = args.clip_ratio_c or _DPPO_RATIO_BOUND, args.loss_agg_mode
    return functional.dppo_policy_loss(
        *inputs, divergence=divergence, clip_ratio_c=bound, loss_agg_mode=mode, **_ranges(args), **scale
    )
