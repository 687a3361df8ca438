"""Sampling with transformers' `model.generate`, for models that cannot be sampled in slots.

`model.generate` only runs the model: a logits processor lets `ResponseRows` choose each token and masks all others.
Every option of the model's generation config that changes logits is switched off.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

from alpaca_ppo.generation.responses import Generation, ResponseRows
from alpaca_ppo.generation.sampling_params import SamplingParams


def sample_with_generate(
    model: PreTrainedModel,
    queries: Tensor,
    query_attn_masks: Tensor,
    *,
    sampling_params: SamplingParams,
    prompt_ids: Tensor,
    before_token: Callable[[], Any] = lambda: None,
) -> Generation:
    """Returns responses to `queries`, as `sample_in_slots` does, from float32 logits, which `model.generate` makes."""
    keys, n = sampling_params.random_keys(prompt_ids), sampling_params.num_return_sequences
    rows = ResponseRows(sampling_params, rows=len(keys), slots=len(keys), dtype=model.dtype, device=keys.device)
    index = torch.arange(len(keys), device=keys.device)
    rows.rows[:], rows.keys[:], rows.limits[:], rows.running[:] = index, keys, sampling_params.max_new_tokens, True
    plain = GenerationConfig(
        max_new_tokens=sampling_params.max_new_tokens, do_sample=False, num_beams=1, use_cache=True
    )
    # PreTrainedModel itself has no `generate`; models inherit it from GenerationMixin.
    runner: Any = model
    with _generation_config(model, plain):
        runner.generate(
            queries.repeat_interleave(n, dim=0),
            attention_mask=query_attn_masks.repeat_interleave(n, dim=0),
            generation_config=plain,
            logits_processor=LogitsProcessorList([_Choose(rows, before_token)]),
            stopping_criteria=StoppingCriteriaList([_Stop(rows)]),
        )
    return rows.generation(index)


@contextmanager
def _generation_config(model: PreTrainedModel, config: GenerationConfig) -> Iterator[None]:
    # generate() fills fields that are None from the model's own config, so that one must be replaced too.
    own = model.generation_config
    model.generation_config = config
    try:
        yield
    finally:
        model.generation_config = own


class _Choose(LogitsProcessor):
    """Lets `rows` choose the next tokens, and leaves only these possible."""

    def __init__(self, rows: ResponseRows, before_token: Callable[[], Any]) -> None:
        self._rows, self._before_token = rows, before_token

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._before_token()
        self._rows.choose(scores, slice(None))
        return scores.fill_(float("-inf")).scatter_(1, self._rows.tokens.unsqueeze(1), 0.0)


class _Stop(StoppingCriteria):
    """Reports the rows that have ended."""

    def __init__(self, rows: ResponseRows) -> None:
        self._rows = rows

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        return ~self._rows.running
