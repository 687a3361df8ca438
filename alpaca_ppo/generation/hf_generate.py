"""Generation by `model.generate`, for models whose cache rows cannot leave: slower, with the same tokens.

`generate` only runs the model here. A logits processor makes our own choice from the logits and leaves `generate` that
one token to take; everything that the model's generation config could do to the logits is switched off.
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
    """Grows `responses` as `decode.decode` does; logits reach it in float32, as `generate` hands them out."""
    plain = GenerationConfig(max_new_tokens=max_new_tokens, do_sample=False, num_beams=1, use_cache=True)
    runner: Any = model  # A type checker sees no `generate` here: models inherit it beside PreTrainedModel.
    with _generation_config(model, plain):
        runner.generate(
            queries.repeat_interleave(num_return_sequences, dim=0),
            attention_mask=attention_mask.repeat_interleave(num_return_sequences, dim=0),
            generation_config=plain,
            logits_processor=LogitsProcessorList([_OurChoice(responses, queries.size(1))]),
            stopping_criteria=StoppingCriteriaList([_OurStops(responses)]),
            synced_gpus=any_rank is not None,
        )


@contextmanager
def _generation_config(model: PreTrainedModel, config: GenerationConfig) -> Iterator[None]:
    # generate() fills whatever the given config leaves at None from the model's own, so that one has to be plain too.
    own = model.generation_config
    model.generation_config = config
    try:
        yield
    finally:
        model.generation_config = own


class _OurChoice(LogitsProcessor):
    def __init__(self, responses: ResponseBuffer, prompt_width: int) -> None:
        self._responses, self._prompt_width = responses, prompt_width

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        rows = torch.arange(len(scores), device=scores.device)
        position = input_ids.size(1) - self._prompt_width
        self._responses.extend(scores, position, rows)
        tokens = self._responses.tokens_at(position, rows)
        return scores.fill_(float("-inf")).scatter_(1, tokens.unsqueeze(1), 0.0)


class _OurStops(StoppingCriteria):
    def __init__(self, responses: ResponseBuffer) -> None:
        self._responses = responses

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        return ~self._responses.running
