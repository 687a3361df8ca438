"""The responses of one call of the sampler: preallocated rows, which grow token by token.

Both built-in backends only run the model, and pass its logits to a `ResponseRows`, so tokens do not depend on the
backend.
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

    def __getitem__(self, rows: Any) -> "Generation":
        """The responses `rows`: an index of tensors."""
        return Generation(self.responses[rows], self.response_mask[rows], self.logprobs[rows], self.stopped[rows])


@dataclass(frozen=True)
class SamplingHooks:
    """What is called while responses are sampled."""

    before_token: Callable[[], Any] = lambda: None
    """Called before tokens are chosen, and several times a second while all rows wait for answers; an exception in it
    ends the sampling."""
    on_finished: Callable[[list[int], Generation], Any] = lambda rows, finished: None
    """Called with rows whose responses are complete, in any order, and these responses in the same order. Each row
    comes once; what a backend does not report is reported at its end."""


class ResponseRows:
    """N responses, and the state of the S of them that are being sampled, each in a slot.

    The tensors are changed in place, and nothing of them is read by the host.

    Args:
        params: how tokens are chosen and what ends a row.
        rows: N.
        slots: S.
        dtype: of the model.
        device: of the model.
    """

    def __init__(
        self, params: SamplingParams, *, rows: int, slots: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._params = params
        self._stop_rule = StopRule(params, device)
        # One row more takes what idle slots write.
        self._scratch_row, shape = rows, (rows + 1, params.max_new_tokens)
        self.responses = torch.full(shape, params.pad_token_id, dtype=torch.long, device=device)
        self.mask = torch.zeros(shape, dtype=torch.bool, device=device)
        logprob_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self.logprobs = torch.zeros(shape, dtype=logprob_dtype, device=device)
        self.stopped = torch.zeros(rows + 1, dtype=torch.bool, device=device)
        """(N + 1,) bool, True = a stop or truncate token or a stop string ended its last turn."""

        def of_slots() -> Tensor:
            return torch.zeros(slots, dtype=torch.long, device=device)

        self.tokens = of_slots()
        """(S,) int64: the token that each slot reads next."""
        self.lengths = of_slots()
        """(S,) int64: tokens in the cache. This is also the column that is written next and, where a row runs, the
        position id of `tokens`."""
        self.positions = of_slots()
        """(S,) int64: the response position that is chosen next."""
        self.turn_starts = of_slots()
        """(S,) int64: the response position at which the turn began; 0 in a response of one turn."""
        self.limits = of_slots()
        """(S,) int64: the response position before which the row must end."""
        self.rows = of_slots() + self._scratch_row
        """(S,) int64: the response in each slot; the scratch row for an idle slot."""
        self.keys = of_slots()
        """(S,) int64: the key of the row's random numbers."""
        self.matched = of_slots()
        """(S,) int64: the state of `StopStrings.advance`, from the start of the turn on; 0 without stop strings."""
        self.running = torch.zeros(slots, dtype=torch.bool, device=device)
        """(S,) bool: False for a row that has ended and for an idle slot."""

    @property
    def of_slots(self) -> tuple[Tensor, ...]:
        """The tensors with an entry per slot."""
        counts = (self.lengths, self.positions, self.turn_starts, self.limits)
        return self.tokens, *counts, self.rows, self.keys, self.matched, self.running

    def choose(self, logits: Tensor, slots: Tensor | slice) -> None:
        """Chooses the next token of the rows in `slots` that run, records it, and advances these rows by one position.

        `lengths` are left to the caller, since the chosen tokens are not yet in the cache.

        Args:
            logits: (N', V), of the next token in each of `slots`.
            slots: which slots: their indices (N',) int64, each at most once, or a slice.
        """
        params, running, positions = self._params, self.running[slots], self.positions[slots]
        numbers = uniforms(self.keys[slots], positions) if params.do_sample else None
        tokens, logprobs = choose_tokens(
            logits, numbers, temperature=params.temperature, top_k=params.top_k, top_p=params.top_p
        )
        in_turn = positions - self.turn_starts[slots]
        ends, self.matched[slots] = self._stop_rule(tokens, in_turn, self.matched[slots])
        rows = self.rows[slots].where(running, self._scratch_row)
        # The position of a row that has ended may be R, which the scratch row does not have.
        columns = positions * running
        self.responses.index_put_((rows, columns), tokens)
        self.logprobs.index_put_((rows, columns), logprobs.to(self.logprobs.dtype))
        self.mask.index_put_((rows, columns), running)
        self.stopped.index_put_((rows,), ends)
        goes_on = running & ~ends & (positions + 1 < self.limits[slots])
        # From here on `running` and `positions`, which are views if `slots` is a slice, hold the new values.
        self.tokens[slots] = tokens.where(running, self.tokens[slots])
        self.positions[slots] = positions + running
        self.running[slots] = goes_on

    def generation(self, rows: Tensor) -> Generation:
        """Returns the responses `rows` (N',)."""
        return Generation(self.responses[rows], self.mask[rows], self.logprobs[rows], self.stopped[rows])
