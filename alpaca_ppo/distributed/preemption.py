"""SIGTERM and SIGINT ask a run to save its state and exit, or SIGINT at a prompt or in a notebook to return there.

A signal handler only records the request. All ranks poll it between steps (`poll_all_ranks`), and each during a rollout
(`poll`), which is then discarded. `trainer.base_trainer` decides what is saved.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from types import FrameType
from typing import Any

from accelerate import Accelerator

from alpaca_ppo.distributed import launcher
from alpaca_ppo.distributed.collectives import max_int_over_ranks

SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Seconds in which signals count as one: Slurm signals every process, and torchrun passes the same signal on.
_ONE_REQUEST = 1.0


def at_prompt() -> bool:
    """Whether this process is an interactive interpreter, IPython or a notebook."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)


class Interrupted(SystemExit):
    """Ends the process with exit code 128 + the signal's number, once the run has saved its state."""

    def __init__(self, signum: int) -> None:
        super().__init__(128 + signum)
        self.signum = signum

    def __str__(self) -> str:
        return signal.Signals(self.signum).name

    def return_to_prompt(self) -> None:
        """Raises KeyboardInterrupt instead of this exception if the signal was SIGINT and there is a prompt."""
        if self.signum == signal.SIGINT and at_prompt():
            raise KeyboardInterrupt(str(self)) from None


class SamplingStopped(KeyboardInterrupt):
    """Leaves this rank's part of a rollout. As a KeyboardInterrupt, neither `except Exception` in user code nor asyncio
    swallows it.
    """


class PreemptionHandler:
    """Records whether a signal has asked the run to stop."""

    def __init__(self, accelerator: Accelerator) -> None:
        # `Engine.synced_forwards`: whether ranks can only leave a rollout together.
        self.lockstep = False
        self._accelerator = accelerator
        self._signum = 0
        # Whether a rollout runs that may be left, whether it is in a `part`, and whether a signal interrupts that part
        # anywhere.
        self._stoppable = self._in_part = self._at_once = False
        self._requested_at = 0.0
        self._pid = os.getpid()

    @contextmanager
    def install(self) -> Iterator[None]:
        """Handles the signals in the block, if this is the main thread.

        The first signal requests a stop; another one at least a second later ends the process immediately, or returns
        to the prompt. A signal after the last poll raises Interrupted, or KeyboardInterrupt, at the end.
        """
        self._signum, self._pid = 0, os.getpid()
        before: dict[signal.Signals, Any] = {}
        try:
            if threading.current_thread() is threading.main_thread():
                for number in SIGNALS:
                    # nohup and a shell's background jobs ignore signals on purpose.
                    if signal.getsignal(number) is not signal.SIG_IGN:
                        before[number] = signal.signal(number, self._handle)
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            late, self._signum = self._signum, 0
        if late:
            interrupted = Interrupted(late)
            interrupted.return_to_prompt()
            raise interrupted

    @contextmanager
    def rollout(self, *, can_stop: bool) -> Iterator[None]:
        """Wraps this rank's rollout. If asked to stop, the rank leaves it at the next `poll`, in lockstep only within a
        `part`. With `can_stop` False it runs to its end, because a checkpoint could not be resumed exactly.
        """
        self._stoppable = can_stop
        try:
            with suppress(SamplingStopped):
                yield
        finally:
            self._stoppable = False

    @contextmanager
    def together(self, *, can_stop: bool) -> Iterator[None]:
        """Wraps what all ranks do together. If `can_stop`, `poll` may raise in it, and must then do so on all ranks.

        Raises:
            Interrupted: on all ranks, after `poll` has raised.
        """
        self._in_part = can_stop
        try:
            with self.rollout(can_stop=can_stop):
                yield
                return
        finally:
            self._in_part = False
        # Only after a `poll` that raised.
        self.poll_all_ranks()

    @contextmanager
    def part(self, *, at_once: bool = False) -> Iterator[None]:
        """Wraps what a rank does without the others in a rollout: sampling, or a call of a reward function. With
        `at_once`, a signal interrupts it anywhere, not only in `poll`. In lockstep, `poll_all_ranks` follows at its
        end.
        """
        self._in_part, self._at_once = True, at_once
        try:
            with suppress(SamplingStopped) if self.lockstep else nullcontext():
                self.poll()
                yield
        finally:
            self._in_part = self._at_once = False
        if self.lockstep and self._stoppable:
            self.poll_all_ranks()

    def poll(self) -> None:
        """Raises SamplingStopped if this rank was asked to stop and may leave its part of a rollout here."""
        if self._signum and self._stoppable and (self._in_part or not self.lockstep):
            raise SamplingStopped

    def poll_all_ranks(self) -> None:
        """Raises Interrupted on all ranks if any was asked to stop; all must call this at the same point."""
        if signum := max_int_over_ranks(self._signum, self._accelerator):
            raise Interrupted(signum)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            # A forked child, such as a worker of a reward function, inherits the handler but never polls.
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
        elif not self._signum:
            self._request_stop(signum)
        elif time.monotonic() - self._requested_at >= _ONE_REQUEST:
            if signum == signal.SIGINT and at_prompt():
                raise KeyboardInterrupt
            os._exit(128 + signum)

    def _request_stop(self, signum: int) -> None:
        self._signum, self._requested_at = signum, time.monotonic()
        launcher.end_without_launcher()
        if self._accelerator.is_main_process:
            after = "exiting; a second signal exits immediately"
            if signum == signal.SIGINT and at_prompt():
                after = "returning to the prompt; a second SIGINT returns immediately, without a checkpoint"
            # Not print, which the signal may have interrupted.
            os.write(2, f"\n{signal.Signals(signum).name}: saving a checkpoint and {after}\n".encode())
        if self._at_once:
            self.poll()
