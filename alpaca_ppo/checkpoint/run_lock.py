"""The lock on an output folder: one run at a time writes there.

The main process of a run holds `run.lock` in its output folder: a file with the run's host, process and start, under a
POSIX lock (`fcntl.lockf`), which the kernel drops when the process ends, however it ends. Forked children do not
inherit it, and it works on NFS. For file systems that do not pass locks on between hosts, the holder also renews the
file's modification time every `HEARTBEAT_SECONDS`, and another host watches whether it does: clocks are not compared.

Read-only use needs no lock. Which parts of a run hold it is decided in `trainer.base_trainer`.
"""

import atexit
import errno
import fcntl
import json
import os
import platform
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from alpaca_ppo.atomic_io import StrPath, explain_disk_full
from alpaca_ppo.distributed import collectives

LOCK_FILE = "run.lock"
HEARTBEAT_SECONDS = 5.0
STALE_SECONDS = 60.0
"""A lock of another host whose file has not been renewed for this long belongs to a run that is dead."""
WAIT_SECONDS = 20.0
"""How long a start waits for a run that is just ending, such as one whose launcher was killed (`launcher`: 13 s)."""
_POLL_SECONDS = 0.2
_PROGRAM = "alpaca_ppo"
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP)


class RunLock:
    """A trainer's hold on its output folder. The main process holds the lock; a refusal reaches every rank.

    Every rank must call the methods at the same points. A process that already holds the lock is let in again, so
    several trainers may use one folder after another in the same process.

    Args:
        accelerator: of the run.
        folder: the run's output folder; created when the lock is acquired. A relative path, and links on it, are
            followed now, so that a reward function may change the current folder.
    """

    def __init__(self, accelerator: Accelerator, folder: StrPath) -> None:
        self._accelerator, self._folder, self._held = accelerator, Path(os.path.realpath(folder)), False

    def acquire(self) -> None:
        """Holds the lock from now on, until `release` or the end of the process.

        Raises:
            ValueError: if another process holds the lock, or has taken it from this one; the other ranks get a
                RuntimeError with the same text.
        """
        with collectives.raise_on_all_ranks(self._accelerator):
            if self._accelerator.is_main_process:
                if self._held:
                    check_kept(self._folder)
                else:
                    lock_folder(self._folder)
        self._held = True

    def release(self) -> None:
        """Gives up this trainer's hold, if it has one."""
        if self._held and self._accelerator.is_main_process:
            unlock_folder(self._folder)
        self._held = False

    @contextmanager
    def until_the_end(self) -> Iterator[None]:
        """Holds the lock in the block; afterwards this trainer does not hold it, even if it did before.

        Raises:
            ValueError: see `acquire`.
        """
        self.acquire()
        try:
            yield
        finally:
            self.release()

    @contextmanager
    def for_a_while(self) -> Iterator[None]:
        """Holds the lock in the block; afterwards this trainer holds it only if it did before.

        Raises:
            ValueError: see `acquire`.
        """
        if self._held:
            yield
            return
        with self.until_the_end():
            yield


@dataclass
class _Held:
    """A lock that this process holds.

    Closing any descriptor of the file drops a POSIX lock, so the file is not opened again while it is in `_HELD`.
    """

    path: Path
    descriptor: int
    record: bytes
    users: int = 1
    lost: bool = False
    ended: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None

    def renew(self) -> None:
        """Renews the file's time, and notices if the file is no longer this run's."""
        # A file system that fails here will fail the next write too, which reports it.
        with suppress(OSError):
            os.utime(self.descriptor)
            # Other code of this process may have read the file and so dropped the lock.
            _try_lock(self.descriptor)
            self.lost |= not self._is_ours()

    def _is_ours(self) -> bool:
        return _is_at(self.descriptor, self.path) and _read(self.descriptor) == self.record

    def close(self) -> None:
        self.ended.set()
        if self.thread is not None:
            # It must not touch a descriptor that is closed and then reused for another file.
            self.thread.join()
        if not self.lost and self._is_ours():
            self.path.unlink()
        os.close(self.descriptor)


_HELD: dict[Path, _Held] = {}
_FOUND_DEAD: set[tuple[int, int, int]] = set()
"""The `_Look.beat` of each lock that this process has watched until its holder was dead: it does not watch it twice."""
_GUARD = threading.Lock()
# A forked child does not hold the locks of its parent.
os.register_at_fork(after_in_child=_HELD.clear)


def lock_folder(folder: StrPath) -> None:
    """Locks `folder` for this process, which may hold it already; `unlock_folder` must be called as often.

    Waits up to `WAIT_SECONDS` for a run that is ending, and up to `STALE_SECONDS` for one of another host.

    Raises:
        ValueError: if another process holds the lock; names it, the folder and the remedy. Also if `run.lock` there was
            not written by this program.
        OSError: if the file cannot be written.
    """
    with _GUARD:
        path = _lock_path(folder)
        if path in _HELD:
            _HELD[path].users += 1
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _take(path, os.O_RDWR | os.O_CREAT)
        assert descriptor is not None, "the file was to be created"
        record = json.dumps(
            {
                "program": _PROGRAM,
                "host": platform.node(),
                "pid": os.getpid(),
                "since": datetime.now().astimezone().isoformat(sep=" ", timespec="seconds"),
                "machine": _machine(),
            }
        ).encode()
        with _closed_on_error(descriptor), explain_disk_full(path, needed=len(record)):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, record, 0)
        held = _HELD[path] = _Held(path, descriptor, record)
        held.thread = threading.Thread(target=_keep_renewing, args=(held,), daemon=True, name=f"heartbeat of {path}")
        held.thread.start()


def unlock_folder(folder: StrPath) -> None:
    """Takes back one `lock_folder`; after the last one the file is removed.

    Does nothing in a process that does not hold the lock, such as a forked child of the run that leaves its `train`.
    """
    with _GUARD:
        path = _lock_path(folder)
        if path in _HELD:
            _HELD[path].users -= 1
            if not _HELD[path].users:
                _HELD.pop(path).close()


def check_unlocked(folder: StrPath) -> None:
    """Checks that no other process holds the lock on `folder`, without taking it; waits as `lock_folder` does.

    Raises:
        ValueError: see `lock_folder`.
    """
    with _GUARD:
        path = _lock_path(folder)
        if path not in _HELD and (descriptor := _take(path, os.O_RDWR)) is not None:
            os.close(descriptor)


def check_kept(folder: StrPath) -> None:
    """Checks that the lock on `folder`, which this process took, is still its own.

    Raises:
        ValueError: if the file was removed or another run has taken it over, which happens after this process was
            suspended for longer than `STALE_SECONDS`; also if this process never took the lock.
    """
    held = _HELD.get(_lock_path(folder))
    if held is None:
        raise ValueError(
            f"process {os.getpid()} does not hold the lock on output_dir ({folder}); only the process that started the "
            "run may write there, not one that it has forked: return results to it instead"
        )
    held.renew()
    if held.lost:
        raise ValueError(
            f"this run has lost its lock on output_dir ({folder}): {LOCK_FILE} was removed, or another run took it "
            f"over because this process had stood still for more than {STALE_SECONDS:.0f} seconds; end one of the two "
            "runs, then resume from the last checkpoint"
        )


@atexit.register
def _unlock_everything() -> None:
    while _HELD:
        _HELD.popitem()[1].close()


def _take(path: Path, flags: int) -> int | None:
    """A descriptor of the locked file at `path`; None if there is no file and `flags` do not create it."""
    begun, first = time.monotonic(), None
    while True:
        # Opened anew each time, because NFS shows another host's changes to a file only after it is opened.
        try:
            descriptor = os.open(path, flags, 0o666)
        except FileNotFoundError:
            return None
        with _closed_on_error(descriptor):
            seen = _look(descriptor, path)
        if seen is not None and (seen.is_free or (seen.locked is not False and seen.beat in _FOUND_DEAD)):
            return descriptor
        if seen is not None:
            first, waited = first or seen, time.monotonic() - begun
            # This process got the lock, so the file system may not pass on the lock of a run on another host.
            watched = seen.locked is not False and seen.beat == first.beat
            if watched and waited >= first.patience:
                _FOUND_DEAD.add(seen.beat)
                return descriptor
            if not watched and waited >= WAIT_SECONDS:
                os.close(descriptor)
                raise ValueError(
                    f"output_dir ({path.parent}) is in use by another run, locked {seen.holder}; wait for it to end "
                    "or stop it, or choose another output_dir"
                )
            if seen is first:
                limit = first.patience if watched else WAIT_SECONDS
                print(f"output_dir ({path.parent}) is locked {seen.holder}; waiting up to {limit:.0f} s", flush=True)
        os.close(descriptor)
        time.sleep(_POLL_SECONDS)


@dataclass(frozen=True)
class _Look:
    """What a process sees that has opened the file.

    Args:
        locked: whether it got the lock; None where the file system has no locks.
        owner: what the file says of its holder; None while it says nothing.
        beat: which file it is (device and inode) and when it was last renewed, in nanoseconds since the epoch.
        patience: seconds without a heartbeat from now on after which the holder is dead.
    """

    locked: bool | None
    owner: dict[str, Any] | None
    beat: tuple[int, int, int]
    patience: float

    @property
    def is_free(self) -> bool:
        """Whether no live process can hold the lock: nobody has yet, or this kernel would know of its holder."""
        if self.locked is False or self.owner is None:
            return self.locked is not False
        return self.locked is True and self.owner["machine"] == _machine()

    @property
    def holder(self) -> str:
        """The holder, for a message."""
        if self.owner is None:
            return "by a process that has just started"
        return "by process {pid} on {host}, since {since}".format(**self.owner)


def _look(descriptor: int, path: Path) -> _Look | None:
    """Tries to lock the open file; None if its holder has removed it meanwhile."""
    locked = _try_lock(descriptor)
    if not _is_at(descriptor, path):
        return None
    status = os.fstat(descriptor)
    # The two hosts' clocks may differ, so even an old file is watched for three heartbeats.
    patience = min(STALE_SECONDS, max(3 * HEARTBEAT_SECONDS, STALE_SECONDS - (time.time() - status.st_mtime)))
    beat = (status.st_dev, status.st_ino, status.st_mtime_ns)
    return _Look(locked, _owner(path, _read(descriptor)), beat, patience)


def _try_lock(descriptor: int) -> bool | None:
    """Whether this process now has the lock; None where the file system has no locks."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        if error.errno in _UNSUPPORTED:
            return None
        raise
    return True


def _owner(path: Path, content: bytes) -> dict[str, Any] | None:
    if not content:
        return None
    try:
        owner = json.loads(content)
        if owner["program"] == _PROGRAM:
            return {name: owner[name] for name in ("host", "pid", "since", "machine")}
    except (ValueError, TypeError, KeyError):
        # Not what this program writes: see below.
        pass
    raise ValueError(
        f"{path} is not a lock file of {_PROGRAM}, which needs this name for its own; move it away, or choose another "
        "output_dir"
    )


@contextmanager
def _closed_on_error(descriptor: int) -> Iterator[None]:
    try:
        yield
    except BaseException:
        os.close(descriptor)
        raise


def _read(descriptor: int) -> bytes:
    return os.pread(descriptor, 4096, 0)


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file is the one at `path`, which may have been removed or replaced meanwhile."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _machine() -> str:
    """Identifies the running kernel, which knows whether a lock's holder lives; containers on one host share it."""
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    return boot_id.read_text().strip() if boot_id.exists() else platform.node()


def _keep_renewing(held: _Held) -> None:
    while not held.ended.wait(HEARTBEAT_SECONDS):
        held.renew()


def _lock_path(folder: StrPath) -> Path:
    return Path(os.path.realpath(folder)) / LOCK_FILE
