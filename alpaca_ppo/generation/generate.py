"""`generate`, the entry point of the sampler: it checks its arguments and restores the model's modes afterwards."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from alpaca_ppo.generation.backends import run_backend
from alpaca_ppo.generation.responses import Generation
from alpaca_ppo.generation.sampling_params import SamplingParams
from alpaca_ppo.generation.slots import OnFinished
from alpaca_ppo.generation.stop_strings import StopStrings
from alpaca_ppo.generation.turns import Turns
from alpaca_ppo.models.modules import eval_mode
from alpaca_ppo.registry import GENERATION_BACKENDS


# Buffers that a forward pass replaces, such as rotary frequencies, must not become inference tensors.
@torch.inference_mode(False)
@torch.no_grad()
def generate(
    model: PreTrainedModel,
    queries: Tensor,
    query_attn_masks: Tensor,
    *,
    max_new_tokens: int,
    pad_token_id: int,
    stop_token_ids: Sequence[int],
    seed: int,
    step: int,
    prompt_ids: Tensor,
    sampling_round: int = 0,
    sample_ids: tuple[int, ...] | None = None,
    temperature: float = 1.0,
    do_sample: bool = True,
    top_k: int | None = None,
    top_p: float | None = None,
    num_return_sequences: int = 1,
    truncate_token_ids: Sequence[int] = (),
    truncate_after: int = 0,
    stop_strings: StopStrings | None = None,
    backend: str = "auto",
    before_token: Callable[[], Any] = lambda: None,
    slots: int | None = None,
    on_finished: OnFinished | None = None,
    turns: Turns | None = None,
) -> Generation:
    """Returns responses to `queries`, on the model's device, with the log-prob of each chosen token.

    The random number behind a token is a function of (seed, step, round, prompt id, sample index, position) only. A
    response therefore does not depend on padding, on the other rows or on their order, except through rounding inside
    the model. The model's own generation config is ignored. The model runs in eval mode without gradients; its modes
    are restored afterwards, also after an exception. A surrounding `torch.inference_mode` does not apply to it.

    Args:
        model: a causal language model of transformers, without a wrapper (for a PEFT model: `get_base_model()`).
        queries: (B, Q) int64, left-padded.
        query_attn_masks: (B, Q), 1 = a real token. Columns that are padding in every row are dropped first.
        max_new_tokens: R, the most tokens of a response, and the width of the result.
        pad_token_id: fills the columns after a response's end; may equal a stop token.
        stop_token_ids: end a response (with `turns`: a turn) at any position.
        seed: seed of the run.
        step: step of the rollout.
        prompt_ids: (B,) int64, index of each prompt in its dataset.
        sampling_round: of the step; in another round, a prompt gets other responses.
        sample_ids: with `num_return_sequences` 1, which of its prompt's samples each row is, for its random numbers;
            None = the first.
        temperature: divides the logits, for the choice of a token and for its log-prob.
        do_sample: True samples from the softmax; False takes the most likely token.
        top_k: sample only from the k most likely tokens. For evaluation: log-probs stay those of the full softmax.
        top_p: sample only from the most likely tokens that together reach this probability. For evaluation too.
        num_return_sequences: n, responses per prompt.
        truncate_token_ids: end a response once at least `truncate_after` of its tokens precede them.
        truncate_after: see `truncate_token_ids`; in tokens, with `turns` of the turn.
        stop_strings: end a response (with `turns`: a turn) with the token that completes one of them, which is part of
            the response; text of the prompt, or of an earlier turn, does not count. None = none.
        backend: "slots" is this package's own loop, which fills the places of ended rows; "generate" runs
            `model.generate`, for models that cannot be sampled so; "auto" chooses between the two; others are added by
            `register_generation_backend`.
        before_token: called before tokens are chosen; an exception in it ends the sampling.
        slots: with "slots", the rows that are decoded at once; None takes all, as do backends without slots.
        on_finished: called with rows whose responses are complete, a list of indices in any order, and a `Generation`
            of these rows, once for each row: with "slots" as soon as they have ended, otherwise at the end.
        turns: who is asked how a response goes on after its stop token, and limits of a turn; with "slots" only, which
            "auto" then takes. None ends every response there.

    Raises:
        ValueError: if an argument is out of range, a prompt is empty or not left-padded, the model's logits are not
            finite, or the backend does not take turns.
    """
    params = SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        pad_token_id=pad_token_id,
        stop_token_ids=tuple(stop_token_ids),
        truncate_token_ids=tuple(truncate_token_ids),
        truncate_after=truncate_after,
        stop_strings=stop_strings,
        num_return_sequences=num_return_sequences,
        do_sample=do_sample,
        backend=backend,
    )
    params = replace(params, top_k=top_k, top_p=top_p, sampling_round=sampling_round, sample_ids=sample_ids)
    params = replace(params, seed=seed, step=step)
    _check_params(params, slots, turns)
    with eval_mode(model):
        generation = run_backend(
            model,
            *_trim(queries, query_attn_masks, model.device),
            sampling_params=params,
            prompt_ids=prompt_ids.to(model.device),
            before_token=before_token,
            slots=slots,
            on_finished=None if on_finished is None else partial(_report, on_finished),
            turns=turns,
        )
    return _check_finite(generation)


def _report(on_finished: OnFinished, rows: list[int], finished: Generation) -> None:
    on_finished(rows, _check_finite(finished, rows))


def _check_params(params: SamplingParams, slots: int | None, turns: Turns | None) -> None:
    if slots is not None and slots < 1:
        raise ValueError(f"slots ({slots}) must be at least 1; None decodes all rows at once")
    if params.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens ({params.max_new_tokens}) must be at least 1")
    if params.num_return_sequences < 1:
        raise ValueError(f"num_return_sequences ({params.num_return_sequences}) must be at least 1")
    if params.sample_ids is not None and params.num_return_sequences != 1:
        raise ValueError(
            f"sample_ids numbers single rows, but num_return_sequences is {params.num_return_sequences}; pass each "
            "sample as a prompt of its own, or leave sample_ids None"
        )
    if not params.temperature > 0:
        raise ValueError(
            f"temperature ({params.temperature}) must be positive; for greedy decoding use do_sample=False"
        )
    if params.top_k is not None and params.top_k < 1:
        raise ValueError(f"top_k ({params.top_k}) must be at least 1; None keeps the whole vocabulary")
    if params.top_p is not None and not 0 < params.top_p <= 1:
        raise ValueError(f"top_p ({params.top_p}) must be in (0, 1]; None keeps the whole vocabulary")
    if turns is not None:
        turns.check()
    GENERATION_BACKENDS.check(params.backend)


def _trim(queries: Tensor, query_attn_masks: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns prompts and mask (int64) on `device`, without the columns that are padding in every row."""
    mask = query_attn_masks.long()
    if mask.size(0) == 0:
        raise ValueError("queries has no rows, so there is nothing to sample; pass at least one prompt")
    lengths = mask.sum(dim=1)
    if bool((lengths == 0).any()):
        row = int((lengths == 0).nonzero()[0])
        raise ValueError(f"the prompt in row {row} is empty; a prompt needs at least one token")
    width = int(lengths.max())
    left_padded = torch.arange(mask.size(1), device=mask.device) >= mask.size(1) - lengths.unsqueeze(1)
    if not torch.equal(left_padded, mask.bool()):
        row = int((left_padded != mask.bool()).any(dim=1).nonzero()[0])
        raise ValueError(f"query_attn_masks has padding after a token in row {row}; queries must be left-padded")
    return queries[:, -width:].to(device), mask[:, -width:].to(device)


def _check_finite(generation: Generation, rows: list[int] | None = None) -> Generation:
    finite = generation.logprobs.isfinite()
    if not bool(finite.all()):
        row, position = (~finite).nonzero()[0].tolist()
        row = row if rows is None else rows[row]
        raise ValueError(
            f"the model's logits are not finite at response position {position} of row {row}: its weights have "
            f"diverged, or half precision overflows; look at the last update, or load the model in float32"
        )
    return generation
