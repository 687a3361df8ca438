"""Sampling with transformers' `model.generate`, for models that cannot be sampled in slots.

`model.generate` only runs the model: a logits processor lets `ResponseRows` choose each token and masks all others.
"""

from typing import Any, Unpack

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from alpaca_ppo.generation.backends import Backend, GenerateOptions
from alpaca_ppo.generation.responses import Generation, ResponseRows, SamplingHooks, SamplingParams
from alpaca_ppo.types import PromptBatch


class GenerateBackend(Backend):
    """Samples responses of one turn, from the float32 logits of `model.generate`.

    Prompts of similar length are sampled together, each with all its responses unless these exceed `rows_at_once`.
    """

    takes_stop_strings = True

    def generate(
        self, model: PreTrainedModel, prompts: PromptBatch, params: SamplingParams, **options: Unpack[GenerateOptions]
    ) -> Generation:
        keys, n = params.random_keys(prompts["prompt_ids"]), params.num_return_sequences
        out = ResponseRows(params, rows=len(keys), slots=len(keys), dtype=model.dtype, device=keys.device)
        out.rows[:] = torch.arange(len(keys), device=keys.device)
        out.keys[:] = keys
        out.limits[:] = params.max_new_tokens
        out.running[:] = True
        lengths = prompts["query_attn_masks"].sum(dim=1).repeat_interleave(n)
        order = lengths.argsort(descending=True, stable=True)
        most = options["rows_at_once"] or len(keys)
        chunk_size = most - most % n if most >= n else most
        for chunk in order.split(chunk_size):
            # The longest comes first.
            width = int(lengths[chunk[0]])
            queries = prompts["queries"][chunk // n, -width:]
            mask = prompts["query_attn_masks"][chunk // n, -width:]
            _generate(model, queries, mask, out, chunk, options["hooks"])
            options["hooks"].on_finished(chunk.tolist(), out.outputs[chunk])
        return out.complete()


# `Any`, because the type checker does not know the `generate` that models inherit.
def _generate(
    model: Any, queries: Tensor, mask: Tensor, out: ResponseRows, chunk: Tensor, hooks: SamplingHooks
) -> None:
    """Samples the responses `chunk` (N,) of `out`, to `queries` (N, Q) with the attention mask `mask`."""

    def choose(input_ids: Tensor, scores: Tensor) -> Tensor:
        hooks.before_token()
        out.choose(scores, chunk)
        # Only the chosen tokens remain possible.
        return scores.fill_(float("-inf")).scatter_(1, out.tokens[chunk].unsqueeze(1), 0.0)

    def ended(input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        return ~out.running[chunk]

    width = out.outputs.responses.size(1)
    plain = GenerationConfig(max_new_tokens=width, do_sample=False, num_beams=1, use_cache=True)
    # `generate` fills fields that are None from the model's own config, so that one must be replaced too.
    own_config, model.generation_config = model.generation_config, plain
    try:
        model.generate(
            queries,
            attention_mask=mask,
            generation_config=plain,
            logits_processor=LogitsProcessorList([choose]),
            stopping_criteria=StoppingCriteriaList([ended]),
        )
    finally:
        model.generation_config = own_config
