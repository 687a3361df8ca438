"""The slot loop: a fixed number of rows is decoded together, and when rows end, waiting ones take their places.

So the few long responses of a rollout do not run alone while other prompts wait, and memory is that of the slots
however many prompts there are. Each prompt is computed once for all its samples, and what all prompts begin with is
computed once for all prompts. A row that has stopped may go on after appended tokens (`OnStop`).

The loop alternates between two passes, `_admit` and `_decode`, and looks after each at which rows have ended. What a
step computes is in `generation.slot_step`; here is only who takes part in it.
"""

import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from alpaca_ppo.generation.graphs import SlotMemory, slot_memory
from alpaca_ppo.generation.responses import Generation
from alpaca_ppo.generation.sampling_params import SamplingParams
from alpaca_ppo.generation.slot_extend import NewTokens, extend
from alpaca_ppo.generation.slot_step import choose_and_record

OnFinished = Callable[[list[int], Generation], Any]
"""Called with the rows whose responses are complete, and these responses in the same order."""

OnStop = Callable[[int, list[int]], Sequence[int] | None]
"""Called with a row that a token has ended, and its response so far. None finishes the row. Otherwise the row goes on
after the tokens that are returned (at least one); the policy did not choose them, so they are holes of
`response_mask`."""

MIN_COMMON = 16
"""A common beginning of all prompts that is shorter than this is not worth a pass of its own, in tokens."""


@dataclass(frozen=True)
class StepShapes:
    """Which numbers of slots and columns a step may have, and how often the host looks at which rows have ended."""

    slot_unit: Callable[[int], int]
    """The number of slots of a step in which this many rows are busy; the result is at least as large."""
    column_unit: int
    """Columns are rounded up to a multiple of it."""
    check_every: int
    """Steps between two looks, each of which synchronizes an accelerator with the host."""
    growth: int
    """Columns beyond the longest prompt that are allocated at once."""
    admission_cost: float
    """What a pass over waiting prompts costs beyond the work on its own tokens, in decode steps."""

    def columns(self, count: int) -> int:
        """Returns `count` rounded up."""
        return -(-count // self.column_unit) * self.column_unit


EXACT = StepShapes(slot_unit=lambda rows: rows, column_unit=1, check_every=1, growth=64, admission_cost=0.5)
"""For a CPU, where other shapes cost nothing, but unused slots and columns do."""

BUCKETED = StepShapes(
    slot_unit=lambda rows: 1 << (rows - 1).bit_length(),
    column_unit=256,
    check_every=8,
    growth=1 << 30,
    admission_cost=4.0,
)
"""For steps that are captured or compiled, and for an accelerator, which is to be asked rarely."""


def sample_in_slots(
    model: PreTrainedModel,
    queries: Tensor,
    query_attn_masks: Tensor,
    *,
    sampling_params: SamplingParams,
    prompt_ids: Tensor,
    slots: int | None = None,
    on_finished: OnFinished | None = None,
    on_stop: OnStop | None = None,
    before_token: Callable[[], Any] = lambda: None,
    shapes: StepShapes | None = None,
) -> Generation:
    """Returns responses to `queries`, the same tokens as `decode` samples.

    Args:
        model: a model that `slot_probe.slot_problem` finds no problem with.
        queries: (B, Q) int64, left-padded, on the model's device.
        query_attn_masks: (B, Q) int64, 1 = a real token.
        sampling_params: how tokens are chosen, and n responses per prompt.
        prompt_ids: (B,) int64.
        slots: rows that are decoded at once; None takes all.
        on_finished: see `OnFinished`; None does nothing. Row b * n + j is sample j of prompt b.
        on_stop: see `OnStop`; None finishes every row at its first stop.
        before_token: called before the tokens of each pass are chosen; an exception in it ends the sampling.
        shapes: of the steps; None chooses by the device.
    """
    prompts = [
        [token for token, real in zip(tokens, mask, strict=True) if real]
        for tokens, mask in zip(queries.tolist(), query_attn_masks.tolist(), strict=True)
    ]
    keys = sampling_params.random_keys(prompt_ids)
    if shapes is None:
        exact = queries.device.type == "cpu" and not sampling_params.compile_decoding
        shapes = EXACT if exact else BUCKETED
    slots = min(slots or len(keys), len(keys))
    common, longest = _common_beginning(prompts), max(map(len, prompts))
    most_columns = shapes.columns(longest + sampling_params.max_new_tokens)
    with slot_memory(
        model,
        sampling_params,
        slots=slots,
        # One for what all prompts begin with, and one for a prompt whose other samples wait.
        extra_slots=bool(common) + (sampling_params.num_return_sequences > 1),
        columns=min(shapes.columns(longest + shapes.growth), most_columns),
        rows=len(keys),
    ) as memory:
        loop = _SlotLoop(model, prompts, keys, sampling_params, slots, shapes, memory, common, most_columns)
        loop.on_finished, loop.on_stop, loop.before_token = on_finished, on_stop, before_token
        loop.run()
        return loop.generation()


@dataclass
class _Busy:
    """What the host knows of the row in a slot; exact after each look at the device."""

    row: int
    """Of the outputs."""
    length: int
    """Tokens in the cache."""
    position: int
    """Response position of the next choice."""


class _SlotLoop:
    """The rows that wait, the rows in slots, and the tensors of the steps.

    Args:
        model: see `sample_in_slots`.
        prompts: token ids of each prompt.
        keys: (N,) int64, the key of each row's random numbers, n rows a prompt.
        params: how tokens are chosen.
        slots: S.
        shapes: of the steps.
        memory: the tensors of the steps, with at least S slots.
        common: how many tokens all prompts begin with that are computed once.
        most_columns: that a row can have.
    """

    on_finished: OnFinished | None
    on_stop: OnStop | None
    before_token: Callable[[], Any]

    def __init__(
        self,
        model: PreTrainedModel,
        prompts: list[list[int]],
        keys: Tensor,
        params: SamplingParams,
        slots: int,
        shapes: StepShapes,
        memory: SlotMemory,
        common: int,
        most_columns: int,
    ) -> None:
        self._model, self._prompts, self._keys, self._params = model, prompts, keys, params
        self._slots, self._shapes, self._memory, self._most_columns = slots, shapes, memory, most_columns
        self._cache, self._state, self._outputs, self._rules = memory.cache, memory.state, memory.outputs, memory.rules
        self._waiting = deque(range(len(keys)))
        self._busy: dict[int, _Busy] = {}
        self._finished = self._decoded = 0
        self._common, self._common_is_cached = common, False
        self._split: tuple[int, Tensor] | None = None
        # Beyond the slots that take part in steps.
        self._common_slot, self._split_slot = self._cache.slots - 1, self._cache.slots - 1 - bool(common)

    def run(self) -> None:
        """Samples every row to its end."""
        while self._waiting or self._busy:
            if self._should_admit():
                self._admit()
            else:
                self._compact()
                self._decode()
            self._look()

    def generation(self) -> Generation:
        """Returns the responses of all rows."""
        return self._responses(torch.arange(len(self._keys), device=self._keys.device))

    def _responses(self, rows: Tensor) -> Generation:
        # A copy, because the next call may get the same buffers.
        out = self._outputs
        return Generation(out.responses[rows], out.mask[rows], out.logprobs[rows], out.stopped[rows])

    def _should_admit(self) -> bool:
        """Whether enough slots are free that a pass over waiting prompts costs less than the free slots waste.

        A pass costs c steps (`StepShapes.admission_cost`). With responses of L tokens, S / L slots become free per
        step, so that k of them take k * L / S steps and are idle for half of these on average, k**2 * L / (2 * S)
        slot-steps of 1 / S steps each. The cost per row, c / k + k * L / (2 * S**2), is least at k = S * sqrt(2c / L).
        """
        if not self._waiting or not self._busy:
            return bool(self._waiting)
        length = max(2.0, self._decoded / self._finished) if self._finished else float(self._params.max_new_tokens)
        enough = min(math.ceil(self._slots * math.sqrt(2 * self._shapes.admission_cost / length)), len(self._waiting))
        return self._slots - len(self._busy) >= enough

    def _admit(self) -> None:
        """Gives the free slots to waiting rows and chooses their first tokens."""
        n = self._params.num_return_sequences
        free = [slot for slot in range(self._slots) if slot not in self._busy]
        placed = [(slot, self._waiting.popleft()) for slot in free[: len(self._waiting)]]
        by_prompt: dict[int, list[int]] = {}
        for slot, row in placed:
            by_prompt.setdefault(row // n, []).append(slot)
            self._busy[slot] = _Busy(row, len(self._prompts[row // n]), 0)
        logits = self._prefill(by_prompt)
        self._choose(logits, [slot for slot, _ in placed])

    def _prefill(self, by_prompt: dict[int, list[int]]) -> Tensor:
        """Puts each prompt into its slots, and returns the logits (k, V) of all these slots in order."""
        known: list[Tensor] = []
        if self._split is not None:
            # Rows wait in the order of their prompts, so its other samples are the first to go on.
            (prompt, logits), slots = self._split, by_prompt.pop(self._split[0])
            self._cache.copy(self._split_slot, slots, len(self._prompts[prompt]))
            known.append(logits.expand(len(slots), -1))
        if by_prompt:
            common = self._cached_common([slots[0] for slots in by_prompt.values()])
            new = [NewTokens(slots[0], common, self._prompts[prompt][common:]) for prompt, slots in by_prompt.items()]
            logits = extend(self._model, self._cache, new)
            for prompt, slots in by_prompt.items():
                self._cache.copy(slots[0], slots[1:], len(self._prompts[prompt]))
            each = [i for i, slots in enumerate(by_prompt.values()) for _ in slots]
            known.append(logits[each] if len(each) > len(logits) else logits)
            self._split = self._keep_split(prompt, slots[0], logits[-1:])
        elif not self._waits(prompt):
            self._split = None
        return torch.cat(known)

    def _waits(self, prompt: int) -> bool:
        """Whether another sample of the prompt waits."""
        return bool(self._waiting) and self._waiting[0] // self._params.num_return_sequences == prompt

    def _cached_common(self, slots: list[int]) -> int:
        """Puts what all prompts begin with into `slots`, and returns its length."""
        if self._common and not self._common_is_cached:
            extend(self._model, self._cache, [NewTokens(self._common_slot, 0, self._prompts[0][: self._common])])
            self._common_is_cached = True
        if self._common:
            self._cache.copy(self._common_slot, slots, self._common)
        return self._common

    def _keep_split(self, prompt: int, slot: int, logits: Tensor) -> tuple[int, Tensor] | None:
        """Keeps the states in `slot` and the logits (1, V) of a prompt if some of its samples still wait."""
        if not self._waits(prompt):
            return None
        self._cache.copy(slot, [self._split_slot], len(self._prompts[prompt]))
        return prompt, logits.clone()

    def _start(self, slots: list[int]) -> Tensor:
        """Writes the rows that the host has put into `slots` into the state, and returns the slots as a tensor."""
        entries = [self._busy[slot] for slot in slots]
        numbers = [slots, [e.row for e in entries], [e.length for e in entries], [e.position for e in entries]]
        state, (index, rows, lengths, positions) = self._state, torch.tensor(numbers, device=self._keys.device)
        state.rows[index], state.lengths[index], state.positions[index] = rows, lengths, positions
        state.keys[index], state.running[index] = self._keys[rows], True
        return index

    def _choose(self, logits: Tensor, slots: list[int]) -> None:
        """Chooses the next tokens of the rows that the host has put into `slots`, from their logits (k, V)."""
        index = self._start(slots)
        self.before_token()
        choose_and_record(logits, self._state, self._outputs, self._rules, slots=index)
        for slot in slots:
            self._busy[slot].position += 1

    def _compact(self) -> None:
        """Moves rows into lower slots if the next step can then be one with fewer slots."""
        target = self._step_slots(len(self._busy))
        movers = sorted(slot for slot in self._busy if slot >= target)
        if not movers:
            return
        holes = [slot for slot in range(target) if slot not in self._busy][: len(movers)]
        for source, hole in zip(movers, holes, strict=True):
            self._busy[hole] = self._busy.pop(source)
            self._cache.copy(source, [hole], self._busy[hole].length)
        sources, targets = torch.tensor([movers, holes], device=self._keys.device)
        for values in vars(self._state).values():
            values[targets] = values[sources]
        self._state.running[sources] = False

    def _step_slots(self, slots: int) -> int:
        return min(self._shapes.slot_unit(slots), self._slots)

    def _decode(self) -> None:
        """Makes the steps up to the next look."""
        steps = min(
            self._shapes.check_every, self._params.max_new_tokens - min(b.position for b in self._busy.values())
        )
        slots = self._step_slots(max(self._busy) + 1)
        for step in range(steps):
            self.before_token()
            # A row that has ended on the device counts on here until the next look.
            columns = min(self._shapes.columns(1 + max(b.length for b in self._busy.values())), self._most_columns)
            self._reserve(columns)
            if step == steps - 1:
                self._memory.request_running()
            self._memory.step(self._model, slots=slots, columns=columns)
            for busy in self._busy.values():
                busy.length += 1
                busy.position += 1

    def _reserve(self, columns: int) -> None:
        """Enlarges the cache for a pass that fills `columns` columns."""
        if columns > self._cache.columns:
            self._cache.reserve(min(columns + self._shapes.growth, self._most_columns))

    def _look(self) -> None:
        """Finishes the rows that have ended, or lets them go on."""
        running = self._memory.running()
        while ended := [slot for slot in self._busy if not running[slot]]:
            resumed = self._resume(ended) if self.on_stop is not None else []
            finished = [self._busy.pop(slot) for slot in ended if slot not in resumed]
            self._finished += len(finished)
            self._decoded += sum(busy.position for busy in finished)
            if self.on_finished is not None and finished:
                rows = [busy.row for busy in finished]
                self.on_finished(rows, self._responses(torch.tensor(rows, device=self._keys.device)))
            if not resumed:
                return
            running = self._memory.running()

    def _resume(self, ended: list[int]) -> list[int]:
        """Appends what `on_stop` returns to the rows in the slots `ended`, chooses the tokens that follow, and returns
        the slots whose rows go on.
        """
        assert self.on_stop is not None
        outputs, width, new = self._outputs, self._params.max_new_tokens, []
        rows = [self._busy[slot].row for slot in ended]
        # The host may have counted steps that a row no longer took.
        exact = torch.stack([self._state.lengths[ended], self._state.positions[ended], outputs.stopped[rows]])
        for slot, length, position, stopped in zip(ended, *exact.tolist(), strict=True):
            busy = self._busy[slot]
            busy.length, busy.position = length, position
            if not stopped or position == width:
                continue
            response = outputs.responses[busy.row, :position].tolist()
            appended = self.on_stop(busy.row, response)
            if appended is None:
                continue
            kept = list(appended)[: width - position]
            outputs.responses[busy.row, position : position + len(kept)] = torch.tensor(kept, device=self._keys.device)
            busy.position += len(kept)
            if busy.position == width:
                outputs.stopped[busy.row] = False
                continue
            # The token that ended the row has not been read yet.
            new.append(NewTokens(slot, length, [response[-1], *kept]))
            busy.length += 1 + len(kept)
        if new:
            self._reserve(max(self._busy[entry.slot].length for entry in new))
            self._choose(extend(self._model, self._cache, new), [entry.slot for entry in new])
        return [entry.slot for entry in new]


def _common_beginning(prompts: list[list[int]]) -> int:
    """How many tokens all prompts begin with that are worth a pass of their own; each prompt keeps one token more."""
    same = sum(1 for _ in itertools.takewhile(lambda tokens: len(set(tokens)) == 1, zip(*prompts, strict=False)))
    common = min(same, min(map(len, prompts)) - 1)
    mean = sum(map(len, prompts)) / len(prompts)
    return common if len(prompts) > 1 and common >= max(MIN_COMMON, mean / 8) else 0
