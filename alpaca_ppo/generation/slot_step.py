"""One step of decoding in slots: every busy slot reads its last token and chooses the next one.

The step works on tensors that keep their shapes and addresses, reads nothing back to the host and runs the same
operators each time, so that it can be captured in a CUDA graph or compiled (`generation.graphs`). Which row sits in
which slot, and when a slot gets another row, is decided elsewhere (`generation.slots`).
"""

from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from alpaca_ppo.functional.rng import uniforms
from alpaca_ppo.generation.sampling_params import SamplingParams
from alpaca_ppo.generation.slot_cache import visible_columns
from alpaca_ppo.generation.stopping_criteria import StopRule
from alpaca_ppo.generation.token_sampling import choose_tokens
from alpaca_ppo.models.packed_attention import AttentionSettings, dense_attention


class StepCache(Protocol):
    """What a step needs of the cache: keys and values in S rows of C columns that are allocated once."""

    def start_step(self, lengths: Tensor, columns: int) -> None:
        """Makes `update` write the state of row i into column `lengths[i]` and return the first `columns` columns of
        the first `len(lengths)` rows.
        """
        ...


@dataclass(frozen=True)
class SlotState:
    """The rows in S slots. The tensors are changed in place and never replaced."""

    tokens: Tensor
    """(S,) int64: the token that each slot reads next."""
    lengths: Tensor
    """(S,) int64: tokens in the cache. This is also the column that is written next and, where a row runs, the position
    id of `tokens`."""
    positions: Tensor
    """(S,) int64: the response position that is chosen next."""
    turn_starts: Tensor
    """(S,) int64: the response position at which the turn began; 0 in a response of one turn."""
    limits: Tensor
    """(S,) int64: the response position before which the row must end."""
    rows: Tensor
    """(S,) int64: the row of the outputs; the scratch row for an idle slot."""
    keys: Tensor
    """(S,) int64: the key of the row's random numbers."""
    matched: Tensor
    """(S,) int64: the state of `StopStrings.advance`, from the start of the turn on; 0 without stop strings."""
    running: Tensor
    """(S,) bool: False for a row that has ended and for an idle slot."""

    @classmethod
    def idle(cls, slots: int, *, scratch_row: int, device: torch.device) -> Self:
        """Returns the state of `slots` idle slots."""

        def zeros() -> Tensor:
            return torch.zeros(slots, dtype=torch.long, device=device)

        running = torch.zeros(slots, dtype=torch.bool, device=device)
        return cls(zeros(), zeros(), zeros(), zeros(), zeros(), zeros() + scratch_row, zeros(), zeros(), running)

    def clear(self, *, scratch_row: int) -> None:
        """Makes all slots idle."""
        for tensor in vars(self).values():
            tensor.zero_()
        self.rows.fill_(scratch_row)


@dataclass(frozen=True)
class SlotOutputs:
    """What the sampler has chosen: N rows and a scratch row, which takes what idle slots write. Changed in place."""

    responses: Tensor
    """(N + 1, R) int64, the pad token where nothing has been chosen."""
    mask: Tensor
    """(N + 1, R) bool, True = a token the policy chose."""
    logprobs: Tensor
    """(N + 1, R) float32 (float64 for a float64 model), in nats; zero outside the mask."""
    stopped: Tensor
    """(N + 1,) bool, True = its last turn was ended by a stop or truncate token or a stop string."""

    @classmethod
    def empty(cls, rows: int, params: SamplingParams, *, logprob_dtype: torch.dtype, device: torch.device) -> Self:
        """Returns outputs for `rows` rows, in which nothing has been chosen yet."""
        shape = (rows + 1, params.max_new_tokens)
        return cls(
            torch.full(shape, params.pad_token_id, dtype=torch.long, device=device),
            torch.zeros(shape, dtype=torch.bool, device=device),
            torch.zeros(shape, dtype=logprob_dtype, device=device),
            torch.zeros(rows + 1, dtype=torch.bool, device=device),
        )

    def clear(self, pad_token_id: int) -> None:
        """Forgets what has been chosen."""
        self.responses.fill_(pad_token_id)
        for tensor in (self.mask, self.logprobs, self.stopped):
            tensor.zero_()

    @property
    def scratch_row(self) -> int:
        """The row that takes what idle slots write; it is no response."""
        return len(self.responses) - 1


class StepRules:
    """How a step chooses tokens and what ends a row, with the stop tokens already on the device."""

    def __init__(self, params: SamplingParams, device: torch.device) -> None:
        self.params = params
        self.stop_rule = StopRule(
            params.stop_token_ids,
            truncate_token_ids=params.truncate_token_ids,
            truncate_after=params.truncate_after,
            stop_strings=params.stop_strings,
            device=device,
        )


def decode_step(
    model: PreTrainedModel,
    cache: StepCache,
    state: SlotState,
    outputs: SlotOutputs,
    rules: StepRules,
    *,
    slots: int,
    columns: int,
) -> None:
    """Runs the model on the next token of the first `slots` slots, and chooses and records a token for those that run.

    Rows that have ended are computed too, but record nothing and do not advance.

    Args:
        model: the language model, with the attention of `models.packed_attention`.
        cache: keys and values of the tokens that were read before.
        state: the slots; `tokens`, `lengths`, `positions` and `running` advance.
        outputs: receives the chosen tokens.
        rules: how tokens are chosen and what ends a row.
        slots: how many slots take part; a row that runs must be in one of them.
        columns: how many columns of the cache are read; more than `lengths` of every row that runs.
    """
    lengths, running = state.lengths[:slots], state.running[:slots]
    # A row that has ended stays at its last position: the next one may be more than the model has.
    position_ids = (lengths + running - 1).clamp(min=0)
    logits = read_tokens(model, cache, state, slots=slots, columns=columns, position_ids=position_ids)
    lengths.add_(running)
    choose_and_record(logits, state, outputs, rules, slots=slice(0, slots))


def read_tokens(
    model: PreTrainedModel,
    cache: StepCache,
    state: SlotState,
    *,
    slots: int,
    columns: int,
    position_ids: Tensor | None = None,
) -> Tensor:
    """Returns the logits (slots, V) after the next token of the first `slots` slots, whose states go into the cache.

    The arguments are those of `decode_step`; `state` is not changed. `position_ids` (slots,) int64 are those of the
    tokens; None takes `lengths`.
    """
    lengths = state.lengths[:slots]
    position_ids = lengths if position_ids is None else position_ids
    cache.start_step(lengths, columns)
    output = model(
        input_ids=state.tokens[:slots].unsqueeze(1),
        position_ids=position_ids.unsqueeze(1),
        # `models.packed_attention.DUMMY_MASK`, made on the device: copying it there would wait for the device.
        attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=lengths.device),
        past_key_values=cache,
        use_cache=True,
        packing=SlotAttention(lengths, columns),
    )
    logits: Tensor = output.logits[:, -1]
    return logits


def choose_and_record(
    logits: Tensor, state: SlotState, outputs: SlotOutputs, rules: StepRules, *, slots: Tensor | slice
) -> None:
    """Chooses the next token of the rows in `slots` that run, records it, and advances these rows by one position.

    The cache's lengths are left to the caller, since the chosen tokens are not yet in the cache.

    Args:
        logits: (N, V), of the next token in each of `slots`.
        state: the slots; `tokens`, `positions` and `running` advance.
        outputs: receives the chosen tokens.
        rules: how tokens are chosen and what ends a row.
        slots: which slots: their indices (N,) int64, each at most once, or a slice.
    """
    params = rules.params
    running, positions = state.running[slots], state.positions[slots]
    numbers = uniforms(state.keys[slots], positions) if params.do_sample else None
    tokens, logprobs = choose_tokens(
        logits, numbers, temperature=params.temperature, top_k=params.top_k, top_p=params.top_p
    )
    ends = rules.stop_rule(tokens, positions - state.turn_starts[slots])
    if rules.stop_rule.stop_strings is not None:
        ends, state.matched[slots] = rules.stop_rule.read(ends, state.matched[slots], tokens)
    rows = state.rows[slots].where(running, outputs.scratch_row)
    # The position of a row that has ended may be R, which the scratch row does not have.
    columns = positions * running
    outputs.responses.index_put_((rows, columns), tokens)
    outputs.logprobs.index_put_((rows, columns), logprobs.to(outputs.logprobs.dtype))
    outputs.mask.index_put_((rows, columns), running)
    outputs.stopped.index_put_((rows,), ends)
    goes_on = running & ~ends & (positions + 1 < state.limits[slots])
    # From here on `running` and `positions`, which are views if `slots` is a slice, hold the new values.
    state.tokens[slots] = tokens.where(running, state.tokens[slots])
    state.positions[slots] = positions + running
    state.running[slots] = goes_on


class SlotAttention:
    """The attention of a decode step: the new token of each slot sees the tokens of its own slot.

    Given to the model as `packing` (see `models.packed_attention`). Masks are made once per step and kind of layer.

    Args:
        lengths: (slots,) int64, the column of each slot's new token.
        columns: how many columns of the cache are read.
    """

    def __init__(self, lengths: Tensor, columns: int) -> None:
        self._lengths, self._columns = lengths, columns
        self._allowed: dict[int | None, Tensor] = {}
        self._biases: dict[tuple[int | None, torch.dtype], Tensor] = {}

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, settings: AttentionSettings
    ) -> Tensor:
        """Returns (slots, 1, heads, width) for query (slots, heads, 1, d), key (slots, kv_heads, columns, d) and value
        (slots, kv_heads, columns, width).
        """
        window = settings.sliding_window
        plain = settings.softcap is None and settings.sinks is None
        mask = self._bias(window, query.dtype) if plain else self._allow(window)
        return dense_attention(query, key, value, mask, settings).transpose(1, 2)

    def _allow(self, sliding_window: int | None) -> Tensor:
        """(slots, 1, 1, columns) bool, True = the new token of the slot sees this column."""
        if sliding_window not in self._allowed:
            allowed = visible_columns(self._lengths, self._columns, sliding_window=sliding_window)
            self._allowed[sliding_window] = allowed[:, None, None]
        return self._allowed[sliding_window]

    def _bias(self, sliding_window: int | None, dtype: torch.dtype) -> Tensor:
        """The same as numbers that are added to the scores: torch makes these of a boolean mask in every layer."""
        kind = (sliding_window, dtype)
        if kind not in self._biases:
            allowed = self._allow(sliding_window)
            self._biases[kind] = torch.zeros_like(allowed, dtype=dtype).masked_fill(~allowed, float("-inf"))
        return self._biases[kind]
