"""One token from one row of logits: inverse distribution function, greedy choice, and the log-prob of what was chosen.

The log-prob is always that of the full softmax at the temperature. top_k and top_p narrow the choice, for evaluation
only.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

_BLOCK = 256


class Choice(NamedTuple):
    """The chosen token of each row."""

    tokens: Tensor
    """(N,) int64."""
    logprobs: Tensor
    """(N,) nats, float32; float64 where the logits are."""


def choose_tokens(
    logits: Tensor,
    uniforms: Tensor | None,
    *,
    temperature: float,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Choice:
    """The token of each row at its uniform number, or the most likely one, and its log-prob at `temperature`.

    A token is chosen with the probability that the softmax of `logits / temperature` gives it, renormalised over what
    top_k and then top_p leave (ties at the k-th place all stay). A token of probability zero is never chosen. A row
    with a NaN among its logits gets the log-prob NaN.

    Args:
        logits: (N, V); computed in float32, or float64 where they are.
        uniforms: (N,) float64 in (0, 1); None takes the most likely token.
        temperature: divides the logits; > 0.
        top_k: only the k most likely tokens.
        top_p: only the most likely tokens that together reach this probability; in (0, 1].
    """
    scores = (logits if logits.dtype == torch.float64 else logits.float()) / temperature
    weights = scores.sub_(scores.amax(dim=-1, keepdim=True)).exp_()
    blocks = _Blocks(weights)
    if uniforms is None:
        tokens = weights.argmax(dim=-1)
    elif top_k is None and top_p is None:
        tokens = blocks.inverse_cdf(uniforms)
    else:
        tokens = _Blocks(_narrow(weights, top_k, top_p)).inverse_cdf(uniforms)
    chosen = weights.gather(1, tokens.unsqueeze(1)).squeeze(1)
    return Choice(tokens, (chosen.double().log() - blocks.total().log()).to(weights.dtype))


class _Blocks:
    """Rows of non-negative weights (N, V) in runs of _BLOCK, and the float64 sum of each run.

    Over 128k tokens a running sum in float32 gives a quarter of them no mass at all, and one in float64 writes four
    times what it reads. In two levels, over the runs and then within one of them, it costs a single reading.
    """

    def __init__(self, weights: Tensor) -> None:
        self._runs = F.pad(weights, (0, -weights.size(1) % _BLOCK)).unflatten(1, (-1, _BLOCK))
        self._sums = self._runs.sum(dim=-1, dtype=torch.float64)

    def total(self) -> Tensor:
        """The sum of each row; (N,) float64."""
        return self._sums.sum(dim=-1)

    def inverse_cdf(self, uniforms: Tensor) -> Tensor:
        """The index at which each row's running sum first exceeds `uniforms` (N,) of its total; (N,) int64."""
        run, rest = _first_exceeding(self._sums, uniforms * self.total())
        inside = self._runs[torch.arange(len(run), device=run.device), run].double()
        return run * _BLOCK + _first_exceeding(inside, rest)[0]


def _first_exceeding(masses: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The first index (N,) whose running sum exceeds `target` (N,), and how much of the target lies in that index."""
    sums = masses.cumsum(dim=-1)
    total = sums[:, -1]
    # Rounding may lift the target to the total, which no sum exceeds; just below it the last index with mass answers.
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    index = (sums > target.unsqueeze(1)).int().argmax(dim=-1)
    before = (sums - masses).gather(1, index.unsqueeze(1)).squeeze(1)
    return index, (target - before).clamp_min(0.0)


def _narrow(weights: Tensor, top_k: int | None, top_p: float | None) -> Tensor:
    """`weights` with zero for every token that top_k, then top_p, leave out."""
    if top_k is not None and top_k < weights.size(1):
        kth = weights.topk(top_k, dim=-1).values[:, -1:]
        weights = weights.where(weights >= kth, 0.0)
    if top_p is not None and top_p < 1.0:
        ordered, order = weights.sort(dim=-1, descending=True, stable=True)
        sums = ordered.cumsum(dim=-1, dtype=torch.float64)
        kept = sums - ordered < top_p * sums[:, -1:]
        weights = weights.where(torch.zeros_like(kept).scatter(1, order, kept), 0.0)
    return weights
