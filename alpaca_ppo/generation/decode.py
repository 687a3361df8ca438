"""The decode loop: one prefill per prompt, then one token per step for the rows that are still running.

Most of a rollout's time is spent here. So each prompt is computed once for all its samples, logits are computed for the
last position only, and rows that have stopped are dropped from the batch.
"""

import inspect
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from alpaca_ppo.functional.packing import position_ids
from alpaca_ppo.generation.kv_cache import REMEDY, decode_cache
from alpaca_ppo.generation.responses import ResponseBuffer

# Dropping rows copies the whole cache, which costs about as much as one decode step.
_MIN_DROP_SHARE = 1 / 8


def decode(
    model: PreTrainedModel,
    queries: Tensor,
    attention_mask: Tensor,
    *,
    num_return_sequences: int,
    max_new_tokens: int,
    responses: ResponseBuffer,
    any_rank: Callable[[bool], bool] | None = None,
) -> None:
    """Extends `responses` token by token until every row has stopped or has `max_new_tokens` tokens.

    Args:
        model: the language model.
        queries: (B, Q) int64, left-padded, on the model's device.
        attention_mask: (B, Q) int64, 1 = a real token.
        num_return_sequences: n, responses per prompt.
        max_new_tokens: the most tokens of a response.
        responses: the buffer of the B * n responses.
        any_rank: returns whether its argument is True on any rank. The loop then ends when no rank has running rows, so
            that all ranks make the same forward passes.

    Raises:
        ValueError: if the model's cache does not support dropping rows.
    """
    batch = _RunningBatch(model, queries, attention_mask, num_return_sequences, max_new_tokens)
    logits = batch.prefill()
    for position in range(max_new_tokens):
        responses.extend(logits, position, batch.rows)
        running = position + 1 < max_new_tokens and batch.drop_stopped(responses.running, position)
        if not (any_rank(running) if any_rank else running):
            break
        logits = batch.advance(responses.tokens_at(position, batch.rows), position)


def _steps_between_checks(device: torch.device) -> int:
    # On an accelerator, reading which rows have stopped synchronizes it with the host.
    return 1 if device.type == "cpu" else 4


class _RunningBatch:
    """The rows that are still running: their cache, attention mask and lengths, in the same row order."""

    def __init__(
        self,
        model: PreTrainedModel,
        queries: Tensor,
        attention_mask: Tensor,
        num_return_sequences: int,
        max_new_tokens: int,
    ) -> None:
        self._model = model
        # The signature of the class, because the forward of the instance may be wrapped.
        self._accepted = inspect.signature(type(model).forward).parameters
        self._cache = decode_cache(model, self._accepted)
        self._queries, self._prompt_mask = queries, attention_mask
        self._width, self._repeats = queries.size(1), num_return_sequences
        repeated = attention_mask.repeat_interleave(num_return_sequences, dim=0)
        response_columns = repeated.new_ones(len(repeated), max_new_tokens)
        self._mask = torch.cat([repeated, response_columns], dim=1)
        self._lengths = repeated.sum(dim=1, keepdim=True)
        self._check_every = _steps_between_checks(queries.device)
        self.rows = torch.arange(len(repeated), device=queries.device)

    def prefill(self) -> Tensor:
        """Returns the logits (N, V) of every response's first token; each prompt is computed once."""
        logits = self._forward(self._queries, self._prompt_mask, position_ids(self._prompt_mask))
        if self._cache.get_seq_length() != self._width:
            raise ValueError(
                f"{type(self._model).__name__} stored {self._cache.get_seq_length()} of {self._width} prompt tokens in "
                f"the cache passed to it, so it cannot be decoded step by step; {REMEDY}"
            )
        if self._repeats == 1:
            return logits
        self._cache.batch_repeat_interleave(self._repeats)
        return logits.repeat_interleave(self._repeats, dim=0)

    def drop_stopped(self, running: Tensor, position: int) -> bool:
        """Returns whether any row is still running, and drops stopped rows if there are enough of them.

        `running` (N,) bool covers all rows, dropped ones too. Between checks the answer is True.
        """
        if (position + 1) % self._check_every:
            return True
        still_running = running[self.rows]
        count = int(still_running.sum())
        if 0 < count <= len(self.rows) * (1 - _MIN_DROP_SHARE):
            kept = still_running.nonzero().squeeze(1)
            self.rows, self._mask, self._lengths = self.rows[kept], self._mask[kept], self._lengths[kept]
            self._cache.batch_select_indices(kept)
        return count > 0

    def advance(self, tokens: Tensor, position: int) -> Tensor:
        """Returns the logits (N', V) after the tokens (N',) at response position `position`."""
        mask = self._mask[:, : self._width + position + 1]
        return self._forward(tokens.unsqueeze(1), mask, self._lengths + position)

    def _forward(self, input_ids: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        optional = {"position_ids": positions, "logits_to_keep": 1}
        output = self._model(
            input_ids=input_ids,
            attention_mask=mask,
            past_key_values=self._cache,
            use_cache=True,
            **{name: value for name, value in optional.items() if name in self._accepted},
        )
        return output.logits[:, -1]
