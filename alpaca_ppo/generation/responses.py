"""What the sampler takes and returns, which token ends a turn, and the responses in the making.

Backends that sample from the model in training pass its logits to a `ResponseRows`, so tokens do not depend on the
backend.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from alpaca_ppo.functional.rng import stream_keys, uniforms
from alpaca_ppo.generation.stopping import StopStrings
from alpaca_ppo.generation.token_sampling import choose_tokens
from alpaca_ppo.types import PromptBatch


@dataclass(frozen=True)
class SamplingParams:
    """The settings of one call of the sampler; `generate` checks them.

    Log-probs stay those of the full softmax with `top_k` and `top_p`, which are meant for evaluation.

    Attributes:
        max_new_tokens: R, the most tokens of a response, and the width of the result.
        temperature: > 0; divides the logits, also for log-probs.
        pad_token_id: fills the columns after a response; may equal a stop token.
        stop_token_ids: end a response at any position.
        truncate_token_ids: end a response after at least `truncate_after` other tokens.
        stop_strings: end a response where one is completed.
        num_return_sequences: n, responses per prompt.
        do_sample: False takes the most likely token (greedy decoding).
        top_k: samples only from the k most likely tokens.
        top_p: samples only from the most likely tokens that together reach this probability, in (0, 1].
        seed: of the run.
        step: of the rollout.
        sampling_round: 0, or the round of `dynamic_sampling` that drew the prompts.
        sample_ids: sample index of each row, where the samples of a prompt are rows of `prompts` and
            `num_return_sequences` is 1; None numbers the samples of each prompt from 0.
        state_layers: numbers of the model's layers, from 1, whose states a backend that can returns as
            `Generation.states`.
    """

    max_new_tokens: int
    temperature: float
    pad_token_id: int
    stop_token_ids: tuple[int, ...]
    truncate_token_ids: tuple[int, ...] = ()
    truncate_after: int = 0
    stop_strings: StopStrings | None = None
    num_return_sequences: int = 1
    do_sample: bool = True
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    step: int = 0
    sampling_round: int = 0
    sample_ids: tuple[int, ...] | None = None
    state_layers: tuple[int, ...] = ()

    def random_keys(self, prompt_ids: Tensor) -> Tensor:
        """Returns the key of each response's stream of random numbers, (P * n,) int64, prompt-major, for `prompt_ids`
        (P,) int64. `functional.rng.uniforms(keys, t)` are the numbers that choose the tokens at position t.
        """
        ids = self.sample_ids
        return stream_keys(
            seed=self.seed,
            step=self.step,
            sampling_round=self.sampling_round,
            prompt_ids=prompt_ids,
            num_return_sequences=self.num_return_sequences,
            sample_ids=None if ids is None else torch.tensor(ids, dtype=torch.int64, device=prompt_ids.device),
        )

    def check(self) -> None:
        """Raises ValueError for a value that is out of range."""
        for name in ("max_new_tokens", "num_return_sequences", "top_k"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} ({value}) must be at least 1")
        if self.sample_ids is not None and self.num_return_sequences != 1:
            raise ValueError(f"num_return_sequences ({self.num_return_sequences}) must be 1 where sample_ids are given")
        if not self.temperature > 0:
            raise ValueError(f"temperature ({self.temperature}) must be positive; for greedy decoding: do_sample=False")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p ({self.top_p}) must be in (0, 1]")

    def check_full_softmax(self) -> None:
        """Raises ValueError for `top_k` or `top_p`, which training must not use."""
        if self.top_k is not None or self.top_p is not None:
            raise ValueError(f"training would sample with top_k {self.top_k} and top_p {self.top_p}; leave both None")


@dataclass(frozen=True)
class Generation:
    """Responses to B prompts, n per prompt: row b * n + j is sample j of prompt b. R is `max_new_tokens`.

    Attributes:
        responses: (B * n, R) int64, the pad token after a row's last token.
        response_mask: (B * n, R) bool, True = a token the policy chose, including the stop token; False for padding and
            for tokens that were appended between two turns (`generation.turns`).
        logprobs: (B * n, R) float32 (float64 for a float64 model), in nats, of the full softmax at the temperature;
            zero outside the mask.
        stopped: (B * n,) bool, True = ended by a stop or truncate token or a stop string, False = cut off by a limit.
        states: (B * n, R, layers, H), the outputs of the layers `state_layers` before each token under the mask,
            anything outside it; None from a backend that keeps no states, and in what is reported of rows on the way.
    """

    responses: Tensor
    response_mask: Tensor
    logprobs: Tensor
    stopped: Tensor
    states: Tensor | None = None

    def __getitem__(self, rows: Any) -> "Generation":
        """The responses `rows`, any index of a tensor."""
        return Generation(self.responses[rows], self.response_mask[rows], self.logprobs[rows], self.stopped[rows])


def unfilled(
    params: SamplingParams, rows: int, *, dtype: torch.dtype = torch.float32, device: torch.device | None = None
) -> Generation:
    """Returns `rows` responses without a token, with log-probs of `dtype`."""
    shape = (rows, params.max_new_tokens)
    return Generation(
        responses=torch.full(shape, params.pad_token_id, dtype=torch.long, device=device),
        response_mask=torch.zeros(shape, dtype=torch.bool, device=device),
        logprobs=torch.zeros(shape, dtype=dtype, device=device),
        stopped=torch.zeros(rows, dtype=torch.bool, device=device),
    )


@dataclass(frozen=True)
class SamplingHooks:
    """What is called while responses are sampled.

    Attributes:
        before_token: called before tokens are chosen, and several times a second while all rows wait for replies; an
            exception ends the sampling.
        on_finished: called with rows whose responses are complete, and these; each row comes once, in any order. At the
            end `generate` reports the rows that a backend has not.
    """

    before_token: Callable[[], Any] = lambda: None
    on_finished: Callable[[list[int], Generation], Any] = lambda rows, finished: None


def unpadded(prompts: PromptBatch) -> list[list[int]]:
    """The token ids of each prompt, without padding."""
    rows = zip(prompts["queries"].tolist(), prompts["query_attn_masks"].tolist(), strict=True)
    return [[token for token, is_token in zip(tokens, mask, strict=True) if is_token] for tokens, mask in rows]


class StopRule:
    """Which token ends its row's turn, by the stop tokens, truncate tokens and stop strings of `params`.

    Attributes:
        stop_ids: tokens that end a turn at any position.
        only_stop_ids: whether nothing but these ends a turn.
    """

    def __init__(self, params: SamplingParams, device: torch.device) -> None:
        stop_ids, truncate_ids = set(params.stop_token_ids), set(params.truncate_token_ids)
        if not params.truncate_after:
            stop_ids, truncate_ids = stop_ids | truncate_ids, set()
        self.stop_ids = sorted(stop_ids)
        self.only_stop_ids = not truncate_ids and params.stop_strings is None
        self._stop_ids = torch.tensor(self.stop_ids, dtype=torch.long, device=device)
        self._truncate_ids = torch.tensor(sorted(truncate_ids), dtype=torch.long, device=device)
        self._truncate_after, self._strings = params.truncate_after, params.stop_strings

    def __call__(self, tokens: Tensor, positions: Tensor, matched: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (N,) bool, True where a token ends its row's turn, and the next `matched` (N,).

        Args:
            tokens: (N,) int64, one of each row.
            positions: (N,) int64, of the tokens in their turns, from 0.
            matched: the states of `StopStrings.advance` before them.
        """
        ends = (tokens.unsqueeze(1) == self._stop_ids).any(dim=1)
        if len(self._truncate_ids):
            truncates = (tokens.unsqueeze(1) == self._truncate_ids).any(dim=1)
            ends = ends | (truncates & (positions >= self._truncate_after))
        if self._strings is not None:
            matched = self._strings.advance(matched, tokens)
            ends = ends | (matched == self._strings.completed)
        return ends, matched


class ResponseRows:
    """N responses (`rows`) that grow token by token in preallocated tensors, and the state of those that are being
    sampled, in S `slots`. `choose` does not synchronize with the host. `dtype` and `device` are those of the model.

    Attributes:
        outputs: the N responses, and an additional row that takes what idle slots write.
        tokens: (S,) int64, as the next seven: the token that each slot reads next.
        lengths: tokens in the cache, so the column that is written next and, for a running row, the position id of
            `tokens`.
        positions: the response position that is chosen next.
        turn_starts: the response position at which the turn began.
        limits: the response position before which the turn must end.
        rows: the last response in each slot; N for a slot that has had none.
        keys: of the row's random numbers.
        matched: the state of `StopStrings.advance` since the start of the turn.
        running: (S,) bool, False for a row whose turn has ended and for an idle slot.
    """

    def __init__(
        self, params: SamplingParams, *, rows: int, slots: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._params = params
        self._stop_rule = StopRule(params, device)
        self._scratch_row = rows
        logprob_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self.outputs = unfilled(params, rows + 1, dtype=logprob_dtype, device=device)
        # The attributes are views of one tensor, which `move` indexes.
        self._slot_state = torch.zeros(8, slots, dtype=torch.long, device=device)
        self.tokens, self.lengths, self.positions, self.turn_starts = self._slot_state[:4]
        self.limits, self.rows, self.keys, self.matched = self._slot_state[4:]
        self.rows.fill_(rows)
        self.running = torch.zeros(slots, dtype=torch.bool, device=device)
        self._states: Tensor | None = None

    def complete(self) -> Generation:
        """The N responses."""
        outputs = self.outputs[: self._scratch_row]
        return replace(outputs, states=None if self._states is None else self._states[: self._scratch_row])

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Moves the state of the slots `sources` (k,) int64 to `targets` (k,), which may be some of the same slots."""
        self._slot_state[:, targets] = self._slot_state[:, sources]
        self.running[targets] = self.running[sources]

    def choose(self, logits: Tensor, slots: Tensor | slice, states: Tensor | None = None) -> None:
        """Chooses and records the next token of the rows in `slots` that run, and advances them by one position.
        `lengths` do not change: the chosen tokens are not yet in the cache.

        Args:
            logits: (N', V), of the next token in each of `slots`.
            slots: their indices (N',) int64, each at most once, or a slice.
            states: (S or more, layers, H), those before the next token of every slot.
        """
        params, out = self._params, self.outputs
        running, positions = self.running[slots], self.positions[slots]
        numbers = uniforms(self.keys[slots], positions) if params.do_sample else None
        tokens, logprobs = choose_tokens(
            logits, numbers, temperature=params.temperature, top_k=params.top_k, top_p=params.top_p
        )
        in_turn = positions - self.turn_starts[slots]
        ends, self.matched[slots] = self._stop_rule(tokens, in_turn, self.matched[slots])
        rows = self.rows[slots].where(running, self._scratch_row)
        # The position of a row that has ended may be R, which the scratch row does not have.
        columns = positions * running
        out.responses.index_put_((rows, columns), tokens)
        out.logprobs.index_put_((rows, columns), logprobs.to(out.logprobs.dtype))
        out.response_mask.index_put_((rows, columns), running)
        out.stopped.index_put_((rows,), ends)
        if states is not None:
            if self._states is None:
                self._states = states.new_empty(*out.responses.shape, *states.shape[1:])
            self._states.index_put_((rows, columns), states[slots])
        goes_on = running & ~ends & (positions + 1 < self.limits[slots])
        # Last, because `running` and `positions` are views of these if `slots` is a slice.
        self.tokens[slots] = tokens.where(running, self.tokens[slots])
        self.positions[slots] = positions + running
        self.running[slots] = goes_on
