import asyncio
import threading
from concurrent.futures import wait
from functools import partial

import pytest

from alpaca_ppo import async_calls
from alpaca_ppo.async_calls import Call, CallTimeout, RowCalls, await_all


@pytest.fixture
def calls(monkeypatch):
    monkeypatch.setattr(async_calls, "MOST_CALLS", 3)
    made = RowCalls()
    yield made
    made.abandon()


def made(calls, *rows):
    """The ended calls of `rows`, by row."""
    ended = {}
    while not ended.keys() >= set(rows):
        ended |= {e.row: e for e in calls.finished(5)}
    return ended


async def slow(value):
    await asyncio.sleep(0)
    return value


def test_sync_and_async_functions_return_and_raise(calls):
    def fail():
        raise KeyError("x")

    async def async_fail():
        raise ValueError("y")

    # A partial of an async function is awaited as that is.
    all_calls = [Call(lambda a: a + 1, {"a": 1}), Call(slow, {"value": 5}), Call(fail), Call(async_fail)]
    for row, call in enumerate([*all_calls, Call(partial(slow, 7), finish=str)]):
        calls.start(row, call)
    ended = made(calls, *range(5))
    assert [ended[row].value for row in range(5)] == [2, 5, None, None, "7"]
    assert [repr(ended[row].error) for row in (2, 3)] == ["KeyError('x')", "ValueError('y')"]
    assert ended[0].error is ended[4].error is None


def test_no_more_run_at_once_than_allowed_and_the_others_in_order(calls):
    at_once, most, began, lock, three = 0, 0, [], threading.Lock(), threading.Barrier(3)

    def work(number):
        nonlocal at_once, most
        with lock:
            at_once, most = at_once + 1, max(most, at_once + 1)
            began.append(number)
        three.wait(60)
        with lock:
            at_once -= 1

    for row in range(9):
        calls.start(row, Call(work, {"number": row}))
    made(calls, *range(9))
    assert most == 3
    assert set(began[:3]) == {0, 1, 2}


def test_async_calls_wait_together(calls):
    async def meet():
        nonlocal here
        here += 1
        while here < 3:
            await asyncio.sleep(0.001)

    here = 0
    for row in range(3):
        calls.start(row, Call(meet, timeout=60))
    assert all(e.error is None for e in made(calls, 0, 1, 2).values())


def test_a_call_that_is_too_slow_is_left_behind_and_its_late_result_is_dropped(calls):
    release, done = threading.Event(), threading.Event()

    def hang():
        release.wait(60)
        done.set()
        return "late"

    async def async_hang():
        await asyncio.sleep(60)

    calls.start(0, Call(hang, timeout=0.01))
    calls.start(1, Call(async_hang, timeout=0.01))
    ended = made(calls, 0, 1)
    assert {type(e.error) for e in ended.values()} == {CallTimeout}
    # The row goes on with another call, in another thread.
    calls.start(0, Call(lambda: "next"))
    assert made(calls, 0)[0].value == "next"
    release.set()
    assert done.wait(60)
    calls.start(0, Call(lambda: "after"))
    assert made(calls, 0)[0].value == "after"


def test_a_call_that_was_too_slow_says_when_it_is_over(calls):
    release = threading.Event()

    async def async_hang():
        await asyncio.sleep(600)

    calls.start(0, Call(release.wait, {"timeout": 60}, timeout=0.01))
    calls.start(1, Call(async_hang, timeout=0.01))
    ended = made(calls, 0, 1)
    # One that waits is cancelled.
    assert wait([ended[1].outcome], 60).done
    assert not ended[0].outcome.done()
    release.set()
    assert ended[0].outcome.result(60)


class Waits:
    """Returns something to await once it is released, which cleans up, once more released, when it is cancelled."""

    def __init__(self):
        self.returns, self.cleaning, self.cleans_up = (threading.Event() for _ in range(3))

    def __call__(self):
        self.returns.wait(60)
        return self.wait()

    async def wait(self):
        try:
            await asyncio.sleep(600)
        finally:
            self.cleaning.set()
            while not self.cleans_up.is_set():
                await asyncio.sleep(0.001)


@pytest.mark.parametrize("end", ["timeout", "abandoned"])
def test_what_a_dropped_call_has_yet_to_await_is_cancelled_and_over_when_it_has_cleaned_up(calls, end):
    function = Waits()
    calls.start(0, Call(function, timeout=0.01 if end == "timeout" else None))
    running = calls._running[0]
    if end == "timeout":
        assert type(made(calls, 0)[0].error) is CallTimeout
    else:
        assert calls.abandon() == {0}
    function.returns.set()
    assert function.cleaning.wait(60) and not running.outcome.done()
    function.cleans_up.set()
    assert wait([running.outcome], 60).done


async def blocks(release):
    release.wait(60)


async def blocks_in_a_task(release):
    await asyncio.gather(blocks(release))


@pytest.mark.parametrize("function", [blocks, blocks_in_a_task])
def test_an_async_function_that_blocks_is_named_and_later_ones_go_on(calls, monkeypatch, function):
    monkeypatch.setattr("alpaca_ppo.async_calls.RESPONSE_SECONDS", 0.5)
    release = threading.Event()
    calls.start(0, Call(function, {"release": release}, timeout=0.05))
    assert type(made(calls, 0)[0].error) is CallTimeout
    with pytest.warns(UserWarning, match=r"^blocks \(.*test_async_calls.py, line \d+\) is async, but works with"):
        calls.start(0, Call(slow, {"value": 5}, timeout=60))
    later = made(calls, 0)[0]
    # The time in which the loop was asked is not the later call's.
    assert later.value == 5 and later.seconds < 0.5
    release.set()


def test_waiting_for_nothing_returns_and_abandoned_calls_are_named(calls):
    assert calls.finished(60) == []
    release = threading.Event()
    for row in range(4):
        calls.start(row, Call(release.wait, {"timeout": 60}))
    assert calls.finished(0.0) == []
    assert calls.abandon() == {0, 1, 2}
    assert calls.finished(60) == []
    release.set()


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError])
def test_an_exit_in_a_call_is_its_error_and_the_loop_goes_on(calls, kind):
    def leave():
        raise kind(3)

    async def async_leave():
        raise kind(3)

    for function in (leave, async_leave, lambda: async_leave()):
        calls.start(0, Call(function))
        assert str(made(calls, 0)[0].error) == f"the call raised {kind.__name__}: 3"
    assert await_all([slow(5)]) == [5]


def test_awaitables_are_awaited_together_and_what_ends_the_program_is_raised_here(monkeypatch):
    async def leave():
        raise SystemExit(3)

    async def fail():
        raise KeyError("x")

    async def meet():
        nonlocal here, most
        here, most = here + 1, max(most, here + 1)
        await asyncio.sleep(0.001)
        here -= 1
        return here

    assert [str(outcome) for outcome in await_all([slow(5), fail()])] == ["5", "'x'"]
    with pytest.raises(SystemExit):
        await_all([leave(), slow(5)])
    here = most = 0
    monkeypatch.setattr(async_calls, "MOST_CALLS", 3)
    assert len(await_all([meet() for _ in range(9)])) == 9 and most == 3
