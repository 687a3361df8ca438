"""The slot loop: a fixed number of rows is decoded together, and when rows end, waiting ones take their places.

So the few long responses of a rollout do not run alone while other prompts wait, and memory is that of the slots
however many prompts there are. A row whose turn has ended may go on after appended tokens (`generation.turns`); until
these are known it keeps its slot, and the others go on without it.

The loop alternates between two passes, `_admit` and `_decode`, and looks after each at which rows have ended. Here is
only who takes part in them: what they compute is in `generation.slot_passes`, how tokens are chosen in
`generation.responses`, how prompts are read in `generation.slot_prompts`.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakSet

import torch
from torch import Tensor
from transformers import PreTrainedModel

from alpaca_ppo.generation.responses import Generation, ResponseRows, SamplingHooks, SamplingParams
from alpaca_ppo.generation.slot_passes import NewTokens, SlotCache, extend, read_next
from alpaca_ppo.generation.slot_prompts import SlotPrompts, group_prompts
from alpaca_ppo.generation.turns import Pending, Reply, Turn, Turns, check_reply
from alpaca_ppo.models.packed_attention import is_installed, underlying_attention
from alpaca_ppo.models.trial import Trial, difference, packing_problem
from alpaca_ppo.types import PromptBatch

_WAIT = 0.1
"""How long to wait for an answer to a turn before `before_token` is called again, in seconds."""


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
"""For an accelerator, which is to be asked rarely and to allocate its cache once."""


def sample_in_slots(
    model: PreTrainedModel,
    prompts: PromptBatch,
    params: SamplingParams,
    *,
    rows_at_once: int | None,
    turns: Turns | None,
    hooks: SamplingHooks,
    shapes: StepShapes | None = None,
) -> Generation:
    """Returns responses to `prompts`, whose rows are reported as soon as they have ended.

    Args:
        model: a model that `slot_problem` finds no problem with.
        prompts: on the model's device, left-padded.
        params: how tokens are chosen, and n responses per prompt; row b * n + j is sample j of prompt b.
        rows_at_once: the number of slots; None takes as many as there are rows.
        turns: who is asked at the end of a turn, and limits; None ends every response with its first turn.
        hooks: what is called meanwhile.
        shapes: of the steps; None chooses by the device.
    """
    tokens = [
        [token for token, real in zip(row, mask, strict=True) if real]
        for row, mask in zip(prompts["queries"].tolist(), prompts["query_attn_masks"].tolist(), strict=True)
    ]
    keys = params.random_keys(prompts["prompt_ids"])
    if shapes is None:
        shapes = EXACT if keys.device.type == "cpu" else BUCKETED
    slots = min(rows_at_once or len(keys), len(keys))
    loop = _SlotLoop(model, tokens, keys, params, slots, shapes, turns, hooks)
    loop.run()
    return loop.out.generation(torch.arange(len(keys), device=keys.device))


@dataclass
class _Row:
    """What the host knows of the row in a slot; exact once its turn has ended (`_SlotLoop._end_turns`)."""

    index: int
    """Of the outputs."""
    length: int
    """Tokens in the cache."""
    position: int = 0
    """Response position of the next choice."""
    turn_start: int = 0
    """Response position at which its turn began."""
    limit: int = 0
    """Response position before which its turn must end."""
    chosen: int = 0
    """Tokens that the policy chose in earlier turns."""
    last: int = 0
    """The last token of its last turn."""
    unread: list[int] | None = None
    """Tokens that it reads before its next turn; None while that is not known."""


class _SlotLoop:
    """The rows that wait, the rows in slots, and the tensors of the steps.

    Args:
        model: see `sample_in_slots`.
        prompts: token ids of each prompt.
        keys: (N,) int64, the key of each row's random numbers, n rows a prompt.
        params: how tokens are chosen.
        slots: S.
        shapes: of the steps.
        turns: see `sample_in_slots`.
        hooks: see `sample_in_slots`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        prompts: list[list[int]],
        keys: Tensor,
        params: SamplingParams,
        slots: int,
        shapes: StepShapes,
        turns: Turns | None,
        hooks: SamplingHooks,
    ) -> None:
        self._turns, self._hooks = turns, hooks
        self._model, self._keys, self._params, self._slots, self._shapes = model, keys, params, slots, shapes
        self.out = ResponseRows(params, rows=len(keys), slots=slots, dtype=model.dtype, device=keys.device)
        longest, groups = max(map(len, prompts)), group_prompts(prompts)
        self._most_columns = shapes.columns(longest + params.max_new_tokens)
        columns = min(shapes.columns(longest + shapes.growth), self._most_columns)
        self._cache = SlotCache(slots + SlotPrompts.extra_slots(groups, params.num_return_sequences), columns)
        n = params.num_return_sequences
        self._lengths = list(map(len, prompts))
        self._prompts = SlotPrompts(model, self._cache, prompts, groups, n)
        self._waiting = deque(prompt * n + i for group in groups for prompt in group.prompts for i in range(n))
        self._busy: dict[int, _Row] = {}
        """The rows that steps advance, by their slots."""
        self._held: dict[int, _Row] = {}
        """The rows between two turns, by their slots."""
        self._ended = self._decoded = 0
        """Turns that have ended, and tokens that the policy chose in them."""
        self._idle_steps = 0
        """Steps that rows of `_held` could have taken part in since the last `_admit`, over these rows."""

    def run(self) -> None:
        """Samples every row to its end."""
        while self._waiting or self._busy or self._held:
            if self._should_admit():
                self._admit()
            elif self._busy:
                self._compact()
                self._decode()
            else:
                self._hooks.before_token()
                self._hear(timeout=_WAIT)
                continue
            self._look()
            self._hear(timeout=0)

    def _answered(self) -> list[int]:
        """The slots whose rows can begin another turn."""
        return [slot for slot, row in self._held.items() if row.unread is not None]

    def _should_admit(self) -> bool:
        """Whether enough rows could begin a turn that a pass over their tokens costs less than their slots waste.

        A pass costs c steps (`StepShapes.admission_cost`). With turns of L tokens, S / L slots become free per step, so
        that k of them take k * L / S steps and are idle for half of these on average, k**2 * L / (2 * S) slot-steps of
        1 / S steps each. The cost per row, c / k + k * L / (2 * S**2), is least at k = S * sqrt(2c / L). At that point
        the slots have been idle for as long as the pass takes. That rule needs no L, and rows between two turns follow
        it: when they can go on depends on their answers, too.
        """
        free, answered = self._slots - len(self._busy) - len(self._held), len(self._answered())
        if not self._busy:
            return answered > 0 or (free > 0 and bool(self._waiting))
        idle_steps = self._idle_steps + answered
        if answered and idle_steps >= self._shapes.admission_cost * (len(self._busy) + answered):
            return True
        if not self._waiting:
            return False
        length = max(2.0, self._decoded / self._ended) if self._ended else float(self._params.max_new_tokens)
        enough = min(math.ceil(self._slots * math.sqrt(2 * self._shapes.admission_cost / length)), len(self._waiting))
        return free >= enough

    def _admit(self) -> None:
        """Gives the free slots to waiting rows, lets rows go on that have been answered, and chooses their tokens."""
        n = self._params.num_return_sequences
        placed: dict[int, list[int]] = {}
        for slot in [slot for slot in range(self._slots) if slot not in self._busy and slot not in self._held]:
            if self._waiting:
                index = self._waiting.popleft()
                placed.setdefault(index // n, []).append(slot)
                self._busy[slot] = _Row(index, self._lengths[index // n])
        appended = []
        for slot in self._answered():
            row = self._busy[slot] = self._held.pop(slot)
            assert row.unread is not None
            appended.append(NewTokens(slot, row.length, row.unread))
            row.length, row.unread = row.length + len(row.unread), None
            self._reserve(row.length + 1)
        self._idle_steps = 0
        logits = self._prompts.read(placed, appended, self._waiting[0] // n if self._waiting else None)
        self._choose(logits)

    def _choose(self, logits: dict[int, Tensor]) -> None:
        """Writes the rows that the host has put into slots to the device, and chooses their next tokens from the logits
        (V,) after each.
        """
        rows = [self._busy[slot] for slot in logits]
        for row in rows:
            row.turn_start, row.limit = row.position, self._params.max_new_tokens
            if self._turns is not None:
                row.limit = self._turns.limit(position=row.position, chosen=row.chosen, width=row.limit)
        numbers = [(r.index, r.length, r.position, r.turn_start, r.limit) for r in rows]
        index, indices, *values = torch.tensor([list(logits), *zip(*numbers, strict=True)], device=self._keys.device)
        out = self.out
        out.rows[index], out.keys[index], out.running[index], out.matched[index] = indices, self._keys[indices], True, 0
        out.lengths[index], out.positions[index], out.turn_starts[index], out.limits[index] = values
        self._hooks.before_token()
        out.choose(torch.stack(list(logits.values())), index)
        for row in rows:
            row.position += 1

    def _compact(self) -> None:
        """Moves rows into lower slots if the next step can then be one with fewer slots."""
        target = self._step_slots(len(self._busy))
        movers = sorted(slot for slot in self._busy if slot >= target)
        if not movers:
            return
        # Those that are free first: their states need not be kept.
        holes = sorted((slot for slot in range(target) if slot not in self._busy), key=self._held.__contains__)
        holes = holes[: len(movers)]
        for source, hole in zip(movers, holes, strict=True):
            row = self._busy[hole] = self._busy.pop(source)
            if hole in self._held:
                held = self._held[source] = self._held.pop(hole)
                self._cache.swap(source, hole, max(row.length, held.length))
            else:
                self._cache.copy(source, [hole], row.length)
        to, of = torch.tensor([movers + holes, holes + movers], device=self._keys.device)
        for values in self.out.of_slots:
            values[to] = values[of]

    def _step_slots(self, slots: int) -> int:
        return min(self._shapes.slot_unit(slots), self._slots)

    def _decode(self) -> None:
        """Makes the steps up to the next look: reads the next token of the first slots, and chooses one for those that
        run. Rows that have ended are computed too, but record nothing and do not advance.
        """
        steps = min(self._shapes.check_every, max(row.limit - row.position for row in self._busy.values()))
        slots = self._step_slots(max(self._busy) + 1)
        self._idle_steps += steps * len(self._answered())
        lengths, running, tokens = self.out.lengths[:slots], self.out.running[:slots], self.out.tokens[:slots]
        for _ in range(steps):
            self._hooks.before_token()
            # A row that has ended on the device counts on here until the next look.
            longest = max(row.length for row in self._busy.values())
            # One more column, into which a slot writes whose row ends with this step and then idles.
            self._reserve(longest + 2)
            columns = min(self._shapes.columns(1 + longest), self._most_columns)
            # A row that has ended stays at its last position: the next one may be more than the model has.
            positions = (lengths + running - 1).clamp(min=0)
            logits = read_next(self._model, self._cache, tokens, lengths, columns=columns, position_ids=positions)
            lengths.add_(running)
            self.out.choose(logits, slice(0, slots))
            for row in self._busy.values():
                row.length += 1
                row.position += 1

    def _reserve(self, columns: int) -> None:
        """Enlarges the cache for rows of `columns` columns, rounded up."""
        columns = min(self._shapes.columns(columns), self._most_columns)
        if columns > self._cache.columns:
            self._cache.reserve(min(columns + self._shapes.growth, self._most_columns))

    def _look(self) -> None:
        """Ends the turns of rows that no longer run: finishes these rows, or asks how they go on."""
        running = self.out.running.tolist()
        ended = {slot: self._busy.pop(slot) for slot in list(self._busy) if not running[slot]}
        if ended and self._turns is not None:
            self._end_turns(self._turns, ended)
        else:
            self._count_turns(list(ended.values()))
            self._finish(list(ended.values()))

    def _count_turns(self, rows: list[_Row]) -> None:
        self._ended += len(rows)
        self._decoded += sum(row.position - row.turn_start for row in rows)

    def _finish(self, rows: list[_Row]) -> None:
        """Reports rows whose responses are complete."""
        if rows:
            indices = [row.index for row in rows]
            self._hooks.on_finished(indices, self.out.generation(torch.tensor(indices, device=self._keys.device)))

    def _end_turns(self, turns: Turns, ended: dict[int, _Row]) -> None:
        """Asks how the rows that were in the slots `ended` go on, and finishes those that have no tokens left."""
        out, width = self.out, self._params.max_new_tokens
        slots, rows = torch.tensor([list(ended), [row.index for row in ended.values()]], device=self._keys.device)
        # The host may have counted steps that a row no longer took.
        exact = torch.stack([out.lengths[slots], out.positions[slots], out.stopped[rows]], dim=1).tolist()
        texts = zip(out.responses[rows].tolist(), out.mask[rows].tolist(), strict=True)
        done, asked = list[_Row](), dict[int, Turn]()
        for (slot, row), numbers, (response, mask) in zip(ended.items(), exact, texts, strict=True):
            row.length, row.position, stopped = numbers
            row.chosen += row.position - row.turn_start
            if turns.limit(position=row.position, chosen=row.chosen, width=width) == row.position:
                done.append(row)
                continue
            row.last = response[row.position - 1]
            self._held[slot] = row
            start, end = row.turn_start, row.position
            asked[slot] = Turn(row.index, response[:end], mask[:end], start, stopped=bool(stopped))
        self._count_turns(list(ended.values()))
        self._finish(done)
        done = []
        for slot, turn in asked.items():
            reply = turns.handler.on_stop(turn)
            if not isinstance(reply, Pending):
                done += self._take(slot, reply)
        self._finish(done)

    def _hear(self, *, timeout: float) -> None:
        """Takes the answers to turns that have come, or come within `timeout` seconds."""
        pending = {row.index: slot for slot, row in self._held.items() if row.unread is None}
        if not pending:
            return
        assert self._turns is not None
        done: list[_Row] = []
        for index, reply in self._turns.answers(pending, timeout):
            done += self._take(pending.pop(index), reply)
        self._finish(done)

    def _take(self, slot: int, reply: Reply) -> list[_Row]:
        """Appends an answer to the row that is held in `slot`; returns the row if its response ends there."""
        row, width = self._held[slot], self._params.max_new_tokens
        appended = check_reply(reply, row.index, self._model.config.get_text_config().vocab_size)
        if appended is not None:
            end = min(row.position + len(appended), width)
            kept = torch.tensor(appended[: end - row.position], dtype=torch.long, device=self._keys.device)
            self.out.responses[row.index, row.position : end] = kept
            row.position = end
            if end < width:
                # The last token of the turn has not been read yet.
                row.unread = [row.last, *appended]
                return []
            self.out.stopped[row.index] = False
        return [self._held.pop(slot)]


def slot_problem(model: PreTrainedModel) -> str | None:
    """Why `model`, a causal language model, cannot be sampled in slots, or None if it can; then the attention for it is
    installed (`models.packed_attention`).
    """
    if model in _served:
        return None
    if problem := packing_problem(model):
        return problem
    if not is_installed(model):
        return f"its attention ({underlying_attention(model)}) reads a cache of its own"
    if (problem := _slots(model)) is None:
        _served.add(model)
    return problem


def _sample_slots(model: PreTrainedModel) -> str | None:
    """Compares two prompts of unequal length, a step and appended tokens in slots with plain passes over the rows."""
    vocabulary, device = model.config.get_text_config().vocab_size, model.device
    rows = [[(7 * i + 3 * j + 1) % vocabulary for j in range(length)] for i, length in enumerate((8, 5))]
    prompts, cache = (5, 2), SlotCache(slots=2, columns=8)
    found = [extend(model, cache, [NewTokens(i, 0, rows[i][:n]) for i, n in enumerate(prompts)])]
    tokens = torch.tensor([row[n] for row, n in zip(rows, prompts, strict=True)], device=device)
    found.append(read_next(model, cache, tokens, torch.tensor(prompts, device=device), columns=6))
    found.append(extend(model, cache, [NewTokens(i, n + 1, rows[i][n + 1 :]) for i, n in enumerate(prompts)]))
    for i, (row, n) in enumerate(zip(rows, prompts, strict=True)):
        whole: Tensor = model(input_ids=torch.tensor([row], device=device), use_cache=False).logits[0]
        if problem := difference(torch.stack([logits[i] for logits in found]), whole[[n - 1, n, -1]], "logits"):
            return f"{problem} from those of a pass over the row"
    return None


_slots = Trial(_sample_slots)
_served: WeakSet[PreTrainedModel] = WeakSet()
"""Models that have been found fit."""
