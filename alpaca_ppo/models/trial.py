"""Whether a model can read rows laid end to end (`packing_problem`), found by trying it on a few tokens; else its rows
are padded. `Trial` serves other trials too (`generation.slots`, `rewards.reward_model`).

It cannot if its attention is not in transformers' interface, or if its state runs from one row into the next.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.functional.packing import PackedRows, RowLayout, Span, pack_rows
from alpaca_ppo.models import packed_attention
from alpaca_ppo.models.actor_critic import Critic
from alpaca_ppo.models.loading import check_lengths
from alpaca_ppo.models.policy import Policy, difference, eval_mode, response_states, unchanged

_LENGTHS = (6, 5, 3, 3)  # descending, as `pack_rows` orders rows end to end
_RECORDER = "packing_trial"
_FLASH = ("flash_attention_", "kernels-community/")


class Trial:
    """Finds out by trying why a model cannot do something, once for all models of the same classes and configuration.

    Args:
        attempt: returns the problem, or None. An error that it raises is a problem too, as of a keyword that the model
            does not take.
    """

    def __init__(self, attempt: Callable[[Any], str | None]) -> None:
        self.attempt = attempt
        self.found: dict[tuple[Any, ...], str | None] = {}

    def __call__(self, model: PreTrainedModel) -> str | None:
        """The problem of `model`, or None. Running out of memory is raised: it says nothing about the model."""
        # Hooks, or a `forward` set on an instance, may compute something else than the class does.
        if any(m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m) for m in model.modules()):
            return self._try(model)
        classes = tuple(type(module) for module in model.modules())
        attention = packed_attention.underlying_attention(model)
        key = (classes, model.config.to_json_string(), model.dtype, model.device.type, attention)
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
            with eval_mode(model), unchanged(model), torch.autocast(model.device.type, enabled=False):
                return self.attempt(model)
        except (torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:
            # Whatever a model of unknown code raises here, the run can pad its rows instead.
            return f"a trial raised {type(error).__name__}: {error}"


def packing_problem(model: PreTrainedModel) -> str | None:
    """Why `model` cannot read rows without padding. None if it can: then `install_attention` is done, if needed."""
    backbone: Any = model.base_model
    if backbone.get_input_embeddings().weight.device.type == "meta":
        return "its weights are on the meta device"
    problem = packing_trial(backbone)
    if problem is None and not packed_attention.underlying_attention(backbone).startswith(_FLASH):
        packed_attention.install_attention(backbone)
    elif packed_attention.is_installed(backbone):
        packed_attention.uninstall_attention(backbone)
    return problem


def padding_reason(model: PreTrainedModel, choice: str | bool) -> str | None:
    """Why the rows of `model` are padded where the option `padding_free` is `choice`, or None if they are not.

    Raises:
        ValueError: when `choice` is True and the model needs padding.
    """
    if not choice:
        return "padding_free is false"
    problem = packing_problem(model)
    if problem is not None and choice != "auto":
        raise ValueError(f"padding_free is true, but {type(model).__name__} needs padding: {problem}; set it to auto")
    return problem


def fit_rows(reader: Policy | Critic, backbone: Any, args: PPOConfig, *, owner: str) -> None:
    """Sets `reader.padding_reason`, after `check_lengths` of the longest row; both may raise a ValueError."""
    if isinstance(backbone, PreTrainedModel):
        check_lengths(backbone.config, {"query_len": args.query_len, "response_len": args.response_len}, owner=owner)
        # A subclass that overrides `states` sets its own.
        if isinstance(reader, Critic) or type(reader).states == Policy.states:
            reader.padding_reason = padding_reason(backbone, args.padding_free)


def _try_packing(backbone: PreTrainedModel) -> str | None:
    """Why rows end to end do not have the states of padded ones, or None. Which attention `backbone` has afterwards is
    open.
    """
    padded_rows, packed = _trial_rows(backbone)
    if packed_attention.is_installed(backbone):
        packed_attention.uninstall_attention(backbone)
    padded = response_states(backbone, padded_rows)
    attention = packed_attention.underlying_attention(backbone)
    if not attention.startswith(_FLASH):
        if not packed_attention.install_attention(backbone):
            return f"its attention ({attention}) cannot be replaced"
        if not torch.equal(response_states(backbone, padded_rows), padded):
            return "its results depend on the name of its attention"
        if problem := _mask_problem(backbone, padded_rows.input_ids[:1]):
            return problem
    if problem := difference(response_states(backbone, packed), padded, "states"):
        return f"{problem} from those of rows with padding"
    assert packed.spans is not None
    for row in packed.spans:
        # NaN reaches whatever is computed from the tokens of this row, and nothing else.
        with_nan = _states_with_nan(backbone, packed, row)
        for other in packed.spans:
            if other != row and bool(with_nan[other.start : other.start + other.length].isnan().any()):
                return "what it computes for one row depends on another"
    return None


packing_trial = Trial(_try_packing)


def _trial_rows(backbone: PreTrainedModel) -> tuple[PackedRows, PackedRows]:
    """A few rows of tokens, left-aligned with padding and end to end. Every token predicts one of a response, so
    `response_states` has the states (T, H) of all tokens, row by row.
    """
    embeddings: Any = backbone.get_input_embeddings()
    count, width = len(_LENGTHS), max(_LENGTHS)
    queries = torch.arange(count).unsqueeze(1)
    responses = torch.arange(count, count * (width + 1)).reshape(count, width)
    # Of L response tokens, L - 1 are read besides the prompt.
    mask = torch.arange(width) < torch.tensor(_LENGTHS).unsqueeze(1)
    size, device = embeddings.weight.size(0), embeddings.weight.device
    rows = [part.to(device) for part in (queries % size, torch.ones_like(queries), responses % size, mask)]
    return pack_rows(*rows), pack_rows(*rows, layout=RowLayout(padding_free=True))


def _states_with_nan(backbone: PreTrainedModel, packed: PackedRows, nan_row: Span) -> Tensor:
    """(T, H) the states of rows end to end, where the embeddings of `nan_row` are NaN."""

    def set_nan(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        output = output.clone()
        output[:, nan_row.start : nan_row.start + nan_row.length] = torch.nan
        return output

    with backbone.get_input_embeddings().register_forward_hook(set_nan):
        return response_states(backbone, packed)


def _mask_problem(backbone: PreTrainedModel, input_ids: Tensor) -> str | None:
    """Why a layer's mask is not causal within the sliding window of its keywords; None if all are.

    Short rows cannot show it, because windows and chunks have thousands of tokens; `_MaskRecorder` asks the masks.
    """
    recorder = _MaskRecorder(input_ids.device)
    before = backbone.config._attn_implementation
    AttentionInterface.register(_RECORDER, recorder.attention)
    AttentionMaskInterface.register(_RECORDER, recorder.make_mask)
    backbone.set_attn_implementation(_RECORDER)
    try:
        backbone(input_ids=input_ids, use_cache=False)
    finally:
        backbone.set_attn_implementation(before)
    if not recorder.problems and not recorder.attention_was_called:
        return "it has no attention of transformers' interface"
    return recorder.problems[0] if recorder.problems else None


class _MaskRecorder:
    """Makes a model's masks and computes its attention, and collects `problems` of both."""

    def __init__(self, device: torch.device) -> None:
        self.problems: list[str] = []
        self.attention_was_called = False
        self._device = device
        # By the number that `make_mask` returned; None for a mask without a window.
        self._windows: list[int | None] = []

    def make_mask(self, **arguments: Any) -> Tensor:
        """Checks a mask on both sides of its window's edges; returns its number, in place of the mask."""
        window = arguments.get("local_size")
        places = [0, 1, 5] if window is None else [0, 1, 5, window - 1, window, window + 1, 2 * window + 1]
        k = torch.tensor(places, device=self._device)
        q, zero = k.unsqueeze(1), k.new_zeros(1, 1)
        causal = k <= q if window is None else (k <= q) & (q - k < window)
        if bool((arguments["mask_function"](zero, zero, q, k.unsqueeze(0)) != causal).any()):
            self.problems.append("its masks are not causal masks or sliding windows")
        self._windows.append(window)
        return torch.full((1, 1, 1, 1), len(self._windows) - 1, device=self._device)

    def attention(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **keywords: Any
    ) -> tuple[Tensor, None]:
        """Compares a layer's keywords with its mask; returns the output for a causal one."""
        self.attention_was_called = True
        window = None if attention_mask is None else self._windows[int(attention_mask.flatten()[0])]
        keyword = keywords.get("sliding_window")
        if keyword != window:
            self.problems.append(f"a layer with a window of {window} tokens has the keyword {keyword}")
        if keywords.get("is_causal") is False or keywords.get("position_bias") is not None:
            self.problems.append("a layer is not causal, or has biases of positions")
        settings = packed_attention.AttentionSettings(keywords.get("scaling"))
        out = packed_attention.dense_attention(query, key, value, None, settings)
        return out.transpose(1, 2).contiguous(), None
