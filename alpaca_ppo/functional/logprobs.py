"""Log-probabilities of given tokens, and entropies: from logits, or from hidden states, a chunk of tokens at a time.

Both are in nats, and in float32 or wider. Temperatures must be positive, and one temperature serves sampling, policy,
old policy and reference. `torch.nn.functional.linear_cross_entropy`, chunked since torch 2.13, is not used: it has no
entropies, no temperature and no transform of the logits, it returns bfloat16 log-probabilities for bfloat16 inputs (0.1
nats off), and it is not clearly faster or smaller (tests/tools/benchmarks/chunked_logprobs.py).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from alpaca_ppo.functional.masked import at_least_float32

# An elementwise, differentiable function of raw logits.
LogitTransform = Callable[[Tensor], Tensor]

# Replaces -inf, whose product with a probability of 0 would be NaN; its exp is 0 even in float64.
LOWEST_LOGPROB = -1e4


class ChunkedLogprobs(NamedTuple):
    """The result of `chunked_logprobs`, each in the shape of the labels."""

    logprobs: Tensor
    entropies: Tensor | None  # None with `with_entropy=False`


def token_logprobs(logits: Tensor, labels: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Log-probability (...) of each of the `labels` (...), int64 in [0, V), under softmax(logits / temperature), of
    `logits` (..., V).
    """
    _check_temperature(temperature)
    _check_labels("logits", logits, labels)
    scaled = at_least_float32(logits) / temperature
    return scaled.gather(-1, labels.unsqueeze(-1)).squeeze(-1) - scaled.logsumexp(dim=-1)


def entropy_from_logits(logits: Tensor) -> Tensor:
    """Entropy (...) of softmax(logits) over the last dimension of `logits` (..., V).

    Divide the logits by the temperature first. A logit of -inf, a token that cannot occur, contributes 0.
    """
    logprobs = at_least_float32(logits).log_softmax(dim=-1).clamp_min(LOWEST_LOGPROB)
    return -(logprobs.exp() * logprobs).sum(dim=-1)


def chunked_logprobs(
    hidden: Tensor,
    lm_head_weight: Tensor,
    labels: Tensor,
    *,
    temperature: float,
    chunk_size: int,
    bias: Tensor | None = None,
    with_entropy: bool = True,
    kept_bytes: float = 0,
    logit_transform: LogitTransform | None = None,
) -> ChunkedLogprobs:
    """`token_logprobs` and `entropy_from_logits` of the logits hidden @ lm_head_weight.T + bias. These are computed for
    one chunk of tokens at a time, and kept for the backward pass only as far as `kept_bytes` has room.

    Both passes hold two float32 (chunk_size, V) tensors at a time, besides what `logit_transform` saves. The backward
    pass recomputes the logits of each chunk, a quarter of the head's operations, unless they were kept; the gradients
    are the same to the last bit. The gradient of the weight is accumulated in place, in float32 or wider. Under
    autocast the matrix product uses autocast's dtype, as the model's head does. There is no second derivative.

    Args:
        hidden: (..., H), the states that the labels are predicted from. The result of zero tokens is still attached to
            the graph.
        lm_head_weight: (V, H).
        labels: (...), int64 in [0, V).
        chunk_size: in tokens.
        bias: (V,).
        kept_bytes: the most bytes of logits that are kept for a backward pass: those of the first chunks that fit
            whole, in the dtype of the matrix product. The backward pass frees them one by one; a second one through a
            retained graph recomputes them.
        logit_transform: an elementwise function of the raw logits in float32 or wider, applied before the temperature
            (Gemma's final soft-capping). Tensors that it closes over get no gradient.
    """
    _check_temperature(temperature)
    _check_labels("hidden", hidden, labels)
    if chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size}; it must be at least 1 token")
    needs_grad = any(tensor is not None and tensor.requires_grad for tensor in (hidden, lm_head_weight, bias))
    if not (torch.is_grad_enabled() and needs_grad):
        kept_bytes = 0
    # Autocast's dtype where autocast would apply to the product, else the wider dtype of the two.
    matmul_dtype = torch.promote_types(hidden.dtype, lm_head_weight.dtype)
    if torch.is_autocast_enabled(hidden.device.type) and matmul_dtype != torch.float64:
        matmul_dtype = torch.get_autocast_dtype(hidden.device.type)
    settings = _Settings(matmul_dtype, temperature, chunk_size, with_entropy, kept_bytes, logit_transform)
    logprobs, entropies = _ChunkedLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden.reshape(-1, hidden.size(-1)), lm_head_weight, bias, labels.reshape(-1), settings
    )
    return ChunkedLogprobs(logprobs.view(labels.shape), entropies.view(labels.shape) if with_entropy else None)


class _Settings(NamedTuple):
    matmul_dtype: torch.dtype
    temperature: float
    chunk_size: int
    with_entropy: bool
    kept_bytes: float
    logit_transform: LogitTransform | None


class _Tokens(NamedTuple):
    """What the backward pass needs of each token, all (N,)."""

    labels: Tensor
    normalizers: Tensor
    entropies: Tensor
    grad_logprobs: Tensor
    grad_entropies: Tensor


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, settings: _Settings
    ) -> tuple[Tensor, Tensor]:
        logprobs = hidden.new_zeros(hidden.size(0), dtype=torch.promote_types(settings.matmul_dtype, torch.float32))
        entropies, normalizers = torch.zeros_like(logprobs), torch.zeros_like(logprobs)
        kept: dict[int, Tensor] = {}
        with torch.autocast(hidden.device.type, enabled=False):
            head = _head(weight, bias, settings)
            bytes_per_token = weight.size(0) * head.weight.element_size()
            for chunk in _chunks(hidden.size(0), settings.chunk_size):
                if chunk.stop * bytes_per_token <= settings.kept_bytes:
                    kept[chunk.start] = head.raw_logits(hidden[chunk])
                logprobs[chunk], normalizers[chunk], entropies[chunk] = _forward_chunk(
                    hidden[chunk], head, labels[chunk], settings, kept.get(chunk.start)
                )
        ctx.save_for_backward(hidden, weight, bias, labels, normalizers, entropies)
        # Not among the saved tensors, because those cannot be freed one by one.
        ctx.settings, ctx.kept = settings, kept
        # The gradient of an output that no loss uses is then None instead of zeros, and the backward pass skips it.
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropies: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, normalizers, entropies = ctx.saved_tensors
        settings = ctx.settings._replace(with_entropy=grad_entropies is not None)
        grad_logprobs = torch.zeros_like(entropies) if grad_logprobs is None else grad_logprobs
        # A placeholder, which is not read without entropies.
        grad_entropies = grad_logprobs if grad_entropies is None else grad_entropies
        tokens = _Tokens(labels, normalizers, entropies, grad_logprobs, grad_entropies)
        inputs = (hidden, weight, bias)
        grads = [
            torch.zeros_like(tensor, dtype=entropies.dtype) if needed else None
            for tensor, needed in zip(inputs, ctx.needs_input_grad, strict=False)
        ]
        with torch.autocast(hidden.device.type, enabled=False):
            head = _head(weight, bias, settings)
            for chunk in _chunks(hidden.size(0), settings.chunk_size):
                states = hidden[chunk].to(settings.matmul_dtype)
                tokens_of_chunk = _Tokens(*(tensor[chunk] for tensor in tokens))
                kept = ctx.kept.pop(chunk.start, None)
                grad_logits = _grad_logits(states, head, tokens_of_chunk, settings, kept)
                _add_chunk(grads, chunk, grad_logits, states, head.weight)
                # Otherwise they would stay in memory beside the tensors of the next chunk.
                del kept, grad_logits
        cast = [None if grad is None else grad.to(tensor.dtype) for grad, tensor in zip(grads, inputs, strict=True)]
        return (*cast, None, None)


class _Head(NamedTuple):
    """The language-model head in the dtype of the matrix product."""

    weight: Tensor
    bias: Tensor | None

    def raw_logits(self, states: Tensor) -> Tensor:
        """The logits (chunk, V) of a chunk, in the dtype of the matrix product."""
        return F.linear(states.to(self.weight.dtype), self.weight, self.bias)


def _forward_chunk(
    states: Tensor, head: _Head, labels: Tensor, settings: _Settings, kept: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | float]:
    """Log-probs, normalizers and entropies (0.0 if they are not asked for) of a chunk, all (chunk,). `kept` are its raw
    logits (chunk, V), if the backward pass will read them, and are not modified. Everything else happens in place, so
    that few (chunk, V) tensors are in memory.
    """
    scaled = at_least_float32(head.raw_logits(states) if kept is None else kept)
    if settings.logit_transform is not None:
        scaled = settings.logit_transform(scaled)
    scaled = scaled.div_(settings.temperature) if kept is None else scaled / settings.temperature
    normalizers = scaled.logsumexp(dim=-1)
    logprobs = scaled.gather(-1, labels.unsqueeze(-1)).squeeze(-1) - normalizers
    if not settings.with_entropy:
        return logprobs, normalizers, 0.0
    all_logprobs = scaled.sub_(normalizers.unsqueeze(-1)).clamp_min_(LOWEST_LOGPROB)
    return logprobs, normalizers, -all_logprobs.exp().mul_(all_logprobs).sum(dim=-1)


def _grad_logits(states: Tensor, head: _Head, tokens: _Tokens, settings: _Settings, kept: Tensor | None) -> Tensor:
    """Gradient of a chunk's raw logits, (chunk, V), in the softmax dtype; `kept`, those logits, is overwritten.

    With p = softmax(z), H its entropy and y the label: d log p_y / dz_j = [j = y] - p_j and
    dH / dz_j = -p_j (log p_j + H).
    """
    raw = at_least_float32(head.raw_logits(states) if kept is None else kept)
    if settings.logit_transform is None:
        scaled = raw.div_(settings.temperature)
    else:
        with torch.enable_grad():
            transformed = settings.logit_transform(raw.requires_grad_())
        # A new tensor: what the transform saved for its own backward must stay as it is.
        scaled = transformed.detach() / settings.temperature
    logprobs = scaled.sub_(tokens.normalizers.unsqueeze(-1)).clamp_min_(LOWEST_LOGPROB)
    grad_logprobs, grad_entropies = tokens.grad_logprobs.unsqueeze(-1), tokens.grad_entropies.unsqueeze(-1)
    if settings.with_entropy:
        grad = logprobs.exp()
        factor = logprobs.add_(tokens.entropies.unsqueeze(-1)).mul_(grad_entropies).add_(grad_logprobs)
        grad.mul_(factor).neg_()
    else:
        grad = logprobs.exp_().mul_(-grad_logprobs)
    grad.scatter_add_(-1, tokens.labels.unsqueeze(-1), grad_logprobs).div_(settings.temperature)
    if settings.logit_transform is None:
        return grad
    (grad_raw,) = torch.autograd.grad(transformed, raw, grad)
    return grad_raw


def _head(weight: Tensor, bias: Tensor | None, settings: _Settings) -> _Head:
    return _Head(weight.to(settings.matmul_dtype), None if bias is None else bias.to(settings.matmul_dtype))


def _add_chunk(grads: list[Tensor | None], chunk: slice, grad_logits: Tensor, states: Tensor, weight: Tensor) -> None:
    """Adds a chunk's part to the gradients of hidden states, weight and bias, in place; None = not needed."""
    grad_hidden, grad_weight, grad_bias = grads
    if grad_bias is not None:
        grad_bias += grad_logits.sum(dim=0)
    grad_logits = grad_logits.to(states.dtype)
    if grad_hidden is not None:
        grad_hidden[chunk] = grad_logits @ weight
    if grad_weight is not None and grad_weight.dtype == states.dtype:
        grad_weight.addmm_(grad_logits.t(), states)
    elif grad_weight is not None:
        grad_weight += grad_logits.t() @ states


def _chunks(tokens: int, chunk_size: int) -> list[slice]:
    return [slice(start, min(start + chunk_size, tokens)) for start in range(0, tokens, chunk_size)]


def _check_temperature(temperature: float) -> None:
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; it must be positive (greedy decoding is do_sample=False)")


def _check_labels(name: str, inputs: Tensor, labels: Tensor) -> None:
    if inputs.shape[:-1] != labels.shape:
        raise ValueError(f"labels has shape {tuple(labels.shape)}, {name} {tuple(inputs.shape)}; pass (...), (..., N)")
