"""Two machines, as two network namespaces: they train what one machine trains, and one does not outlive the other."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file
from torch.testing import assert_close

from tests.integration.launching import ENVIRONMENT, HANG, ROOT, start, survivors, write_run
from tests.integration.nodes import ADDRESSES, INTERFACE, Node, kill, two_nodes
from tests.tiny_runs import metric_lines
from tests.tools.warm_python import warm_python

pytestmark = pytest.mark.proof
CONFIGS = "examples/accelerate_configs"
# What one machine is started with, and two: two_nodes.yaml is ddp.yaml for two machines.
SETTINGS = {"ddp": ("ddp", "two_nodes"), "zero3": ("zero3", "zero3")}
# The others start forked processes.
FROM_SCRATCH = {"ddp"}


@pytest.fixture
def nodes() -> Iterator[tuple[Node, Node]]:
    with two_nodes() as pair:
        yield pair


def warm_commands(folder: Path) -> Path:
    """`folder`, with a command `accelerate` that starts forked processes."""
    folder.mkdir()
    command = folder / "accelerate"
    command.write_text(f'#!/bin/sh\nexec {warm_python()} -m accelerate.commands.accelerate_cli "$@"\n')
    command.chmod(0o700)
    return folder


class Job:
    """`examples/multi_node/launch.sh` on two nodes with a process each.

    Args:
        nodes: where.
        config: of examples/accelerate_configs, without the suffix.
        flags: for train_ppo.py.
        logs: folder for the output of each node.
        warm: start launchers and workers with `warm_python`.
    """

    def __init__(self, nodes: tuple[Node, Node], config: str, *flags: str, logs: Path, warm: bool = True) -> None:
        self._logs = [logs / f"node{rank}.log" for rank in range(2)]
        commands = warm_commands(logs / "bin") if warm else Path(sys.executable).parent
        self.launchers = []
        for rank, (node, log) in enumerate(zip(nodes, self._logs, strict=True)):
            environment = {
                **ENVIRONMENT,
                "PATH": f"{commands}:{os.environ['PATH']}",
                "CONFIG_FILE": f"{CONFIGS}/{config}.yaml",
                "MACHINE_RANK": str(rank),
                "MAIN_IP": ADDRESSES[0],
                # Without it gloo looks for the address of the host's own name, which both nodes share.
                "GLOO_SOCKET_IFNAME": INTERFACE,
            }
            command = node.inside("examples/multi_node/launch.sh", *flags)
            with log.open("wb") as stream:
                launcher = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=stream, stderr=subprocess.STDOUT)
            self.launchers.append(launcher)

    def ended(self, timeout: float) -> list[int]:
        """The launchers' exit codes, both within `timeout` seconds."""
        end = time.monotonic() + timeout
        return [launcher.wait(timeout=max(0.0, end - time.monotonic())) for launcher in self.launchers]

    def output(self) -> str:
        """What both nodes have written so far."""
        return "\n".join(log.read_text(errors="replace") for log in self._logs)


@pytest.mark.parametrize("name", list(SETTINGS))
def test_two_nodes_train_the_same_model_as_one(nodes, tmp_path, name):
    run = ("--config", str(write_run(tmp_path)), "--output_dir")
    one_machine, two_machines = SETTINGS[name]
    outcome = start("examples/train_ppo.py", *run, str(tmp_path / "one"), config=one_machine)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    job = Job(nodes, two_machines, *run, str(tmp_path / "two"), logs=tmp_path, warm=name not in FROM_SCRATCH)
    assert job.ended(timeout=HANG) == [0, 0], job.output()
    assert "each of 2 processes" in job.output()
    for role in ("policy", "value"):
        one, two = (load_file(tmp_path / run / "final" / role / "model.safetensors") for run in ("one", "two"))
        assert_close(two, one, rtol=1e-6, atol=1e-6)
    first, second = (metric_lines(tmp_path / run) for run in ("one", "two"))
    assert [line["step"] for line in second] == [1, 2]
    for one_line, two_line in zip(first, second, strict=True):
        assert two_line == pytest.approx(one_line, rel=1e-6, abs=1e-8)


def is_worker(process: psutil.Process) -> bool:
    """Whether this is the command of a rank, not of the launcher."""
    command = process.cmdline()
    return "examples/train_ppo.py" in command and "launch" not in command


@pytest.mark.parametrize("lost", ["worker", "node"])
def test_the_other_node_ends_when_one_dies(nodes, tmp_path, lost):
    # Some minutes of steps: the run must end by itself where this process is killed.
    flags = ("--config", str(write_run(tmp_path)), "--output_dir", str(tmp_path / "run"), "--total_epochs", "500")
    job = Job(nodes, "two_nodes", *flags, logs=tmp_path)
    metrics, deadline = tmp_path / "run/metrics.jsonl", time.monotonic() + 120
    while not metrics.exists() or len(metrics.read_bytes().splitlines()) < 2:
        assert time.monotonic() < deadline and not any(p.poll() for p in job.launchers), job.output()
        time.sleep(0.1)
    processes = [*nodes[0].processes(), *nodes[1].processes()]
    # A forked worker is killed by way of the command that has started it.
    kill([process for process in nodes[1].processes() if lost == "node" or is_worker(process)])
    codes = job.ended(timeout=60)
    assert codes[0] > 0, job.output()
    assert codes[1] == (-signal.SIGKILL if lost == "node" else 1), job.output()
    # The workers too: one that waits for ever would keep its GPU.
    assert len(processes) >= 4 and not survivors(processes, seconds=10), job.output()
