"""Surrogate losses of the policy, the log-likelihood of its own successes, and importance weights for a sampler whose
probabilities differ slightly.

`register_policy_loss` adds a loss that a configuration can name. The caller adds the KL and entropy terms.

The surrogate losses share these arguments:

- `logprobs` (B, R), nats: of the policy in training; they receive the gradient;
- `old_logprobs` (B, R), nats: of the policy that the advantages were computed for;
- `advantages` (B, R);
- `response_mask` (B, R) bool, True = a token the policy chose;
- `loss_agg_mode` and `denominator`: see `aggregate_loss`;
- `weights` (B, R): factors of the tokens' losses, such as importance weights; detached.

With A the advantage of a token and ratio = exp(clamp(logprobs - old_logprobs, -20, 20)), they return the loss and these
stats, over the masked tokens of the call:

- `clipfrac`: the fraction of tokens whose clip or trust region acts;
- `clipfrac_lower`: the fraction of tokens that `clip_ratio_c` bounds, 0 without it;
- `approx_kl_k1`, `approx_kl_k3`: KL(old || new) per token, in nats;
- `ratio_mean`, `ratio_min`, `ratio_max`.

Without masked tokens all of them are 0, but `ratio_min` and `ratio_max` are 1. A range or bound outside its limits, an
unknown mode and shapes that differ raise a `ValueError`.
"""

import math
from collections.abc import Callable
from typing import get_args

import torch
from torch import Tensor

from alpaca_ppo.functional.kl import LOG_RATIO_LIMIT
from alpaca_ppo.functional.masked import Loss, aggregate_loss, check_row_values, masked_mean, zero_outside
from alpaca_ppo.registry import POLICY_LOSSES, DppoDivergence, RolloutCorrectionLevel

ROLLOUT_CORRECTION_LEVELS: tuple[str, ...] = get_args(RolloutCorrectionLevel)
DIVERGENCES: tuple[str, ...] = get_args(DppoDivergence)

# Added to 1 - p, which may round to 0.
_KL_EPSILON = 1e-8

PolicyLoss = Callable[..., Loss]


def register_policy_loss(
    name: str, *, clips: bool = True, dual_clip: bool = False, loss_agg_mode: str | None = None
) -> Callable[[PolicyLoss], PolicyLoss]:
    """A decorator that adds the policy loss `name`, a function

        loss(logprobs, old_logprobs, advantages, response_mask, *, args, weights, denominator) -> Loss

    of the arguments that the module describes and `args`, the run's `PPOConfig`. It returns this micro-batch's part of
    the optimizer step's loss, `aggregate_loss(losses, response_mask, args.loss_agg_mode, denominator=denominator)` of
    its per-token losses. Its stats are logged as `ppo/policy/<name>`, without `approx_kl_k1`: those that end in `_min`
    or `_max` as extremes, others as means over tokens. The option `target_kl_stop` needs `approx_kl_k3` among them.

    Args:
        name: the value of the option `policy_loss` that selects it, without spaces, commas and colons. A loss that a
            user has registered under this name before is replaced.
        clips: reads `cliprange_high`, which is refused otherwise.
        dual_clip: reads `clip_ratio_c`, which is refused otherwise.
        loss_agg_mode: the only one that the loss allows; None = all of them.

    Raises:
        ValueError: if `name` is built in, is empty, or has a space, comma or colon.
    """
    return POLICY_LOSSES.register(name, clips=clips, dual_clip=dual_clip, loss_agg_mode=loss_agg_mode)


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
    (arXiv:1912.09729). Per token:

        loss = max(-A * ratio, -A * clip(ratio, 1 - cliprange_low, 1 + cliprange_high))
        loss = min(loss, -A * clip_ratio_c)     where A < 0, with dual clip

    Arguments that are not listed are described in the module.

    Args:
        cliprange_low: how far the ratio may fall below 1, in [0, 1].
        cliprange_high: how far it may rise above 1.
        clip_ratio_c: upper bound of the ratio where the advantage is negative, above 1; None = no dual clip.
    """
    _check_clip_ranges(cliprange_low, cliprange_high, clip_ratio_c)
    advantages = zero_outside(advantages, response_mask).detach()
    log_ratio, ratio = _ratios(logprobs, old_logprobs, response_mask)
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - cliprange_low, 1 + cliprange_high)
    losses = torch.maximum(unclipped, clipped)
    bounded = None
    if clip_ratio_c is not None:
        bound = -advantages * clip_ratio_c
        bounded = (advantages < 0) & (losses > bound)
        losses = torch.where(bounded, bound, losses)
    losses = _weighted(losses, weights, response_mask)
    stats = _update_stats(log_ratio, ratio, response_mask, clipped=clipped > unclipped, bounded=bounded)
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
    equations 13 and 14). With s = exp(clamp(mean of logprobs - old_logprobs over the row's masked tokens, -20, 20)):

        loss = max(-A * s, -A * clip(s, 1 - cliprange_low, 1 + cliprange_high))

    The gradient is straight-through: that of s with respect to the log-probability of each token is taken to be s,
    which is exact for a row of equal advantages. The geometric mean keeps s close to 1, so the clip ranges are far
    smaller than in `policy_loss` (in the paper: 3e-4 and 4e-4).

    The ratio stats describe s (`ratio_mean` over tokens); the KL stats use the log-ratios of single tokens.
    """
    _check_clip_ranges(cliprange_low, cliprange_high)
    advantages = zero_outside(advantages, response_mask).detach()
    logprobs = zero_outside(logprobs, response_mask)
    token_log_ratio = (logprobs - zero_outside(old_logprobs, response_mask)).detach()
    # Its value is that of the row, its gradient that of each token's log-probability.
    log_ratio = logprobs - logprobs.detach() + masked_mean(token_log_ratio, response_mask, dim=1).unsqueeze(1)
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - cliprange_low, 1 + cliprange_high)
    losses = _weighted(torch.maximum(unclipped, clipped), weights, response_mask)
    token_log_ratio = token_log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    stats = _update_stats(token_log_ratio, ratio, response_mask, clipped=clipped > unclipped)
    return Loss(aggregate_loss(losses, response_mask, loss_agg_mode, denominator=denominator), stats)


def cispo_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    cliprange_low: float,
    cliprange_high: float,
    loss_agg_mode: str = "token-mean",
    weights: Tensor | None = None,
    denominator: Tensor | float | None = None,
) -> Loss:
    """REINFORCE with clipped importance weights (CISPO, arXiv:2506.13585). Per token:

        loss = -stop_gradient(clip(ratio, 1 - cliprange_low, 1 + cliprange_high)) * A * logprob

    Only the gradient of this loss means something. Unlike in `policy_loss`, a token whose ratio is clipped keeps a
    gradient. The paper bounds the ratio from above only, as `cliprange_low` of 1 does.
    """
    _check_clip_ranges(cliprange_low, cliprange_high)
    advantages = zero_outside(advantages, response_mask).detach()
    log_ratio, ratio = _ratios(logprobs.detach(), old_logprobs, response_mask)
    clipped = ratio.clamp(1 - cliprange_low, 1 + cliprange_high)
    losses = _weighted(-clipped * advantages * zero_outside(logprobs, response_mask), weights, response_mask)
    stats = _update_stats(log_ratio, ratio, response_mask, clipped=clipped != ratio)
    return Loss(aggregate_loss(losses, response_mask, loss_agg_mode, denominator=denominator), stats)


def sapo_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    tau_pos: float,
    tau_neg: float,
    loss_agg_mode: str = "seq-mean-token-mean",
    weights: Tensor | None = None,
    denominator: Tensor | float | None = None,
) -> Loss:
    """A smooth gate in place of the clip (SAPO, arXiv:2511.20347). Per token, with tau = tau_pos where A > 0 and
    tau_neg elsewhere, both positive:

        loss = -A * sigmoid(tau * (ratio - 1)) * 4 / tau

    The gate's slope is 1 at ratio 1, and falls to both sides, the faster the larger tau is. The paper takes 1.0 for
    tau_pos and 1.05 for tau_neg. Nothing is clipped: `clipfrac` is 0.
    """
    for name, tau in (("tau_pos", tau_pos), ("tau_neg", tau_neg)):
        if not tau > 0:
            raise ValueError(f"{name} is {tau}; it must be positive, because the loss is divided by it")
    advantages = zero_outside(advantages, response_mask).detach()
    log_ratio, ratio = _ratios(logprobs, old_logprobs, response_mask)
    # Tensors, because torch.where makes float32 of two Python numbers.
    tau_of_token = torch.where(advantages > 0, ratio.new_full((), tau_pos), ratio.new_full((), tau_neg))
    losses = -advantages * torch.sigmoid(tau_of_token * (ratio - 1)) * (4 / tau_of_token)
    losses = _weighted(losses, weights, response_mask)
    stats = _update_stats(log_ratio, ratio, response_mask, clipped=torch.zeros_like(response_mask))
    return Loss(aggregate_loss(losses, response_mask, loss_agg_mode, denominator=denominator), stats)


def gmpo_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    cliprange_low: float,
    cliprange_high: float,
    weights: Tensor | None = None,
    denominator: Tensor | float | None = None,
) -> Loss:
    """The geometric mean of a row's ratios, each clipped on its own (GMPO, arXiv:2507.20673):

        clipped = min(log ratio, cliprange_high)     where A > 0
                  max(log ratio, -cliprange_low)     where A < 0
                  0                                  where A = 0
        loss of a row = -mean of A * exp(mean of clipped)     means over the row's masked tokens

    and the loss is the mean over rows that have tokens. In the paper the advantages of a row are equal. The ranges
    bound logarithms (nats), and may be wider than those of `policy_loss` (0.4 in the paper), because the mean evens out
    single tokens. The ratios in the stats are those of tokens, before they are clipped.

    Args:
        weights: (B, R), not negative: a row's loss is multiplied by the geometric mean of its tokens' weights.
        denominator: the number of rows with tokens in the whole optimizer step.
    """
    _check_clip_ranges(cliprange_low, cliprange_high, max_low=math.inf)
    advantages = zero_outside(advantages, response_mask).detach()
    log_ratio, ratio = _ratios(logprobs, old_logprobs, response_mask)
    sign = advantages.sign()
    unclipped, clipped = sign * log_ratio, sign * log_ratio.clamp(-cliprange_low, cliprange_high)
    log_ratio_of_row = masked_mean(sign * torch.minimum(unclipped, clipped), response_mask, dim=1)
    row_losses = -masked_mean(advantages, response_mask, dim=1) * log_ratio_of_row.exp()
    if weights is not None:
        row_losses = row_losses * masked_mean(weights.detach().log(), response_mask, dim=1).exp()
    losses = row_losses.unsqueeze(1).expand(response_mask.shape)
    stats = _update_stats(log_ratio, ratio, response_mask, clipped=clipped < unclipped)
    return Loss(aggregate_loss(losses, response_mask, "seq-mean-token-mean", denominator=denominator), stats)


def dppo_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    divergence: str = "tv",
    cliprange_low: float,
    cliprange_high: float,
    clip_ratio_c: float = 20.0,
    loss_agg_mode: str = "token-mean",
    weights: Tensor | None = None,
    denominator: Tensor | float | None = None,
) -> Loss:
    """A trust region in probabilities instead of ratios (DPPO with the binary divergences, arXiv:2602.04879). Per
    token, with p = exp(logprobs) and q = exp(old_logprobs):

        loss = -A * stop_gradient(min(ratio, clip_ratio_c)) * logprob     where the divergence is in range, else 0

        tv in range:  p - q <= cliprange_high               where A > 0
                      p - q >= -cliprange_low               elsewhere
        kl in range:  kl <= cliprange_high  or  p <= q      where A > 0
                      kl <= cliprange_low   or  p >= q      elsewhere
        kl = q * (log q - log p) + (1 - q) * log((1 - q + 1e-8) / (1 - p + 1e-8))

    The divergence is that of two outcomes: this token, or any other. A rare token may multiply its probability, and a
    likely one may not move far. Only the gradient of this loss means something. `clipfrac` is the fraction of tokens
    out of range, which have no gradient; `clipfrac_lower` that of tokens in range whose ratio is bounded.

    Args:
        divergence: `tv` (a difference of probabilities) or `kl` (nats).
        cliprange_low: the largest divergence of a token that has become less likely.
        cliprange_high: the largest divergence of one that has become more likely.
        clip_ratio_c: upper bound of the ratio, above 1.
    """
    if divergence not in DIVERGENCES:
        raise ValueError(f"divergence is {divergence!r}; it must be one of {', '.join(DIVERGENCES)}")
    _check_clip_ranges(cliprange_low, cliprange_high, clip_ratio_c, max_low=math.inf)
    advantages = zero_outside(advantages, response_mask).detach()
    log_ratio, ratio = _ratios(logprobs.detach(), old_logprobs, response_mask)
    new, old = zero_outside(logprobs, response_mask), zero_outside(old_logprobs, response_mask).detach()
    p, q = new.detach().exp(), old.exp()
    if divergence == "tv":
        in_range = torch.where(advantages > 0, p - q <= cliprange_high, p - q >= -cliprange_low)
    else:
        kl = q * (old - new.detach()) + (1 - q) * torch.log((1 - q + _KL_EPSILON) / (1 - p + _KL_EPSILON))
        in_range = torch.where(advantages > 0, (kl <= cliprange_high) | (p <= q), (kl <= cliprange_low) | (p >= q))
    losses = torch.where(in_range, -advantages * ratio.clamp_max(clip_ratio_c) * new, 0.0)
    losses = _weighted(losses, weights, response_mask)
    bounded = in_range & (ratio > clip_ratio_c)
    stats = _update_stats(log_ratio, ratio, response_mask, clipped=~in_range, bounded=bounded)
    return Loss(aggregate_loss(losses, response_mask, loss_agg_mode, denominator=denominator), stats)


def positive_nll_loss(
    logprobs: Tensor, positive: Tensor, response_mask: Tensor, *, denominator: Tensor | float | None = None
) -> Loss:
    """Minus the mean log-probability of the tokens of responses that succeeded (VAPO, arXiv:2504.05118, which adds it
    to the policy loss with the weight 0.1); 0, attached to the graph, if none did. `positive` (B,) bool, True = the
    response succeeded. `denominator` is the number of such tokens in the whole optimizer step, and may be 0.

    The stat `positive_fraction` is the fraction of masked tokens that are of positive rows.
    """
    check_row_values("positive", positive, response_mask)
    mask = response_mask & positive.unsqueeze(1)
    if denominator is not None:
        denominator = torch.as_tensor(denominator).clamp_min(1)
    loss = aggregate_loss(-logprobs, mask, "token-mean", denominator=denominator)
    return Loss(loss, {"positive_fraction": masked_mean(mask.to(loss.dtype), response_mask)})


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
        normalize: divide by the mean weight over this call's masked tokens (`token`) or rows (`sequence`), so that the
            scale of the loss does not change; pass the global batch.
    """
    if level not in ROLLOUT_CORRECTION_LEVELS:
        raise ValueError(f"level is {level!r}; it must be one of {', '.join(ROLLOUT_CORRECTION_LEVELS)}")
    if not threshold > 0:
        raise ValueError(f"threshold is {threshold}; it must be positive, because it is the largest weight")
    log_ratio = zero_outside(old_logprobs, response_mask) - zero_outside(rollout_logprobs, response_mask)
    counted = response_mask
    if level == "sequence":
        log_ratio = log_ratio.sum(dim=1, keepdim=True)
        counted = response_mask.any(dim=1, keepdim=True)
    weights = log_ratio.detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().clamp_max(threshold)
    if normalize:
        # The mean is 0 only if no token counts; the infinite weights are then all outside the mask.
        weights = weights / masked_mean(weights, counted)
    return zero_outside(weights.expand(response_mask.shape), response_mask)


def _ratios(logprobs: Tensor, old_logprobs: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
    """(B, R) each: log-ratios of new to old probabilities, clamped to +-20, 0 outside the mask; and the ratios."""
    log_ratio = zero_outside(logprobs, response_mask) - zero_outside(old_logprobs, response_mask).detach()
    log_ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return log_ratio, log_ratio.exp()


def _weighted(losses: Tensor, weights: Tensor | None, response_mask: Tensor) -> Tensor:
    return losses if weights is None else losses * zero_outside(weights, response_mask).detach()


def _update_stats(
    log_ratio: Tensor, ratio: Tensor, response_mask: Tensor, *, clipped: Tensor, bounded: Tensor | None = None
) -> dict[str, Tensor]:
    """The stats that the module describes. `clipped` and `bounded` (B, R) are True for the tokens that `clipfrac` and
    `clipfrac_lower` count.
    """
    log_ratio, ratio = log_ratio.detach(), ratio.detach()
    bounded = torch.zeros_like(response_mask) if bounded is None else bounded
    has_tokens = response_mask.any()
    # The appended infinity keeps the reductions defined for a batch without rows.
    infinity = ratio.new_full((1,), torch.inf)
    smallest = torch.cat([torch.where(response_mask, ratio, infinity).flatten(), infinity]).amin()
    largest = torch.cat([torch.where(response_mask, ratio, -infinity).flatten(), -infinity]).amax()
    return {
        "clipfrac": masked_mean(clipped.to(ratio.dtype), response_mask),
        "clipfrac_lower": masked_mean(bounded.to(ratio.dtype), response_mask),
        "approx_kl_k1": masked_mean(-log_ratio, response_mask),
        "approx_kl_k3": masked_mean(torch.expm1(log_ratio) - log_ratio, response_mask),
        "ratio_mean": masked_mean(ratio, response_mask),
        "ratio_min": torch.where(has_tokens, smallest, 1.0),
        "ratio_max": torch.where(has_tokens, largest, 1.0),
    }


def _check_clip_ranges(low: float, high: float, clip_ratio_c: float | None = None, *, max_low: float = 1.0) -> None:
    """Checks the ranges of a loss; `low` is at most 1 where it bounds a ratio, which is never negative."""
    if not 0 <= low <= max_low:
        raise ValueError(f"cliprange_low is {low}; it must be in [0, {max_low}]")
    if not high >= 0:
        raise ValueError(f"cliprange_high is {high}; it must not be negative")
    if clip_ratio_c is not None and not clip_ratio_c > 1:
        raise ValueError(f"clip_ratio_c is {clip_ratio_c}; it must be above 1, where the ratio starts")
