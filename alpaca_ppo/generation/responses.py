"""The responses of one call of the sampler, in preallocated rows that grow token by token.

Every backend that runs a model itself passes logits to a `ResponseBuffer`, so tokens do not depend on the backend.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from alpaca_ppo.functional.rng import uniforms
from alpaca_ppo.generation.sampling_params import SamplingParams
from alpaca_ppo.generation.stopping_criteria import StopRule
from alpaca_ppo.generation.token_sampling import choose_tokens


@dataclass(frozen=True)
class Generation:
    """Responses to B prompts, n per prompt: row b * n + j is sample j of prompt b. R is `max_new_tokens`."""

    responses: Tensor
    """(B * n, R) int64, the pad token after a row's last token."""
    response_mask: Tensor
    """(B * n, R) bool, True = a token the policy chose, including the stop token; False after a row's last token, and
    where something else appended tokens between two turns (`generation.turns`)."""
    logprobs: Tensor
    """(B * n, R) float32 (float64 for a float64 model), in nats, of the full softmax at the temperature; zero outside
    the mask."""
    stopped: Tensor
    """(B * n,) bool, True = ended by a stop or truncate token or a stop string, False = cut off by a limit, such as R
    tokens."""


class ResponseBuffer:
    """Chooses the next token of each row, stores it, and tracks which rows are still running.

    Args:
        keys: (N,) int64, the key of each row's random numbers.
        params: how tokens are chosen and what ends a row.
        logprob_dtype: dtype of the stored log-probs.
        before_token: called before the tokens of each position are chosen; it may raise to end the sampling.
    """

    def __init__(
        self,
        keys: Tensor,
        params: SamplingParams,
        *,
        logprob_dtype: torch.dtype,
        before_token: Callable[[], Any] = lambda: None,
    ) -> None:
        shape, device = (len(keys), params.max_new_tokens), keys.device
        self._keys, self._params, self._before_token = keys, params, before_token
        self._stop_rule = StopRule(
            params.stop_token_ids,
            truncate_token_ids=params.truncate_token_ids,
            truncate_after=params.truncate_after,
            stop_strings=params.stop_strings,
            device=device,
        )
        self._tokens = torch.full(shape, params.pad_token_id, dtype=torch.long, device=device)
        self._mask = torch.zeros(shape, dtype=torch.bool, device=device)
        self._logprobs = torch.zeros(shape, dtype=logprob_dtype, device=device)
        self._matched = torch.zeros(len(keys), dtype=torch.long, device=device)
        """(N,) how much of a stop string each row ends with."""
        self.running = torch.ones(len(keys), dtype=torch.bool, device=device)
        """(N,) bool, True = no token has ended the row yet."""

    def extend(self, logits: Tensor, position: int, rows: Tensor) -> None:
        """Chooses and stores the tokens at `position` of `rows` (N',), whose logits are (N', V).

        Rows that stopped earlier do not change.
        """
        self._before_token()
        params, running = self._params, self.running[rows]
        numbers = uniforms(self._keys[rows], position) if params.do_sample else None
        tokens, logprobs = choose_tokens(
            logits, numbers, temperature=params.temperature, top_k=params.top_k, top_p=params.top_p
        )
        self._tokens[rows, position] = tokens.where(running, params.pad_token_id)
        self._logprobs[rows, position] = logprobs.where(running, 0.0).to(self._logprobs.dtype)
        self._mask[rows, position] = running
        ends, self._matched[rows] = self._stop_rule.read(self._stop_rule(tokens, position), self._matched[rows], tokens)
        self.running[rows] = running & ~ends

    def tokens_at(self, position: int, rows: Tensor) -> Tensor:
        """Returns the tokens (N',) at `position` of `rows`, which the model reads next."""
        return self._tokens[rows, position]

    def finish(self) -> Generation:
        """Returns the responses; rows that are still running count as not stopped."""
        return Generation(self._tokens, self._mask, self._logprobs, ~self.running)
