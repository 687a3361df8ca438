"""The slot loop: a fixed number of rows is decoded together, and when rows end, waiting ones take their places.

So the few long responses of a rollout do not run alone while other prompts wait, and memory is that of the slots. A
row that waits for the reply to a turn (`generation.turns`) keeps its slot, and the others go on without it.

The loop alternates between two passes, `_admit` and `_decode`, and after each collects the rows that have ended.
`slot_passes` computes, `responses` chooses tokens, `slot_prompts` reads prompts.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakSet

import torch
from torch import Tensor
from transformers import PreTrainedModel

from alpaca_ppo.generation.backends import GenerateOptions
from alpaca_ppo.generation.responses import Generation, ResponseRows, SamplingParams, unpadded
from alpaca_ppo.generation.slot_passes import NewTokens, SlotCache, extend, read_next
from alpaca_ppo.generation.slot_prompts import SlotPrompts
from alpaca_ppo.generation.turns import Pending, Reply, Turn, Turns, check_reply
from alpaca_ppo.models.packed_attention import is_installed, underlying_attention
from alpaca_ppo.models.policy import difference
from alpaca_ppo.models.state_reader import decoder_layers
from alpaca_ppo.models.trial import Trial, packing_problem
from alpaca_ppo.types import PromptBatch

# How long to wait for a reply before `before_token` is called again.
_REPLY_SECONDS = 0.1


@dataclass(frozen=True)
class StepShapes:
    """How many slots and columns a step may have, and how often the host reads results.

    Attributes:
        slot_unit: from the number of busy rows to the number of slots of a step.
        column_unit: columns are rounded up to a multiple of it.
        check_every: steps after which the host reads which rows have ended.
        admission_cost: fixed cost of a pass over waiting prompts, in decode steps.
    """

    slot_unit: Callable[[int], int]
    column_unit: int
    check_every: int
    admission_cost: float

    def columns(self, count: int) -> int:
        """Returns `count` rounded up."""
        return -(-count // self.column_unit) * self.column_unit


# For a CPU, where new shapes cost nothing, but unused slots and columns do.
EXACT = StepShapes(slot_unit=lambda rows: rows, column_unit=1, check_every=1, admission_cost=0.5)

# For an accelerator, where synchronization should be rare.
BUCKETED = StepShapes(slot_unit=lambda n: 1 << (n - 1).bit_length(), column_unit=256, check_every=8, admission_cost=4.0)


@dataclass
class _Row:
    """What the host knows of the row in a slot. `length`, `position`, `turn_start` and `limit` are those of
    `ResponseRows`; during a turn the first two may be too large, until `SlotLoop._collect_ended` corrects them.

    Attributes:
        last: the last token of its last turn.
        unread: tokens that it reads before its next turn; None while the reply is pending.
    """

    index: int
    length: int
    position: int = 0
    turn_start: int = 0
    limit: int = 0
    last: int = 0
    unread: list[int] | None = None


class SlotLoop:
    """Samples the responses of one call of `Backend.generate`, from a model without a `slot_problem`; reports rows as
    soon as they have ended. `rows_at_once` is the number of slots. `shapes`: None chooses by the device.

    Each row in a slot is either in `_busy`, if steps advance it, or in `_between_turns`; both are keyed by slot.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        prompts: PromptBatch,
        params: SamplingParams,
        options: GenerateOptions,
        shapes: StepShapes | None = None,
    ) -> None:
        shapes = shapes or (EXACT if model.device.type == "cpu" else BUCKETED)
        self._model, self._params, self._shapes = model, params, shapes
        self._turns, self._hooks = options["turns"], options["hooks"]
        self._keys = params.random_keys(prompts["prompt_ids"])
        rows, n = len(self._keys), params.num_return_sequences
        self._slots = min(options["rows_at_once"] or rows, rows)
        self._out = ResponseRows(params, rows=rows, slots=self._slots, dtype=model.dtype, device=self._keys.device)

        tokens = unpadded(prompts)
        self._lengths = [len(prompt) for prompt in tokens]
        columns = shapes.columns(max(self._lengths) + params.max_new_tokens)
        layers = decoder_layers(model, params.state_layers) if params.state_layers else []
        self._prompts = SlotPrompts(model, tokens, n, slots=self._slots, columns=columns, output_layers=layers)
        self._cache, groups = self._prompts.cache, self._prompts.groups

        self._waiting = deque(prompt * n + i for group in groups for prompt in group.prompts for i in range(n))
        self._busy: dict[int, _Row] = {}
        self._between_turns: dict[int, _Row] = {}
        # Over all rows; their quotient is the mean length of a turn, or a little more: see `_collect_ended`.
        self._ended_turns = self._decoded_tokens = 0
        # Steps since the last `_admit` that rows with a reply could have taken part in, summed over these rows.
        self._idle_steps = 0

    def run(self) -> Generation:
        """Samples every row to its end."""
        while self._waiting or self._busy or self._between_turns:
            if self._should_admit():
                self._admit()
            elif self._busy:
                self._compact()
                self._decode()
            else:
                self._hooks.before_token()
                self._receive_replies(timeout=_REPLY_SECONDS)
                continue
            self._collect_ended()
            self._receive_replies(timeout=0)
        return self._out.complete()

    def _resumable(self) -> list[int]:
        """The slots whose rows can begin another turn."""
        return [slot for slot, row in self._between_turns.items() if row.unread is not None]

    def _should_admit(self) -> bool:
        """Whether a pass over the rows that could begin a turn costs less than leaving their slots idle.

        A pass costs c steps (`StepShapes.admission_cost`). With turns of L tokens, one of S slots becomes free every
        L / S steps. Until k are free, each has been idle for k * L / (2 * S) steps on average, which is worth
        k * L / (2 * S**2) steps of all slots. The cost per row, c / k + k * L / (2 * S**2), is least at
        k = S * sqrt(2c / L): so many slots must be free for waiting rows. At this k the idle slots have cost as much as
        the pass does. That needs no L, so it is the condition for rows between two turns.
        """
        free = self._slots - len(self._busy) - len(self._between_turns)
        resumable = len(self._resumable())
        if not self._busy:
            return resumable > 0 or (free > 0 and bool(self._waiting))
        # With the step that would come next.
        idle_steps = self._idle_steps + resumable
        if resumable and idle_steps >= self._shapes.admission_cost * (len(self._busy) + resumable):
            return True
        if not self._waiting:
            return False
        length = float(self._params.max_new_tokens)
        if self._ended_turns:
            # The first token of a turn comes with the pass, so one of a single token takes no step.
            length = max(2.0, self._decoded_tokens / self._ended_turns)
        cheapest = math.ceil(self._slots * math.sqrt(2 * self._shapes.admission_cost / length))
        return free >= min(cheapest, len(self._waiting))

    def _admit(self) -> None:
        """Gives free slots to waiting rows, resumes rows that have a reply, and chooses the next tokens of both."""
        n = self._params.num_return_sequences
        placed: dict[int, list[int]] = {}
        free = [slot for slot in range(self._slots) if slot not in self._busy and slot not in self._between_turns]
        for slot in free[: len(self._waiting)]:
            index = self._waiting.popleft()
            placed.setdefault(index // n, []).append(slot)
            self._busy[slot] = _Row(index, self._lengths[index // n])
        appended = []
        for slot in self._resumable():
            row = self._busy[slot] = self._between_turns.pop(slot)
            assert row.unread is not None
            appended.append(NewTokens(slot, row.length, row.unread))
            row.length += len(row.unread)
            row.unread = None
        self._idle_steps = 0
        next_prompt = self._waiting[0] // n if self._waiting else None
        self._choose(self._prompts.read(placed, appended, next_prompt))

    def _choose(self, logits: dict[int, Tensor]) -> None:
        """Begins a turn of each row in a slot of `logits`, and chooses its first token from the logits (V,) there."""
        out = self._out
        numbers = []
        for slot in logits:
            row = self._busy[slot]
            row.turn_start, row.limit = row.position, self._params.max_new_tokens
            if self._turns is not None:
                row.limit = self._turns.limit(row.position, row.limit)
            numbers.append((slot, row.index, row.length, row.position, row.turn_start, row.limit))
        # One tensor, so that a device is written to once.
        on_device = torch.tensor(numbers, device=self._keys.device)
        slots, indices, lengths, positions, turn_starts, limits = on_device.T.contiguous()
        out.rows[slots], out.keys[slots] = indices, self._keys[indices]
        out.lengths[slots], out.positions[slots] = lengths, positions
        out.turn_starts[slots], out.limits[slots] = turn_starts, limits
        out.running[slots], out.matched[slots] = True, 0
        self._hooks.before_token()
        out.choose(torch.stack(list(logits.values())), slots, self._cache.outputs)
        for slot in logits:
            self._busy[slot].position += 1

    def _compact(self) -> None:
        """Moves rows into lower slots if the next step can then have fewer."""
        target = min(self._shapes.slot_unit(len(self._busy)), self._slots)
        movers = sorted(slot for slot in self._busy if slot >= target)
        if not movers:
            return
        holes = [slot for slot in range(target) if slot not in self._busy]
        # Free slots first: their states need not be kept.
        holes.sort(key=lambda slot: slot in self._between_turns)
        holes = holes[: len(movers)]
        for mover, hole in zip(movers, holes, strict=True):
            row = self._busy[hole] = self._busy.pop(mover)
            if hole in self._between_turns:
                other = self._between_turns[mover] = self._between_turns.pop(hole)
                self._cache.swap(mover, hole, max(row.length, other.length))
            else:
                self._cache.copy(mover, [hole], row.length)
        sources, targets = torch.tensor([holes + movers, movers + holes], device=self._keys.device)
        self._out.move(sources, targets)

    def _decode(self) -> None:
        """Makes the steps up to the next `_collect_ended`. A row that ends earlier is computed, but not advanced."""
        steps = min(self._shapes.check_every, max(row.limit - row.position for row in self._busy.values()))
        slots = min(self._shapes.slot_unit(max(self._busy) + 1), self._slots)
        self._idle_steps += steps * len(self._resumable())
        lengths, running, tokens = self._out.lengths[:slots], self._out.running[:slots], self._out.tokens[:slots]
        for _ in range(steps):
            self._hooks.before_token()
            # Counts also rows that have ended on the device since the host last read it.
            longest = max(row.length for row in self._busy.values())
            columns = min(self._shapes.columns(1 + longest), self._cache.columns)
            # A row that has ended stays at its last position: the next one may be more than the model has.
            positions = (lengths + running - 1).clamp(min=0)
            logits = read_next(self._model, self._cache, tokens, lengths, positions, columns=columns)
            lengths.add_(running)
            self._out.choose(logits, slice(0, slots), self._cache.outputs)
            for row in self._busy.values():
                row.length += 1
                row.position += 1

    def _collect_ended(self) -> None:
        """Ends the turns of rows that no longer run: finishes those of full width (without turns, all), and asks how
        the others go on.
        """
        running = self._out.running.tolist()
        ended = {slot: self._busy.pop(slot) for slot in list(self._busy) if not running[slot]}
        if not ended:
            return
        turns = self._turns
        asked: dict[int, _Row] = {}
        if turns is not None:
            slots = torch.tensor(list(ended), device=self._keys.device)
            # The host may have counted steps that a row no longer took.
            lengths, positions = self._out.lengths[slots].tolist(), self._out.positions[slots].tolist()
            for (slot, row), length, position in zip(ended.items(), lengths, positions, strict=True):
                row.length, row.position = length, position
                if position < self._params.max_new_tokens:
                    asked[slot] = row
        self._ended_turns += len(ended)
        self._decoded_tokens += sum(row.position - row.turn_start for row in ended.values())
        self._finish([row for slot, row in ended.items() if slot not in asked])
        if turns is not None and asked:
            self._ask_handler(turns, asked)

    def _finish(self, rows: list[_Row]) -> None:
        """Reports rows whose responses are complete."""
        if rows:
            indices = [row.index for row in rows]
            self._hooks.on_finished(indices, self._out.outputs[torch.tensor(indices, device=self._keys.device)])

    def _ask_handler(self, turns: Turns, rows: dict[int, _Row]) -> None:
        """Asks how `rows` (by slot) go on, and appends the replies that are not pending."""
        self._between_turns |= rows
        indices = torch.tensor([row.index for row in rows.values()], dtype=torch.long, device=self._keys.device)
        outputs = self._out.outputs[indices]
        responses, masks = outputs.responses.tolist(), outputs.response_mask.tolist()
        stopped = outputs.stopped.tolist()
        ended_by_reply: list[_Row] = []
        for i, (slot, row) in enumerate(rows.items()):
            response, mask = responses[i][: row.position], masks[i][: row.position]
            row.last = response[-1]
            reply = turns.handler.on_stop(Turn(row.index, response, mask, row.turn_start, stopped=stopped[i]))
            if not isinstance(reply, Pending):
                ended_by_reply += self._append_reply(slot, reply)
        self._finish(ended_by_reply)

    def _receive_replies(self, *, timeout: float) -> None:
        """Appends the replies that have come, or come within `timeout` seconds."""
        pending = {row.index: slot for slot, row in self._between_turns.items() if row.unread is None}
        if self._turns is None or not pending:
            return
        complete: list[_Row] = []
        for index, reply in self._turns.replies(pending, timeout):
            complete += self._append_reply(pending.pop(index), reply)
        self._finish(complete)

    def _append_reply(self, slot: int, reply: Reply) -> list[_Row]:
        """Appends the reply to the turn of the row in `slot`; returns the row in a list if its response ends there."""
        row, width = self._between_turns[slot], self._params.max_new_tokens
        appended = check_reply(reply, row.index, self._model.config.get_text_config().vocab_size)
        if appended is not None:
            end = min(row.position + len(appended), width)
            kept = torch.tensor(appended[: end - row.position], dtype=torch.long, device=self._keys.device)
            self._out.outputs.responses[row.index, row.position : end] = kept
            row.position = end
            if end < width:
                # The last token of the turn has not been read yet.
                row.unread = [row.last, *appended]
                return []
            self._out.outputs.stopped[row.index] = False
        return [self._between_turns.pop(slot)]


# Models that can be sampled in slots, also those with hooks, which a `Trial` would try again.
_models_without_problem: WeakSet[PreTrainedModel] = WeakSet()


def slot_problem(model: PreTrainedModel) -> str | None:
    """Why `model` cannot be sampled in slots. None if it can: then the attention of `packed_attention` is installed."""
    if model in _models_without_problem:
        return None
    if problem := packing_problem(model):
        return problem
    if not is_installed(model):
        return f"its attention ({underlying_attention(model)}) reads a cache of its own"
    problem = _slot_trial(model)
    if problem is None:
        _models_without_problem.add(model)
    return problem


def _compare_slots(model: PreTrainedModel) -> str | None:
    """How the logits of two prompts, a step and appended tokens in slots differ from those of plain passes over the
    rows; None if they do not.
    """
    vocabulary, device = model.config.get_text_config().vocab_size, model.device
    rows = [[(7 * i + 3 * j + 1) % vocabulary for j in range(length)] for i, length in enumerate((8, 5))]
    cache = SlotCache(slots=2, columns=8)
    # The prompts have so many tokens; the step reads the next one of each row, the last pass the others.
    lengths = (5, 2)
    prompts = extend(model, cache, [NewTokens(i, 0, rows[i][:n]) for i, n in enumerate(lengths)])
    tokens = torch.tensor([row[n] for row, n in zip(rows, lengths, strict=True)], device=device)
    filled = torch.tensor(lengths, device=device)
    step = read_next(model, cache, tokens, filled, filled, columns=max(lengths) + 1)
    appended = extend(model, cache, [NewTokens(i, n + 1, rows[i][n + 1 :]) for i, n in enumerate(lengths)])
    for i, (row, n) in enumerate(zip(rows, lengths, strict=True)):
        plain: Tensor = model(input_ids=torch.tensor([row], device=device), use_cache=False).logits[0]
        in_slots = torch.stack([prompts[i], step[i], appended[i]])
        if problem := difference(in_slots, plain[[n - 1, n, -1]], "logits"):
            return f"{problem} from those of a pass over the row"
    return None


_slot_trial = Trial(_compare_slots)
