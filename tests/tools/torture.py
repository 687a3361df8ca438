"""Kills real runs at every kind of moment and starts them again, until what they leave is compared with a run that was
left alone: `make torture`, or `python -m tests.tools.torture --help`.

Three parts. `sweep` kills one process before its 1st, 2nd, 3rd ... access to the disk, so that none is left out; a
process that has imported everything is forked for each attempt. `random` kills one rank, all ranks or the launcher
alone, with SIGKILL, of real starts on one process and under `accelerate launch`, in a phase and after a delay that a
seed decides. The next start follows at once, while ranks without their launcher may still be there. `torture_vllm`
is of runs with a vLLM server.
"""

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from alpaca_ppo.checkpoint.directory import newest_checkpoint
from tests.integration.launching import ENVIRONMENT, command
from tests.integration.run_killed import PHASES, SAVED, run
from tests.tiny_runs import metric_lines
from tests.tools import torture_vllm

SCRIPT = Path(__file__).parents[1] / "integration/run_killed.py"
LAUNCHER = -1
"""Stands for the launcher among the ranks to kill."""
INTERRUPTED = "SIGTERM@update:15"
"""In the second step: the checkpoint of the first is replaced."""
CACHED = ("critic_layout=cached", "critic_width=64", "critic_depth=1")


def outcome(folder: Path) -> dict[str, Any]:
    """All that must not depend on how often the run was killed: metrics, tables and final models."""
    kinds = ("rollouts/*", "eval/*", "final/*/*.safetensors")
    files = {str(p.relative_to(folder)): p.read_bytes() for kind in kinds for p in sorted(folder.glob(kind))}
    return {"metrics.jsonl": metric_lines(folder), **files}


def check_promises(folder: Path) -> None:
    """A checkpoint that the run reported as saved is there, unless a later one has taken its place."""
    reported = [int(step) for step in re.findall(r"checkpoint-(\d+)\n", _text(folder / SAVED))]
    newest = newest_checkpoint(folder)
    step = -1 if newest is None else int(newest.name.rpartition("-")[2])
    assert max(reported, default=-1) <= step, f"{folder}: checkpoint-{max(reported)} was reported, newest is {newest}"


def check_outcome(folder: Path, expected: dict[str, Any]) -> None:
    """The folder holds what the undisturbed run left, and nothing half done."""
    found = outcome(folder)
    assert found.keys() == expected.keys(), f"{folder}: {sorted(found.keys() ^ expected.keys())}"
    for name, content in expected.items():
        assert found[name] == content, f"{folder}: {name} differs"
    hidden = [str(path.relative_to(folder)) for path in folder.rglob(".*")]
    assert not hidden, f"{folder}: {hidden} is left"


def forked(folder: Path, *settings: str) -> int:
    """The exit status of a run in a forked process: negative where a signal ended it."""
    sys.stdout.flush()
    folder.parent.mkdir(parents=True, exist_ok=True)
    child = os.fork()
    if not child:
        status = 1
        try:
            with open(folder.with_suffix(".log"), "a") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            run(str(folder), *settings)
            status = 0
        except SystemExit as ended:
            status = int(ended.code or 0)
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def sweep(folder: Path, *settings: str, before: str = "", stride: int = 1) -> int:
    """Kills a run before each access to the disk (each `stride`-th), after the trouble `before`; returns how many."""
    assert forked(folder / "whole", *settings) == 0, _text(folder / "whole.log")
    expected, kills = outcome(folder / "whole"), 0
    for number in range(1, 10_000, stride):
        parts = folder / f"parts{number}"
        trouble = ",".join(filter(None, [before, f"SIGKILL@disk:{number}"]))
        status = forked(parts, *settings, f"trouble={trouble}")
        assert status in (0, -signal.SIGKILL, 143), f"{parts}: {status}\n{_text(parts.with_suffix('.log'))}"
        check_promises(parts)
        assert forked(parts, *settings) == 0, _text(parts.with_suffix(".log"))
        check_outcome(parts, expected)
        if status != -signal.SIGKILL:
            return kills
        kills += 1
    raise AssertionError("the run never ends")


class Victim:
    """A real start of the run, in a session of its own; `hold` seconds are spent in every reward call."""

    def __init__(self, folder: Path, processes: int, hold: float = 0.02, *, fsdp: bool = False) -> None:
        self.folder, self.processes, self.earlier = folder, processes, set[int]()
        # Ranks of an earlier start, whose launcher was killed, may still be there and note their phases.
        self.earlier = {self.phase(rank)[0] for rank in range(processes)}
        for rank in range(processes):
            (folder / f"phase{rank}.txt").unlink(missing_ok=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        self.log = open(folder.with_suffix(".log"), "a")
        own = command(SCRIPT, folder, f"hold={hold}", f"fsdp={fsdp}", config=None if processes == 1 else "ddp")
        self.process = subprocess.Popen(own, env=ENVIRONMENT, stdout=self.log, stderr=self.log, start_new_session=True)

    def phase(self, rank: int) -> tuple[int, str]:
        """The process and the phase of a rank; 0 before it has begun."""
        found = _text(self.folder / f"phase{rank}.txt").split()
        return (int(found[0]), found[1]) if len(found) == 2 and int(found[0]) not in self.earlier else (0, "start")

    def kill_in(self, phase: str, *, occurrence: int, delay: float, ranks: list[int]) -> str | None:
        """Kills `ranks` (or the launcher) `delay` seconds after the `occurrence`-th time that rank 0 enters `phase`;
        returns the phase it was in, or None where the run ended before.
        """
        last, seen = "", 0
        while self.process.poll() is None:
            now = self.phase(0)[1]
            seen += now == phase and now != last
            last = now
            if seen == occurrence:
                time.sleep(delay)
                now = self.phase(0)[1]
                pids = [self.process.pid if rank == LAUNCHER else self.phase(rank)[0] for rank in ranks]
                if self.process.poll() is None and all(pids):
                    for pid in pids:
                        with suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
                    return now
            time.sleep(0.001)
        return None

    def wait(self, seconds: float = 120) -> int:
        """The exit status of the script or of its launcher."""
        status = self.process.wait(timeout=seconds)
        self.log.close()
        return status


def torment(
    folder: Path, *, processes: int, kills: int, chance: random.Random, fsdp: bool = False
) -> list[tuple[str, ...]]:
    """Kills runs until `kills` is reached, starting each again until it ends; returns a row of the table for each."""
    whole = Victim(folder / "whole", processes, fsdp=fsdp)
    assert whole.wait() == 0, _text(folder / "whole.log")
    expected, rows, number = outcome(folder / "whole"), [], 0
    while len(rows) < kills:
        number += 1
        parts = folder / f"parts{number}"
        while True:
            victim = Victim(parts, processes, fsdp=fsdp)
            single = range(processes) if processes == 1 else range(LAUNCHER, processes)
            ranks = chance.choice([list(range(processes)), *([rank] for rank in single)])
            aim = {"phase": chance.choice(PHASES), "occurrence": chance.choice([1, 1, 2]), "ranks": ranks}
            # Saving takes some 20 milliseconds, the rest of a step some 300.
            hit = victim.kill_in(**aim, delay=chance.random() * (0.03 if "save" in aim["phase"] else 0.2))
            start, status = time.monotonic(), victim.wait()
            if hit is None or status == 0:
                break
            check_promises(parts)
            newest, seconds = newest_checkpoint(parts), time.monotonic() - start
            resumed = newest.name if newest else "anew"
            killed = "launcher" if ranks == [LAUNCHER] else str(ranks)
            rows.append((str(len(rows) + 1), str(processes), killed, hit, f"{seconds:.1f}", str(status), resumed))
            print(" | ".join(rows[-1]), flush=True)
        assert status == 0, _text(parts.with_suffix(".log"))
        check_outcome(parts, expected)
    return rows


def main(folder: Path, *, kills: int, seed: int, stride: int) -> None:
    """Both parts, with a table at the end."""
    begun = time.monotonic()
    plain = sweep(folder / "sweep", stride=stride)
    print(f"killed before each of {plain} accesses to the disk (every {stride}.): the same run each time", flush=True)
    replaced = sweep(folder / "interrupted", *CACHED, before=INTERRUPTED, stride=stride)
    print(f"likewise {replaced} of a run with a cached critic that a SIGTERM interrupts in an update", flush=True)
    chance, rows = random.Random(seed), []
    print("kill | processes | ranks | in | s to end | exit | goes on from", flush=True)
    for processes, fsdp in ((1, False), (2, False), (2, True)) if kills > 2 else ():
        parts = folder / f"{processes}{'_fsdp' * fsdp}"
        rows += torment(parts, processes=processes, kills=kills // 3, chance=chance, fsdp=fsdp)
    for phase, count in Counter(row[3] for row in rows).most_common():
        print(f"{count} in {phase}")
    print(
        f"{len(rows)} random kills and {plain + replaced} swept ones in {time.monotonic() - begun:.0f} s: all the same"
    )
    if kills > 2 and not torture_vllm.main(folder / "vllm"):
        sys.exit(1)


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stride", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        main(Path(name), kills=arguments.kills, seed=arguments.seed, stride=arguments.stride)
