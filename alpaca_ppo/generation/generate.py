"""`generate`, the entry point of the sampler: it checks what it is given and what a backend returns."""

from dataclasses import replace

import torch
from transformers import PreTrainedModel

from alpaca_ppo.generation.backends import Backend, make_backend
from alpaca_ppo.generation.responses import Generation, SamplingHooks
from alpaca_ppo.generation.sampling_params import SamplingParams
from alpaca_ppo.generation.turns import Turns
from alpaca_ppo.models.modules import eval_mode
from alpaca_ppo.types import PromptBatch


# Buffers that a forward pass replaces, such as rotary frequencies, must not become inference tensors.
@torch.inference_mode(False)
@torch.no_grad()
def generate(
    model: PreTrainedModel,
    prompts: PromptBatch,
    params: SamplingParams,
    *,
    backend: str | Backend = "auto",
    rows_at_once: int | None = None,
    turns: Turns | None = None,
    hooks: SamplingHooks | None = None,
) -> Generation:
    """Returns `params.num_return_sequences` responses to each prompt, with the log-prob of each chosen token.

    The random number behind a token is a function of (seed, step, round, prompt id, sample index, position) only. A
    response therefore does not depend on padding, on the other rows or on their order, except through rounding inside
    the model. The model's own generation config is ignored. The model runs in eval mode without gradients; its modes
    are restored afterwards, also after an exception. A surrounding `torch.inference_mode` does not apply to it.

    Args:
        model: a causal language model of transformers, without a wrapper (for a PEFT model: `get_base_model()`).
        prompts: `queries` (B, Q), left-padded, `query_attn_masks` and `prompt_ids`; `rows` are not read.
        params: how tokens are chosen and what ends a response.
        backend: what samples, or its name: "slots" is this package's own loop, in which waiting prompts take the places
            of ended rows; "generate" runs `model.generate`; "auto" is slots where the model allows it.
        rows_at_once: the most responses that are sampled at a time; None sets no limit.
        turns: who is asked how a response goes on after its stop token, and limits of a turn. None ends it there.
        hooks: what is called meanwhile.

    Raises:
        ValueError: if a parameter is out of range, a prompt is empty or not left-padded, the model's logits are not
            finite, or the backend does not take turns or stop strings.
    """
    if isinstance(backend, str):
        backend = make_backend(backend)
    hooks = hooks or SamplingHooks()
    params.check()
    if rows_at_once is not None and rows_at_once < 1:
        raise ValueError(f"rows_at_once ({rows_at_once}) must be at least 1; None samples all rows at once")
    if turns is not None:
        turns.check()
    for option, given, taken in (
        ("environments or tools", turns, backend.takes_turns),
        ("stop_strings", params.stop_strings, backend.takes_stop_strings),
    ):
        if given is not None and not taken:
            raise ValueError(f"generation_backend is {backend.name!r}, which does not take {option}; set it to auto")
    missing = set(range(len(prompts["queries"]) * params.num_return_sequences))

    def report(rows: list[int], finished: Generation) -> None:
        missing.difference_update(rows)
        hooks.on_finished(rows, _check_finite(finished, rows))

    with eval_mode(model):
        generation = backend.generate(
            model,
            _trimmed(prompts, model.device),
            params,
            rows_at_once=rows_at_once,
            turns=turns,
            hooks=replace(hooks, on_finished=report),
        )
    _check_shapes(generation, backend, (len(prompts["queries"]) * params.num_return_sequences, params.max_new_tokens))
    if missing:
        rows = sorted(missing)
        report(rows, generation[rows])
    return generation


def _trimmed(prompts: PromptBatch, device: torch.device) -> PromptBatch:
    """`prompts` on `device`, without the columns that are padding in every row."""
    mask = prompts["query_attn_masks"].long()
    if len(mask) == 0:
        raise ValueError("queries has no rows; pass at least one prompt")
    lengths = mask.sum(dim=1)
    if bool((lengths == 0).any()):
        raise ValueError(f"the prompt in row {int(lengths.argmin())} is empty; a prompt needs at least one token")
    width = int(lengths.max())
    left_padded = torch.arange(mask.size(1), device=mask.device) >= mask.size(1) - lengths.unsqueeze(1)
    if not torch.equal(left_padded, mask.bool()):
        row = int((left_padded != mask.bool()).any(dim=1).nonzero()[0])
        raise ValueError(f"query_attn_masks has padding after a token in row {row}; queries must be left-padded")
    return PromptBatch(
        queries=prompts["queries"][:, -width:].to(device),
        query_attn_masks=mask[:, -width:].to(device),
        prompt_ids=prompts["prompt_ids"].to(device),
        rows=prompts["rows"],
    )


def _check_shapes(generation: Generation, backend: Backend, shape: tuple[int, int]) -> None:
    """Raises a ValueError unless a user's backend has returned what it must."""
    wanted = {"responses": shape, "response_mask": shape, "logprobs": shape, "stopped": shape[:1]}
    found = {name: tuple(getattr(getattr(generation, name, None), "shape", ())) for name in wanted}
    if found != wanted:
        raise ValueError(f"generation_backend {backend.name!r} returned {found}; it must be a Generation of {wanted}")


def _check_finite(generation: Generation, rows: list[int]) -> Generation:
    finite = generation.logprobs.isfinite()
    if not bool(finite.all()):
        row, position = (~finite).nonzero()[0].tolist()
        raise ValueError(
            f"logits of row {rows[row]} are not finite at response position {position}: the weights have diverged, or "
            "half precision overflows"
        )
    return generation
