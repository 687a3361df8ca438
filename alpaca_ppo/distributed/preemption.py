"""SIGTERM and SIGINT ask a run to save its state and exit; the ranks agree on when. At a prompt or in a notebook,
SIGINT leads back there instead.

A signal handler only records the request. The run polls for it at points where it can stop: with `poll_all_ranks`
when every rank is at the same point, or with `poll_local` during a rollout, when each rank works by itself until
rollouts are gathered. What is saved then is decided in `trainer.base_trainer` and `trainer.progress`.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

from accelerate import Accelerator

from alpaca_ppo.distributed import launcher
from alpaca_ppo.distributed.collectives import max_int_over_ranks
from alpaca_ppo.distributed.engine import Engine

SIGNALS = (signal.SIGTERM, signal.SIGINT)
_ONE_REQUEST = 1.0
"""Seconds in which signals count as one: Slurm signals every process, and torchrun then passes the same signal on."""


def at_prompt() -> bool:
    """Whether somebody goes on typing in this process: an interactive interpreter, IPython or a notebook."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)


class Interrupted(SystemExit):
    """Ends the process, once the run has saved its state, with 128 + the signal's number as its exit code."""

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
    """Raised to leave this rank's part of a rollout.

    It is a KeyboardInterrupt, so that neither `except Exception` in user code nor asyncio swallows it.
    """


class PreemptionHandler:
    """Records whether a signal has asked the run to stop.

    Args:
        accelerator: of the run.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._signum = 0
        self._installed = self._in_rollout = self._raise_at_once = False
        self._requested_at = 0.0
        self._pid = os.getpid()

    @contextmanager
    def install(self) -> Iterator[None]:
        """Installs the handlers for the duration of the block, if this is the main thread and they are not ignored.

        The first signal requests a stop; another one at least a second later ends the process immediately, or, if it is
        a SIGINT and there is a prompt, raises KeyboardInterrupt wherever the run is. The old handlers are restored at
        the end.

        Raises:
            Interrupted: at the end, if a signal arrived after the last poll; KeyboardInterrupt for a SIGINT with a
                prompt.
        """
        self._signum, self._pid, self._installed = 0, os.getpid(), True
        before: dict[signal.Signals, Any] = {}
        try:
            if threading.current_thread() is threading.main_thread():
                for number in SIGNALS:
                    # nohup and a shell's background jobs ignore signals on purpose.
                    if signal.getsignal(number) is not signal.SIG_IGN:
                        before[number] = signal.signal(number, self._note)
            yield
        finally:
            self._installed = False
            for number, handler in before.items():
                signal.signal(number, handler)
        if self._signum:
            late = Interrupted(self._signum)
            late.return_to_prompt()
            raise late

    def for_rollout(
        self,
        engine: Engine,
        *,
        can_stop: bool = True,
        on_rows: Callable[[int], Any] = lambda rows: None,
    ) -> "RolloutPoll":
        """Returns the `RolloutPoll` of one rollout.

        Args:
            engine: the policy's; it decides whether ranks run their forward passes in lockstep.
            can_stop: False if a checkpoint saved now could not be resumed exactly; the rollout is then run to its end.
            on_rows: called with the number of responses that are finished.
        """
        return RolloutPoll(
            self if can_stop else None,
            synced_forwards=engine.synced_forwards,
            on_rows=on_rows,
        )

    @contextmanager
    def local_part(self) -> Iterator[None]:
        """A block in which this rank may stop on its own: SamplingStopped leaves the block and is caught at its end."""
        self._in_rollout = True
        try:
            with suppress(SamplingStopped):
                yield
        finally:
            self._in_rollout = False

    def poll_local(self) -> None:
        """Raises SamplingStopped in a rollout's local part if this rank was asked to stop."""
        if self._in_rollout and self.requested:
            raise SamplingStopped

    def poll_all_ranks(self) -> None:
        """Called by every rank at the same point; raises Interrupted on all of them if any was asked to stop."""
        if self._installed and (signum := max_int_over_ranks(self.requested, self._accelerator)):
            raise Interrupted(signum)

    @contextmanager
    def raise_at_once(self) -> Iterator[None]:
        """In a rollout's local part, lets a signal interrupt the code in the block immediately, as Ctrl-C would."""
        self._raise_at_once = self._in_rollout
        try:
            self.poll_local()
            yield
        finally:
            self._raise_at_once = False

    @property
    def requested(self) -> int:
        """The number of the signal that this rank received, or 0."""
        return self._signum if self._installed else 0

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            # A forked child, such as a reward function's worker, inherits the handler but never polls.
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
        elif not self._signum:
            self._signum, self._requested_at = signum, time.monotonic()
            launcher.end_without_launcher()
            if self._accelerator.is_main_process:
                after = "exiting; a second signal exits immediately"
                if signum == signal.SIGINT and at_prompt():
                    after = "returning to the prompt; a second SIGINT returns immediately, without a checkpoint"
                # Not print: a handler may run in the middle of another print.
                os.write(2, f"\n{signal.Signals(signum).name}: saving a checkpoint and {after}\n".encode())
            if self._raise_at_once:
                raise SamplingStopped
        elif time.monotonic() - self._requested_at >= _ONE_REQUEST:
            if signum == signal.SIGINT and at_prompt():
                raise KeyboardInterrupt
            os._exit(128 + signum)


@dataclass(frozen=True)
class RolloutPoll:
    """Checks whether a rollout should stop, for any engine; every rank calls it between passes.

    Args:
        handler: the run's; with None the rollout is never stopped.
        synced_forwards: True if ranks must make the same forward passes, and so stop at the same point.
        on_rows: called with the number of responses that are finished.
    """

    handler: PreemptionHandler | None = None
    synced_forwards: bool = False
    on_rows: Callable[[int], Any] = lambda rows: None

    def __call__(self) -> None:
        """Raises if a stop was requested: on every rank, or on this one alone (`rollout`)."""
        if self.handler is None:
            return
        if self.synced_forwards:
            self.handler.poll_all_ranks()
        else:
            self.handler.poll_local()

    @contextmanager
    def rollout(self) -> Iterator[None]:
        """Wraps one rank's part of a rollout, which ends early if this rank alone was asked to stop."""
        if self.handler is None or self.synced_forwards:
            yield
            return
        with self.handler.local_part():
            yield

    @contextmanager
    def sampling(self) -> Iterator[Callable[[], Any]]:
        """Wraps the sampling of responses; yields the function that the sampler calls before each token."""
        if not self.synced_forwards or self.handler is None:
            yield self
        else:
            with self._local_part_of_synced_rollout():
                yield self.handler.poll_local

    @contextmanager
    def interruptible_call(self) -> Iterator[None]:
        """Wraps a call that may take minutes, such as a reward function's; a signal ends it immediately."""
        if self.handler is None:
            yield
        elif self.synced_forwards:
            with self._local_part_of_synced_rollout(), self.handler.raise_at_once():
                yield
        else:
            with self.handler.raise_at_once():
                yield

    def raise_on_all_ranks(self) -> None:
        """Raises Interrupted on every rank, after a rollout that some rank left early."""
        assert self.handler is not None, "only a signal ends a rollout early"
        self.handler.poll_all_ranks()

    @contextmanager
    def _local_part_of_synced_rollout(self) -> Iterator[None]:
        """Wraps the work that each rank does alone between synchronized passes; at its end all ranks stop if any must.

        Raises:
            Interrupted: on every rank, if any was asked to stop.
        """
        assert self.handler is not None
        with self.handler.local_part():
            yield
        self.handler.poll_all_ranks()
