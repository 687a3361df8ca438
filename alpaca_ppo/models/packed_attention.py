"""Attention in which the caller decides which keys a query sees: rows without padding, caches with rows of different
lengths.

`install_attention` makes a model call functions that are registered here. They are the model's attention, unless the
keyword `packing` comes with the forward pass: then its `attend` computes the attention of every layer. Unlike a global
switch, a keyword also reaches layers that gradient checkpointing recomputes.

`PackedSequences` is the packing of rows in one sequence without padding (`functional.packing`): on CUDA in half
precision one call of torch's variable-length kernel, otherwise a batch for each length of rows. Flash attentions of
transformers take the lengths of the rows instead. Which models can have rows without padding is decided in `trial`.
"""

import inspect
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import accumulate, groupby
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.attention import varlen
from torch.nn.functional import scaled_dot_product_attention as sdpa
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from alpaca_ppo.functional.packing import PackedRows, RowLayout, Span

# The `attention_mask` that goes with `packing`, to be moved to the model's device. As it has four dimensions,
# transformers builds no mask, and does not ask the device whether `position_ids` are those of packed sequences.
DUMMY_MASK = torch.ones(1, 1, 1, 1, dtype=torch.bool)

SHARED_IN_UPDATES = 16
"""Fewest tokens of a prompt that several rows of an update read once: sharing splits attention into more batches."""

_PREFIX = "packed_"


class AttentionSettings(NamedTuple):
    """What a layer's attention computes with, besides which keys a query sees."""

    scaling: float | None = None  # of the scores; None = 1 / sqrt(d)
    sliding_window: int | None = None  # keys that a query sees, itself included; None = all before it
    # Scores become softcap * tanh(scores / softcap) (Gemma 2, arXiv:2408.00118).
    softcap: float | None = None
    sinks: Tensor | None = None  # (heads,) the score in each head of a key without a value (gpt-oss)


class Packing(Protocol):
    """What the keyword `packing` of a forward pass holds."""

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, settings: AttentionSettings
    ) -> Tensor:
        """The output (1, N, heads, width) of the attention layer `module`, whose number is `module.layer_idx`.

        Args:
            query: (1, heads, N, d), rotated.
            key: (1, kv_heads, M, d), rotated.
            value: (1, kv_heads, M, width).
        """


def install_attention(model: PreTrainedModel) -> bool:
    """Lets `model` take the keyword `packing`; returns False, and changes nothing, if its attention cannot.

    Without the keyword the model computes as before. Copies of the model keep the attention; `save_pretrained` does not
    write it.
    """
    if is_installed(model):
        return True
    current = model.config._attn_implementation
    # A layer that returns its attention weights needs the model's own eager attention.
    if current not in _UNDERLYING or not model._can_set_attn_implementation() or model.config.output_attentions:
        return False
    model.set_attn_implementation(_PREFIX + current)
    return True


def is_installed(model: Any) -> bool:
    """Whether `model`, a backbone or a model with a head, takes the keyword `packing`."""
    return str(model.config._attn_implementation).startswith(_PREFIX)


def uninstall_attention(model: PreTrainedModel) -> None:
    """Undoes `install_attention`."""
    model.set_attn_implementation(underlying_attention(model))


def underlying_attention(model: PreTrainedModel) -> str:
    """The name of the attention that `model` has without the keyword `packing`, such as sdpa."""
    return str(model.config._attn_implementation).removeprefix(_PREFIX)


def _attention(
    underlying: Callable[..., Any], module: nn.Module, *args: Any, packing: Packing | None = None, **kwargs: Any
) -> Any:
    """What layers call after `install_attention`: returns the output, and weights or None."""
    if packing is None:
        return underlying(module, *args, **kwargs)
    query, key, value, *_ = args
    get = kwargs.get
    settings = AttentionSettings(get("scaling"), get("sliding_window"), get("softcap"), get("s_aux"))
    return packing.attend(module, query, key, value, settings), None


def _eager(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    # Each file of transformers has an eager attention of its own, which is not in the interface.
    return vars(sys.modules[type(module).__module__])["eager_attention_forward"](module, *args, **kwargs)


_UNDERLYING: dict[str, Callable[..., Any]] = {"sdpa": ALL_ATTENTION_FUNCTIONS["sdpa"], "eager": _eager}
for _name, _function in _UNDERLYING.items():
    AttentionInterface.register(_PREFIX + _name, partial(_attention, _function))
    AttentionMaskInterface.register(_PREFIX + _name, ALL_MASK_ATTENTION_FUNCTIONS[_name])


def dense_attention(
    query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None, settings: AttentionSettings
) -> Tensor:
    """softmax(scores of the allowed keys) @ value, (B, heads, N, width).

    Args:
        query: (B, heads, N, d).
        key: (B, kv_heads, M, d); heads is a multiple of kv_heads.
        value: (B, kv_heads, M, width).
        allowed: bool, broadcast to (B, heads, N, M): True = the query sees the key, at least one for each query; None =
            query i sees the keys 0 to i (N = M).
        settings: those of the layer; `sliding_window` is ignored, since `allowed` decides.
    """
    scaling, _, softcap, sinks = settings
    groups = query.size(1) // key.size(1)
    if softcap is None and sinks is None:
        heads_see_the_same = allowed is None or allowed.dim() < 3 or allowed.size(-3) == 1
        if groups > 1 and query.size(2) == 1 and heads_see_the_same:
            # The heads that share keys become queries: nothing is copied.
            folded = query.unflatten(1, (key.size(1), groups)).squeeze(3)
            return sdpa(folded, key, value, attn_mask=allowed, scale=scaling).flatten(1, 2).unsqueeze(2)
        key, value = _repeated(key, groups), _repeated(value, groups)
        return sdpa(query, key, value, attn_mask=allowed, is_causal=allowed is None, scale=scaling)
    if allowed is None:
        allowed = torch.ones(query.size(2), key.size(2), dtype=torch.bool, device=query.device).tril()
    scores = (query @ _repeated(key, groups).mT) * (query.size(-1) ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
    if sinks is not None:
        sink = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    if sinks is not None:
        weights = weights[..., :-1]
    return weights.to(value.dtype) @ _repeated(value, groups)


def _repeated(heads: Tensor, groups: int) -> Tensor:
    """(B, kv_heads, M, d) as (B, kv_heads * groups, M, d)."""
    return heads if groups == 1 else heads.repeat_interleave(groups, dim=1)


def row_layout(backbone: nn.Module, *, padding_free: bool) -> RowLayout:
    """The layout for `backbone`. Prompts are shared, but not by flash attentions of transformers."""
    if not padding_free or not is_installed(backbone):
        return RowLayout(padding_free=padding_free)
    return RowLayout(padding_free=True, share_prompts=SHARED_IN_UPDATES if torch.is_grad_enabled() else 1)


def sequence_keywords(backbone: nn.Module, packed: PackedRows) -> dict[str, Any]:
    """The keywords of `backbone`'s forward pass besides `input_ids`, for rows with `spans`."""
    assert packed.spans is not None
    device = packed.input_ids.device
    if is_installed(backbone):
        mask = DUMMY_MASK.to(device)
        return {"position_ids": packed.position_ids, "attention_mask": mask, "packing": PackedSequences(packed.spans)}
    # The names of transformers' FlashAttentionKwargs. Flash attention has no prefixes.
    assert not any(span.prefix_length for span in packed.spans)
    lengths = [span.length for span in packed.spans]
    ends, longest = _cumulative(lengths, device), max(lengths)
    flash = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
    return {"position_ids": packed.position_ids, **flash}


class PackedSequences:
    """The `packing` of rows in one sequence, whose tokens see what `spans` say."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self.spans = tuple(spans)
        self.longest = max(span.prefix_length + span.length for span in spans)
        # Neighbours of equal length and prefix, which are computed in one batch.
        self._batches = [list(rows) for _, rows in groupby(self.spans, key=lambda span: span[1:])]
        self._prefix_starts = {span.prefix_start for span in self.spans if span.prefix_length}
        self._masks: dict[int | None, Tensor] = {}
        # What the kernel is told: the columns of the keys, or None if it reads each key once, in order; and the
        # cumulative lengths of queries and keys, and the longest of each.
        self._kernel_rows: tuple[Tensor | None, tuple[Tensor, Tensor, int, int]] | None = None

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, settings: AttentionSettings
    ) -> Tensor:
        """Attention of each token to its span up to itself and to the span's prefix; see `Packing`."""
        scaling, window, softcap, sinks = settings
        if window is not None and window >= self.longest:
            window = None
        if softcap is None and sinks is None and (dtype := kernel_serves(query, key, value, window=window)):
            heads = (part[0].transpose(0, 1).to(dtype) for part in (query, key, value))
            return self._by_kernel(*heads, scaling=scaling, window=window).unsqueeze(0)
        # The backward pass of one split is one concatenation; that of a slice fills a whole sequence with zeros.
        sizes = [len(rows) * rows[0].length for rows in self._batches]
        splits = (part.split(sizes, dim=2) for part in (query, key, value))
        prefixes: dict[int, tuple[Tensor, Tensor]] = {}
        outputs = []
        for rows, *split in zip(self._batches, *splits, strict=True):
            _, length, prefix_start, prefix_length = rows[0]
            # (rows, heads, L, d) of (1, heads, rows * L, d).
            q, k, v = (part[0].unflatten(1, (len(rows), -1)).transpose(0, 1) for part in split)
            if not self._prefix_starts.isdisjoint(row.start for row in rows):
                parts = zip(k.unbind(), v.unbind(), strict=True)
                prefixes |= {row.start: part for row, part in zip(rows, parts, strict=True)}
            if prefix_length:
                first_k, first_v = (part.expand(len(rows), -1, -1, -1) for part in prefixes[prefix_start])
                k, v = torch.cat([first_k, k], dim=2), torch.cat([first_v, v], dim=2)
            allowed = None
            if prefix_length or (window is not None and length > window):
                mask = self._mask(window, query.device)
                allowed = mask[prefix_length : prefix_length + length, : prefix_length + length]
            outputs.append(dense_attention(q, k, v, allowed, settings).transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs).unsqueeze(0)

    def _mask(self, window: int | None, device: torch.device) -> Tensor:
        """(longest, longest) bool: causal, within `window` keys."""
        if window not in self._masks:
            ones = torch.ones(self.longest, self.longest, dtype=torch.bool, device=device)
            self._masks[window] = ones.tril() if window is None else ones.tril().triu(1 - window)
        return self._masks[window]

    def _by_kernel(
        self, query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None, window: int | None
    ) -> Tensor:
        """Causal attention by torch's kernel for CUDA in half precision, (T, heads, width), of `query` (T, heads, d),
        `key` (T, kv_heads, d) and `value` (T, kv_heads, width <= d).
        """
        if self._kernel_rows is None:
            query_ends = key_ends = _cumulative([span.length for span in self.spans], query.device)
            key_columns = None
            if any(span.prefix_length for span in self.spans):
                columns = []
                for span in self.spans:
                    columns.append(torch.arange(span.prefix_start, span.prefix_start + span.prefix_length))
                    columns.append(torch.arange(span.start, span.start + span.length))
                key_columns = torch.cat(columns).to(query.device)
                key_ends = _cumulative([span.prefix_length + span.length for span in self.spans], query.device)
            longest_query = max(span.length for span in self.spans)
            self._kernel_rows = key_columns, (query_ends, key_ends, longest_query, self.longest)
        key_columns, lengths = self._kernel_rows
        if key_columns is not None:
            key, value = key[key_columns], value[key_columns]
        # The kernel takes one width; multi-head latent attention has values that are narrower than its keys.
        width = value.size(-1)
        if width < query.size(-1):
            value = torch.nn.functional.pad(value, (0, query.size(-1) - width))
        before_and_after = (-1 if window is None else window - 1, 0)
        grouped = query.size(1) != key.size(1)
        out: Any = varlen.varlen_attn(
            query, key, value, *lengths, scale=scaling, window_size=before_and_after, enable_gqa=grouped
        )
        return out[..., :width]


def _cumulative(lengths: Sequence[int], device: torch.device) -> Tensor:
    """(rows + 1,) int32: 0 and the cumulative sums of `lengths`."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def kernel_serves(query: Tensor, key: Tensor, value: Tensor, *, window: int | None) -> torch.dtype | None:
    """The dtype in which torch's kernel computes these heads (1, heads, N, d); None if it cannot."""
    if not query.is_cuda:
        return None
    # Autocast does not cover the kernel.
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else query.dtype
    sizes = (query.size(1), key.size(1), query.size(-1), value.size(-1))
    return dtype if kernel_works(query.device, dtype, *sizes, windowed=window is not None) else None


@lru_cache
def kernel_works(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, d: int, width: int, *, windowed: bool
) -> bool:
    """Whether torch's kernel gives the right numbers and gradients, found by trying it once. It depends on the version
    of torch, the GPU, the dtype and the sizes.
    """
    if dtype not in (torch.float16, torch.bfloat16):
        return False
    sequences = PackedSequences([Span(0, 5), Span(5, 3), Span(8, 2, prefix_start=0, prefix_length=5)])
    generator = torch.Generator().manual_seed(0)
    window = 2 if windowed else None
    drawn = [
        torch.randn(10, number, size, generator=generator)
        for number, size in ((heads, d), (kv_heads, d), (kv_heads, width), (heads, width))
    ]

    def without_kernel(*parts: Tensor) -> Tensor:
        # Tensors on the CPU never take the kernel.
        q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in parts)
        return sequences.attend(nn.Identity(), q, k, v, AttentionSettings(sliding_window=window))[0]

    def outputs_and_gradients(parts: list[Tensor], attend: Callable[..., Tensor]) -> list[Tensor]:
        inputs = [part.detach().requires_grad_() for part in parts[:3]]
        out = attend(*inputs)
        return [out.detach(), *torch.autograd.grad((out * parts[3]).sum(), inputs)]

    with torch.enable_grad(), torch.autocast("cuda", enabled=False):
        expected = outputs_and_gradients(drawn, without_kernel)
        try:
            by_kernel = partial(sequences._by_kernel, scaling=None, window=window)
            found = outputs_and_gradients([part.to(device, dtype) for part in drawn], by_kernel)
        except torch.OutOfMemoryError:
            # Running out of memory says nothing about the kernel.
            raise
        except (RuntimeError, ValueError, TypeError, NotImplementedError):
            # torch 2.11 has the function without some of the keywords.
            return False
    return all(torch.allclose(a.float().cpu(), b, rtol=0.05, atol=0.05) for a, b in zip(found, expected, strict=True))


def cache_argument(model: PreTrainedModel) -> str:
    """Returns the name by which `model` takes a cache, which transformers 5.24 has changed."""
    kind: Any = type(model)
    return _cache_argument(kind)


@lru_cache
def _cache_argument(kind: type[PreTrainedModel]) -> str:
    return "cache" if "cache" in inspect.signature(kind.forward).parameters else "past_key_values"
