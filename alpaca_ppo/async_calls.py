"""Calls functions of users, which may be async, slow or broken: one event loop in a daemon thread awaits what is async,
and each other call has a daemon thread of its own.

`await_all` serves reward functions. `RowCalls` serves environments and tools, whose calls belong to rows and have a
time limit; a call that is too late is abandoned, and its result dropped.
"""

import asyncio
import inspect
import math
import re
import sys
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

# Calls that run at a time; others wait in order.
MOST_CALLS = 64
# In which the event loop must respond after a call timed out, or it counts as blocked.
RESPONSE_SECONDS = 1.0
_POLL_SECONDS = 0.1


def error_text(error: BaseException) -> str:
    """The type and the message of an exception; the type alone if its `__str__` fails."""
    try:
        return f"{type(error).__name__}: {error}"
    # Also SystemExit: this is code of the user, or of the policy.
    except BaseException:
        return type(error).__name__


def name_of(function: Callable[..., Any]) -> str:
    """The name of a function, of that in a `functools.partial`, or of the class of a callable object."""
    while isinstance(function, partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


class Parameters(NamedTuple):
    """The arguments that a function takes by name; `required` are those without a default, and `any_others` says
    whether it has `**kwargs`.
    """

    names: list[str]
    required: list[str]
    any_others: bool


def parameters_of(function: Callable[..., Any]) -> Parameters:
    """The parameters of `function`. Those that a `functools.wraps` decorator may supply itself are not required. For a
    class without a signature, such as one written in C, only `any_others` is set.
    """
    try:
        own = wrapped = inspect.signature(function).parameters
        # `own` are those of the decorator that may supply some, if any. `functools.lru_cache` itself has no signature.
        with suppress(ValueError):
            supplier = inspect.unwrap(function, stop=supplies)
            own = inspect.signature(supplier, follow_wrapped=False).parameters
    except ValueError:
        return Parameters([], [], any_others=True)
    takes_others, wrapped_does = (any(p.kind is p.VAR_KEYWORD for p in ps.values()) for ps in (own, wrapped))
    # A decorator that supplies the first argument of a method passes self on.
    named = {name: p for name, p in (own | wrapped if takes_others else own).items() if name != "self"}
    names = [name for name, p in named.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    required = [name for name in names if name in own and own[name].default is inspect.Parameter.empty]
    return Parameters(names, required, any_others=takes_others and wrapped_does)


def supplies(decorated: Any) -> bool:
    """Whether a decorator may add to the arguments that it passes on, as far as the source of `decorated` shows."""
    # A `functools.partial` has no code, and what was typed in has no source.
    with suppress(AttributeError, OSError):
        source = " ".join(inspect.getsource(decorated.__code__).split())
        # The wrapper's parameters and the arguments of its calls: all "*args,**keywords" if it passes on what it gets.
        passed = [re.sub(r":[^,]*|,? *$| ", "", part) for part in re.findall(r"\(([^()]*\*\*[^()]*)\)", source)]
        is_changed = re.search(r"\*(\w+)\b.*\b\1(\[[^]]*\] = | \|?= |\.(update|setdefault)\()", source)
        return len(passed) < 2 or len({*passed}) > 1 or is_changed is not None
    return True


class _Loop:
    """An event loop in a daemon thread, with the CUDA device of the thread that begins it."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = _daemon(self.loop.run_forever)
        self._response: threading.Event | None = None

    def probe(self) -> None:
        """Asks for a response, which `blocking_function` waits for."""
        self._response = threading.Event()
        self.loop.call_soon_threadsafe(self._response.set)

    def blocking_function(self) -> str:
        """The function that blocks the loop, with its place, if the loop has not responded to `probe`; else empty."""
        response, self._response = self._response, None
        if response is None or response.wait(RESPONSE_SECONDS):
            return ""
        assert self._thread.ident is not None
        frames = traceback.extract_stack(sys._current_frames()[self._thread.ident])
        # A task that a user's function has started has no frames of this module, only asyncio's.
        not_users = (__file__, asyncio.base_events.__file__, asyncio.events.__file__)
        last = max(i for i, frame in enumerate(frames) if frame.filename in not_users)
        # The user's first function, or the last frame of all where the loop runs none.
        frame = frames[min(last + 1, len(frames) - 1)]
        return f"{frame.name} ({frame.filename}, line {frame.lineno})"


# The process's event loop, once there is one.
_loops: list[_Loop] = []


async def _outcome(awaitable: Awaitable[Any]) -> tuple[Any, BaseException | None]:
    """The result and the exception of `awaitable`. In the loop's thread a SystemExit would end the loop silently."""
    try:
        return await awaitable, None
    except BaseException as error:
        return None, error


def _event_loop() -> _Loop:
    """The process's event loop; a new one if a function blocks it."""
    if _loops and (blocker := _loops[0].blocking_function()):
        warnings.warn(
            f"{blocker} is async, but works without await, which blocks others; await in it, or make it sync",
            stacklevel=2,
        )
        _loops.clear()
    if not _loops:
        _loops.append(_Loop())
    return _loops[0]


def _daemon(target: Callable[[], Any]) -> threading.Thread:
    """Starts a thread with the CUDA device of this one; otherwise it would be cuda:0."""
    # Asking for the device initializes CUDA.
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def work() -> None:
        if device is not None:
            torch.cuda.set_device(device)
        target()

    thread = threading.Thread(target=work, name="functions of the user", daemon=True)
    thread.start()
    return thread


def await_all(awaitables: Sequence[Awaitable[Any]], poll: Callable[[], Any] = lambda: None) -> list[Any]:
    """Awaits all at once; returns the result of each, or the exception that it raised. Calls `poll` meanwhile.

    Raises:
        BaseException: SystemExit or KeyboardInterrupt of an awaitable; what a signal or `poll` raises meanwhile.
    """

    async def gathered() -> list[tuple[Any, BaseException | None]]:
        gate = asyncio.Semaphore(MOST_CALLS)

        async def limited(awaitable: Awaitable[Any]) -> tuple[Any, BaseException | None]:
            async with gate:
                return await _outcome(awaitable)

        return await asyncio.gather(*map(limited, awaitables))

    event_loop = _event_loop()
    future = asyncio.run_coroutine_threadsafe(gathered(), event_loop.loop)
    try:
        while not wait([future], _POLL_SECONDS).done:
            poll()
        outcomes = future.result()
    except BaseException:
        future.cancel()
        event_loop.probe()
        raise
    for _, error in outcomes:
        if isinstance(error, SystemExit | KeyboardInterrupt):
            raise error
    return [value if error is None else error for value, error in outcomes]


@dataclass(frozen=True)
class Call:
    """A call of a user's function, sync or async, that is to be made.

    Attributes:
        timeout: in seconds; None sets no limit.
        finish: turns what the function returns into the value of the call. It runs in the thread in which the function
            ends, and its errors are those of the call.
    """

    function: Callable[..., Any]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    timeout: float | None = None
    finish: Callable[[Any], Any] = lambda value: value


class CallTimeout(Exception):
    """A call was not done in time."""


@dataclass(eq=False)
class RowCall:
    """A call that has begun. `RowCalls.finished` returns it once it has ended or timed out.

    Attributes:
        outcome: what the function returns or raises, also after a timeout.
        task: that awaits what is async, once there is one; cancelled if nothing waits for the call any more (`drop`).
        error: what it raised; `CallTimeout` if it was not done in time.
        seconds: its duration, without the time that it waited to begin.
    """

    row: int
    deadline: float
    began: float = field(default_factory=time.monotonic)
    outcome: Future[Any] = field(default_factory=Future)
    task: Future[Any] | None = None
    value: Any = None
    error: Exception | None = None
    seconds: float = 0.0
    dropped: bool = False

    def drop(self) -> None:
        """Cancels what is async, also where the function has yet to return it."""
        self.dropped = True
        if self.task is not None:
            self.task.cancel()


class RowCalls:
    """Calls functions for rows, one at a time for each row, `most` (None = MOST_CALLS) in all, from one thread."""

    def __init__(self, most: int | None = None) -> None:
        self._most = most or MOST_CALLS
        self._waiting: deque[tuple[int, Call]] = deque()
        self._running: dict[int, RowCall] = {}

    def start(self, row: int, call: Call) -> None:
        """Begins a call, or lets it wait."""
        assert row not in self._running, f"row {row} has a call already"
        self._waiting.append((row, call))
        self._begin()

    def finished(self, timeout: float) -> list[RowCall]:
        """The calls that have ended since the last time. Waits up to `timeout` seconds for one.

        An exception such as SystemExit, in code that the policy wrote, becomes the call's error, so that it does not
        end the run silently.
        """
        until = time.monotonic() + timeout
        ended: list[RowCall] = []
        while self._running and not ended:
            running = list(self._running.values())
            soonest = min([until, *(call.deadline for call in running)])
            wait([call.outcome for call in running], max(0.0, soonest - time.monotonic()), FIRST_COMPLETED)
            now = time.monotonic()
            ended = [call for call in running if call.outcome.done() or call.deadline <= now]
            for call in ended:
                self._end(call, now)
            self._begin()
            if now >= until:
                break
        return ended

    def abandon(self) -> set[int]:
        """Drops all calls; returns the rows whose calls were running."""
        rows = set(self._running)
        for call in self._running.values():
            call.drop()
        self._running.clear()
        self._waiting.clear()
        return rows

    def _begin(self) -> None:
        while self._waiting and len(self._running) < self._most:
            row, call = self._waiting.popleft()
            # First, because it may wait for a loop that is blocked.
            loop = _event_loop().loop
            running = RowCall(row, math.inf if call.timeout is None else time.monotonic() + call.timeout)
            if inspect.iscoroutinefunction(call.function):
                made = _finish(partial(call.function, **call.arguments), call.finish, running.outcome)
                running.task = asyncio.run_coroutine_threadsafe(made, loop)
            else:
                _daemon(partial(_make_call, call, loop, running))
            self._running[row] = running

    def _end(self, call: RowCall, now: float) -> None:
        """Records the call's value, error or timeout."""
        del self._running[call.row]
        call.seconds = now - call.began
        if not call.outcome.done():
            call.error = CallTimeout()
            _loops[0].probe()
            call.drop()
        elif (error := call.outcome.exception()) is None:
            call.value = call.outcome.result()
        else:
            call.error = error if isinstance(error, Exception) else RuntimeError(f"the call raised {error_text(error)}")


def _make_call(call: Call, loop: asyncio.AbstractEventLoop, running: RowCall) -> None:
    try:
        value = call.function(**call.arguments)
        # Of an object whose __call__ is async, or a function that returns a coroutine.
        if not inspect.isawaitable(value):
            running.outcome.set_result(call.finish(value))
            return
    except BaseException as raised:
        running.outcome.set_exception(raised)
        return
    running.task = asyncio.run_coroutine_threadsafe(_finish(lambda: value, call.finish, running.outcome), loop)
    if running.dropped:
        running.task.cancel()


async def _finish(function: Callable[[], Awaitable[Any]], finish: Callable[[Any], Any], outcome: Future[Any]) -> None:
    try:
        outcome.set_result(finish(await function()))
    # As in `_outcome`.
    except BaseException as raised:
        outcome.set_exception(raised)
        # Breaks a reference cycle: the exception's traceback holds this frame.
        del outcome
