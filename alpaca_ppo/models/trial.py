"""What a model can do, found by trying it on a few tokens: rows laid end to end (`packing_problem`), and other reads of
its own keys and values (`generation.slots`). What fails falls back to the plain way, and says why.

A model cannot be packed whose attention is its own, or whose state runs from one row into the next.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from alpaca_ppo.functional.packing import PackedRows, RowLayout, Span, pack_rows
from alpaca_ppo.models.packed_attention import (
    AttentionSettings,
    dense_attention,
    install_attention,
    is_installed,
    sequence_keywords,
    underlying_attention,
    uninstall_attention,
)
from alpaca_ppo.models.policy import eval_mode

_LENGTHS = (6, 5, 3, 3)
_RECORDER = "packing_trial"
_FLASH = ("flash_attention_", "kernels-community/")


class Trial:
    """Why a model cannot do what `attempt` tries; found once for models of the same classes and configuration, since a
    run has copies of a model, and a test suite many alike.

    Args:
        attempt: returns the problem, or None; an error in it is one, such as that of a keyword which a forward pass
            does not take.
    """

    def __init__(self, attempt: Callable[[Any], str | None]) -> None:
        self.attempt = attempt
        self.found: dict[tuple[Any, ...], str | None] = {}

    def __call__(self, model: PreTrainedModel) -> str | None:
        """The problem of `model`, or None. Running out of memory is raised: it says nothing about the model."""
        # A model with hooks, or with a forward of its own in an instance, may compute something else.
        if any(m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m) for m in model.modules()):
            return self._try(model)
        classes = tuple(type(module) for module in model.modules())
        key = (classes, model.config.to_json_string(), model.dtype, model.device.type, underlying_attention(model))
        if key in self.found:
            return self.found[key]
        problem = self._try(model)
        # Weights that have diverged say nothing about other models.
        if problem is None or all(bool(p.isfinite().all()) for p in model.parameters()):
            self.found[key] = problem
        return problem

    @torch.no_grad()
    def _try(self, model: PreTrainedModel) -> str | None:
        try:
            with eval_mode(model), torch.autocast(model.device.type, enabled=False):
                return self.attempt(model)
        except (torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:
            # Models of any kind come here, and what is wrong with one is no error of a run without it.
            return f"a trial raised {type(error).__name__}: {error}"


def difference(found: Tensor, expected: Tensor, what: str) -> str | None:
    """What differs by more than the rounding of a deep model, parts of which are float32 whatever its dtype."""
    tolerance = 1e-3 if expected.dtype in (torch.float64, torch.float32) else 0.1
    most = float((found - expected).abs().max())
    return None if most <= tolerance * float(expected.abs().max()) else f"its {what} differ by {most:.3g}"


def packing_problem(model: PreTrainedModel) -> str | None:
    """Why `model` cannot read rows without padding, or None if it can; then the attention for it is installed
    (`install_attention`).
    """
    backbone: Any = model.base_model
    if backbone.get_input_embeddings().weight.device.type == "meta":
        return "its weights are on the meta device"
    problem = _packing(backbone)
    if problem is None and not _has_flash_attention(backbone):
        install_attention(backbone)
    elif is_installed(backbone):
        uninstall_attention(backbone)
    return problem


def padding_reason(model: PreTrainedModel, choice: str | bool) -> str | None:
    """Why the rows of `model` are padded where the option `padding_free` is `choice`, or None if they are not.

    Raises:
        ValueError: when they must not be and the model needs it.
    """
    if not choice:
        return "padding_free is false"
    problem = packing_problem(model)
    if problem is not None and choice != "auto":
        raise ValueError(
            f"padding_free is true, but {type(model).__name__} (model_type {model.config.model_type!r}) cannot compute "
            f"rows without padding: {problem}; set padding_free: auto or false, or use another model"
        )
    return problem


def _has_flash_attention(backbone: PreTrainedModel) -> bool:
    return underlying_attention(backbone).startswith(_FLASH)


def _differs_packed(backbone: PreTrainedModel) -> str | None:
    """Compares rows end to end with padded ones; which attention `backbone` is left with is up to the caller."""
    padded_rows, packed = _rows(backbone)
    if is_installed(backbone):
        uninstall_attention(backbone)
    padded = _padded(backbone, padded_rows)
    if not _has_flash_attention(backbone):
        if not install_attention(backbone):
            return f"its attention ({underlying_attention(backbone)}) cannot be replaced"
        if not torch.equal(_padded(backbone, padded_rows), padded):
            return "its results depend on the name of its attention"
        if problem := _mask_problem(backbone, padded_rows.input_ids[:1]):
            return problem
    if problem := difference(_states(backbone, packed), padded, "states"):
        return f"{problem} from those of rows with padding"
    assert packed.spans is not None
    for spoilt in packed.spans:
        # NaN reaches whatever is computed from these tokens, and nothing else.
        with_nan = _states(backbone, packed, spoilt)
        if any(bool(with_nan[s.start : s.start + s.length].isnan().any()) for s in packed.spans if s != spoilt):
            return "what it computes for one row depends on another"
    return None


_packing = Trial(_differs_packed)


def _rows(backbone: PreTrainedModel) -> tuple[PackedRows, PackedRows]:
    """A few rows of tokens, left-aligned with padding and end to end."""
    embeddings: Any = backbone.get_input_embeddings()
    count, width = len(_LENGTHS), max(_LENGTHS)
    queries = torch.arange(count).unsqueeze(1)
    responses = torch.arange(count, count * (width + 1)).reshape(count, width)
    # Of L response tokens, L - 1 are read besides the prompt.
    mask = torch.arange(width) < torch.tensor(_LENGTHS).unsqueeze(1)
    size, device = embeddings.weight.size(0), embeddings.weight.device
    rows = [part.to(device) for part in (queries % size, torch.ones_like(queries), responses % size, mask)]
    return pack_rows(*rows), pack_rows(*rows, layout=RowLayout(padding_free=True))


def _padded(backbone: nn.Module, rows: PackedRows) -> Tensor:
    """(T, H) the states of the real tokens, row by row."""
    hidden: Tensor = backbone(input_ids=rows.input_ids, use_cache=False).last_hidden_state
    return torch.cat([row[:length] for row, length in zip(hidden, _LENGTHS, strict=True)])


def _states(backbone: PreTrainedModel, packed: PackedRows, spoilt: Span | None = None) -> Tensor:
    """(T, H) the states of rows end to end; with the embeddings of the tokens of `spoilt` set to NaN."""

    def spoil(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        output = output.clone()
        if spoilt is not None:
            output[:, spoilt.start : spoilt.start + spoilt.length] = torch.nan
        return output

    keywords = sequence_keywords(backbone, packed)
    with backbone.get_input_embeddings().register_forward_hook(spoil):
        hidden: Tensor = backbone(input_ids=packed.input_ids, use_cache=False, **keywords).last_hidden_state
    return hidden[0]


def _mask_problem(backbone: PreTrainedModel, input_ids: Tensor) -> str | None:
    """Whether some layer's mask is not what its attention is told: causal, within the window in its keywords.

    A trial on short rows cannot tell, because windows and chunks have thousands of tokens.
    """
    windows: list[int | None] = []
    problems: list[str] = []

    def mask(**arguments: Any) -> Tensor:
        window = arguments.get("local_size")
        edges = [0, 1, 5] if window is None else [0, 1, 5, window - 1, window, window + 1, 2 * window + 1]
        k = torch.tensor(edges, device=input_ids.device)
        q, zero = k.unsqueeze(1), k.new_zeros(1, 1)
        causal = k <= q if window is None else (k <= q) & (q - k < window)
        if bool((arguments["mask_function"](zero, zero, q, k.unsqueeze(0)) != causal).any()):
            problems.append("its masks are not causal masks or sliding windows")
        windows.append(window)
        return torch.full((1, 1, 1, 1), len(windows) - 1, device=input_ids.device)

    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kw: Any):  # type: ignore[no-untyped-def]
        called.append(True)
        window = None if attention_mask is None else windows[int(attention_mask.flatten()[0])]
        if kw.get("sliding_window") != window:
            problems.append(f"a layer with a window of {window} tokens has the keyword {kw.get('sliding_window')}")
        if kw.get("is_causal") is False or kw.get("position_bias") is not None:
            problems.append("a layer is not causal, or has biases of positions")
        out = dense_attention(query, key, value, None, AttentionSettings(kw.get("scaling")))
        return out.transpose(1, 2).contiguous(), None

    called: list[bool] = []
    before = backbone.config._attn_implementation
    AttentionInterface.register(_RECORDER, attention)
    AttentionMaskInterface.register(_RECORDER, mask)
    backbone.set_attn_implementation(_RECORDER)
    try:
        backbone(input_ids=input_ids, use_cache=False)
    finally:
        backbone.set_attn_implementation(before)
    return problems[0] if problems else None if called else "it has no attention of transformers' interface"
