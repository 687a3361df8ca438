"""Means, variances and loss sums over the True entries of a mask.

A mask has the shape of its values (else `ValueError`: a mask that is broadcast would give wrong counts), and True =
counts. The True entries are selected with `torch.where` before any arithmetic, so a NaN elsewhere changes neither a
result nor a gradient.
"""

from typing import NamedTuple, get_args

import torch
from torch import Tensor

from alpaca_ppo.registry import LossAggMode

LOSS_AGG_MODES: tuple[str, ...] = get_args(LossAggMode)

WHITEN_EPSILON = 1e-8
# In units of `torch.finfo.eps`: the relative difference up to which two numbers count as equal.
ROUNDING_ERROR = 4.0


class Loss(NamedTuple):
    """A scalar loss and detached statistics.

    Attributes:
        loss: scalar, attached to the graph.
        stats: detached scalars, over the masked tokens of this call.
    """

    loss: Tensor
    stats: dict[str, Tensor]


def at_least_float32(values: Tensor) -> Tensor:
    """`values` as float32, or unchanged if they are float64 already."""
    return values if values.dtype == torch.float64 else values.float()


def zero_outside(values: Tensor, mask: Tensor) -> Tensor:
    """`values` where `mask` is True, 0 elsewhere, in float32 or wider. The gradient elsewhere is 0, even of a NaN."""
    if values.shape != mask.shape:
        raise ValueError(f"mask has shape {tuple(mask.shape)}, but values {tuple(values.shape)}; pass that shape")
    values = at_least_float32(values)
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def check_row_values(name: str, values: Tensor, response_mask: Tensor) -> None:
    """Raises a `ValueError` unless `values`, called `name`, is (B,) and the mask (B, R)."""
    if response_mask.dim() != 2 or values.shape != response_mask.shape[:1]:
        problem = f"{name} has shape {tuple(values.shape)}, response_mask {tuple(response_mask.shape)}"
        raise ValueError(f"{problem}; pass (B,) and (B, R)")


def masked_mean(values: Tensor, mask: Tensor, dim: int | tuple[int, ...] | None = None) -> Tensor:
    """The mean of `values` where `mask` is True, over `dim` (default: all); 0 if no entry is True."""
    dims = tuple(range(values.dim())) if dim is None else dim
    # A count of 0 becomes 1: the sum is 0 there, and the NaN of 0 / 0 would spread to an average over micro-batches.
    return zero_outside(values, mask).sum(dim=dims) / mask.sum(dim=dims).clamp_min(1)


def rounding_error(magnitude: Tensor) -> Tensor:
    """The difference up to which numbers of `magnitude` count as equal, in its dtype (at 1000, 5e-4 in float32)."""
    return ROUNDING_ERROR * torch.finfo(magnitude.dtype).eps * magnitude.detach()


def masked_var(values: Tensor, mask: Tensor, *, unbiased: bool = True) -> Tensor:
    """The variance of `values` where `mask` is True, a scalar; 0 for fewer than two entries, and exactly 0 for entries
    that are equal up to `rounding_error`. `unbiased` divides by the number of True entries minus one (Bessel's
    correction) instead of by that number.
    """
    _, deviations = _centred(values, mask)
    return deviations.square().sum() / (mask.sum() - int(unbiased)).clamp_min(1)


def masked_whiten(values: Tensor, mask: Tensor, *, keep_mean: bool = False) -> Tensor:
    """`(values - mean) * rsqrt(var + 1e-8)` where `mask` is True, 0 elsewhere. Mean and unbiased variance are those of
    the True entries. If these are equal up to `rounding_error`, the result is exactly 0. `keep_mean` adds the mean
    back, so that only the scale changes.
    """
    mean, deviations = _centred(values, mask)
    # Divided by the largest deviation, since the squares of values above 1e19 overflow float32.
    unit = _largest(deviations).clamp_min(1)
    scaled = deviations / unit
    variance = scaled.square().sum() / (mask.sum() - 1).clamp_min(1)
    whitened = scaled * torch.rsqrt(variance + WHITEN_EPSILON / unit.square())
    return zero_outside(whitened + mean, mask) if keep_mean else whitened


def _centred(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of the True entries, and the deviations of `values` from it: 0 outside the mask, and everywhere if the
    entries are equal up to `rounding_error`.
    """
    values = zero_outside(values, mask)
    mean = masked_mean(values, mask)
    deviations = zero_outside(values - mean, mask)
    # In float32, the rounding error of the mean of thousands of large values can exceed their differences. The
    # deviations are small, so their mean is accurate, and centring a second time removes the error.
    correction = masked_mean(deviations, mask)
    deviations = zero_outside(deviations - correction, mask)
    equal = _largest(deviations) <= rounding_error(_largest(values))
    return mean + correction, torch.where(equal, 0.0, deviations)


def _largest(values: Tensor) -> Tensor:
    """The largest absolute value, a detached scalar; 0 of an empty tensor."""
    magnitudes = values.detach().abs().flatten()
    return torch.cat([magnitudes, magnitudes.new_zeros(1)]).amax()


def aggregate_loss(losses: Tensor, mask: Tensor, mode: str, *, denominator: Tensor | float | None = None) -> Tensor:
    """The scalar loss of per-token losses:

    - `token-mean`: sum over tokens / tokens;
    - `seq-mean-token-sum`: sum over tokens / sequences;
    - `seq-mean-token-mean`: sum over sequences of their token means / sequences;
    - `seq-mean-token-sum-norm`: sum over tokens / padded length R / sequences (Dr. GRPO, arXiv:2503.20783).

    Rows of `mask` (B, R) that are empty do not count as sequences. If all are, the result is 0, still attached to the
    graph of `losses`.

    `denominator` replaces the count of this call by that of the whole optimizer step: tokens (`token-mean`) or
    sequences (`seq-mean-*`). The results of its micro-batches then add up to the result of its whole batch, if all are
    padded to the same length.
    """
    if mode not in LOSS_AGG_MODES:
        raise ValueError(f"loss_agg_mode is {mode!r}; it must be one of {', '.join(LOSS_AGG_MODES)}")
    selected = zero_outside(losses, mask)
    if isinstance(denominator, Tensor):
        denominator = denominator.to(selected)
    tokens = mask.sum(dim=-1)
    if mode == "token-mean":
        return selected.sum() / (tokens.sum().clamp_min(1) if denominator is None else denominator)
    per_sequence = selected.sum(dim=-1)
    if mode == "seq-mean-token-mean":
        per_sequence = per_sequence / tokens.clamp_min(1)
    elif mode == "seq-mean-token-sum-norm":
        per_sequence = per_sequence / max(losses.size(-1), 1)
    return per_sequence.sum() / ((tokens > 0).sum().clamp_min(1) if denominator is None else denominator)
