"""The regression loss of a scalar critic. The losses of distributional critics are in `distributional`."""

import torch
from torch import Tensor

from alpaca_ppo.functional.masked import Loss, aggregate_loss, masked_mean, zero_outside


def value_loss(
    vpreds: Tensor,
    old_values: Tensor,
    returns: Tensor,
    response_mask: Tensor,
    *,
    cliprange_value: float | None = None,
    loss_agg_mode: str = "token-mean",
    denominator: Tensor | float | None = None,
) -> Loss:
    """Half the squared error to the returns, the larger one of the raw and the clipped prediction:

        loss = 0.5 * aggregate(max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2))

    Clipping follows PPO2 of OpenAI Baselines and is not described in a paper.

    Args:
        vpreds: (B, R), the critic's predictions, which receive the gradient.
        old_values: (B, R), its predictions at the time of the rollout.
        returns: (B, R), targets, not whitened.
        response_mask: (B, R) bool, True = a token the policy chose.
        cliprange_value: c, positive: how far a prediction can move from the old one before the clipped error stops
            changing; None = no clipping.
        loss_agg_mode: as for `denominator`, see `aggregate_loss`.

    Returns:
        The loss, and the stats `clipfrac` (fraction of tokens whose clipped error is the larger), `error` (mean squared
        error before clipping) and `vpred` (mean prediction), over the masked tokens of this call.
    """
    if cliprange_value is not None and not cliprange_value > 0:
        raise ValueError(f"cliprange_value is {cliprange_value}; it must be positive, or None for no clipping")
    vpreds = zero_outside(vpreds, response_mask)
    old_values = zero_outside(old_values, response_mask).detach()
    returns = zero_outside(returns, response_mask).detach()
    errors = losses = (vpreds - returns).square()
    if cliprange_value is not None:
        clipped = vpreds.clamp(old_values - cliprange_value, old_values + cliprange_value)
        losses = torch.maximum(errors, (clipped - returns).square())
    stats = {
        "clipfrac": masked_mean((losses > errors).to(errors.dtype), response_mask),
        "error": masked_mean(errors.detach(), response_mask),
        "vpred": masked_mean(vpreds.detach(), response_mask),
    }
    return Loss(0.5 * aggregate_loss(losses, response_mask, loss_agg_mode, denominator=denominator), stats)
