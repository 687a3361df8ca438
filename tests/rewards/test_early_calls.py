"""Reward functions that are called for finished chunks: in a fixed order, with what they would get otherwise."""

import asyncio
import random
import sys
import threading
import time

import pytest
import torch

from alpaca_ppo.rewards import FailurePolicy, FunctionReward, RewardError
from alpaca_ppo.rewards.batch import make_reward_batch
from alpaca_ppo.rewards.early_calls import EarlyCalls
from alpaca_ppo.rewards.reward_function import call_functions

pytestmark = pytest.mark.usefixtures("deadline")

CHUNKS = [slice(0, 2), slice(2, 4), slice(4, 5)]
PENDING = {"stopped": torch.zeros(5)}


def batch_of(chunk, samples=None):
    rows = range(chunk.start, chunk.stop)
    texts = [f"text {row}" for row in rows]
    return make_reward_batch([f"prompt {row}" for row in rows], texts, [[row] for row in rows], [{} for _ in rows])


def early(*functions, policy=None):
    return EarlyCalls([FunctionReward(f) for f in functions], policy or FailurePolicy(), CHUNKS, batch_of)


def finish(calls, rows=(4, 3, 0, 1, 2)):
    for row in rows:
        calls.on_finished([row], PENDING)


def results(*functions, policy=None, **how):
    """The scores of each chunk."""
    with early(*functions, policy=policy) as calls:
        finish(calls, **how)
        return [calls.next_result().scores for _ in CHUNKS]


def at_once(*functions, policy=None):
    """The same without threads."""
    sources = [FunctionReward(function) for function in functions]
    return [call_functions(sources, batch_of(chunk), policy or FailurePolicy()) for chunk in CHUNKS]


def doubled(completion_ids, **columns):
    return [2.0 * ids[0] for ids in completion_ids]


async def halved(completion_ids, **columns):
    await asyncio.sleep(0.001 * random.random())
    return [0.5 * ids[0] for ids in completion_ids]


def test_the_scores_are_those_of_calls_at_once():
    expected = [[[0.0, 2.0], [0.0, 0.5]], [[4.0, 6.0], [1.0, 1.5]], [[8.0], [2.0]]]
    for order in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [1, 4, 0, 2, 3]):
        found = results(doubled, halved, rows=order)
        assert [[source.scores for source in chunk] for chunk in found] == expected
    assert at_once(doubled, halved) == found


def test_chunks_are_called_in_their_order_and_once_their_own_rows_are_finished():
    called, seen = [], threading.Event()

    def judge(completion_ids, **columns):
        called.append([ids[0] for ids in completion_ids])
        seen.set()
        return doubled(completion_ids)

    with early(judge) as calls:
        finish(calls, [4, 3, 2, 1])
        assert not seen.wait(0.02) and called == [], "the first chunk has an unfinished row"
        finish(calls, [0])
        calls.next_result(), calls.next_result(), calls.next_result()
    assert called == [[0, 1], [2, 3], [4]]


def test_async_calls_of_several_chunks_run_at_once():
    begun = 0

    async def judge(completion_ids, **columns):
        nonlocal begun
        begun += 1
        while begun < len(CHUNKS):
            await asyncio.sleep(0.001)
        return [0.0] * len(completion_ids)

    async def bounded(**columns):
        return await asyncio.wait_for(judge(**columns), timeout=20)

    assert results(bounded)[2][0].scores == [0.0]


def test_draws_before_the_first_await_come_in_the_same_order_as_at_once():
    def drawing(completions, **columns):
        return [random.random() for _ in completions]

    async def asking(completions, **columns):
        time.sleep(0.002)
        drawn = [random.random() for _ in completions]
        await asyncio.sleep(0.002)
        return drawn

    random.seed(3)
    expected = at_once(drawing, asking, drawing)
    random.seed(3)
    assert results(drawing, asking, drawing) == expected


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_exception_is_raised_where_the_sampler_looks_and_names_source_and_row(asynchronous):
    called = []

    def judge(completions, **columns):
        called.append(completions)
        if "text 3" in completions:
            raise TimeoutError("no answer")
        return [0.0] * len(completions)

    async def async_judge(completions, **columns):
        await asyncio.sleep(0)
        return judge(completions)

    async_judge.__name__ = "judge"
    function = async_judge if asynchronous else judge
    with pytest.raises(RewardError) as expected:
        at_once(function)
    called.clear()
    with pytest.raises(RewardError) as found, early(function) as calls:
        finish(calls, [0, 1, 2, 3])
        while True:
            calls.check()
            time.sleep(0.001)
    assert str(found.value) == str(expected.value) and "text 3" in str(found.value) and found.value.row == 1
    assert isinstance(found.value.__cause__, TimeoutError)
    with pytest.raises(RewardError):
        finish(calls, [4])
    # Who waits for a chunk's scores hears of it too, be it another chunk's failure.
    with pytest.raises(RewardError), early(function) as calls:
        finish(calls, [2, 3, 0, 1])
        calls.next_result(), calls.next_result()
    assert ["text 4"] not in called


def test_retries_and_rows_that_fail_by_themselves_are_as_at_once():
    def service(calls):
        def judge(completions, **columns):
            calls.append(completions)
            if len(calls) == 1 or "text 2" in completions:
                raise TimeoutError("no answer")
            return [1.0] * len(completions)

        return judge

    policy = FailurePolicy(retries=1, pause=0.001, drop=True)
    first, second = [], []
    expected, found = at_once(service(first), policy=policy), results(service(second), policy=policy)
    assert first == second
    assert [chunk[0].scores for chunk in found] == [[1.0, 1.0], [None, 1.0], [1.0]]
    assert str(found[1][0].failures[0]) == str(expected[1][0].failures[0])


@pytest.mark.parametrize("seconds", [0.0, 0.03])
def test_repeated_calls_come_in_the_same_order_however_long_an_async_function_takes(seconds):
    called, asked = [], []

    def judge(completion_ids, **columns):
        called.append([ids[0] for ids in completion_ids])
        if called == [[0, 1]] or 2 in called[-1]:
            raise TimeoutError("no answer")
        return [random.random() for _ in completion_ids]

    async def asking(completion_ids, **columns):
        asked.append([ids[0] for ids in completion_ids])
        await asyncio.sleep(seconds)
        if asked == [[0, 1]] or 3 in asked[-1]:
            raise TimeoutError("no answer either")
        return [0.0] * len(completion_ids)

    def last(completion_ids, **columns):
        called.append("last")
        return [random.random() for _ in completion_ids]

    policy = FailurePolicy(retries=1, pause=0.001, drop=True)
    random.seed(3)
    found = results(judge, asking, last, policy=policy)
    # Each chunk: all functions, those that failed once more, then each row by itself.
    first, second = [[0, 1], "last", [0, 1]], [[2, 3], "last", [2, 3], [2], [3]]
    assert called == [*first, *second, [4], "last"]
    assert asked == [[0, 1], [0, 1], [2, 3], [2, 3], [2], [3], [4]]
    called.clear(), asked.clear()
    random.seed(3)
    expected = at_once(judge, asking, last, policy=policy)
    assert [[source.scores for source in chunk] for chunk in found] == [
        [source.scores for source in chunk] for chunk in expected
    ]


def test_both_threads_have_the_device_of_the_thread_that_makes_them(monkeypatch):
    used = {}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: used.setdefault(threading.get_ident(), device))

    def judge(completions, **columns):
        return [used.get(threading.get_ident()) for _ in completions]

    async def async_judge(completions, **columns):
        return judge(completions)

    first = results(judge, async_judge)[0]
    assert [source.scores for source in first] == [[3, 3], [3, 3]]
    # In a notebook, whose thread runs an event loop already, async functions run in another one.
    used.clear()

    async def notebook():
        return at_once(async_judge)

    assert asyncio.run(notebook())[0][0].scores == [3, 3]
    assert threading.get_ident() not in used


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_function_that_ends_the_process_does(asynchronous):
    async def leaving_late(**columns):
        sys.exit(7)

    with pytest.raises(SystemExit) as ended:
        results(leaving_late if asynchronous else lambda **columns: sys.exit(7))
    assert ended.value.code == 7


def test_a_call_that_nobody_waits_for_any_more_is_ended():
    begun, ended = threading.Event(), []

    def busy(**columns):
        try:
            while True:
                begun.set()
                time.sleep(0.001)
        finally:
            ended.append("busy")

    async def waiting(completions, **columns):
        try:
            begun.set()
            await asyncio.sleep(60)
        finally:
            ended.append("waiting")

    def failing(**columns):
        begun.set()
        raise TimeoutError

    start = time.monotonic()
    for function, policy in ((busy, None), (waiting, None), (failing, FailurePolicy(retries=1, pause=60))):
        begun.clear()
        with early(function, policy=policy) as calls:
            finish(calls)
            assert begun.wait(20)
    while any("reward functions" in thread.name for thread in threading.enumerate()):
        assert time.monotonic() - start < 30
        time.sleep(0.001)
    assert ended.count("busy") == 1 and "waiting" in ended
