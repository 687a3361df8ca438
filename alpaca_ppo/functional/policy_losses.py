"""Clipped surrogate losses for the policy, and the weights that correct them for another sampler. The KL and entropy
terms are added by the caller.
"""

import torch
from torch import Tensor

from alpaca_ppo.functional.kl import LOG_RATIO_LIMIT
from alpaca_ppo.functional.masked import Loss, aggregate_loss, masked_mean, zero_outside

ROLLOUT_CORRECTION_LEVELS: tuple[str, ...] = ("token", "sequence")


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


def gspo_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    cliprange_low: float,
    cliprange_high: float,
    loss_agg_mode: str = "seq-mean-token-mean",
    weights: Tensor | None = None,
    denominator: Tensor | float | None = None,
) -> Loss:
    """The clipped loss of the sequence's ratio, in its form for advantages of tokens (GSPO-token, arXiv:2507.18071,
    equations 13 and 14).

    With s = exp(clamp(mean of logprobs - old_logprobs over the row's masked tokens, -20, 20)), the same number on all
    tokens of a row, and A the advantage:

        loss = max(-A * s, -A * clip(s, 1 - cliprange_low, 1 + cliprange_high))

    The gradient is straight-through: that of s with respect to its own token's log-probability is taken to be s. Where
    the advantages of a row are equal, the row's gradient is the exact one. The geometric mean keeps s close to 1, so
    the clip ranges are far smaller than in `policy_loss` (the paper: 3e-4 and 4e-4).

    Args:
        logprobs: (B, R), of the policy that is trained, in nats; the gradient flows here.
        old_logprobs: (B, R), of the policy that the advantages belong to.
        advantages: (B, R).
        response_mask: (B, R) bool, True = a token the policy chose.
        cliprange_low: how far the sequence's ratio may fall below 1.
        cliprange_high: how far it may rise above 1.
        loss_agg_mode: see `aggregate_loss`.
        weights: (B, R) factor of each token's loss, as importance weights are; detached here.
        denominator: see `aggregate_loss`.

    Returns:
        The loss, and the stats of `policy_loss`. Of these, `ratio_mean`, `ratio_min` and `ratio_max` are of s, the
        mean over tokens; `clipfrac_lower` is 0, because there is no dual clip; `approx_kl_*` are of the tokens' own
        log-ratios, comparable with `policy_loss`.

    Raises:
        ValueError: for a negative clip range, cliprange_low > 1, an unknown mode, and shapes that differ.
    """
    _check_clip_ranges(cliprange_low, cliprange_high, clip_ratio_c=None)
    advantages = zero_outside(advantages, response_mask).detach()
    logprobs = zero_outside(logprobs, response_mask)
    token_log_ratio = (logprobs - zero_outside(old_logprobs, response_mask)).detach()
    log_ratio = logprobs - logprobs.detach() + masked_mean(token_log_ratio, response_mask, dim=1).unsqueeze(1)
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - cliprange_low, 1 + cliprange_high)
    losses = torch.maximum(unclipped, clipped)
    if weights is not None:
        losses = losses * zero_outside(weights, response_mask).detach()
    token_log_ratio = token_log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    stats = {
        "clipfrac": masked_mean((clipped > unclipped).to(ratio.dtype), response_mask),
        "clipfrac_lower": ratio.new_zeros(()),
        **_ratio_stats(token_log_ratio, ratio.detach(), response_mask),
    }
    return Loss(aggregate_loss(losses, response_mask, loss_agg_mode, denominator=denominator), stats)


def rollout_correction_weights(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    response_mask: Tensor,
    *,
    level: str,
    threshold: float,
    normalize: bool = False,
) -> Tensor:
    """Truncated importance weights (Ionides, 2008), (B, R), detached and 0 outside the mask, for responses to whose
    tokens the sampler gave slightly other probabilities than the trainer does:

        weight = min(exp(clamp(log ratio, -20, 20)), threshold)

    where the log ratio is old - rollout of the token (`token`), or its sum over the row's masked tokens (`sequence`),
    which gives all tokens of a row one weight.

    Args:
        old_logprobs: (B, R), of the trainer's own forward pass, in nats.
        rollout_logprobs: (B, R), of the sampler.
        response_mask: (B, R) bool, True = a token the policy chose.
        level: `token` or `sequence`.
        threshold: the largest weight, before any normalisation; positive, infinity does not truncate.
        normalize: divide by the mean weight over the masked tokens (`token`) or over the rows that have any
            (`sequence`), so that the weights keep the size of the loss. The mean is over this call: pass the whole
            optimizer-step batch.

    Raises:
        ValueError: for an unknown level, a threshold that is not positive, and shapes that differ.
    """
    if level not in ROLLOUT_CORRECTION_LEVELS:
        raise ValueError(f"level is {level!r}; it must be one of {', '.join(ROLLOUT_CORRECTION_LEVELS)}")
    if not threshold > 0:
        raise ValueError(f"threshold is {threshold}; it must be positive, because weights are cut to at most that")
    log_ratio = zero_outside(old_logprobs, response_mask) - zero_outside(rollout_logprobs, response_mask)
    counted = response_mask
    if level == "sequence":
        log_ratio, counted = log_ratio.sum(dim=1, keepdim=True), response_mask.any(dim=1, keepdim=True)
    weights = log_ratio.detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().clamp_max(threshold)
    if normalize:
        # The mean is 0 only where nothing is counted, and then nothing is kept below.
        weights = weights / masked_mean(weights, counted)
    return zero_outside(weights.expand(response_mask.shape), response_mask)


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
