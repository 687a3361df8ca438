"""Responses of several turns in slots: the tokens of plain passes over whole rows, whenever answers come."""

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import PreTrainedModel

from alpaca_ppo.functional.rng import uniforms
from alpaca_ppo.generation import PENDING, Generation, SamplingParams, Turn, Turns, generate
from alpaca_ppo.generation.slots import EXACT, StepShapes
from alpaca_ppo.generation.token_sampling import choose_tokens
from tests.generation.test_generate import PROMPT_IDS, PROMPTS, padded
from tests.generation.test_slots import BUCKETS, SETTINGS, assert_states, in_slots, model_of
from tests.models.test_packed_sequences import InFloat64
from tests.tiny_models import EOS, PAD, tiny_causal_lm

WIDTH = 20
STOPS, TRUNCATES = tuple(range(2, 64, 5)), tuple(range(3, 64, 4))
SEVERAL: dict[str, Any] = {
    "stop_token_ids": STOPS,
    "truncate_token_ids": TRUNCATES,
    "truncate_after": 3,
    "max_new_tokens": WIDTH,
}
# Answers to a row's first, second and third turn, None from then on. Stop tokens among them end nothing.
ANSWERS: list[list[list[int]]] = [
    [[33, EOS, 40], [41], [42, 43, 44, 45, 46, 47, 48]],
    [[50, 51], list(range(30, 55))],
    [],
    [[], [60, 7], []],
]


class Script:
    """Answers turns from ANSWERS, some at once and others after several calls of `ready`, in an order of its own."""

    def __init__(self, delays: random.Random | None = None) -> None:
        self.turns: list[Turn] = []
        self.pending: dict[int, tuple[int, Any]] = {}
        self.waits: list[float] = []
        self._delays, self._asked = delays, Counter[int]()

    def on_stop(self, turn: Turn) -> Any:
        assert turn.row not in self.pending
        self.turns.append(turn)
        script = dict(enumerate(ANSWERS[turn.row % 4]))
        reply = script.get(self._asked[turn.row])
        self._asked[turn.row] += 1
        if self._delays is None or self._delays.random() < 0.3:
            return reply
        self.pending[turn.row] = (self._delays.randint(1, 9), reply)
        return PENDING

    def ready(self, timeout: float) -> Sequence[Any]:
        assert self.pending and self._delays is not None
        self.waits.append(timeout)
        self.pending = {row: (left - 1, reply) for row, (left, reply) in self.pending.items()}
        found = [(row, self.pending.pop(row)[1]) for row, (left, _) in list(self.pending.items()) if left <= 0]
        self._delays.shuffle(found)
        return found


def plain(
    model: PreTrainedModel, prompt: list[int], key: Tensor, answers: list[list[int]], *, most_in_turn: int = WIDTH
) -> tuple[list[int], list[bool], list[float], bool, list[tuple[int, int, bool]]]:
    """Tokens, mask, log-probs and `stopped` of one row by a pass over the whole row for each token, and of each turn
    that is asked about its first position, its end, and whether a token ended it.
    """
    tokens: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    asked: list[tuple[int, int, bool]] = []
    start = 0
    while True:
        logits = model(torch.tensor([prompt + tokens]), use_cache=False).logits[:, -1]
        choice = choose_tokens(logits, uniforms(key.view(1), len(tokens)), temperature=0.9)
        token = int(choice.tokens)
        tokens, mask, logprobs = [*tokens, token], [*mask, True], [*logprobs, float(choice.logprobs)]
        stopped = token in STOPS or (token in TRUNCATES and len(tokens) - start > 3)
        if len(tokens) == WIDTH:
            return tokens, mask, logprobs, stopped, asked
        if not stopped and len(tokens) - start < most_in_turn:
            continue
        asked.append((start, len(tokens), stopped))
        if len(asked) > len(answers):
            return tokens, mask, logprobs, stopped, asked
        appended = answers[len(asked) - 1][: WIDTH - len(tokens)]
        tokens, mask = tokens + appended, mask + [False] * len(appended)
        logprobs = logprobs + [0.0] * len(appended)
        if len(tokens) == WIDTH:
            return tokens, mask, logprobs, False, asked
        start = len(tokens)


@pytest.mark.parametrize("most", [None, 4])
@torch.no_grad()
def test_responses_of_several_turns_are_those_of_plain_passes_whenever_answers_come(most: int | None) -> None:
    model = model_of("qwen3", num_hidden_layers=3)
    keys = SamplingParams(**SETTINGS).random_keys(torch.tensor(PROMPT_IDS))
    with InFloat64():
        wanted = [
            plain(model, PROMPTS[row // 3], keys[row], ANSWERS[row % 4], most_in_turn=most or WIDTH)
            for row in range(12)
        ]
        runs: list[tuple[int | None, StepShapes, random.Random | None]] = [(4, EXACT, None), (None, BUCKETS, None)]
        runs += [(slots, EXACT, random.Random(slots)) for slots in (1, 3, 7)]
        runs += [(5, BUCKETS, random.Random(5))]
        for slots, shapes, delays in runs:
            script, polls, reported = Script(delays), list[int](), list[int]()
            found = in_slots(
                model,
                slots=slots,
                shapes=shapes,
                turns=Turns(script, most),
                before_token=lambda polls=polls: polls.append(0),
                on_finished=lambda rows, _, reported=reported: reported.extend(rows),
                state_layers=(1, 2),
                **SEVERAL,
            )
            assert_states(model, PROMPTS, found)
            for row, (tokens, mask, logprobs, stopped, asked) in enumerate(wanted):
                rest = WIDTH - len(tokens)
                assert found.responses[row].tolist() == tokens + [PAD] * rest
                assert found.response_mask[row].tolist() == mask + [False] * rest
                whole = torch.tensor(logprobs + [0.0] * rest, dtype=torch.float64)
                assert_close(found.logprobs[row], whole, rtol=1e-10, atol=1e-10)
                assert bool(found.stopped[row]) == stopped
                # The handler saw what was said up to the end of each turn, and nothing of a row without tokens left.
                seen = [turn for turn in script.turns if turn.row == row]
                assert [(turn.start, len(turn.response), turn.stopped) for turn in seen] == asked
                for turn, (_, end, _) in zip(seen, asked, strict=True):
                    assert turn.response == tokens[:end] and turn.response_mask == mask[:end]
            assert sorted(reported) == list(range(12)) and not script.pending
            if delays is not None:
                assert 0 in script.waits and len(polls) > sum(wait > 0 for wait in script.waits)
                assert slots != 1 or any(wait > 0 for wait in script.waits)
    kinds = Counter((stopped, len(tokens) == WIDTH, mask[-1]) for tokens, mask, _, stopped, _ in wanted)
    ends = Counter(stopped for *_, asked in wanted for _, _, stopped in asked)
    # Rows that a token ends, and rows that appended tokens fill; turns that a token ends, and those that a limit ends.
    assert kinds[True, False, True] and ends[True]
    assert (kinds[False, True, False] and not ends[False]) if most is None else ends[False]


class Late:
    """Answers the first turn of row 0 at call number `wait` of `ready` and ends all other turns at once."""

    def __init__(self, wait: int, reply: Any) -> None:
        self.waits: list[float] = []
        self._left, self._reply = wait, reply

    def on_stop(self, turn: Turn) -> Any:
        return PENDING if turn.row == 0 and turn.start == 0 else None

    def ready(self, timeout: float) -> Sequence[Any]:
        self.waits.append(timeout)
        return [(0, self._reply)] if len(self.waits) == self._left else []


def sample(handler: Any, **arguments: Any) -> Generation:
    settings = {"max_new_tokens": 12, "stop_token_ids": STOPS, "truncate_token_ids": (), **arguments}
    # The limit ends a turn that no token ends.
    return in_slots(model_of("llama"), turns=Turns(handler, max_turn_tokens=3), slots=3, **settings)


def test_a_row_that_waits_for_an_answer_does_not_hold_the_others() -> None:
    finished: list[list[int]] = []
    late, polls = Late(40, [5, 6]), list[int]()
    found = sample(late, on_finished=lambda rows, _: finished.append(rows), before_token=lambda: polls.append(0))
    assert finished[-1] == [0] and sorted(row for rows in finished for row in rows) == list(range(12))
    # It is asked without waiting while rows are sampled, and waited for only when no other is left.
    first = next(i for i, wait in enumerate(late.waits) if wait > 0)
    assert 5 < first < 40 and all(wait > 0 for wait in late.waits[first:])
    # Each wait is a poll, so that a signal ends it.
    assert len(polls) > len(late.waits) - first
    mask = found.response_mask[0].tolist()
    assert False in mask and found.responses[0, mask.index(False) : mask.index(False) + 2].tolist() == [5, 6]

    class Interrupted(Exception):
        pass

    def poll() -> None:
        polls.append(0)
        if len(polls) == stop_at:
            raise Interrupted

    stop_at, polls = len(polls) - 12, []
    late = Late(40, [5, 6])
    with pytest.raises(Interrupted):
        sample(late, before_token=poll)
    assert late.waits[-1] > 0


def test_a_step_leaves_out_rows_that_wait_for_an_answer() -> None:
    model, steps = model_of("llama"), list[int]()

    class AllButOne:
        """Lets all rows wait but the last one, whose turns go on, until that one has ended."""

        def __init__(self) -> None:
            self.rows: list[int] = []

        def on_stop(self, turn: Turn) -> Any:
            if turn.row == 11:
                return [5]
            self.rows.append(turn.row)
            return PENDING

        def ready(self, timeout: float) -> Any:
            if timeout == 0:
                return []
            rows, self.rows = self.rows, []
            return [(row, None) for row in rows]

    model.register_forward_pre_hook(
        lambda _, args, kwargs: steps.append(kwargs["input_ids"].size(0)) if kwargs["input_ids"].size(1) == 1 else None,
        with_kwargs=True,
    )
    found = in_slots(model, turns=Turns(AllButOne()), max_new_tokens=60, stop_token_ids=STOPS, truncate_token_ids=())
    running = found.response_mask.sum(dim=1)[:11]
    # The last row shares steps with no one once all others wait.
    assert int(found.response_mask[11].sum()) > int(running.max()) + 5
    assert steps.count(1) >= int(found.response_mask[11].sum()) - int(running.max()) - 5
    assert sum(steps) <= 1 + int((found.response_mask.sum(dim=1)).sum())


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ("text", "answered row 0 with 'text'; return None or a sequence of token ids"),
        (torch.tensor([3]), r"answered row 0 with tensor\(\[3\]\); return"),
        ([5, 64], "gave row 0 the token 64; use ids from 0 to 63"),
        ([-1], "gave row 0 the token -1"),
        ([5.0], "gave row 0 the token 5.0"),
        (PENDING, "answered row 0 with <Pending.PENDING: 'pending'>; return"),
    ],
)
def test_an_answer_that_is_no_tokens_is_refused(reply: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"the turn handler {message}"):
        sample(Late(3, reply))


def test_an_answer_for_a_row_that_waits_for_none_is_refused() -> None:
    class Twice(Late):
        def ready(self, timeout: float) -> Any:
            return [(0, [5]), (0, [5])]

    with pytest.raises(ValueError, match=r"ready\(\) answered row 0, which waits for none; return"):
        sample(Twice(1, None))


def test_turns_are_passed_to_backends_that_take_them_and_refused_by_others() -> None:
    params, found = SamplingParams(**{**SETTINGS, **SEVERAL}), []

    def sampled(backend: str, arch: str = "llama") -> Generation:
        model = model_of("llama") if arch == "llama" else tiny_causal_lm(arch)
        return generate(model, padded(PROMPTS), params, backend=backend, rows_at_once=5, turns=Turns(Script()))

    for backend in ("auto", "slots"):
        found.append(sampled(backend))
        with pytest.raises(ValueError, match="cannot run Bloom.*: .*several turns need slots"):
            sampled(backend, "bloom")
    assert torch.equal(found[0].responses, found[1].responses)
    assert (found[0].responses.ne(PAD) & ~found[0].response_mask).any()
    with pytest.raises(ValueError, match="generation_backend is 'generate', which does not take environments"):
        sampled("generate")
