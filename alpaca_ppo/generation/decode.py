"""The decode loop: one prefill a prompt, then a token a step for the rows that still run.

Its cost is what a rollout costs: no logits but the last position's, no prompt computed twice, no forward for rows that
have stopped.
"""

import inspect
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from alpaca_ppo.functional.packing import position_ids
from alpaca_ppo.generation.kv_cache import REMEDY, decode_cache
from alpaca_ppo.generation.responses import ResponseBuffer

# Taking rows out copies the whole cache once, about what one more step of it costs.
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
    """Grows `responses` from `queries` (B, Q), left-padded, with `attention_mask` (B, Q) int64, on the model's device.

    With `any_rank` the loop ends where no rank has rows left, so that all ranks make the same passes.

    Raises:
        ValueError: when rows cannot leave the model's cache.
    """
    batch = _Batch(model, queries, attention_mask, num_return_sequences, max_new_tokens)
    logits = batch.prefill()
    for position in range(max_new_tokens):
        responses.extend(logits, position, batch.rows)
        running = position + 1 < max_new_tokens and batch.drop_stopped(responses.running, position)
        if not (any_rank(running) if any_rank else running):
            break
        logits = batch.advance(responses.tokens_at(position, batch.rows), position)


def _steps_between_checks(device: torch.device) -> int:
    # Asking an accelerator which rows have stopped makes it wait for the host.
    return 1 if device.type == "cpu" else 4


class _Batch:
    """The rows that still run: their cache, attention mask and positions, row by row in step."""

    def __init__(
        self,
        model: PreTrainedModel,
        queries: Tensor,
        attention_mask: Tensor,
        num_return_sequences: int,
        max_new_tokens: int,
    ) -> None:
        self._model = model
        # The class's own signature: a trainer may have wrapped the instance's forward.
        self._accepted = inspect.signature(type(model).forward).parameters
        self._cache = decode_cache(model, self._accepted)
        self._queries, self._prompt_mask = queries, attention_mask
        self._width, self._repeats = queries.size(1), num_return_sequences
        repeated = attention_mask.repeat_interleave(num_return_sequences, dim=0)
        room = repeated.new_ones(len(repeated), max_new_tokens)
        self._mask = torch.cat([repeated, room], dim=1)
        self._lengths = repeated.sum(dim=1, keepdim=True)
        self._check_every = _steps_between_checks(queries.device)
        self.rows = torch.arange(len(repeated), device=queries.device)

    def prefill(self) -> Tensor:
        """The logits (N, V) of every response's first token, each prompt computed once."""
        logits = self._forward(self._queries, self._prompt_mask, position_ids(self._prompt_mask))
        if self._cache.get_seq_length() != self._width:
            raise ValueError(
                f"{type(self._model).__name__} left {self._cache.get_seq_length()} of {self._width} prompt tokens in "
                f"the cache that it was given, so it cannot be decoded step by step; {REMEDY}"
            )
        if self._repeats == 1:
            return logits
        self._cache.batch_repeat_interleave(self._repeats)
        return logits.repeat_interleave(self._repeats, dim=0)

    def drop_stopped(self, running: Tensor, position: int) -> bool:
        """Whether any row runs on, by `running` (N,) of all rows; takes stopped ones out where that pays."""
        if (position + 1) % self._check_every:
            return True
        alive = running[self.rows]
        count = int(alive.sum())
        if 0 < count <= len(self.rows) * (1 - _MIN_DROP_SHARE):
            kept = alive.nonzero().squeeze(1)
            self.rows, self._mask, self._lengths = self.rows[kept], self._mask[kept], self._lengths[kept]
            self._cache.batch_select_indices(kept)
        return count > 0

    def advance(self, tokens: Tensor, position: int) -> Tensor:
        """The logits (N', V) that follow the tokens (N',) at response position `position`."""
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
