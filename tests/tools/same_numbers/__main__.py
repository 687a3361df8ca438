"""Makes about sixty small trainings at one commit and in the working tree, and compares metrics, tables and weights to
the last bit: `make same-numbers BASE=<commit>`, or `python -m tests.tools.same_numbers --help`.

A change that claims to move no number is held to it. Both sides get the same inputs and the same runner, the working
tree's; of the two trees only the package differs. Ends with 1 where anything differs, or a run fails.
"""

import argparse
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.tools.same_numbers.compare import Comparison, compare_runs
from tests.tools.same_numbers.settings import RUNS

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = "alpaca_ppo"
SIDES = ("base", "tree")
# The same threads and hashes on both sides; no GPU, which DeepSpeed would take; no network.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "MKL_NUM_THREADS": "1",
    # DeepSpeed imports torch's compiler, which would start processes for work that never comes.
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "PYTHONHASHSEED": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "DS_ACCELERATOR": "cpu",
}
_SHOWN = 6


def git(*arguments: str) -> str:
    """What git prints in this repository.

    Raises:
        SystemExit: with git's own message, where it fails.
    """
    outcome = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    if outcome.returncode:
        sys.exit(f"git {' '.join(arguments)} failed: {outcome.stderr.strip()}")
    return outcome.stdout.strip()


@contextmanager
def checked_out(commit: str, folder: Path) -> Iterator[None]:
    """`commit` in the new `folder`, which is removed at the end."""
    git("worktree", "add", "--detach", str(folder), commit)
    try:
        yield
    finally:
        git("worktree", "remove", "--force", str(folder))


@contextmanager
def runner(side: str, folder: Path, names: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process that makes the runs `names` with the package in `folder`/source_`side`; it and its own end with the
    block.
    """
    source, outputs = folder / f"source_{side}", folder / side
    outputs.mkdir()
    # The tree first: the package may be installed from another one.
    path = os.pathsep.join([str(source), str(folder / "runner")])
    command = [sys.executable, "-m", "same_numbers.runs", str(source), *names]
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": path}
    with open(folder / f"{side}.log", "w") as log:
        process = subprocess.Popen(command, cwd=outputs, env=environment, stderr=log, start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def make_runs(commit: str, folder: Path, names: Sequence[str]) -> None:
    """Makes the runs on both sides, at the same time, into `folder`/base and `folder`/tree.

    Raises:
        SystemExit: where a runner fails as a whole.
    """
    leave_out = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(__file__).parent, folder / "runner" / "same_numbers", ignore=leave_out)
    # A copy, so that the working tree may change meanwhile.
    shutil.copytree(ROOT / PACKAGE, folder / "source_tree" / PACKAGE, ignore=leave_out)
    with checked_out(commit, folder / "source_base"):
        with runner("base", folder, names) as base, runner("tree", folder, names) as tree:
            statuses = base.wait(), tree.wait()
    for side, status in zip(SIDES, statuses, strict=True):
        if status:
            sys.exit(f"the runs of {side} ended with {status}:\n{(folder / f'{side}.log').read_text()[-4000:]}")


def compared(name: str, folder: Path) -> Comparison:
    """The comparison of run `name`; where it failed, the end of what it printed is the difference."""
    failures = [(side, folder / side / name / "failed.txt") for side in SIDES]
    failed = [f"failed in {side}: {path.read_text()}" for side, path in failures if path.exists()]
    return Comparison(differences=failed) if failed else compare_runs(folder / "base" / name, folder / "tree" / name)


def _kind(difference: str) -> str:
    """The file of a difference, or the folder where there are several of its kind: `metrics.jsonl`, `rollouts`."""
    return re.split("[ :/]", difference)[0]


def report(comparisons: dict[str, Comparison]) -> str:
    """The first differences of each run in each kind of file, then a table of a line for each run."""
    lines = []
    for name, found in comparisons.items():
        for kind, differences in itertools.groupby(found.differences, _kind):
            lines_of_kind = [f"{name}: {line}" for line in differences]
            lines += lines_of_kind[:_SHOWN]
            if len(lines_of_kind) > _SHOWN:
                lines.append(f"{name}: and {len(lines_of_kind) - _SHOWN} more in {kind}")
        lines += [f"{name}: note: {line}" for line in found.notes]
    width = max(map(len, comparisons))
    lines += ["", f"{'run':{width}}  values  tensors  verdict"]
    for name, found in comparisons.items():
        verdict = f"DIFFERS ({len(found.differences)})" if found.differences else "equal"
        lines.append(f"{name:{width}}  {found.numbers:6}  {found.tensors:7}  {verdict}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Compares, prints the report, and returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.tools.same_numbers", description=__doc__)
    parser.add_argument("base", nargs="?", default="HEAD", help="commit to compare the working tree with")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=list(RUNS), help="these runs instead of all")
    parser.add_argument("--list", action="store_true", help="print the runs and their settings")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="new folder in which the outputs stay")
    arguments = parser.parse_args(argv)
    if arguments.list:
        print("\n".join(f"{name}: {run}" for name, run in RUNS.items()))
        return 0
    commit, begun = git("rev-parse", "--verify", f"{arguments.base}^{{commit}}"), time.monotonic()
    names = arguments.only or list(RUNS)
    # As for SIGINT, the check-out is removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep.resolve() if arguments.keep else Path(temporary)
        folder.mkdir(parents=True, exist_ok=not arguments.keep)
        make_runs(commit, folder, names)
        comparisons = {name: compared(name, folder) for name in names}
    print(report(comparisons))
    different = [name for name, found in comparisons.items() if found.differences]
    verdict = f"{len(different)} of {len(names)} runs differ" if different else f"all {len(names)} runs are equal"
    print(f"{verdict}: {commit[:7]} and the working tree, {time.monotonic() - begun:.0f} s")
    return bool(different)


if __name__ == "__main__":
    sys.exit(main())
