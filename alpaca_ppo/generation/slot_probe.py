"""Which models can be sampled in slots: found by trying it on a few tokens.

Not so are models whose attention cannot be given keys from elsewhere, and those that keep a state beside keys and
values.
"""

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from alpaca_ppo.generation.slot_cache import SlotCache
from alpaca_ppo.generation.slot_passes import NewTokens, extend, read_next
from alpaca_ppo.models.modules import eval_mode
from alpaca_ppo.models.packed_attention import is_installed, underlying_attention
from alpaca_ppo.models.packing_probe import once_per_kind, packing_problem

_problems: dict[tuple[Any, ...], str | None] = {}
"""What was found, by what it depends on: a run has copies of a model, and a test suite many alike."""


def slot_problem(model: PreTrainedModel) -> str | None:
    """Why `model`, a causal language model, cannot be sampled in slots, or None if it can; then the attention for it is
    installed (`models.packed_attention`).
    """
    if problem := packing_problem(model):
        return problem
    if not is_installed(model):
        return f"its attention ({underlying_attention(model)}) reads a cache of its own"
    return once_per_kind(_problems, model, _try)


@torch.no_grad()
def _try(model: PreTrainedModel) -> str | None:
    parameters = inspect.signature(type(model).forward).parameters
    if "past_key_values" not in parameters or all(p.kind != p.VAR_KEYWORD for p in parameters.values()):
        return "its forward pass takes no past_key_values, or no further keywords"
    try:
        with eval_mode(model), torch.autocast(model.device.type, enabled=False):
            return _problem(model)
    except (torch.OutOfMemoryError, MemoryError):
        # Says nothing about the model.
        raise
    except Exception as error:
        # Models of any kind come here, and what is wrong with one is no error of a run without slots.
        return f"a trial raised {type(error).__name__}: {error}"


def _problem(model: PreTrainedModel) -> str | None:
    """Compares two prompts of unequal length, a step and appended tokens with passes over whole rows."""
    vocabulary, device = model.config.get_text_config().vocab_size, model.device
    rows = [[(7 * i + 3 * j + 1) % vocabulary for j in range(length)] for i, length in enumerate((8, 5))]
    prompts = (5, 2)
    cache = SlotCache(slots=2, columns=8)
    found = [extend(model, cache, [NewTokens(i, 0, rows[i][:n]) for i, n in enumerate(prompts)])]
    tokens = torch.tensor([row[n] for row, n in zip(rows, prompts, strict=True)], device=device)
    found.append(read_next(model, cache, tokens, torch.tensor(prompts, device=device), columns=6))
    found.append(extend(model, cache, [NewTokens(i, n + 1, rows[i][n + 1 :]) for i, n in enumerate(prompts)]))
    for i, (row, n) in enumerate(zip(rows, prompts, strict=True)):
        whole: Tensor = model(input_ids=torch.tensor([row], device=device), use_cache=False).logits[0]
        expected = whole[[n - 1, n, -1]]
        mine = torch.stack([logits[i] for logits in found])
        # Rounding in a deep model; a state that is lost changes the numbers themselves.
        tolerance = {torch.float64: 1e-6, torch.float32: 1e-3}.get(mine.dtype, 0.1)
        if not torch.allclose(mine, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max())):
            return f"its logits differ by {float((mine - expected).abs().max()):.3g} from those of a pass over the row"
    return None
