"""Means, variances and loss sums over the True entries of a mask.

Every function selects the True entries with `torch.where` before any arithmetic, so a NaN elsewhere changes neither a
result nor a gradient. Nothing here communicates between processes: if a sum must be divided by a count over the
whole optimizer step, the caller passes that count as `denominator`.
"""

from typing import NamedTuple, get_args

import torch
from torch import Tensor

from alpaca_ppo.registry import LossAggMode

LOSS_AGG_MODES: tuple[str, ...] = get_args(LossAggMode)

WHITEN_EPSILON = 1e-8


class Loss(NamedTuple):
    """A scalar loss and detached statistics."""

    loss: Tensor
    """Scalar, attached to the graph."""
    stats: dict[str, Tensor]
    """Detached scalars, over the masked tokens of this call."""


def at_least_float32(values: Tensor) -> Tensor:
    """`values` as float32, or unchanged if they are float64 already."""
    return values if values.dtype == torch.float64 else values.float()


def zero_outside(values: Tensor, mask: Tensor) -> Tensor:
    """`values` where `mask` is True and 0 elsewhere, in float32 or wider. The gradient elsewhere is 0 too, even of a
    NaN.

    Args:
        values: any shape and dtype.
        mask: bool of the same shape, True = counts.

    Raises:
        ValueError: when the two shapes differ. A mask that is broadcast would give wrong counts.
    """
    if values.shape != mask.shape:
        raise ValueError(
            f"mask has shape {tuple(mask.shape)} but values has {tuple(values.shape)}; "
            "pass a mask with one entry for each value"
        )
    values = at_least_float32(values)
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def masked_mean(values: Tensor, mask: Tensor, dim: int | tuple[int, ...] | None = None) -> Tensor:
    """The mean of `values` where `mask` is True, over `dim` (default: all); 0 if no entry is True.

    Args:
        values: any shape.
        mask: bool of the same shape, True = counts.
        dim: dimension or dimensions to reduce.

    Raises:
        ValueError: when the two shapes differ.
    """
    dims = tuple(range(values.dim())) if dim is None else dim
    # A count of 0 becomes 1: the sum is 0 there, and the NaN of 0 / 0 would spread to an average over micro-batches.
    return zero_outside(values, mask).sum(dim=dims) / mask.sum(dim=dims).clamp_min(1)


def masked_var(values: Tensor, mask: Tensor, *, unbiased: bool = True) -> Tensor:
    """The variance of `values` where `mask` is True, a scalar; 0 for fewer than two entries.

    Args:
        values: any shape.
        mask: bool of the same shape, True = counts.
        unbiased: divide by the number of True entries minus one (Bessel's correction) instead of by that number.

    Raises:
        ValueError: when the two shapes differ.
    """
    deviations = zero_outside(values - masked_mean(values, mask), mask)
    return deviations.square().sum() / (mask.sum() - int(unbiased)).clamp_min(1)


def masked_whiten(values: Tensor, mask: Tensor, *, keep_mean: bool = False) -> Tensor:
    """`(values - mean) * rsqrt(var + 1e-8)` where `mask` is True, 0 elsewhere. Mean and unbiased variance are those of
    the True entries.

    Args:
        values: any shape.
        mask: bool of the same shape, True = counts.
        keep_mean: add the mean back: only the scale changes.

    Raises:
        ValueError: when the two shapes differ.
    """
    # Zeroed before the product: 0 * NaN in its backward pass would reach the mean and, through it, every entry.
    values = zero_outside(values, mask)
    mean = masked_mean(values, mask)
    whitened = (values - mean) * torch.rsqrt(masked_var(values, mask) + WHITEN_EPSILON)
    return zero_outside(whitened + mean if keep_mean else whitened, mask)


def aggregate_loss(losses: Tensor, mask: Tensor, mode: str, *, denominator: Tensor | float | None = None) -> Tensor:
    """The scalar loss of per-token losses:

    - `token-mean`: sum over tokens / tokens;
    - `seq-mean-token-sum`: sum over tokens / sequences;
    - `seq-mean-token-mean`: sum over sequences of their token means / sequences;
    - `seq-mean-token-sum-norm`: sum over tokens / padded length R / sequences (Dr. GRPO, arXiv:2503.20783).

    Rows with an empty mask do not count as sequences. If all rows are empty, the result is 0, still attached to the
    graph of `losses`.

    Args:
        losses: (B, R), in any unit.
        mask: (B, R) bool, True = counts.
        mode: one of the above.
        denominator: the number of tokens (`token-mean`) or sequences (`seq-mean-*`) in the whole optimizer-step batch,
            which replaces the count of this call: the results of the batch's parts then add up to the result of the
            whole, if all of them are padded to the same length.

    Raises:
        ValueError: for an unknown mode, and when the two shapes differ.
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
