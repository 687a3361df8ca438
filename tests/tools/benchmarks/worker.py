"""A program of the benchmark as a process that makes one step whenever it is asked to, and reports what it took.

The process reads one line of JSON for each step from stdin and answers with one on stdout; between steps it waits and
uses no processor. So the programs take turns, step by step, on a machine whose speed changes by the minute.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from tests.tools.benchmarks.flops import flop_counter
from tests.tools.benchmarks.workloads import Workload


class Finished(Exception):
    """No further step is asked for."""


def _status_bytes(field: str) -> int:
    """A field of /proc/self/status that is in KiB, such as VmRSS or VmHWM (the peak of VmRSS)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


class StepMeter:
    """Measures the steps of this process and talks to the parent.

    `begin` waits until a step is asked for, `end` reports it. Seconds by stage are added with `stage`.
    """

    def __init__(self) -> None:
        # Whatever a library prints must not mix with the answers.
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._before_models = _status_bytes("VmRSS")
        self._stages: dict[str, float] = {}
        self._cpu_stages: dict[str, float] = {}
        self._counter: Any = None

    def train(self, trainer: Any, *libraries: Any) -> None:
        """Says which versions of `libraries` run, and trains until no further step is asked for."""
        self.answer(versions=versions(*libraries))
        with suppress(Finished):
            trainer.train()

    def begin(self) -> None:
        """Waits for the parent.

        Raises:
            Finished: when no further step is asked for.
        """
        line = sys.stdin.readline()
        if not line:
            raise Finished
        self._stages, self._cpu_stages = {}, {}
        self._counter = flop_counter() if json.loads(line)["count_flops"] else None
        if self._counter is not None:
            self._counter.__enter__()
        self._start = time.perf_counter(), time.process_time()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Adds the seconds inside the block to the stage `name`, by the clock and of processor time."""
        start, cpu = time.perf_counter(), time.process_time()
        yield
        self.add_seconds(name, time.perf_counter() - start)
        self._cpu_stages[name] = self._cpu_stages.get(name, 0.0) + time.process_time() - cpu

    def add_seconds(self, name: str, seconds: float) -> None:
        """Adds seconds by the clock to the stage `name`."""
        self._stages[name] = self._stages.get(name, 0.0) + seconds

    @property
    def wall(self) -> float:
        """Seconds since the step began."""
        return time.perf_counter() - self._start[0]

    def end(self, *, response_tokens: int, recomputed: bool) -> None:
        """Reports the step.

        Args:
            response_tokens: that were sampled, eos included.
            recomputed: whether the policy's log-probs were computed again after sampling.
        """
        wall, cpu = self.wall, time.process_time() - self._start[1]
        flops = None
        if self._counter is not None:
            self._counter.__exit__(None, None, None)
            flops = self._counter.get_total_flops()
        self.answer(
            wall=wall,
            cpu=cpu,
            flops=flops,
            stages=self._stages,
            cpu_stages=self._cpu_stages,
            recomputed=recomputed,
            response_tokens=response_tokens,
            peak_bytes=_status_bytes("VmHWM") - self._before_models,
        )

    def answer(self, **fields: Any) -> None:
        """Sends one line of JSON."""
        print(json.dumps(fields), file=self._answers, flush=True)


def given_workload() -> Workload:
    """The workload in this process's first argument."""
    fields = json.loads(sys.argv[1])
    return Workload(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})


def versions(*modules: Any) -> dict[str, str]:
    """Names and versions of `modules`, torch among them."""
    return {module.__name__: module.__version__ for module in (torch, *modules)}
