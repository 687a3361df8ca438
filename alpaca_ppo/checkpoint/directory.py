"""The output folder of a run: its lock, and its checkpoint folders, which are found, verified and deleted here.

The main process of a run holds `run.lock` in its output folder (`filelock`, that is `flock`), which the kernel gives
back when the process ends, however it ends. `run.lock.txt` beside it says who holds it, for the error of another run.
Read-only use needs no lock. What a checkpoint contains is in `serialization`.
"""

import hashlib
import itertools
import json
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
from alpaca_ppo.config.fields import shown
from alpaca_ppo.distributed import collectives

LOCK_FILE, HOLDER_FILE = "run.lock", "run.lock.txt"
WAIT_SECONDS = 20.0
"""How long a start waits for a run that is just ending, such as one whose launcher was killed (`launcher`: 13 s)."""

FORMAT = {"format": "alpaca_ppo checkpoint", "version": 5}
RESUME = "--resume_from_checkpoint, or resume_from_checkpoint: true in YAML"
"""How the newest checkpoint of a run is continued."""
_REMEDY = "set resume_from_checkpoint to another checkpoint, or start a new run"
"""None is chosen automatically, because that would silently lose steps."""
FILES = ("model.safetensors", "state.pt")
_FOLDERS_OF_A_RUN = ("checkpoint-*", "abandoned-checkpoint-*", "final", "rollouts", "eval")
# run.yaml and runs/ stay: the run that starts may have written to them, and TensorBoard hides what is older.
_RECORDS_OF_A_RUN = ("metrics.jsonl", "skipped_updates.jsonl", "findings.jsonl", "report.html")


def newest_checkpoint(output_dir: StrPath) -> Path | None:
    """The checkpoint folder with the highest step in `output_dir`, or None."""
    return next(reversed(_checkpoints(output_dir)), None)


def resolve_checkpoint(resume: bool | str | None, output_dir: StrPath, *, overwrite: bool) -> Path | None:
    """The folder to resume from: the named one, or for True (or the text `true`) the newest in `output_dir`; None for
    a new run. With `overwrite`, an earlier run in `output_dir` may be deleted.

    Raises:
        ValueError: when True finds no checkpoint in `output_dir`; when a new run, or one that goes on from a checkpoint
            of another folder, finds a run in `output_dir` that is not to be overwritten.
    """
    if str(resume).lower() == "true":
        newest = newest_checkpoint(output_dir)
        if newest is None:
            raise ValueError(
                f"resume_from_checkpoint is true but output_dir ({output_dir}) holds no checkpoint-<step> folder; "
                "name one, or leave resume_from_checkpoint out to start a new run"
            )
        return newest
    named = Path(str(resume)) if resume else None
    if not overwrite and (named is None or (named.is_dir() and not is_in(named, output_dir))):
        check_no_earlier_run(output_dir)
    return named


def is_in(checkpoint: Path, output_dir: StrPath) -> bool:
    """Whether `checkpoint` is one of the run in `output_dir`."""
    return checkpoint.parent.resolve() == Path(output_dir).resolve()


def check_kinds(output_dir: StrPath) -> None:
    """Checks that what a run writes as a folder is none of another kind in `output_dir`, and likewise its files.

    Raises:
        ValueError: for a file, or a link to nothing, with the name of a folder, or a folder with that of a file.
    """
    for path in sorted(Path(output_dir).glob("*")):
        if re.fullmatch(r"(abandoned-)?checkpoint-\d+|final|rollouts|eval|runs", path.name):
            kind, right = "folder", path.is_dir()
        else:
            kind, right = "file", path.name not in (LOCK_FILE, HOLDER_FILE, *_RECORDS_OF_A_RUN) or path.is_file()
        if not right:
            raise ValueError(
                f"output_dir ({output_dir}) holds {path.name}, which is no {kind}, as a run would write one; move it "
                "away, or choose another output_dir"
            )


def check_no_earlier_run(output_dir: StrPath) -> None:
    """Checks that `output_dir` holds no earlier run, finished or not, that a new run would overwrite.

    Raises:
        ValueError: when `output_dir` holds final models, a checkpoint (including any that a killed process was about to
            replace) or the metrics of a step.
    """
    newest, final = newest_checkpoint(output_dir), committed_path(Path(output_dir) / "final")
    metrics = Path(output_dir) / "metrics.jsonl"
    lines = metrics.read_bytes().splitlines() if metrics.is_file() else []
    # An evaluation before the first step is none, nor is a damaged line.
    steps = sum(line.startswith(b'{"step": ') and not line.startswith(b'{"step": 0,') for line in lines)
    if final.exists():
        found = "a finished run (its models are in final/)"
    elif newest is not None:
        found = f"{newest.name} of an earlier run"
    elif steps:
        found = f"the records of an earlier run (metrics.jsonl has {steps} steps) without a checkpoint"
    else:
        return
    resume = "" if newest is None else f"continue it with {RESUME}, "
    raise ValueError(
        f"output_dir ({output_dir}) holds {found}; {resume}choose another output_dir, or let a new trainer delete it "
        "with overwrite_output_dir: true"
    )


def remove_run(output_dir: StrPath) -> None:
    """Deletes what an earlier run left in `output_dir`, and nothing else: checkpoints, final models and records."""
    for pattern in _FOLDERS_OF_A_RUN:
        for folder in list_committed(output_dir, pattern):
            remove_folder(folder)
    for name in _RECORDS_OF_A_RUN:
        (Path(output_dir) / name).unlink(missing_ok=True)


def abandon_later_checkpoints(folder: Path) -> list[Path]:
    """Renames the checkpoints beside `folder` with higher steps to `abandoned-...`, and returns their new paths.

    A run that resumes from `folder` leaves that branch and must not mistake them for its own newest checkpoints.
    """
    found = _checkpoints(folder.parent)
    # A link is renamed itself, wherever it points to.
    places = [path.resolve() for path in found]
    later = found[places.index(folder.resolve()) + 1 :] if folder.resolve() in places else []
    moved = []
    for path in later:
        numbered = (path.with_name(f"abandoned-{path.name}{f'-{i}' if i else ''}") for i in itertools.count())
        moved.append(path.rename(next(name for name in numbered if not name.exists())))
    return moved


def rotate_checkpoints(output_dir: StrPath, save_total_limit: int | None, *, keep: Collection[Path] = ()) -> None:
    """Deletes the oldest checkpoints until `save_total_limit` are left (None = no limit).

    Those in `keep` count towards the limit but are never deleted.
    """
    protected = {path.resolve() for path in keep}
    found = _checkpoints(output_dir)
    surplus = 0 if save_total_limit is None else max(0, len(found) - save_total_limit)
    for path in [path for path in found if path.resolve() not in protected][:surplus]:
        remove_folder(path)


def write_manifest(folder: Path) -> None:
    """Writes manifest.json with the sizes and hashes of `FILES`, all of which must be in `folder`."""
    files = {name: {"bytes": (folder / name).stat().st_size, "sha256": _hash(folder / name)} for name in FILES}
    (folder / "manifest.json").write_text(json.dumps(FORMAT | {"files": files}, indent=2), encoding="utf-8")


def verify_files(folder: Path, hashed: Collection[str] = FILES) -> None:
    """Checks that `folder` is a complete checkpoint, by the sizes of all files and the hashes of those in `hashed`.

    Raises:
        ValueError: for a folder that is missing, incomplete, damaged or not a checkpoint; names the file.
    """
    there = committed_path(folder)
    if not there.is_dir():
        raise ValueError(
            f"checkpoint {folder} does not exist or is not a folder; name an existing checkpoint-<step> folder"
        )
    try:
        manifest = json.loads((there / "manifest.json").read_text(encoding="utf-8"))
        entries = {name: manifest["files"][name] for name in FILES}
        files = {name: (int(entry["bytes"]), str(entry["sha256"])) for name, entry in entries.items()}
        found = {key: manifest[key] for key in FORMAT}
    except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise ValueError(f"{folder} has no readable manifest.json of a checkpoint; {_REMEDY}") from error
    if found != FORMAT:
        raise ValueError(
            f"{folder}/manifest.json has {shown(found)} instead of {FORMAT}; install the version that wrote it"
        )
    for name, written in files.items():
        path = there / name
        size = path.stat().st_size if path.is_file() else 0
        actual = (size, _hash(path) if size and name in hashed else written[1])
        if actual != written:
            raise ValueError(
                f"checkpoint file {folder / name} is damaged: it was written with {written[0]} bytes and hash "
                f"{written[1][:12]}, and has {actual[0]} and {actual[1][:12]}; {_REMEDY}"
            )


def _hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _checkpoints(output_dir: StrPath) -> list[Path]:
    found = list_committed(output_dir, "checkpoint-*")
    numbered = [(re.fullmatch(r"checkpoint-(\d+)", path.name), path) for path in found]
    return [path for _, path in sorted((int(match[1]), path) for match, path in numbered if match)]


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
            holder = "by a process that has just started"
            with suppress(FileNotFoundError):
                holder = (self._folder / HOLDER_FILE).read_text("utf-8")
            print(f"output_dir ({self._folder}) is locked {holder}; waiting up to {WAIT_SECONDS:.0f} s", flush=True)
            try:
                self._lock.acquire(timeout=WAIT_SECONDS)
            except Timeout:
                raise ValueError(
                    f"output_dir ({self._folder}) is in use by another run, locked {holder}; wait for it to end or "
                    "stop it, or choose another output_dir"
                ) from None
        if self._lock.lock_counter == 1:
            since = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
            holder = f"by process {os.getpid()} on {platform.node()}, since {since}"
            write_text_atomically(self._folder / HOLDER_FILE, holder)

    def release(self) -> None:
        """Gives back what one `acquire` took. The files are removed under the lock, so that no other run's are."""
        if self._lock.lock_counter == 1:
            for name in (HOLDER_FILE, LOCK_FILE):
                (self._folder / name).unlink(missing_ok=True)
        self._lock.release()


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
    def held(self) -> Iterator[None]:
        """Holds the lock in the block; afterwards this trainer holds it only if it did before."""
        held_before = self._held
        self.acquire()
        try:
            yield
        finally:
            if not held_before:
                self.release()


def check_unlocked(folder: StrPath) -> None:
    """Checks that no other process holds the lock on `folder`; waits as `FolderLock.acquire` does.

    Raises:
        ValueError: see there.
    """
    if (Path(folder) / LOCK_FILE).exists():
        lock = FolderLock(folder)
        lock.acquire()
        lock.release()
