"""Runs functions of users beside the sampler: sync ones in daemon threads, async ones in one event loop.

What runs is keyed by the row that it belongs to; one call a row at a time. A call that is not done in time is left to
itself: its thread gets no other work, and what it returns later is dropped.
"""

import asyncio
import inspect
import sys
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, cast

from alpaca_ppo.environments.texts import error_text
from alpaca_ppo.rewards.reward_function import same_device


@dataclass(frozen=True)
class Call:
    """A function of the user to be called, sync or async."""

    function: Callable[..., Any]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    timeout: float | None = None
    """Seconds; None waits without end."""
    finish: Callable[[Any], Any] = lambda value: value
    """Part of the call: makes of what the function returns what the call returns."""


class CallTimeout(Exception):
    """A call was not done in time.

    Args:
        over: set once the call has ended after all.
    """

    def __init__(self, over: threading.Event) -> None:
        super().__init__()
        self.over = over


@dataclass(frozen=True)
class Ended:
    """A call that has ended."""

    row: int
    value: Any = None
    error: Exception | None = None
    """What it raised; `CallTimeout` if it was not done in time."""
    seconds: float = 0.0
    """That it took, without the time that it waited to begin."""


_SIGN_OF_LIFE = 1.0
"""Seconds in which an event loop must answer after a call in it was not done in time."""

Report = Callable[[Any, BaseException | None], None]
"""Called with what a call returned and what it raised."""


@dataclass
class _Running:
    ticket: int
    deadline: float | None
    began: float
    over: threading.Event
    thread: "_Thread | None" = None
    task: Any = None


class Workers:
    """Calls functions for rows, at most `max_concurrent` at a time; others wait in order.

    Threads and the event loop are kept for later calls. All methods are for one thread.

    Args:
        max_concurrent: calls at a time.
    """

    def __init__(self, max_concurrent: int) -> None:
        self._max_concurrent = max_concurrent
        self._waiting: deque[tuple[int, Call]] = deque()
        self._running: dict[int, _Running] = {}
        self._done: SimpleQueue[tuple[int, int, Any, BaseException | None]] = SimpleQueue()
        self._idle: list[_Thread] = []
        self._loop: _Loop | None = None
        self._tickets = 0

    @property
    def busy(self) -> bool:
        """Whether a call has not ended."""
        return bool(self._waiting or self._running)

    def start(self, row: int, call: Call) -> None:
        """Begins a call, or lets it wait."""
        assert row not in self._running, f"row {row} has a call already"
        self._waiting.append((row, call))
        self._begin()

    def finished(self, timeout: float) -> list[Ended]:
        """The calls that have ended since the last time. Waits up to `timeout` seconds where none has.

        An exception that would end the program, such as SystemExit of code that the policy wrote, is the call's error:
        what users run here must not end the run in silence.
        """
        until = time.monotonic() + timeout
        ended: list[Ended] = []
        while self._running and not ended:
            deadlines = [running.deadline for running in self._running.values() if running.deadline is not None]
            ended += self._collect(max(0.0, min([until, *deadlines]) - time.monotonic()))
            ended += self._expired()
            self._begin()
            if time.monotonic() >= until:
                break
        return ended

    def abandon(self) -> set[int]:
        """Forgets all calls; returns the rows whose calls were running."""
        rows = set(self._running)
        for running in self._running.values():
            self._leave(running)
        self._running.clear()
        self._waiting.clear()
        return rows

    def _begin(self) -> None:
        while self._waiting and len(self._running) < self._max_concurrent:
            row, call = self._waiting.popleft()
            self._tickets += 1
            began = time.monotonic()
            deadline = None if call.timeout is None else began + call.timeout
            running = self._running[row] = _Running(self._tickets, deadline, began, threading.Event())
            report = self._reporter(row, running)
            loop = self._event_loop()
            if inspect.iscoroutinefunction(call.function):
                running.task = asyncio.run_coroutine_threadsafe(_outcome(call, report), loop)
            else:
                running.thread = self._idle.pop() if self._idle else _Thread(same_device())
                running.thread.inbox.put((call, loop, report))

    def _reporter(self, row: int, running: _Running) -> Report:
        def report(value: Any, error: BaseException | None) -> None:
            running.over.set()
            self._done.put((row, running.ticket, value, error))

        return report

    def _collect(self, timeout: float) -> list[Ended]:
        ended: list[Ended] = []
        while True:
            try:
                row, ticket, value, error = self._done.get(timeout=timeout) if timeout else self._done.get_nowait()
            except Empty:
                return ended
            running = self._running.get(row)
            if running is None or running.ticket != ticket:
                continue
            del self._running[row]
            if running.thread is not None:
                self._idle.append(running.thread)
            if error is not None and not isinstance(error, Exception):
                error = RuntimeError(f"the call raised {error_text(error)}")
            ended.append(Ended(row, value, error, time.monotonic() - running.began))
            timeout = 0.0

    def _expired(self) -> list[Ended]:
        now = time.monotonic()
        late = [row for row, running in self._running.items() if running.deadline and running.deadline <= now]
        ended = []
        for row in late:
            running = self._running.pop(row)
            self._leave(running)
            ended.append(Ended(row, error=CallTimeout(running.over), seconds=now - running.began))
        if late and self._loop is not None:
            self._loop.probe()
        return ended

    def _leave(self, running: _Running) -> None:
        if running.thread is not None:
            running.thread.inbox.put(None)
        if running.task is not None:
            running.task.cancel()

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is not None and (holder := self._loop.holder()):
            warnings.warn(
                f"{holder} is async, but works without await, so that no other async function of an environment or "
                "tool can go on; later ones run in a new event loop. Await what takes long there, or make it a sync "
                "function, which has a thread of its own",
                stacklevel=2,
            )
            self._loop = None
        if self._loop is None:
            self._loop = _Loop()
        return self._loop.loop


class _Loop:
    """An event loop in a daemon thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="async environments", daemon=True)
        self._thread.start()
        self._heard: threading.Event | None = None

    def probe(self) -> None:
        """Asks for a sign of life, which `holder` waits for."""
        self._heard = threading.Event()
        self.loop.call_soon_threadsafe(self._heard.set)

    def holder(self) -> str:
        """What the loop is held by if it has given no sign of life since `probe`; otherwise empty."""
        heard, self._heard = self._heard, None
        if heard is None or heard.wait(_SIGN_OF_LIFE):
            return ""
        frames = traceback.extract_stack(sys._current_frames()[cast(int, self._thread.ident)])
        inside = [i for i, frame in enumerate(frames) if frame.filename == __file__]
        frame = frames[min(inside[-1] + 1, len(frames) - 1)] if inside else frames[-1]
        return f"{frame.name} ({frame.filename}, line {frame.lineno})"


class _Thread:
    """A daemon thread that makes one call after another; None in its inbox ends it."""

    def __init__(self, use_device: Callable[[], None]) -> None:
        self.inbox: SimpleQueue[Any] = SimpleQueue()
        self._use_device = use_device
        threading.Thread(target=self._work, name="environment", daemon=True).start()

    def _work(self) -> None:
        self._use_device()
        while (job := self.inbox.get()) is not None:
            call, loop, report = job
            value: Any = None
            error: BaseException | None = None
            try:
                value = call.function(**call.arguments)
                # A partial, or an object whose __call__ is async.
                if inspect.isawaitable(value):
                    value = asyncio.run_coroutine_threadsafe(_awaited(value), loop).result()
                value = call.finish(value)
            except BaseException as raised:
                value, error = None, raised
            report(value, error)


async def _awaited(awaitable: Any) -> Any:
    return await awaitable


async def _outcome(call: Call, report: Report) -> None:
    """Reports what the async function returns, or the exception that it raises."""
    value: Any = None
    error: BaseException | None = None
    try:
        value = call.finish(await call.function(**call.arguments))
    except asyncio.CancelledError:
        error = RuntimeError("the call was cancelled")
    except BaseException as raised:
        error = raised
    report(value, error)
