import asyncio
import threading
import time
from functools import partial

import pytest

from alpaca_ppo.environments.workers import Call, CallTimeout, Workers


@pytest.fixture
def workers():
    made = Workers(3)
    yield made
    made.abandon()


def all_of(workers):
    ended = []
    while workers.busy:
        ended += workers.finished(5)
    return {e.row: e for e in ended}


async def slow(value):
    await asyncio.sleep(0)
    return value


def test_sync_and_async_functions_return_and_raise(workers):
    def fail():
        raise KeyError("x")

    async def async_fail():
        raise ValueError("y")

    calls = [Call(lambda a: a + 1, {"a": 1}), Call(slow, {"value": 5}), Call(fail), Call(async_fail)]
    # A partial of an async function is called in a thread and awaited in the loop.
    calls.append(Call(partial(slow, 7)))
    for row, call in enumerate(calls):
        workers.start(row, call)
    ended = all_of(workers)
    assert [ended[row].value for row in range(5)] == [2, 5, None, None, 7]
    assert [repr(ended[row].error) for row in (2, 3)] == ["KeyError('x')", "ValueError('y')"]
    assert ended[0].error is ended[4].error is None


def test_no_more_run_at_once_than_allowed_and_the_others_in_order(workers):
    at_once, most, began, lock = 0, 0, [], threading.Lock()

    def work(number):
        nonlocal at_once, most
        with lock:
            at_once, most = at_once + 1, max(most, at_once + 1)
            began.append(number)
        time.sleep(0.01)
        with lock:
            at_once -= 1

    for row in range(9):
        workers.start(row, Call(work, {"number": row}))
    assert len(all_of(workers)) == 9
    assert most == 3
    assert set(began[:3]) == {0, 1, 2}


def test_async_calls_wait_together(workers):
    async def meet():
        nonlocal here
        here += 1
        while here < 3:
            await asyncio.sleep(0.001)

    here = 0
    for row in range(3):
        workers.start(row, Call(meet, timeout=5))
    assert all(e.error is None for e in all_of(workers).values())


def test_a_call_that_is_too_slow_is_left_behind_and_its_late_result_is_dropped(workers):
    release, done = threading.Event(), threading.Event()

    def hang():
        release.wait(5)
        done.set()
        return "late"

    async def async_hang():
        await asyncio.sleep(60)

    workers.start(0, Call(hang, timeout=0.01))
    workers.start(1, Call(async_hang, timeout=0.01))
    ended = all_of(workers)
    assert {type(e.error) for e in ended.values()} == {CallTimeout}
    # The row goes on with another call, in another thread.
    workers.start(0, Call(lambda: "next"))
    assert all_of(workers)[0].value == "next"
    release.set()
    assert done.wait(5)
    workers.start(0, Call(lambda: "after"))
    assert all_of(workers)[0].value == "after"


def test_a_call_that_was_too_slow_says_when_it_is_over(workers):
    release = threading.Event()

    async def async_hang():
        await asyncio.sleep(60)

    workers.start(0, Call(release.wait, {"timeout": 5}, timeout=0.01))
    workers.start(1, Call(async_hang, timeout=0.01))
    ended = all_of(workers)
    # One that waits is cancelled.
    assert ended[1].error.over.wait(5)
    assert not ended[0].error.over.is_set()
    release.set()
    assert ended[0].error.over.wait(5)


async def blocks(release):
    release.wait(10)


def test_an_async_function_that_blocks_is_named_and_later_ones_go_on(workers, monkeypatch):
    monkeypatch.setattr("alpaca_ppo.environments.workers._SIGN_OF_LIFE", 0.1)
    release = threading.Event()
    workers.start(0, Call(blocks, {"release": release}, timeout=0.05))
    assert type(all_of(workers)[0].error) is CallTimeout
    with pytest.warns(UserWarning, match=r"^blocks \(.*test_workers.py, line \d+\) is async, but works without await"):
        workers.start(0, Call(slow, {"value": 5}, timeout=5))
    assert all_of(workers)[0].value == 5
    release.set()


def test_waiting_for_nothing_returns_and_abandoned_calls_are_named(workers):
    assert workers.finished(60) == []
    release = threading.Event()
    for row in range(4):
        workers.start(row, Call(release.wait, {"timeout": 5}))
    assert workers.finished(0.0) == []
    assert workers.abandon() == {0, 1, 2}
    assert not workers.busy
    release.set()


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_an_exit_in_a_call_is_its_error(workers, kind):
    def leave():
        raise kind(3)

    async def async_leave():
        raise kind(3)

    workers.start(0, Call(leave))
    assert str(all_of(workers)[0].error) == f"the call raised {kind.__name__}: 3"
    if kind is not GeneratorExit:
        workers.start(0, Call(async_leave))
        assert str(all_of(workers)[0].error) == f"the call raised {kind.__name__}: 3"


def test_a_call_that_cancels_itself_is_an_error(workers):
    async def cancel():
        raise asyncio.CancelledError

    workers.start(0, Call(cancel))
    assert "cancelled" in str(all_of(workers)[0].error)
