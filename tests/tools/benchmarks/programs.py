"""The programs of the benchmark as processes that take turns."""

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import alpaca_ppo
from tests.tools.benchmarks.workloads import Workload

ROOT = Path(__file__).resolve().parents[3]
WARM_UP = 5
"""Steps before those that are measured. By then a run with `old_policy: auto` has compared sampler and trainer twice
since its policy left the reference, and no longer computes the old log-probs itself."""


@dataclass(frozen=True)
class Step:
    """What one step of a program took."""

    wall: float
    """Seconds by the clock."""
    cpu: float
    """Seconds of processor time, of all threads."""
    flops: int | None
    """None where they were not counted; counting slows a step down."""
    stages: dict[str, float]
    """Seconds by the clock of each stage; what is missing from the sum belongs to none."""
    cpu_stages: dict[str, float]
    """Processor time of stages, where a program measures it."""
    recomputed: bool
    """Whether the policy's log-probs were computed again after sampling (`mismatch/recomputed`)."""
    response_tokens: int
    """Sampled in the step."""
    peak_bytes: int
    """Highest resident memory of the process so far, less what it had before it built its models."""


class Program:
    """A process that makes steps of a workload: `tests.tools.benchmarks.<module>`, run by `python`."""

    def __init__(self, module: str, python: str, workload: Workload, threads: int) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": str(threads),
            # This package's own setting for all of them.
            **alpaca_ppo._WAITING,
        }
        self._errors = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            [python, "-m", f"tests.tools.benchmarks.{module}", json.dumps(asdict(workload))],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self._name = module
        self.versions: dict[str, str] = self._answer()["versions"]

    def step(self, *, count_flops: bool = False) -> Step:
        """Makes one step."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"count_flops": count_flops}) + "\n")
        self._process.stdin.flush()
        return Step(**self._answer())

    def end(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.kill()
        self._process.wait()
        self._errors.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._errors.seek(0)
            raise RuntimeError(f"{self._name} ended:\n{self._errors.read()[-4000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def started(programs: Sequence[tuple[str, str, Workload]], threads: int) -> Iterator[list[Program]]:
    """The (module, python, workload) `programs`, which end with the block."""
    with ExitStack() as stack:
        running = []
        for module, python, workload in programs:
            running.append(Program(module, python, workload, threads))
            stack.callback(running[-1].end)
        yield running


def take_turns(programs: Sequence[Program], rounds: int, *, warm_up: int = WARM_UP) -> list[list[Step]]:
    """`rounds` steps of each program in turns, after a warm-up; who goes first changes from round to round."""
    for _ in range(warm_up):
        for program in programs:
            program.step()
    steps: list[list[Step]] = [[] for _ in programs]
    for number in range(rounds):
        print(f"round {number + 1} of {rounds}", flush=True)
        for i in range(len(programs)):
            turn = (i + number) % len(programs)
            steps[turn].append(programs[turn].step())
    return steps
