"""Kills and stops the processes of runs that vLLM samples for, in every phase: a part of `make torture`.

Phases are the server's start, publishing, sampling and the update; processes are the trainer and the API server, the
engine and the worker of vLLM. Servers that are killed are started again in one run (`restarted`), or end the run where
they start (`refused`); a trainer that is killed or asked to end, also beside a stopped server, is resumed (`resumed`).
All runs must end with the metrics of one that was left alone, and leave no process, no weights, no shared memory.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from alpaca_ppo.checkpoint.directory import newest_checkpoint
from tests.integration.launching import ENVIRONMENT, ROOT, command
from tests.integration.run_vllm_killed import EVENTS
from tests.tiny_runs import metric_lines

PYTHON = Path(os.environ.get("VLLM_PYTHON", ".venv-vllm/bin/python"))
SCRIPT = ROOT / "tests/integration/run_vllm_killed.py"
SERVER, LATER = ("api", "engine", "worker"), ("publishing", "sampling", "update")
NOTICED, ENDED, LEFT = 90.0, 12.0, 15.0
"""Seconds: from a kill to the restart, or to the end where the server starts; from a signal to the end of the run; from
that to the end of everything else. An engine that gets SIGTERM obeys it only once it is made, and then may let its API
server wait for the 60 s in which that must answer.
"""


class Table:
    """A row for each cell, printed as it comes."""

    def __init__(self) -> None:
        self.cells = self.failures = 0
        print("phase | process | signal | s | outcome", flush=True)

    def add(self, blow: str, seconds: float, outcome: str, *, failed: Any) -> None:
        self.cells += 1
        self.failures += bool(failed)
        print(" | ".join([*blow.split(":"), f"{seconds:.1f}", outcome + " FAILED" * bool(failed)]), flush=True)


def run(folder: Path, blows: list[str], *settings: str) -> tuple[int, float, list[dict[str, Any]]]:
    """The exit status of a run, when it ended, and its events."""
    folder.mkdir(parents=True, exist_ok=True)
    known = len(_events(folder))
    words = command(SCRIPT, folder, _memory(folder), ",".join(blows), f"vllm_python={PYTHON.absolute()}", *settings)
    with (folder / "log").open("a") as log:
        log.write(f"\n--- {' '.join(blows)}\n")
        log.flush()
        environment = {"VLLM_CPU_KVCACHE_SPACE": "1", **ENVIRONMENT, "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(words, env=environment, stdout=log, stderr=log, start_new_session=True)
        status = process.wait(timeout=3000)
    return status, time.time(), _events(folder)[known:]


def left(folder: Path, ended: float, events: list[dict[str, Any]]) -> list[str]:
    """What is there of the run after a while."""
    sessions = {event["session"] for event in events if "session" in event}
    files = {file for event in events for file in event.get("files", ())}
    while True:
        found = [f"process {process.pid}" for process in psutil.process_iter() if _session(process.pid) in sessions]
        found += [str(path) for path in _memory(folder).iterdir()]
        found += [file for file in files if Path(file).exists() and str(_memory(folder)) not in file]
        found += [str(path) for path in folder.glob("vllm_*.model") if path.is_symlink()]
        if not found:
            _memory(folder).rmdir()
        if not found or time.time() > ended + LEFT:
            return found
        time.sleep(0.2)


def differences(folder: Path, expected: list[dict[str, Any]]) -> str:
    """How metrics differ from those of the run that was left alone, in words."""
    found = _metrics(folder)
    if len(found) != len(expected):
        return f"{len(found)} steps"
    names = {name for ours, theirs in zip(found, expected, strict=True) for name in ours if ours[name] != theirs[name]}
    return f"other {', '.join(sorted(names)[:3])}" if names else ""


def restarted(folder: Path, blows: list[str], expected: list[dict[str, Any]], table: Table) -> None:
    """One run, whose server is started again after each blow."""
    status, ended, events = run(folder, blows)
    problem = differences(folder, expected) if status == 0 else f"exit status {status}"
    for event in events:
        if event["what"] == "blow":
            later = [other for other in events if other["at"] > event["at"]]
            again = [other["at"] for other in later if other["what"] in ("start", "done")][:1]
            seconds = (again or [ended])[0] - event["at"]
            if "trainer" in event["blow"]:
                table.add(event["blow"], 0.0, "the run goes on", failed=problem)
            else:
                table.add(event["blow"], seconds, "started again", failed=problem or seconds > NOTICED)
    done = [event for event in events if event["what"] == "done"]
    for blow in done[0]["left"] if done else []:
        table.add(blow, 0.0, "never struck", failed=True)
    remains = left(folder, ended, events)
    table.add("all:of these:-", 0.0, f"{problem or 'the same metrics'}, left: {remains}", failed=problem or remains)


def refused(folder: Path, blow: str, table: Table) -> None:
    """A run whose first server is killed ends with a reason."""
    status, ended, events = run(folder, [blow])
    seconds, remains = ended - _struck(events), left(folder, ended, events)
    said = [line for line in (folder / "log").read_text().splitlines() if line.startswith("ValueError: the vLLM")]
    bad = status != 1 or not said or seconds > NOTICED or remains
    table.add(blow, seconds, f"{status}: {said[-1] if said else 'without a reason'}; left: {remains}", failed=bad)


def resumed(folder: Path, blows: list[str], expected: list[dict[str, Any]], table: Table) -> None:
    """One run that each blow ends, and that goes on from its checkpoint."""
    for blow in blows:
        status, ended, events = run(folder, [blow])
        seconds, remains = ended - _struck(events), left(folder, ended, events)
        right = {"SIGKILL": -9, "SIGINT": 130}.get(blow.rpartition(":")[2], 143)
        saved = newest_checkpoint(folder)
        bad = status != right or seconds > ENDED or remains
        table.add(blow, seconds, f"{status}, {saved.name if saved else 'anew'}, left: {remains}", failed=bad)
    status, ended, events = run(folder, [])
    problem = differences(folder, expected) if status == 0 else f"exit status {status}"
    table.add("all:of these:-", 0.0, problem or "the same metrics", failed=problem)


def bounded(folder: Path, blow: str, table: Table) -> None:
    """A run beside a stopped server ends or goes on after its bounds, which are small here."""
    status, ended, events = run(folder, [blow], "bound=4", "ddp_timeout=8", "total_episodes=50")
    struck, again = _struck(events), [event["at"] for event in events if event["what"] == "start"][1:]
    remains, seconds = left(folder, ended, events), (again or [ended])[0] - struck
    outcome = "started again" if again else "ends"
    said = [line for line in (folder / "log").read_text().splitlines() if "the vLLM server" in line]
    bad = seconds > 4 * 8 + LEFT or remains or status not in (0, 1)
    table.add(blow, seconds, f"{outcome}, {status}: {said[-1] if said else ''}; left: {remains}", failed=bad)


def main(folder: Path, only: str = "") -> bool:
    """All cells, whose blows begin as `only` says; returns whether all hold."""
    if not PYTHON.exists():
        print(f"vLLM: left out, because there is no {PYTHON} (VLLM_PYTHON)")
        return True
    chosen = tuple(only.split(","))
    table = Table()
    kills = [f"{phase}:trainer:SIGSTOP" for phase in LATER]
    kills += [f"{phase}:{p}:{s}" for s in ("SIGKILL", "SIGTERM") for p in SERVER for phase in LATER]
    starts = [f"starting:{p}:{s}" for s in ("SIGKILL", "SIGTERM") for p in SERVER]
    ends = [f"{phase}:trainer:{s}" for phase in ("starting", *LATER) for s in ("SIGKILL", "SIGTERM")]
    ends += ["starting:trainer:SIGINT"]
    ends += [f"{phase}:{p}:SIGSTOP+SIGTERM" for p in SERVER for phase in ("starting", *LATER)]
    bounds = [f"{phase}:{p}:SIGSTOP" for p in SERVER for phase in ("publishing", "sampling")]
    kills, starts, ends, bounds = ([b for b in bs if b.startswith(chosen)] for bs in (kills, starts, ends, bounds))
    whole = folder / "whole"
    if not (whole / "final").exists():
        status, ended, events = run(whole, [])
        assert status == 0 and not left(whole, ended, events), (whole / "log").read_text()
    expected = _metrics(whole)
    restarted(folder / "restarted", kills, expected, table) if kills else None
    for number, blow in enumerate(starts):
        refused(folder / f"refused{number}", blow, table)
    resumed(folder / "resumed", ends, expected, table) if ends else None
    for number, blow in enumerate(bounds):
        bounded(folder / f"bounded{number}", blow, table)
    print(f"vLLM: {table.cells} cells, {table.failures} failed")
    return not table.failures


def _struck(events: list[dict[str, Any]]) -> float:
    """When the last signal was sent."""
    return max((event["at"] for event in events if event["what"] in ("blow", "then")), default=0.0)


def _events(folder: Path) -> list[dict[str, Any]]:
    path = folder / EVENTS
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _metrics(folder: Path) -> list[dict[str, Any]]:
    """Without what two runs need not share: the rounding of the server's log-probs."""
    return [{k: v for k, v in line.items() if not k.startswith("mismatch/")} for line in metric_lines(folder)]


def _memory(folder: Path) -> Path:
    """Where the run writes its weights: a folder of its own in shared memory."""
    memory = Path("/dev/shm") / f"torture-{os.getpid()}-{folder.name}"
    memory.mkdir(exist_ok=True)
    return memory


def _session(pid: int) -> int:
    with suppress(OSError, psutil.Error):
        if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            return os.getsid(pid)
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--only", default="", help="beginnings of blows, PHASE:PROCESS:SIGNAL, separated by commas")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        sys.exit(not main(arguments.folder or Path(name), arguments.only))
