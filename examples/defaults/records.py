"""Runs that have ended, as lines of a file, and how the missing ones are made: each as a process of its own."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

Run = dict[str, Any]
KEY = ("row", "task", "seed")
"""What tells one run of a file from another."""


def recorded(record: Path) -> list[Run]:
    """Returns the runs in `record`."""
    return [json.loads(line) for line in record.read_text("utf-8").splitlines()] if record.exists() else []


def runs_of(runs: Sequence[Run], row: str, task: str) -> list[Run]:
    """Returns the runs of `row` on `task`."""
    return [run for run in runs if (run["row"], run["task"]) == (row, task)]


def missing(asked: Sequence[Run], runs: Sequence[Run]) -> list[Run]:
    """Returns the runs of `asked` that are not among `runs`."""
    made = {tuple(run[name] for name in KEY) for run in runs}
    return [run for run in asked if tuple(run[name] for name in KEY) not in made]


def outcome(module: str, root: Path, asked: Run) -> Run:
    """Returns what `python -m module root asked` says in its last line.

    Raises:
        RuntimeError: with the end of its output, if it fails.
    """
    command = [sys.executable, "-m", module, str(root), json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(
            f"{asked} ended with status {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        )
    ended: Run = json.loads(done.stdout.splitlines()[-1])
    return ended


def fill(record: Path, asked: Sequence[Run], make: Callable[[Run], Run], *, jobs: int) -> list[Run]:
    """Makes the runs of `asked` that `record` lacks, `jobs` at once, each recorded when it ends, and returns all.

    When a run fails, the others are made first.
    """
    failed: Future[Run] | None = None
    with ThreadPoolExecutor(jobs) as pool:
        started = {pool.submit(make, run): run for run in missing(asked, recorded(record))}
        for ended in as_completed(started):
            if ended.exception():
                failed = ended
                continue
            run = {**started[ended], **ended.result()}
            with record.open("a", encoding="utf-8") as file:
                file.write(json.dumps(run) + "\n")
            print(run, flush=True)
    if failed:
        failed.result()
    return recorded(record)
