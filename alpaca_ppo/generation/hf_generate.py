"""Sampling with transformers' `model.generate`, for models whose cache does not support dropping rows.

It gives the same tokens as the decode loop, more slowly. `model.generate` only runs the model: a logits processor lets
the `ResponseBuffer` choose each token and masks all others. Every option of the model's generation config that changes
logits is switched off.
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

from alpaca_ppo.generation.responses import ResponseBuffer


def decode_with_generate(
    model: PreTrainedModel,
    queries: Tensor,
    attention_mask: Tensor,
    *,
    num_return_sequences: int,
    max_new_tokens: int,
    responses: ResponseBuffer,
    any_rank: Callable[[bool], bool] | None = None,
) -> None:
    """Extends `responses` as `decode.decode` does, from float32 logits, which `model.generate` converts to."""
    plain = GenerationConfig(max_new_tokens=max_new_tokens, do_sample=False, num_beams=1, use_cache=True)
    # PreTrainedModel itself has no `generate`; models inherit it from GenerationMixin.
    runner: Any = model
    with _generation_config(model, plain):
        runner.generate(
            queries.repeat_interleave(num_return_sequences, dim=0),
            attention_mask=attention_mask.repeat_interleave(num_return_sequences, dim=0),
            generation_config=plain,
            logits_processor=LogitsProcessorList([_ChooseFromBuffer(responses, queries.size(1))]),
            stopping_criteria=StoppingCriteriaList([_StopFromBuffer(responses)]),
            synced_gpus=any_rank is not None,
        )


@contextmanager
def _generation_config(model: PreTrainedModel, config: GenerationConfig) -> Iterator[None]:
    # generate() fills fields that are None from the model's own config, so that one must be replaced too.
    own = model.generation_config
    model.generation_config = config
    try:
        yield
    finally:
        model.generation_config = own


class _ChooseFromBuffer(LogitsProcessor):
    """Lets the buffer choose the next token, and leaves only that token possible."""

    def __init__(self, responses: ResponseBuffer, prompt_width: int) -> None:
        self._responses, self._prompt_width = responses, prompt_width

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        rows = torch.arange(len(scores), device=scores.device)
        position = input_ids.size(1) - self._prompt_width
        self._responses.extend(scores, position, rows)
        tokens = self._responses.tokens_at(position, rows)
        return scores.fill_(float("-inf")).scatter_(1, tokens.unsqueeze(1), 0.0)


class _StopFromBuffer(StoppingCriteria):
    """Reports the rows that have stopped in the buffer."""

    def __init__(self, responses: ResponseBuffer) -> None:
        self._responses = responses

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        return ~self._responses.running
