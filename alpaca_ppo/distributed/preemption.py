"""SIGTERM and SIGINT ask a run to save where it stands and to end; ranks agree on when.

A handler only takes a note. Where the run may stop it asks `poll_all_ranks` (every rank is there) or `poll_local`
(sampling, where each rank goes its own way until rollouts are gathered). What is saved then is not here (`run_keeping`,
`resume_point`).
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from types import FrameType
from typing import Any

from accelerate import Accelerator

from alpaca_ppo.distributed.collectives import largest

SIGNALS = (signal.SIGTERM, signal.SIGINT)
_ONE_REQUEST = 1.0
"""Seconds in which signals count as one: Slurm signals every process, and torchrun then passes the same signal on."""


class Interrupted(SystemExit):
    """Ends the process, once the run has saved where it stands, with 128 + the signal's number as its exit code."""

    def __init__(self, signum: int) -> None:
        super().__init__(128 + signum)
        self.signum = signum

    def __str__(self) -> str:
        return signal.Signals(self.signum).name


class SamplingStopped(KeyboardInterrupt):
    """Leaves this rank's part of a rollout. A KeyboardInterrupt, because other code and asyncio let that through."""


class PreemptionHandler:
    """Whether a signal has asked the run to end.

    Args:
        accelerator: of the run.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._signum = 0
        self._listening = self._sampling = self._raise_at_once = False
        self.synced_forwards = False
        """Whether ranks keep in step in a rollout that may be stopped."""
        self._asked_at = 0.0
        self._pid = os.getpid()

    @contextmanager
    def install(self) -> Iterator[None]:
        """Inside, SIGTERM and SIGINT are requests, where this is the main thread and they were not ignored; a second
        one, a second or more after the first, ends the process at once. Afterwards they do what they did before.

        Raises:
            Interrupted: at the end, for a request that no check has met.
        """
        self._signum, self._pid, self._listening = 0, os.getpid(), True
        before: dict[signal.Signals, Any] = {}
        try:
            if threading.current_thread() is threading.main_thread():
                for number in SIGNALS:
                    # nohup and a shell's background jobs ignore signals on purpose.
                    if signal.getsignal(number) is not signal.SIG_IGN:
                        before[number] = signal.signal(number, self._note)
            yield
        finally:
            self._listening = False
            for number, handler in before.items():
                signal.signal(number, handler)
        if self._signum:
            raise Interrupted(self._signum)

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Inside, and only there, this rank may be stopped alone: SamplingStopped leaves the block and ends there."""
        self._sampling = True
        try:
            with suppress(SamplingStopped):
                yield
        finally:
            self._sampling = False

    def poll_local(self) -> None:
        """Raises SamplingStopped where this rank, as it samples, was asked to end."""
        if self._sampling and self.requested:
            raise SamplingStopped

    @contextmanager
    def interruptible_call(self) -> Iterator[None]:
        """Inside, where a reward function may take minutes, a signal stops the sampling at once, as Ctrl-C would."""
        with self.no_sync() if self.synced_forwards else nullcontext():
            self._raise_at_once = self._sampling
            try:
                self.poll_local()
                yield
            finally:
                self._raise_at_once = False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Around a part that this rank does without the others, where ranks keep in step otherwise: it may be stopped
        alone, and at the end all of them agree.

        Raises:
            Interrupted: on every rank, where any was asked to end.
        """
        with self.sampling():
            yield
        self.poll_all_ranks()

    def poll_all_ranks(self) -> None:
        """Called by every rank at the same point; raises Interrupted on all of them where any was asked to end."""
        if self._listening and (signum := largest(self.requested, self._accelerator)):
            raise Interrupted(signum)

    @property
    def requested(self) -> int:
        """The number of the signal that this rank got, or 0."""
        return self._signum if self._listening else 0

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            # A forked child, such as a reward function's worker, inherits the handler but runs nothing that asks.
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
        elif not self._signum:
            self._signum, self._asked_at = signum, time.monotonic()
            if self._accelerator.is_main_process:
                name = signal.Signals(signum).name
                # Not print: a handler may run in the middle of another print.
                os.write(2, f"\n{name}: saving, then ending; a second signal ends the run at once\n".encode())
            if self._raise_at_once:
                raise SamplingStopped
        elif time.monotonic() - self._asked_at >= _ONE_REQUEST:
            os._exit(128 + signum)
