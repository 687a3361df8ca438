"""Clipped surrogate losses of the policy, and importance weights for a sampler whose probabilities differ slightly.

`register_policy_loss` adds a loss that a configuration can name. The caller adds the KL and entropy terms.
"""

from collections.abc import Callable
from typing import get_args

import torch
from torch import Tensor

from alpaca_ppo.functional.kl import LOG_RATIO_LIMIT
from alpaca_ppo.functional.masked import Loss, aggregate_loss, masked_mean, zero_outside
from alpaca_ppo.registry import POLICY_LOSSES, RolloutCorrectionLevel

ROLLOUT_CORRECTION_LEVELS: tuple[str, ...] = get_args(RolloutCorrectionLevel)

PolicyLoss = Callable[..., Loss]
"""A loss as `register_policy_loss` describes it."""


def register_policy_loss(
    name: str, *, dual_clip: bool = False, loss_agg_mode: str | None = None
) -> Callable[[PolicyLoss], PolicyLoss]:
    """A decorator that adds the policy loss `name`, a function

        loss(logprobs, old_logprobs, advantages, response_mask, *, args, weights, denominator) -> Loss

    of four (B, R) tensors and, by keyword, the run's `PPOConfig`, `weights` ((B, R) importance weights of the tokens,
    or None) and `denominator` (see `aggregate_loss`). It returns this micro-batch's part of the optimizer step's loss,
    `aggregate_loss(losses, response_mask, args.loss_agg_mode, denominator=denominator)` of its per-token losses. Its
    statistics are logged as `ppo/policy/<name>`: those that end in `_min` or `_max` as extremes, others as means over
    tokens.

    Args:
        name: the value of `policy_loss` that selects it.
        dual_clip: reads `clip_ratio_c`; other losses refuse that option.
        loss_agg_mode: the only `loss_agg_mode` that the loss allows; None = all of them.

    Raises:
        ValueError: when the name is taken, or holds a space, comma or colon.
    """
    return POLICY_LOSSES.register(name, dual_clip=dual_clip, loss_agg_mode=loss_agg_mode)


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
        logprobs: (B, R), of the policy in training, in nats; they receive the gradient.
        old_logprobs: (B, R), of the policy that the advantages were computed for.
        advantages: (B, R).
        response_mask: (B, R) bool, True = a token the policy chose.
        cliprange_low: how far the ratio may fall below 1.
        cliprange_high: how far it may rise above 1.
        clip_ratio_c: upper bound of the ratio where the advantage is negative, above 1; None = no dual clip.
        loss_agg_mode: see `aggregate_loss`.
        weights: (B, R), factors of the tokens' losses, such as importance weights; detached here.
        denominator: see `aggregate_loss`.

    Returns:
        The loss, and the stats `clipfrac` (fraction of tokens whose clipped term is the larger), `clipfrac_lower`
        (fraction of tokens that dual clip bounds), `approx_kl_k1` and `approx_kl_k3` (KL(old || new) per token, in
        nats), `ratio_mean`, `ratio_min` and `ratio_max`. Fractions and means are over the masked tokens of this call.
        Where there are none, they are 0, and `ratio_min` and `ratio_max` are 1.

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
    """The clipped loss with one ratio per sequence, in its form for per-token advantages (GSPO-token, arXiv:2507.18071,
    equations 13 and 14).

    With s = exp(clamp(mean of logprobs - old_logprobs over the row's masked tokens, -20, 20)), the same for all tokens
    of a row, and A the advantage:

        loss = max(-A * s, -A * clip(s, 1 - cliprange_low, 1 + cliprange_high))

    The gradient is straight-through: on each token, the gradient of s with respect to that token's log-probability is
    taken to be s. If the advantages of a row are equal, its gradient is exact. The geometric mean keeps s close to 1,
    so the clip ranges are far smaller than in `policy_loss` (in the paper: 3e-4 and 4e-4).

    Args:
        logprobs: (B, R), of the policy in training, in nats; they receive the gradient.
        old_logprobs: (B, R), of the policy that the advantages were computed for.
        advantages: (B, R).
        response_mask: (B, R) bool, True = a token the policy chose.
        cliprange_low: how far the ratio of a sequence may fall below 1.
        cliprange_high: how far it may rise above 1.
        loss_agg_mode: see `aggregate_loss`.
        weights: (B, R), factors of the tokens' losses, such as importance weights; detached here.
        denominator: see `aggregate_loss`.

    Returns:
        The loss, and the stats of `policy_loss`. `ratio_mean` (over tokens), `ratio_min` and `ratio_max` describe s.
        `clipfrac_lower` is 0, because there is no dual clip. `approx_kl_k1` and `approx_kl_k3` use the log-ratios of
        single tokens, as in `policy_loss`.

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
    """Truncated importance weights (Ionides, 2008), (B, R), detached and 0 outside the mask, for a sampler whose
    log-probabilities differ slightly from those of the trainer:

        weight = min(exp(clamp(log ratio, -20, 20)), threshold)

    where the log ratio is old_logprobs - rollout_logprobs of the token (`token`), or the sum of these over the row's
    masked tokens (`sequence`), which gives all tokens of a row the same weight.

    Args:
        old_logprobs: (B, R), from the trainer's forward pass, in nats.
        rollout_logprobs: (B, R), from the sampler.
        response_mask: (B, R) bool, True = a token the policy chose.
        level: `token` or `sequence`.
        threshold: the largest weight, before normalisation; positive, infinity for no truncation.
        normalize: divide by the mean weight over the masked tokens (`token`) or over the rows that have any
            (`sequence`), so that the scale of the loss does not change. The mean is over this call: pass the global
            batch.

    Raises:
        ValueError: for an unknown level, a threshold that is not positive, and shapes that differ.
    """
    if level not in ROLLOUT_CORRECTION_LEVELS:
        raise ValueError(f"level is {level!r}; it must be one of {', '.join(ROLLOUT_CORRECTION_LEVELS)}")
    if not threshold > 0:
        raise ValueError(f"threshold is {threshold}; it must be positive, because it is the largest weight")
    log_ratio = zero_outside(old_logprobs, response_mask) - zero_outside(rollout_logprobs, response_mask)
    counted = response_mask
    if level == "sequence":
        log_ratio, counted = log_ratio.sum(dim=1, keepdim=True), response_mask.any(dim=1, keepdim=True)
    weights = log_ratio.detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().clamp_max(threshold)
    if normalize:
        # The mean is 0 only if no token counts; all weights are 0 then.
        weights = weights / masked_mean(weights, counted)
    return zero_outside(weights.expand(response_mask.shape), response_mask)


def _ratio_stats(log_ratio: Tensor, ratio: Tensor, response_mask: Tensor) -> dict[str, Tensor]:
    anywhere = response_mask.any()
    one, infinity = ratio.new_ones(()), ratio.new_full((1,), torch.inf)
    # The appended infinity keeps the reductions defined for a batch without rows.
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
        raise ValueError(f"cliprange_low is {cliprange_low}; it must be in [0, 1], because a ratio is never negative")
    if not cliprange_high >= 0:
        raise ValueError(f"cliprange_high is {cliprange_high}; it must not be negative")
    if clip_ratio_c is not None and not clip_ratio_c > 1:
        raise ValueError(f"clip_ratio_c is {clip_ratio_c}; it must be above 1, or None for no dual clip")
