"""The responses while they grow: one preallocated row each, whichever backend runs the model."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from alpaca_ppo.functional.rng import uniforms
from alpaca_ppo.generation.stopping_criteria import StopRule
from alpaca_ppo.generation.token_sampling import choose_tokens


@dataclass(frozen=True)
class Generation:
    """Responses to B prompts, n each: row b * n + j is sample j of prompt b. R is the number of tokens asked for."""

    responses: Tensor
    """(B * n, R) int64, the pad token after a row's last token."""
    response_mask: Tensor
    """(B * n, R) bool, True = a token the policy chose, the stop token included."""
    logprobs: Tensor
    """(B * n, R) nats, float32 (float64 of a float64 model), full softmax at the temperature, zero outside the mask."""
    stopped: Tensor
    """(B * n,) bool, True where a stop token or a truncating token was hit, False where the room ran out."""


@dataclass(frozen=True)
class Choosing:
    """How a token is chosen from the logits. `top_k` and `top_p` are for evaluation."""

    temperature: float
    do_sample: bool
    top_k: int | None
    top_p: float | None


class ResponseBuffer:
    """Chooses the next token of each row, writes it down, and knows which rows still run.

    Args:
        keys: (N,) int64, the random stream of each row.
        max_new_tokens: R.
        pad_token_id: fills what follows a row's end.
        choosing: how a token is chosen.
        stop_rule: what ends a row.
        logprob_dtype: of the log-probs.
        before_token: called before each position's tokens are chosen; it may raise.
    """

    def __init__(
        self,
        keys: Tensor,
        *,
        max_new_tokens: int,
        pad_token_id: int,
        choosing: Choosing,
        stop_rule: StopRule,
        logprob_dtype: torch.dtype,
        before_token: Callable[[], Any] = lambda: None,
    ) -> None:
        shape, device = (len(keys), max_new_tokens), keys.device
        self._keys, self._choosing, self._stop_rule = keys, choosing, stop_rule
        self._pad_token_id, self._before_token = pad_token_id, before_token
        self._tokens = torch.full(shape, pad_token_id, dtype=torch.long, device=device)
        self._mask = torch.zeros(shape, dtype=torch.bool, device=device)
        self._logprobs = torch.zeros(shape, dtype=logprob_dtype, device=device)
        self.running = torch.ones(len(keys), dtype=torch.bool, device=device)

    def extend(self, logits: Tensor, position: int, rows: Tensor) -> None:
        """Chooses and writes the tokens at `position` of the rows `rows` (N',), whose logits are (N', V).

        Of rows that stopped before nothing changes.
        """
        self._before_token()
        how, running = self._choosing, self.running[rows]
        numbers = uniforms(self._keys[rows], position) if how.do_sample else None
        tokens, logprobs = choose_tokens(logits, numbers, temperature=how.temperature, top_k=how.top_k, top_p=how.top_p)
        self._tokens[rows, position] = tokens.where(running, self._pad_token_id)
        self._logprobs[rows, position] = logprobs.where(running, 0.0).to(self._logprobs.dtype)
        self._mask[rows, position] = running
        self.running[rows] = running & ~self._stop_rule(tokens, position)

    def tokens_at(self, position: int, rows: Tensor) -> Tensor:
        """The tokens (N',) at `position` of `rows`: what the model reads next."""
        return self._tokens[rows, position]

    def finish(self) -> Generation:
        """What was generated; the rows still running ran out of room."""
        return Generation(self._tokens, self._mask, self._logprobs, ~self.running)
