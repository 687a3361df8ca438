"""Losses of critics that learn the distribution of the return, and the values read from it: the mean, or the mean of a
lower or upper tail.

A distribution is either categorical (probabilities of fixed atoms, C51, or of bins, HL-Gauss) or a row of quantiles
(QR-DQN, IQN). Returns and values are in reward units. The networks, and the sampling of IQN's taus, are in
`models.critic_heads`.

The losses share these arguments:

- `logits` or `quantiles` (B, R, N): the predictions, which receive the gradient;
- `returns` (B, R): targets, not whitened;
- `response_mask` (B, R) bool, True = a token the policy chose;
- `loss_agg_mode` and `denominator`: see `aggregate_loss`.

They return the loss and these stats, over the masked tokens of the call, 0 if there are none:

- `error`: the mean squared difference between the predicted mean and the (unclamped) return;
- `vpred`: the average of the predicted means;
- `edge_mass` (categorical): the predicted probability of the first and the last atom or bin together; if it is large,
  the support may be too narrow;
- `outside_support` (categorical): the fraction of returns that were clamped.

They do not clip against old values as `value_loss` does: the gradients of the cross-entropy and of the Huber loss are
bounded. Sizes, supports, levels and modes that are not allowed, and shapes that differ, raise a `ValueError`.
"""

import math
from typing import get_args

import torch
from torch import Tensor
from torch.types import Device

from alpaca_ppo.functional.masked import Loss, aggregate_loss, at_least_float32, masked_mean, zero_outside
from alpaca_ppo.registry import CVaRTail


def c51_atoms(
    num_atoms: int, *, v_min: float, v_max: float, dtype: torch.dtype = torch.float32, device: Device = None
) -> Tensor:
    """The support of C51, (num_atoms,): at least two evenly spaced returns from v_min to v_max inclusive."""
    if num_atoms < 2:
        raise ValueError(f"num_atoms is {num_atoms}; it must be at least 2, one atom at v_min and one at v_max")
    _check_support(v_min, v_max)
    return torch.linspace(v_min, v_max, num_atoms, dtype=dtype, device=device)


def c51_project(returns: Tensor, atoms: Tensor) -> Tensor:
    """The categorical distribution on `atoms` that represents each return (arXiv:1707.06887, equation 7, with the whole
    return in place of the Bellman update of each atom).

    A return is clamped to [first atom, last atom]. Its mass of 1 is split between the two neighbouring atoms by
    distance, the nearer atom getting more, so the mean of the distribution is the clamped return.

    `returns` (...) become (..., num_atoms), rows that sum to 1; `atoms` (num_atoms,) are ascending, at least two.
    """
    if atoms.dim() != 1 or atoms.numel() < 2:
        raise ValueError(f"atoms has shape {tuple(atoms.shape)}; pass a vector of at least two, such as c51_atoms()")
    returns, atoms = at_least_float32(returns), at_least_float32(atoms)
    dtype = torch.promote_types(returns.dtype, atoms.dtype)
    atoms = atoms.to(dtype).contiguous()
    returns = returns.to(dtype).clamp(atoms[0], atoms[-1]).contiguous()
    # A return on the first atom has index 0 and no lower neighbour, a NaN the index past the end: clamp both.
    upper = torch.searchsorted(atoms, returns).clamp(1, atoms.numel() - 1)
    lower = upper - 1
    share = (returns - atoms[lower]) / (atoms[upper] - atoms[lower])
    probs = torch.zeros(*returns.shape, atoms.numel(), dtype=dtype, device=returns.device)
    probs = probs.scatter(-1, lower.unsqueeze(-1), (1 - share).unsqueeze(-1))
    return probs.scatter(-1, upper.unsqueeze(-1), share.unsqueeze(-1))


def c51_loss(
    logits: Tensor,
    returns: Tensor,
    response_mask: Tensor,
    *,
    v_min: float,
    v_max: float,
    loss_agg_mode: str = "token-mean",
    denominator: Tensor | float | None = None,
) -> Loss:
    """The cross-entropy, in nats, between each projected return and the predicted categorical distribution
    (arXiv:1707.06887, algorithm 1):

        loss = aggregate(-sum_i c51_project(R)_i * log softmax(logits)_i)

    over `c51_atoms(num_atoms, v_min=v_min, v_max=v_max)`.
    """
    returns = zero_outside(returns, response_mask).detach()
    log_probs = _zero_rows_outside(logits, response_mask, "logits").log_softmax(dim=-1)
    atoms = c51_atoms(logits.size(-1), v_min=v_min, v_max=v_max, dtype=log_probs.dtype, device=logits.device)
    losses = -(c51_project(returns, atoms) * log_probs).sum(dim=-1)
    stats = _categorical_stats(log_probs, atoms, returns, response_mask, v_min=v_min, v_max=v_max)
    return Loss(aggregate_loss(losses, response_mask, loss_agg_mode, denominator=denominator), stats)


def hl_gauss_centres(
    num_bins: int, *, v_min: float, v_max: float, dtype: torch.dtype = torch.float32, device: Device = None
) -> Tensor:
    """(num_bins,): the centres of at least two bins of equal width that cover [v_min, v_max], ascending."""
    edges = _bin_edges(num_bins, v_min=v_min, v_max=v_max, dtype=dtype, device=device)
    return (edges[:-1] + edges[1:]) / 2


def hl_gauss_project(returns: Tensor, *, v_min: float, v_max: float, num_bins: int, sigma: float) -> Tensor:
    """The mass that a normal distribution around each return has in each bin (HL-Gauss, arXiv:1806.04613; here as in
    arXiv:2403.03950):

        p_i = (cdf(edge_(i+1)) - cdf(edge_i)) / (cdf(v_max) - cdf(v_min)),    cdf of N(clamp(R, v_min, v_max), sigma)

    Where the support ends, the normal distribution is cut off and renormalised, so within about two sigma of an edge
    the mean of the projection lies further inside than the return (0.8 sigma at the edge itself): choose a support that
    is wider than the returns by that much. The paper's sigma is 0.75 bin widths.

    `returns` (...) become (..., num_bins), rows that sum to 1, over bins of equal width from v_min to v_max.
    """
    if not (sigma > 0 and math.isfinite(sigma)):
        raise ValueError(f"sigma is {sigma}; it must be positive and finite, such as 0.75 * (v_max - v_min) / num_bins")
    returns = at_least_float32(returns)
    edges = _bin_edges(num_bins, v_min=v_min, v_max=v_max, dtype=returns.dtype, device=returns.device)
    cdf: Tensor = torch.special.ndtr((edges - returns.clamp(v_min, v_max).unsqueeze(-1)) / sigma)
    return cdf.diff(dim=-1) / (cdf[..., -1:] - cdf[..., :1])


def hl_gauss_loss(
    logits: Tensor,
    returns: Tensor,
    response_mask: Tensor,
    *,
    v_min: float,
    v_max: float,
    sigma: float,
    loss_agg_mode: str = "token-mean",
    denominator: Tensor | float | None = None,
) -> Loss:
    """The cross-entropy, in nats, between each smoothed return and the predicted probabilities of the bins
    (HL-Gauss, arXiv:2403.03950):

        loss = aggregate(-sum_i hl_gauss_project(R)_i * log softmax(logits)_i)

    over bins of equal width from v_min to v_max.
    """
    returns = zero_outside(returns, response_mask).detach()
    log_probs = _zero_rows_outside(logits, response_mask, "logits").log_softmax(dim=-1)
    targets = hl_gauss_project(returns, v_min=v_min, v_max=v_max, num_bins=logits.size(-1), sigma=sigma)
    losses = -(targets * log_probs).sum(dim=-1)
    centres = hl_gauss_centres(logits.size(-1), v_min=v_min, v_max=v_max, dtype=log_probs.dtype, device=logits.device)
    stats = _categorical_stats(log_probs, centres, returns, response_mask, v_min=v_min, v_max=v_max)
    return Loss(aggregate_loss(losses, response_mask, loss_agg_mode, denominator=denominator), stats)


def hl_gauss_value(logits: Tensor, *, v_min: float, v_max: float) -> Tensor:
    """The mean (...) of the distribution that `logits` (..., num_bins) predict: the probabilities of the bins times
    their centres.
    """
    probs = at_least_float32(logits).softmax(dim=-1)
    return probs @ hl_gauss_centres(probs.size(-1), v_min=v_min, v_max=v_max, dtype=probs.dtype, device=probs.device)


def quantile_midpoints(num_quantiles: int, *, dtype: torch.dtype = torch.float32, device: Device = None) -> Tensor:
    """The levels tau_i = (i + 1/2) / K, i = 0 .. K - 1, at which K quantiles of equal mass approximate a distribution
    best (arXiv:1710.10044, lemma 2), (num_quantiles,).
    """
    if num_quantiles < 1:
        raise ValueError(f"num_quantiles is {num_quantiles}; it must be at least 1")
    return (torch.arange(num_quantiles, dtype=dtype, device=device) + 0.5) / num_quantiles


def quantile_huber_loss(
    quantiles: Tensor,
    returns: Tensor,
    taus: Tensor,
    response_mask: Tensor,
    *,
    kappa: float = 1.0,
    loss_agg_mode: str = "token-mean",
    denominator: Tensor | float | None = None,
) -> Loss:
    """The quantile Huber loss: quantile regression with a quadratic zone of half-width kappa (arXiv:1710.10044,
    equation 10). With d = R - quantile_i, and the mean over i:

        loss = aggregate(mean(|tau_i - 1(d < 0)| * huber(d)))
        huber(d) = 0.5 * d^2 where |d| <= kappa, kappa * (|d| - 0.5 * kappa) elsewhere

    The paper sums over the quantiles; the mean makes the scale of the loss independent of K. As in that paper, and
    unlike arXiv:1806.06923, equation 3, the Huber loss is not divided by kappa. In the quadratic zone the minimum is an
    expectile: unless kappa is small compared with the spread of the returns, the quantiles are biased towards the mean.

    Args:
        taus: (K,) or (B, R, K), the levels in (0, 1) of `quantiles` (B, R, K): `quantile_midpoints`, or for IQN uniform
            samples, with which `vpred` is an estimate; detached.
        kappa: in units of the return, positive.
    """
    if not kappa > 0:
        raise ValueError(f"kappa is {kappa}; it must be positive (a small one approaches plain quantile regression)")
    if taus.shape not in (quantiles.shape, quantiles.shape[-1:]):
        raise ValueError(f"taus has shape {tuple(taus.shape)}, quantiles {tuple(quantiles.shape)}; pass that or (K,)")
    returns = zero_outside(returns, response_mask).detach()
    quantiles = _zero_rows_outside(quantiles, response_mask, "quantiles")
    if taus.dim() > 1:
        taus = _zero_rows_outside(taus, response_mask, "taus")
    differences = returns.unsqueeze(-1) - quantiles
    distances = differences.abs()
    inside = distances.clamp(max=kappa)
    # Both branches of the Huber loss in one: 0.5 * d^2 where inside = |d|, kappa * (|d| - 0.5 * kappa) elsewhere.
    huber = inside * (distances - 0.5 * inside)
    weights = (taus.detach().to(differences) - (differences < 0).to(differences)).abs()
    losses = (weights * huber).mean(dim=-1)
    vpreds = quantiles.detach().mean(dim=-1)
    stats = {
        "error": masked_mean((vpreds - returns).square(), response_mask),
        "vpred": masked_mean(vpreds, response_mask),
    }
    return Loss(aggregate_loss(losses, response_mask, loss_agg_mode, denominator=denominator), stats)


def cvar_from_quantiles(quantiles: Tensor, *, alpha: float, tail: CVaRTail = "lower") -> Tensor:
    """The mean (...) of the lower or upper `alpha` tail (CVaR) of the distribution that K quantiles at
    `quantile_midpoints` represent; for alpha = 1 the mean of the distribution.

    Each quantile has the mass 1/K; at the boundary of the tail, only the part of it inside the tail counts:

        cvar = sum_i min(1/K, max(0, alpha - i/K)) * quantile_(i) / alpha,    quantile_(0) <= ... <= quantile_(K-1)

    and for the upper tail with quantile_(0) >= ... >= quantile_(K-1).

    `quantiles` (..., K) are sorted first, because the loss does not keep learned quantiles in order. Sorting a quantile
    curve that crosses brings it closer to the true one (arXiv:0704.3649). `alpha` is in (0, 1].
    """
    _check_tail(alpha, tail)
    ordered = at_least_float32(quantiles).sort(dim=-1, descending=tail == "upper").values
    count = alpha * ordered.size(-1)
    # In units of quantiles rather than mass, so that alpha = 1 gives every quantile exactly the same weight.
    weights = (count - torch.arange(ordered.size(-1), dtype=ordered.dtype, device=ordered.device)).clamp(0, 1)
    return (ordered * weights).sum(dim=-1) / count


def cvar_from_categorical(probs: Tensor, atoms: Tensor, *, alpha: float, tail: CVaRTail = "lower") -> Tensor:
    """The mean (...) of the lower or upper `alpha` tail (CVaR) of a categorical distribution.

    Of the atom at the boundary of the tail only the mass inside the tail counts, so the result is continuous in alpha
    (Rockafellar and Uryasev, "Conditional value-at-risk for general loss distributions", 2002, proposition 8):

        cvar = sum_i min(p_i, max(0, alpha - (p_0 + ... + p_(i-1)))) * atom_i / alpha

    and for the upper tail counted from the last atom down. The centres of HL-Gauss's bins are atoms too.

    `probs` (..., num_atoms) are rows that sum to 1, `atoms` (num_atoms,) ascending, and `alpha` is in (0, 1].
    """
    _check_tail(alpha, tail)
    if atoms.shape != probs.shape[-1:]:
        raise ValueError(f"atoms has shape {tuple(atoms.shape)}, probs {tuple(probs.shape)}; pass one for each entry")
    probs = at_least_float32(probs)
    if tail == "upper":
        probs, atoms = probs.flip(-1), atoms.flip(-1)
    mass_before = torch.nn.functional.pad(probs[..., :-1].cumsum(dim=-1), (1, 0))
    masses = torch.minimum(probs, (alpha - mass_before).clamp_min(0))
    return (masses * at_least_float32(atoms)).sum(dim=-1) / alpha


def _check_tail(alpha: float, tail: str) -> None:
    if not 0 < alpha <= 1:
        raise ValueError(f"alpha is {alpha}; the tail's probability must be in (0, 1], where 1 gives the mean")
    if tail not in get_args(CVaRTail):
        raise ValueError(f"tail is {tail!r}; choose one of {', '.join(get_args(CVaRTail))}")


def _bin_edges(num_bins: int, *, v_min: float, v_max: float, dtype: torch.dtype, device: Device) -> Tensor:
    """(num_bins + 1,): the edges of bins of equal width from v_min to v_max."""
    if num_bins < 2:
        raise ValueError(f"num_bins is {num_bins}; it must be at least 2, or there is nothing to predict")
    _check_support(v_min, v_max)
    return torch.linspace(v_min, v_max, num_bins + 1, dtype=dtype, device=device)


def _check_support(v_min: float, v_max: float) -> None:
    if not v_min < v_max:
        raise ValueError(f"v_min ({v_min}) must be below v_max ({v_max}); the returns should lie between them")


def _categorical_stats(
    log_probs: Tensor, atoms: Tensor, returns: Tensor, response_mask: Tensor, *, v_min: float, v_max: float
) -> dict[str, Tensor]:
    """`log_probs` (B, R, N) are those of `atoms` (N,), or of bins with these centres."""
    probs = log_probs.detach().exp()
    vpreds = (probs * atoms).sum(dim=-1)
    outside = (returns < v_min) | (returns > v_max)
    return {
        "edge_mass": masked_mean(probs[..., 0] + probs[..., -1], response_mask),
        "outside_support": masked_mean(outside.to(probs.dtype), response_mask),
        "error": masked_mean((vpreds - returns).square(), response_mask),
        "vpred": masked_mean(vpreds, response_mask),
    }


def _zero_rows_outside(values: Tensor, mask: Tensor, name: str) -> Tensor:
    """`zero_outside` for (B, R, N) values and a (B, R) mask."""
    if values.shape[:-1] != mask.shape:
        raise ValueError(f"mask has shape {tuple(mask.shape)}, {name} {tuple(values.shape)}; pass (B, R) and (B, R, N)")
    return zero_outside(values, mask.unsqueeze(-1).expand_as(values))
