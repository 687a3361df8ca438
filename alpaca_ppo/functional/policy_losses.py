"""Clipped surrogate losses for the policy. The KL and entropy terms are added by the caller."""

import torch
from torch import Tensor

from alpaca_ppo.functional.kl import LOG_RATIO_LIMIT
from alpaca_ppo.functional.masked import Loss, aggregate_loss, masked_mean, zero_outside


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    cliprange_low: float,
    cliprange_high: float,
    clip_ratio_c: float | None = None,
    loss_agg_mode: str = "token-mean",
    weights: Tensor | None = None,
    denominator: Tensor | float | None = None,
) -> Loss:
    """PPO's clipped loss (arXiv:1707.06347, equation 7) with separate clip ranges (arXiv:2503.14476) and dual clip
    (arXiv:1912.09729).

    Per token, with ratio = exp(clamp(logprobs - old_logprobs, -20, 20)) and A the advantage:

        loss = max(-A * ratio, -A * clip(ratio, 1 - cliprange_low, 1 + cliprange_high))
        loss = min(loss, -A * clip_ratio_c)     where A < 0, with dual clip

    Args:
        logprobs: (B, R), of the policy that is trained, in nats; the gradient flows here.
        old_logprobs: (B, R), of the policy that the advantages belong to.
        advantages: (B, R).
        response_mask: (B, R) bool, True = a token the policy chose.
        cliprange_low: how far the ratio may fall below 1.
        cliprange_high: how far it may rise above 1.
        clip_ratio_c: bound of the ratio where the advantage is negative, more than 1; None = no dual clip.
        loss_agg_mode: see `aggregate_loss`.
        weights: (B, R) factor of each token's loss, as importance weights are; detached here.
        denominator: see `aggregate_loss`.

    Returns:
        The loss, and the stats `clipfrac` (share of tokens whose clipped term is the larger), `clipfrac_lower` (share
        that dual clip bounds), `approx_kl_k1` and `approx_kl_k3` (KL(old || new) a token, in nats), `ratio_mean`,
        `ratio_min` and `ratio_max`. Shares and means are over the masked tokens of this call; without any they are 0,
        and `ratio_min` and `ratio_max` are 1.

    Raises:
        ValueError: for a negative clip range, cliprange_low > 1, clip_ratio_c <= 1, an unknown mode, and shapes that
            differ.
    """
    _check_clip_ranges(cliprange_low, cliprange_high, clip_ratio_c)
    advantages = zero_outside(advantages, response_mask).detach()
    log_ratio = zero_outside(logprobs, response_mask) - zero_outside(old_logprobs, response_mask).detach()
    log_ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - cliprange_low, 1 + cliprange_high)
    losses = torch.maximum(unclipped, clipped)
    bounded = torch.zeros_like(response_mask)
    if clip_ratio_c is not None:
        bound = -advantages * clip_ratio_c
        bounded = (advantages < 0) & (losses > bound)
        losses = torch.where(bounded, bound, losses)
    if weights is not None:
        losses = losses * zero_outside(weights, response_mask).detach()
    stats = {
        "clipfrac": masked_mean((clipped > unclipped).to(ratio.dtype), response_mask),
        "clipfrac_lower": masked_mean(bounded.to(ratio.dtype), response_mask),
        **_ratio_stats(log_ratio.detach(), ratio.detach(), response_mask),
    }
    return Loss(aggregate_loss(losses, response_mask, loss_agg_mode, denominator=denominator), stats)


def _ratio_stats(log_ratio: Tensor, ratio: Tensor, response_mask: Tensor) -> dict[str, Tensor]:
    anywhere = response_mask.any()
    one, infinity = ratio.new_ones(()), ratio.new_full((1,), torch.inf)
    # The appended infinity gives batches without a row something to reduce.
    smallest = torch.cat([torch.where(response_mask, ratio, infinity).flatten(), infinity]).amin()
    largest = torch.cat([torch.where(response_mask, ratio, -infinity).flatten(), -infinity]).amax()
    return {
        "approx_kl_k1": masked_mean(-log_ratio, response_mask),
        "approx_kl_k3": masked_mean(torch.expm1(log_ratio) - log_ratio, response_mask),
        "ratio_mean": masked_mean(ratio, response_mask),
        "ratio_min": torch.where(anywhere, smallest, one),
        "ratio_max": torch.where(anywhere, largest, one),
    }


def _check_clip_ranges(cliprange_low: float, cliprange_high: float, clip_ratio_c: float | None) -> None:
    if not 0 <= cliprange_low <= 1:
        raise ValueError(f"cliprange_low is {cliprange_low}; it must be in [0, 1], because a ratio cannot fall below 0")
    if not cliprange_high >= 0:
        raise ValueError(f"cliprange_high is {cliprange_high}; it must not be negative")
    if clip_ratio_c is not None and not clip_ratio_c > 1:
        raise ValueError(f"clip_ratio_c is {clip_ratio_c}; dual clip needs more than 1, None switches it off")
