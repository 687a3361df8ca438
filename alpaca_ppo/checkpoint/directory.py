"""The output folder of a run: the lock on it, and which checkpoints and earlier runs it holds.

The main process of a run holds `run.lock` (`flock`), which the kernel releases however it ends. `run.lock.txt` names
the holder, for the error of another run. Reading needs no lock. What a checkpoint holds is in `serialization`.
"""

import itertools
import os
import platform
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from accelerate import Accelerator
from filelock import FileLock, Timeout

from alpaca_ppo.atomic_io import StrPath, committed_path, list_committed, remove_folder, write_text_atomically
from alpaca_ppo.distributed import collectives

LOCK_FILE, HOLDER_FILE = "run.lock", "run.lock.txt"
# How long a start waits for a run that is ending; ranks whose launcher was killed need 13 s (see `launcher`).
WAIT_SECONDS = 20.0

# How to continue the newest checkpoint, for messages.
RESUME = "--resume_from_checkpoint, or resume_from_checkpoint: true in YAML"
_FOLDERS_OF_A_RUN = r"checkpoint-\d+|abandoned-checkpoint-\d+(-\d+)?|final|rollouts|eval"
# Not run.yaml and runs/, to which the run that starts may have written. TensorBoard hides what is older.
_RECORDS_OF_A_RUN = ("metrics.jsonl", "skipped_updates.jsonl", "findings.jsonl", "report.html")


def newest_checkpoint(output_dir: StrPath) -> Path | None:
    """The checkpoint folder with the highest step in `output_dir`, or None."""
    return next(reversed(_checkpoints(output_dir)), None)


def resolve_checkpoint(resume: bool | str | None, output_dir: StrPath, *, overwrite: bool) -> Path | None:
    """The folder to resume from: the named one, or for True (or the text `true`) the newest in `output_dir`; None for
    a new run. Raises a ValueError when True finds no checkpoint and, without `overwrite`, when `output_dir` holds
    another run than that to resume.
    """
    if str(resume).lower() == "true":
        newest = newest_checkpoint(output_dir)
        if newest is None:
            raise ValueError(f"resume_from_checkpoint is true, but output_dir {output_dir} has no checkpoint; name one")
        return newest
    named = Path(str(resume)) if resume else None
    if not overwrite and (named is None or (committed_path(named).is_dir() and not is_in(named, output_dir))):
        check_no_earlier_run(output_dir)
    return named


def is_in(checkpoint: Path, output_dir: StrPath) -> bool:
    """Whether the folder `checkpoint` lies in `output_dir`."""
    return checkpoint.parent.resolve() == Path(output_dir).resolve()


def check_kinds(output_dir: StrPath) -> None:
    """Raises a ValueError if `output_dir` holds a file, or a dangling link, where a run writes a folder, or a folder
    where it writes a file.
    """
    for path in sorted(Path(output_dir).glob("*")):
        names_folder = re.fullmatch(f"{_FOLDERS_OF_A_RUN}|runs", path.name)
        names_file = path.name in (LOCK_FILE, HOLDER_FILE, *_RECORDS_OF_A_RUN)
        if (names_folder and not path.is_dir()) or (names_file and not path.is_file()):
            kind = "folder" if names_folder else "file"
            raise ValueError(f"output_dir ({output_dir}) holds {path.name}, which is no {kind}; move it away")


def check_no_earlier_run(output_dir: StrPath) -> None:
    """Raises a ValueError if `output_dir` holds an earlier run: final models, a checkpoint or the metrics of a step."""
    newest = newest_checkpoint(output_dir)
    metrics = Path(output_dir) / "metrics.jsonl"
    lines = metrics.read_bytes().splitlines() if metrics.is_file() else []
    # Step 0 is an evaluation before the first step. Damaged lines do not count.
    steps = sum(1 for line in lines if line.startswith(b'{"step": ') and not line.startswith(b'{"step": 0,'))
    if committed_path(Path(output_dir) / "final").exists():
        found = "a finished run (its models are in final/)"
    elif newest is not None:
        found = f"{newest.name} of an earlier run"
    elif steps:
        found = f"the records of an earlier run (metrics.jsonl has {steps} steps) without a checkpoint"
    else:
        return
    resume = "" if newest is None else f"continue it with {RESUME}, "
    remedy = f"{resume}choose another output_dir, or let a new trainer delete it with overwrite_output_dir: true"
    raise ValueError(f"output_dir ({output_dir}) holds {found}; {remedy}")


def remove_run(output_dir: StrPath) -> None:
    """Deletes the checkpoints, final models, tables and records of an earlier run in `output_dir`, and nothing else."""
    for folder in list_committed(output_dir, "*"):
        if re.fullmatch(_FOLDERS_OF_A_RUN, folder.name):
            remove_folder(folder)
    for name in _RECORDS_OF_A_RUN:
        (Path(output_dir) / name).unlink(missing_ok=True)


def abandon_later_checkpoints(folder: Path) -> list[Path]:
    """Renames the checkpoints of later steps beside `folder` to `abandoned-...`, so that a run that resumes from
    `folder` does not mistake them for its own; returns their new paths.
    """
    checkpoints = _checkpoints(folder.parent)
    # A link among them is renamed itself, wherever it points to.
    resolved = [path.resolve() for path in checkpoints]
    later = checkpoints[resolved.index(folder.resolve()) + 1 :] if folder.resolve() in resolved else []
    moved = []
    for path in later:
        target = path.with_name(f"abandoned-{path.name}")
        copies = itertools.count(1)
        while target.exists():
            target = path.with_name(f"abandoned-{path.name}-{next(copies)}")
        moved.append(path.rename(target))
    return moved


def rotate_checkpoints(output_dir: StrPath, save_total_limit: int | None, *, keep: Collection[Path] = ()) -> None:
    """Deletes the oldest checkpoints but those in `keep` until `save_total_limit` are left (None = no limit)."""
    checkpoints = _checkpoints(output_dir)
    kept = {path.resolve() for path in keep}
    surplus = 0 if save_total_limit is None else max(0, len(checkpoints) - save_total_limit)
    for path in [path for path in checkpoints if path.resolve() not in kept][:surplus]:
        remove_folder(path)


def _checkpoints(output_dir: StrPath) -> list[Path]:
    """The checkpoint folders in `output_dir` in the order of their steps."""
    found = [path for path in list_committed(output_dir, "checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("checkpoint-")))


class FolderLock:
    """This process's lock on `folder`. Several objects for one folder share the lock; the last `release` opens it."""

    def __init__(self, folder: StrPath) -> None:
        # Resolved now, because a reward function may change the current folder.
        self._folder = Path(os.path.realpath(folder))
        self._lock = FileLock(self._folder / LOCK_FILE, thread_local=False, is_singleton=True, poll_interval=0.2)

    def acquire(self) -> None:
        """Creates and locks the folder. Raises a ValueError that names the holder, if another process holds the lock
        for longer than `WAIT_SECONDS`.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire(blocking=False)
        except Timeout:
            holder = "by a process that has just started"
            with suppress(FileNotFoundError):
                holder = (self._folder / HOLDER_FILE).read_text("utf-8")
            print(f"output_dir ({self._folder}) is locked {holder}; waiting up to {WAIT_SECONDS:.0f} s", flush=True)
            try:
                self._lock.acquire(timeout=WAIT_SECONDS)
            except Timeout:
                problem = f"output_dir ({self._folder}) is in use, locked {holder}"
                raise ValueError(f"{problem}; end that run, or choose another folder") from None
        if self._lock.lock_counter == 1:
            since = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
            holder = f"by process {os.getpid()} on {platform.node()}, since {since}"
            write_text_atomically(self._folder / HOLDER_FILE, holder)

    def release(self) -> None:
        """Undoes one `acquire`."""
        if self._lock.lock_counter == 1:
            # While the lock is still held, so that no other run's files are removed.
            for name in (HOLDER_FILE, LOCK_FILE):
                (self._folder / name).unlink(missing_ok=True)
        self._lock.release()


class RunLock:
    """A trainer's lock on its output folder, which its main process holds; every rank must call the methods at the same
    points.
    """

    def __init__(self, accelerator: Accelerator, folder: StrPath) -> None:
        self._accelerator, self._lock, self._is_held = accelerator, FolderLock(folder), False

    def acquire(self) -> None:
        """Holds the lock until `release` or the end of the process. Raises as `FolderLock.acquire`, on the other ranks
        a RuntimeError with the same text.
        """
        if not self._is_held:
            with collectives.raise_on_all_ranks(self._accelerator):
                if self._accelerator.is_main_process:
                    self._lock.acquire()
            self._is_held = True

    def release(self) -> None:
        """Releases the lock, if this trainer holds it."""
        if self._is_held and self._accelerator.is_main_process:
            self._lock.release()
        self._is_held = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Holds the lock in the block, and afterwards only if this trainer held it before."""
        held_before = self._is_held
        self.acquire()
        try:
            yield
        finally:
            if not held_before:
                self.release()


def check_unlocked(folder: StrPath) -> None:
    """Checks that no other process holds the lock on `folder`; waits and raises as `FolderLock.acquire` does."""
    if (Path(folder) / LOCK_FILE).exists():
        lock = FolderLock(folder)
        lock.acquire()
        lock.release()
