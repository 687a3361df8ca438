"""Choosing one token per row of logits, by inverse-CDF sampling or greedily, with the log-prob of the chosen token.

The log-prob is always that of the full softmax at the temperature; top_k and top_p restrict the choice only.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

_BLOCK_SIZE = 256
_CPU_CHUNK = 2**16


class Choice(NamedTuple):
    """The chosen token of each row.

    Attributes:
        tokens: (N,) int64.
        logprobs: (N,) float32 (float64 for float64 logits), in nats.
    """

    tokens: Tensor
    logprobs: Tensor


def choose_tokens(
    logits: Tensor, uniforms: Tensor | None, *, temperature: float, top_k: int | None = None, top_p: float | None = None
) -> Choice:
    """Returns a token for each row of `logits` (N, V), drawn by its uniform number, and its log-prob.

    A token is drawn with its probability under softmax(logits / temperature), renormalized over the tokens that top_k
    and then top_p keep (all tokens tied at the k-th place are kept). A token of probability zero is never drawn. If a
    row of logits contains a NaN, its log-prob is NaN. `uniforms` are (N,) float64 in (0, 1); None takes the
    most likely token.
    """
    weights = _weights(logits, temperature)
    blocks = _Blocks(weights)
    if uniforms is None:
        tokens = weights.argmax(dim=-1)
    elif top_k is None and top_p is None:
        tokens = blocks.inverse_cdf(uniforms)
    else:
        tokens = _Blocks(_filter_top_k_top_p(weights, top_k, top_p)).inverse_cdf(uniforms)
    chosen = weights.gather(1, tokens.unsqueeze(1)).squeeze(1)
    return Choice(tokens, (chosen.double().log() - blocks.total.log()).to(weights.dtype))


def _weights(logits: Tensor, temperature: float) -> Tensor:
    """Returns exp((logits - their maximum) / temperature), in float32 or float64.

    In place where possible, because on a CPU most of the time goes into moving bytes.
    """
    scores = logits if logits.dtype == torch.float64 else logits.float()
    if temperature != 1.0:
        scores = scores / temperature
    peak = scores.amax(dim=-1, keepdim=True)
    return (scores - peak if scores is logits else scores.sub_(peak)).exp_()


class _Blocks:
    """Rows of non-negative weights (N, V) in blocks of _BLOCK_SIZE, the last padded with zeros, and the float64 sums of
    each block and of each row (`total`, (N,)).

    With a single cumulative sum over 128k tokens, float32 leaves a quarter of the tokens without any mass, and float64
    writes four times the bytes that it reads. Two levels, over the blocks and then within one, read the weights once.
    """

    def __init__(self, weights: Tensor) -> None:
        self._weights = weights
        size = weights.size(1)
        rest = size % _BLOCK_SIZE
        sums = [_block_sums(weights[:, : size - rest].unflatten(1, (-1, _BLOCK_SIZE)))] if size > rest else []
        if rest:
            # Only the last block is padded; padding whole rows would copy them.
            last = F.pad(weights[:, size - rest :], (0, _BLOCK_SIZE - rest))
            sums.append(last.sum(dim=-1, keepdim=True, dtype=torch.float64))
        self._sums = torch.cat(sums, dim=1)
        self.total = self._sums.sum(dim=-1)

    def inverse_cdf(self, uniforms: Tensor) -> Tensor:
        """Returns (N,) int64: the first index at which a row's cumulative sum exceeds `uniforms` (N,) of its total."""
        sums = self._sums.cumsum(dim=-1)
        block, target = _first_exceeding(sums, uniforms * self.total)
        before = (sums - self._sums).gather(1, block.unsqueeze(1)).squeeze(1)
        size = self._weights.size(1)
        columns = (block * _BLOCK_SIZE).unsqueeze(1) + torch.arange(_BLOCK_SIZE, device=block.device)
        weights = self._weights.gather(1, columns.clamp_max(size - 1)).where(columns < size, 0.0)
        within = weights.double().cumsum(dim=-1)
        return block * _BLOCK_SIZE + _first_exceeding(within, (target - before).clamp_min(0.0))[0]


def _block_sums(blocks: Tensor) -> Tensor:
    """Returns the float64 sums (N, blocks) of `blocks` (N, blocks, _BLOCK_SIZE)."""
    # torch's sum first copies its whole input to float64. On a CPU that is slow if the copy exceeds the cache; on CUDA
    # more kernels would cost more.
    if blocks.device.type != "cpu":
        return blocks.sum(dim=-1, dtype=torch.float64)
    chunk = max(1, _CPU_CHUNK // (len(blocks) * _BLOCK_SIZE))
    parts = [part.sum(dim=-1, dtype=torch.float64) for part in blocks.split(chunk, dim=1)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _first_exceeding(sums: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the first index (N,) at which cumulative sums (N, M) exceed `target` (N,), and the target used."""
    # Rounding may raise the target to the total, which no sum exceeds. The product is the largest float64 below the
    # total, for which the last index with mass is found.
    target = torch.minimum(target, sums[:, -1] * (1 - 2**-53))
    return (sums > target.unsqueeze(1)).int().argmax(dim=-1), target


def _filter_top_k_top_p(weights: Tensor, top_k: int | None, top_p: float | None) -> Tensor:
    """Returns `weights` with zero for every token that top_k, then top_p, exclude."""
    if top_k is not None and top_k < weights.size(1):
        kth = weights.topk(top_k, dim=-1).values[:, -1:]
        weights = weights.where(weights >= kth, 0.0)
    if top_p is not None and top_p < 1.0:
        ordered, order = weights.sort(dim=-1, descending=True, stable=True)
        sums = ordered.cumsum(dim=-1, dtype=torch.float64)
        kept = sums - ordered < top_p * sums[:, -1:]
        weights = weights.where(torch.zeros_like(kept).scatter(1, order, kept), 0.0)
    return weights
