"""The lock on an output folder: one run at a time writes there.

The main process of a run holds `run.lock` in its output folder (`filelock`, that is `flock`), which the kernel gives
back when the process ends, however it ends. `run.lock.json` beside it says who holds it, for the error of another run.

Read-only use needs no lock. Which parts of a run hold it is decided in `trainer.base_trainer`.
"""

import json
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from accelerate import Accelerator
from filelock import FileLock, Timeout

from alpaca_ppo.atomic_io import StrPath, write_text_atomically
from alpaca_ppo.distributed import collectives

LOCK_FILE, HOLDER_FILE = "run.lock", "run.lock.json"
WAIT_SECONDS = 20.0
"""How long a start waits for a run that is just ending, such as one whose launcher was killed (`launcher`: 13 s)."""


class FolderLock:
    """A hold of this process on `folder`. Those that it has on one folder are one lock, which the last one gives back.

    A relative path, and links on it, are followed now, so that a reward function may change the current folder.
    """

    def __init__(self, folder: StrPath) -> None:
        self._folder = Path(os.path.realpath(folder))
        self._lock = FileLock(self._folder / LOCK_FILE, thread_local=False, is_singleton=True, poll_interval=0.2)

    def acquire(self) -> None:
        """Locks the folder, which is created; waits up to `WAIT_SECONDS` for a run that is ending.

        Raises:
            ValueError: if another process holds the lock; names it.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire(blocking=False)
        except Timeout:
            self._wait()
        if self._lock.lock_counter == 1:
            since = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
            holder = {"host": platform.node(), "process": os.getpid(), "since": since}
            write_text_atomically(self._folder / HOLDER_FILE, json.dumps(holder))

    def release(self) -> None:
        """Gives back what one `acquire` took. The files are removed under the lock, so that no other run's are."""
        if self._lock.lock_counter == 1:
            for name in (HOLDER_FILE, LOCK_FILE):
                (self._folder / name).unlink(missing_ok=True)
        self._lock.release()

    def _wait(self) -> None:
        print(f"output_dir ({self._folder}) is locked {self._holder}; waiting up to {WAIT_SECONDS:.0f} s", flush=True)
        try:
            self._lock.acquire(timeout=WAIT_SECONDS)
        except Timeout:
            raise ValueError(
                f"output_dir ({self._folder}) is in use by another run, locked {self._holder}; wait for it to end or "
                "stop it, or choose another output_dir"
            ) from None

    @property
    def _holder(self) -> str:
        # It has the lock and has not written the file yet.
        with suppress(FileNotFoundError):
            return "by process {process} on {host}, since {since}".format(
                **json.loads((self._folder / HOLDER_FILE).read_text("utf-8"))
            )
        return "by a process that has just started"


class RunLock:
    """A trainer's hold on its output folder. The main process holds the lock; a refusal reaches every rank.

    Every rank must call the methods at the same points. Several trainers may use one folder after another in the same
    process.
    """

    def __init__(self, accelerator: Accelerator, folder: StrPath) -> None:
        self._accelerator, self._lock, self._held = accelerator, FolderLock(folder), False

    def acquire(self) -> None:
        """Holds the lock from now on, until `release` or the end of the process.

        Raises:
            ValueError: if another process holds it; the other ranks get a RuntimeError with the same text.
        """
        if not self._held:
            with collectives.raise_on_all_ranks(self._accelerator):
                if self._accelerator.is_main_process:
                    self._lock.acquire()
            self._held = True

    def release(self) -> None:
        """Gives up this trainer's hold, if it has one."""
        if self._held and self._accelerator.is_main_process:
            self._lock.release()
        self._held = False

    @contextmanager
    def until_the_end(self) -> Iterator[None]:
        """Holds the lock in the block; afterwards this trainer does not hold it, even if it did before."""
        self.acquire()
        try:
            yield
        finally:
            self.release()

    @contextmanager
    def for_a_while(self) -> Iterator[None]:
        """Holds the lock in the block; afterwards this trainer holds it only if it did before."""
        if self._held:
            yield
            return
        with self.until_the_end():
            yield


def check_unlocked(folder: StrPath) -> None:
    """Checks that no other process holds the lock on `folder`; waits as `FolderLock.acquire` does.

    Raises:
        ValueError: see there.
    """
    if (Path(folder) / LOCK_FILE).exists():
        lock = FolderLock(folder)
        lock.acquire()
        lock.release()
