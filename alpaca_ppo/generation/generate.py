"""`generate`: the one entry to the sampler. It checks what it is given, and leaves the model as it found it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from alpaca_ppo.functional.rng import stream_keys
from alpaca_ppo.generation.decode import decode
from alpaca_ppo.generation.hf_generate import decode_with_generate
from alpaca_ppo.generation.responses import Choosing, Generation, ResponseBuffer
from alpaca_ppo.generation.stopping_criteria import StopRule


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
    temperature: float = 1.0,
    do_sample: bool = True,
    top_k: int | None = None,
    top_p: float | None = None,
    num_return_sequences: int = 1,
    truncate_token_ids: Sequence[int] = (),
    truncate_after: int = 0,
    backend: Literal["decode", "generate"] = "decode",
    any_rank: Callable[[bool], bool] | None = None,
    before_token: Callable[[], Any] = lambda: None,
) -> Generation:
    """Responses to `queries`, on the model's device, with the log-prob of each chosen token.

    A response does not depend on padding, on the other rows or on their order, as far as the model's arithmetic does
    not: the random number of a token is a function of (seed, step, prompt id, sample index, position) alone. The
    model's own generation config is not looked at. The model runs in eval mode, without gradients, and is left in the
    mode it was in, also by an exception.

    Args:
        model: a causal language model of transformers, not wrapped (of a PEFT model: `get_base_model()`).
        queries: (B, Q) int64, left-padded.
        query_attn_masks: (B, Q), 1 = real. Columns that are padding in every row cost nothing.
        max_new_tokens: R, tokens of a response at most, and the width of the result.
        pad_token_id: what follows a response's end; may equal a stop token.
        stop_token_ids: end a response wherever they come.
        seed: of the run.
        step: of the rollout.
        prompt_ids: (B,) int64, index of each prompt in its dataset.
        temperature: divides the logits, for the choice and for the log-probs.
        do_sample: True samples the softmax; False takes the most likely token.
        top_k: sample only among the k most likely tokens. For evaluation: log-probs stay those of the full softmax.
        top_p: likewise, only among the most likely ones that together reach this probability.
        num_return_sequences: samples a prompt, n.
        truncate_token_ids: end a response where at least `truncate_after` of its tokens stand before them.
        truncate_after: tokens.
        backend: "decode", the loop of this package, or "generate", `model.generate`, for models whose cache rows cannot
            leave.
        any_rank: tells whether its argument is True on any rank. Given where the model's parameters lie in parts on
            several ranks (ZeRO 3): ranks then make the same number of passes.
        before_token: called before each position's tokens are chosen; what it raises ends the sampling.

    Raises:
        ValueError: when an argument is out of its range, a prompt is empty or not left-padded, rows cannot leave the
            model's cache, or the model's logits are not finite.
    """
    _check_arguments(max_new_tokens, num_return_sequences, temperature, top_k, top_p, backend)
    queries, mask = _trimmed(queries, query_attn_masks)
    queries, mask = queries.to(model.device), mask.to(model.device)
    samples: dict[str, Any] = {"prompt_ids": prompt_ids.to(model.device), "num_return_sequences": num_return_sequences}
    responses = ResponseBuffer(
        stream_keys(seed=seed, step=step, **samples),
        max_new_tokens=max_new_tokens,
        pad_token_id=pad_token_id,
        choosing=Choosing(temperature, do_sample, top_k, top_p),
        stop_rule=_stop_rule(model, stop_token_ids, truncate_token_ids, truncate_after),
        logprob_dtype=torch.float64 if model.dtype == torch.float64 else torch.float32,
        before_token=before_token,
    )
    grow = decode if backend == "decode" else decode_with_generate
    size = {"num_return_sequences": num_return_sequences, "max_new_tokens": max_new_tokens}
    with _eval_mode(model):
        grow(model, queries, mask, **size, responses=responses, any_rank=any_rank)
    return _checked(responses.finish())


def _stop_rule(
    model: PreTrainedModel, stop_token_ids: Sequence[int], truncate_token_ids: Sequence[int], truncate_after: int
) -> StopRule:
    return StopRule(
        stop_token_ids, truncate_token_ids=truncate_token_ids, truncate_after=truncate_after, device=model.device
    )


def _check_arguments(
    max_new_tokens: int,
    num_return_sequences: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    backend: str,
) -> None:
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens ({max_new_tokens}) must be at least 1")
    if num_return_sequences < 1:
        raise ValueError(f"num_return_sequences ({num_return_sequences}) must be at least 1")
    if not temperature > 0:
        raise ValueError(f"temperature ({temperature}) must be positive; do_sample=False takes the most likely token")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k ({top_k}) must be at least 1; None keeps the whole vocabulary")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p ({top_p}) must be in (0, 1]; None keeps the whole vocabulary")
    if backend not in ("decode", "generate"):
        raise ValueError(f"generation_backend ({backend!r}) must be 'decode' or 'generate'")


def _trimmed(queries: Tensor, query_attn_masks: Tensor) -> tuple[Tensor, Tensor]:
    """Prompts and mask (int64) without the columns that are padding in every row."""
    mask = query_attn_masks.long()
    if mask.size(0) == 0:
        raise ValueError("queries has no row; there is nothing to sample")
    lengths = mask.sum(dim=1)
    if bool((lengths == 0).any()):
        row = int((lengths == 0).nonzero()[0])
        raise ValueError(f"the prompt in row {row} is empty; a prompt needs at least one token")
    width = int(lengths.max())
    left_padded = torch.arange(mask.size(1), device=mask.device) >= mask.size(1) - lengths.unsqueeze(1)
    if not torch.equal(left_padded, mask.bool()):
        row = int((left_padded != mask.bool()).any(dim=1).nonzero()[0])
        raise ValueError(f"query_attn_masks has padding right of a token in row {row}; queries must be left-padded")
    return queries[:, -width:], mask[:, -width:]


@contextmanager
def _eval_mode(model: PreTrainedModel) -> Iterator[None]:
    """Eval mode for every module of `model`, then the mode each of them had."""
    was_training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in was_training:
            module.training = True


def _checked(generation: Generation) -> Generation:
    finite = generation.logprobs.isfinite()
    if not bool(finite.all()):
        row, position = (~finite).nonzero()[0].tolist()
        raise ValueError(
            f"the model's logits are not finite at response position {position} of row {row}; its weights have "
            f"diverged, or its half precision overflows: look at the last update, or load it in float32"
        )
    return generation
