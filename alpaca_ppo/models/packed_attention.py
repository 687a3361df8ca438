"""Attention in which the caller decides which keys a query sees: rows without padding, caches with rows of their own
lengths.

`install_attention` makes a model call functions that are registered here. They are the model's own attention, unless
the keyword `packing` comes with the forward pass: then its `attend` computes the attention of every layer. A keyword
reaches layers that gradient checkpointing recomputes, too, where a global switch would no longer be set. Rows without
padding are in `packed_sequences`, and which models can have them is decided in `trial`.
"""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

DUMMY_MASK = torch.ones(1, 1, 1, 1, dtype=torch.bool)
"""The `attention_mask` that goes with `packing`: because of its four dimensions transformers builds no mask of its own,
nor asks the device whether `position_ids` are those of packed sequences. Move it to the model's device."""

_PREFIX = "packed_"
_UNDERLYING = ("sdpa", "eager")


class AttentionSettings(NamedTuple):
    """How a layer attends, whatever its queries see."""

    scaling: float | None = None
    """Of the scores; None = 1 / sqrt(d)."""
    sliding_window: int | None = None
    """Keys that a query sees, itself included; None = all before it."""
    softcap: float | None = None
    """Scores become softcap * tanh(scores / softcap) (Gemma 2, arXiv:2408.00118); None leaves them."""
    sinks: Tensor | None = None
    """(heads,) scores of a key without a value, one for each head (gpt-oss); None without."""


class Packing(Protocol):
    """What the keyword `packing` of a forward pass holds."""

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, settings: AttentionSettings
    ) -> Tensor:
        """Returns what each of N queries reads, (1, N, heads, width of the values).

        Args:
            module: the attention layer; `module.layer_idx` is its number.
            query: (1, heads, N, d), rotated.
            key: (1, kv_heads, M, d), rotated.
            value: (1, kv_heads, M, width).
            settings: those of the layer.
        """
        ...


def install_attention(model: PreTrainedModel) -> bool:
    """Makes `model` heed the keyword `packing`; False if its attention cannot, which leaves it as it is.

    Without the keyword nothing changes, neither numbers nor masks. The choice is kept by copies of the model, and is
    not part of what `save_pretrained` writes.
    """
    if is_installed(model):
        return True
    current = model.config._attn_implementation
    # A layer that returns its attention weights needs the model's own eager attention.
    if current not in _UNDERLYING or not model._can_set_attn_implementation() or model.config.output_attentions:
        return False
    _register(current)
    model.set_attn_implementation(_PREFIX + current)
    return True


def is_installed(model: Any) -> bool:
    """Whether `model`, a backbone or a model with a head, heeds the keyword `packing`."""
    return str(model.config._attn_implementation).startswith(_PREFIX)


def uninstall_attention(model: PreTrainedModel) -> None:
    """Undoes `install_attention`."""
    model.set_attn_implementation(underlying_attention(model))


def underlying_attention(model: PreTrainedModel) -> str:
    """The name of the attention that `model` has without the keyword `packing`, such as sdpa."""
    return str(model.config._attn_implementation).removeprefix(_PREFIX)


def _register(name: str) -> None:
    AttentionInterface.register(_PREFIX + name, _WRAPPERS[name])
    AttentionMaskInterface.register(_PREFIX + name, ALL_MASK_ATTENTION_FUNCTIONS[name])


def _packed_sdpa(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    return _attention(ALL_ATTENTION_FUNCTIONS["sdpa"], module, query, key, value, *args, **kwargs)


def _packed_eager(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    # Each file of transformers has an eager attention of its own, which is not in the interface.
    own = vars(sys.modules[type(module).__module__])["eager_attention_forward"]
    return _attention(own, module, query, key, value, *args, **kwargs)


_WRAPPERS: dict[str, Callable[..., Any]] = {"sdpa": _packed_sdpa, "eager": _packed_eager}


def _attention(
    underlying: Callable[..., Any],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *args: Any,
    packing: Packing | None = None,
    **kwargs: Any,
) -> Any:
    if packing is None:
        return underlying(module, query, key, value, attention_mask, *args, **kwargs)
    settings = AttentionSettings(
        scaling=kwargs.get("scaling"),
        sliding_window=kwargs.get("sliding_window"),
        softcap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux"),
    )
    return packing.attend(module, query, key, value, settings), None


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    allowed: Tensor | None,
    settings: AttentionSettings,
) -> Tensor:
    """Returns softmax(scores of the allowed keys) @ value, (B, heads, N, width).

    Args:
        query: (B, heads, N, d).
        key: (B, kv_heads, M, d); heads is a multiple of kv_heads.
        value: (B, kv_heads, M, width).
        allowed: bool, broadcast to (B, heads, N, M): True = the query sees the key, at least one for each query; None =
            query i sees the keys 0 to i (N = M).
        settings: of the layer; a sliding window is up to `allowed`.
    """
    scaling, _, softcap, sinks = settings
    groups = query.size(1) // key.size(1)
    if softcap is None and sinks is None:
        if groups > 1 and query.size(2) == 1 and (allowed is None or allowed.dim() < 3 or allowed.size(-3) == 1):
            # The heads that share keys become queries: nothing is copied.
            folded = query.unflatten(1, (key.size(1), groups)).squeeze(3)
            return scaled_dot_product_attention(folded, key, value, attn_mask=allowed, scale=scaling).reshape(
                query.size(0), query.size(1), 1, value.size(-1)
            )
        return scaled_dot_product_attention(
            query,
            _repeated(key, groups),
            _repeated(value, groups),
            attn_mask=allowed,
            is_causal=allowed is None,
            scale=scaling,
        )
    if allowed is None:
        allowed = torch.ones(query.size(2), key.size(2), dtype=torch.bool, device=query.device).tril()
    scores = (query @ _repeated(key, groups).mT) * (query.size(-1) ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
    if sinks is None:
        weights = scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    else:
        sink = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, sink], dim=-1)
        weights = weights.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))[..., :-1]
    return weights.to(value.dtype) @ _repeated(value, groups)


def _repeated(heads: Tensor, groups: int) -> Tensor:
    """(B, kv_heads, M, d) as (B, kv_heads * groups, M, d)."""
    return heads if groups == 1 else heads.repeat_interleave(groups, dim=1)
