"""Calls of reward functions for responses that are finished, while the sampler decodes others.

The responses are cut into chunks at fixed places, and a chunk's calls begin once all of its responses are finished and
those of the chunks before it have begun. Where a function that is not async fails, the chunk's calls are made to the
end, repetitions included, before those of the next one begin. What such functions are called with, and in which order,
is thus the same as without threads. Of async functions, that holds for the first calls, not for repeated ones.

Reward models are not run here: they would compete with the sampler for the device.
"""

import asyncio
import ctypes
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

from torch import Tensor

from alpaca_ppo.rewards.batch import RewardBatch
from alpaca_ppo.rewards.reward_function import (
    Calls,
    FailurePolicy,
    FunctionReward,
    FunctionScores,
    function_calls,
    same_device,
)

_FAREWELL = 1.0
"""Seconds that a thread gets to end by itself; one that a function blocks ends with the process."""


class CalledFunctions(NamedTuple):
    """What the functions returned for one chunk."""

    batch: RewardBatch
    """What they were called with."""
    scores: list[FunctionScores]
    """Of each function, in the sources' order."""


class _Abandoned(BaseException):
    """Ends the thread of `EarlyCalls` inside a function whose scores nobody waits for any more."""


class EarlyCalls:
    """The calls for one rollout's chunks, made in a thread of their own, and awaited in the event loop of another.

    Functions that are not async are called one after another. Async functions of a chunk are awaited together, and
    later chunks are begun meanwhile. Both threads have the CUDA device of the one that makes this object.

    It is a context manager: at the end of its block, calls that still run are abandoned (an exception is raised inside
    them), and nothing is called any more.

    Args:
        functions: the sources.
        policy: what happens if a function raises.
        chunks: the rows of each chunk, in the rows' order and without gaps.
        make_batch: returns what the functions get for a chunk, given its rows and the tensors of its samples. It is
            called in the thread of the functions.
    """

    def __init__(
        self,
        functions: Sequence[FunctionReward],
        policy: FailurePolicy,
        chunks: Sequence[slice],
        make_batch: Callable[[slice, dict[str, Tensor]], RewardBatch],
    ) -> None:
        self._functions, self._policy, self._chunks, self._make_batch = functions, policy, chunks, make_batch
        self._chunk_of = [number for number, chunk in enumerate(chunks) for _ in range(chunk.start, chunk.stop)]
        self._num_missing = [chunk.stop - chunk.start for chunk in chunks]
        self._results: list[Future[CalledFunctions]] = [Future() for _ in chunks]
        self._num_taken = 0
        self._failure: BaseException | None = None
        # Of the thread: chunks that wait for those before them, the chunk to begin next, and chunks whose last call
        # comes before it.
        self._complete: dict[int, dict[str, Tensor]] = {}
        self._next = 0
        self._first: set[int] = set()
        self._events: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._closed = threading.Event()
        self._calling = False
        self._use_device = same_device()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._work, name="reward functions", daemon=True)
        self._loop: _LoopThread | None = None

    def __enter__(self) -> "EarlyCalls":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._closed.set()
        with self._lock:
            if self._calling:
                _raise_in(self._thread, _Abandoned)
        self._events.put(None)
        self._thread.join(_FAREWELL)
        if self._loop is not None:
            self._loop.close()

    def on_finished(self, rows: Sequence[int], samples: dict[str, Tensor]) -> None:
        """Begins the calls of every chunk that the finished `rows` complete.

        Args:
            rows: indices of responses that were not passed before.
            samples: (rows, ...) tensors of all responses on the CPU; those of finished ones are final.

        Raises:
            BaseException: as `check`.
        """
        for row in rows:
            number = self._chunk_of[row]
            self._num_missing[number] -= 1
            assert self._num_missing[number] >= 0, f"row {row} was finished twice"
            if self._num_missing[number] == 0:
                part = {key: value[self._chunks[number]] for key, value in samples.items()}
                self._events.put(partial(self._completed, number, part))
        self.check()

    def check(self) -> None:
        """Raises what a function has raised (as `call_functions` would), if one has.

        The sampler calls it between tokens, so that a failure ends the sampling soon.
        """
        if self._failure is not None:
            raise self._failure

    def next_result(self) -> CalledFunctions:
        """Waits for what the functions return for the next chunk, from the first on.

        Raises:
            BaseException: as `check`.
        """
        number, self._num_taken = self._num_taken, self._num_taken + 1
        assert self._num_missing[number] == 0, "a chunk has a result once all of its responses are finished"
        return self._results[number].result()

    def _work(self) -> None:
        try:
            self._use_device()
            while (event := self._events.get()) is not None and not self._closed.is_set():
                event()
                self._begin()
        except _Abandoned:
            pass
        except BaseException as error:  # also SystemExit of a function: the main thread raises it
            self._failure = error
            for result in self._results:
                if not result.done():
                    result.set_exception(error)

    def _completed(self, number: int, samples: dict[str, Tensor]) -> None:
        self._complete[number] = samples

    def _begin(self) -> None:
        """Begins the calls of every chunk whose turn it is."""
        while self._next in self._complete and not self._first:
            number, self._next = self._next, self._next + 1
            batch = self._make_batch(self._chunks[number], self._complete.pop(number))
            # The end of the block, which abandons the call, ends a pause, too.
            calls = function_calls(self._functions, batch, self._policy, pause=self._closed.wait)
            self._continue(number, batch, calls, None)

    def _continue(
        self, number: int, batch: RewardBatch, calls: Calls[list[FunctionScores]], outcomes: list[Any] | None
    ) -> None:
        """Makes a chunk's calls up to the next await, given the `outcomes` of the last one."""
        for outcome in outcomes or ():
            # `function_calls` treats every exception as a failed call, but these two end the run.
            if isinstance(outcome, SystemExit | KeyboardInterrupt):
                raise outcome
        self._set_calling(True)
        try:
            pending = calls.send(outcomes)
        except StopIteration as finished:
            self._first.discard(number)
            self._results[number].set_result(CalledFunctions(batch, finished.value))
            return
        finally:
            self._set_calling(False)
        if pending.has_failed:
            self._first.add(number)
        go_on = partial(self._continue, number, batch, calls)
        self._loop = self._loop or _LoopThread(self._use_device)
        self._loop.start(pending.awaitables, lambda outcomes: self._events.put(partial(go_on, outcomes)))

    def _set_calling(self, calling: bool) -> None:
        with self._lock:
            self._calling = calling


class _LoopThread:
    """An event loop in a thread of its own.

    Args:
        use_device: called first in the thread.
    """

    def __init__(self, use_device: Callable[[], None]) -> None:
        self._use_device = use_device
        running: Future[asyncio.AbstractEventLoop] = Future()
        self._thread = threading.Thread(target=self._run, args=(running,), name="async reward functions", daemon=True)
        self._thread.start()
        self._loop = running.result()

    def _run(self, running: "Future[asyncio.AbstractEventLoop]") -> None:
        self._use_device()
        # At its end, the runner cancels what still runs.
        with asyncio.Runner() as runner:
            loop = runner.get_loop()
            loop.call_soon(running.set_result, loop)
            loop.run_forever()

    def start(self, awaitables: Sequence[Awaitable[Any]], on_done: Callable[[list[Any]], None]) -> None:
        """Awaits `awaitables` together; returns once each has run up to its first await, so that what they do before
        it happens in the order of the calls.

        Args:
            awaitables: to be awaited.
            on_done: called in the loop's thread with the result of each, or the exception that it raised.
        """
        begun: Future[None] = Future()
        asyncio.run_coroutine_threadsafe(_gather(awaitables, begun, on_done), self._loop)
        begun.result()

    def close(self) -> None:
        """Cancels what still runs, and ends the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_FAREWELL)


async def _gather(
    awaitables: Sequence[Awaitable[Any]], begun: "Future[None]", on_done: Callable[[list[Any]], None]
) -> None:
    tasks = [asyncio.ensure_future(_outcome(awaitable)) for awaitable in awaitables]
    try:
        await asyncio.sleep(0)
    finally:
        begun.set_result(None)
    on_done(list(await asyncio.gather(*tasks)))


async def _outcome(awaitable: Awaitable[Any]) -> Any:
    try:
        return await awaitable
    except BaseException as error:  # a SystemExit would end the loop's thread without a word
        return error


def _raise_in(thread: threading.Thread, exception: type[BaseException]) -> None:
    """Raises `exception` in `thread` at its next instruction of Python."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(exception))
