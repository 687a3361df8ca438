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
import torch
from torch.testing import assert_close

from tests.integration.nodes import ADDRESSES, INTERFACE, Node, NotPermitted, two_nodes
from tests.tiny_runs import metric_lines

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("run_tiny.py")
CONFIGS = ROOT / "examples/accelerate_configs"
# What one machine is started with, and two: two_nodes.yaml is ddp.yaml for two machines.
SETTINGS = {"ddp": ("ddp.yaml", "two_nodes.yaml")}


@pytest.fixture
def nodes() -> Iterator[tuple[Node, Node]]:
    try:
        context = two_nodes()
        pair = context.__enter__()
    except NotPermitted as reason:
        pytest.skip(f"network namespaces are not permitted: {reason}")
    try:
        yield pair
    finally:
        context.__exit__(None, None, None)


def command(config: str, output_dir: Path, *settings: str, flags: tuple[str, ...] = ()) -> list[str]:
    """`accelerate launch` of run_tiny.py with two processes in all."""
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(CONFIGS / config)]
    return [*launch, "--num_processes", "2", *flags, str(SCRIPT), str(output_dir), *settings]


def start(arguments: list[str], log: Path) -> subprocess.Popen[bytes]:
    """Starts `arguments` with both output streams in `log`."""
    # Without the name gloo looks for the address of the host's own name, which both nodes share.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": INTERFACE}
    with log.open("wb") as stream:
        return subprocess.Popen(arguments, cwd=ROOT, env=environment, stdout=stream, stderr=subprocess.STDOUT)


def kill(processes: list[psutil.Process]) -> None:
    """SIGKILL to each that is still there."""
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            pass


class Job:
    """One run on two nodes; ends with the `with` block."""

    def __init__(self, nodes: tuple[Node, Node], config: str, output_dir: Path, *settings: str) -> None:
        port = "29500"  # Nobody else is in these networks.
        self.logs = [output_dir.with_name(f"{output_dir.name}-node{rank}.log") for rank in range(2)]
        self.launchers = []
        for rank, (node, log) in enumerate(zip(nodes, self.logs, strict=True)):
            flags = ("--num_machines", "2", "--machine_rank", str(rank), "--main_process_ip", ADDRESSES[0])
            arguments = command(config, output_dir, *settings, flags=(*flags, "--main_process_port", port))
            self.launchers.append(start(node.inside(*arguments), log))

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *raised: object) -> None:
        for rank in range(2):
            if self.launchers[rank].poll() is None:
                kill(self.processes(rank))
            self.launchers[rank].wait()

    def processes(self, rank: int) -> list[psutil.Process]:
        """Launcher and workers of a node, the launcher first."""
        launcher = psutil.Process(self.launchers[rank].pid)
        return [launcher, *launcher.children(recursive=True)]

    def output(self) -> str:
        """What both nodes have written so far."""
        return "\n".join(log.read_text(errors="replace") for log in self.logs)


@pytest.mark.parametrize("name", list(SETTINGS))
def test_two_nodes_train_the_same_model_as_one(nodes, tmp_path, name):
    one_machine, two_machines = SETTINGS[name]
    alone = command(one_machine, tmp_path / "one", flags=("--main_process_port", "0"))
    outcome = subprocess.run(
        alone, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300
    )
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    with Job(nodes, two_machines, tmp_path / "two") as job:
        codes = [launcher.wait(timeout=300) for launcher in job.launchers]
        assert codes == [0, 0], job.output()
    assert "each of 2 processes" in job.output()
    one, two = (torch.load(tmp_path / run / "weights.pt", weights_only=True) for run in ("one", "two"))
    for key in one:
        assert_close(two[key], one[key], rtol=1e-6, atol=1e-6)
    first, second = (metric_lines(tmp_path / run) for run in ("one", "two"))
    assert len(first) == len(second) == 2
    for one_line, two_line in zip(first, second, strict=True):
        assert two_line == pytest.approx(one_line, rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("lost", ["worker", "node"])
def test_the_other_node_ends_when_one_dies(nodes, tmp_path, lost):
    with Job(nodes, "two_nodes.yaml", tmp_path / "run", "total_episodes=100000") as job:
        metrics, deadline = tmp_path / "run/metrics.jsonl", time.monotonic() + 120
        while not metrics.exists() or len(metrics.read_bytes().splitlines()) < 2:
            assert time.monotonic() < deadline and not any(p.poll() for p in job.launchers), job.output()
            time.sleep(0.1)
        first, second = job.processes(0), job.processes(1)
        assert len(first) >= 2 and len(second) >= 2
        kill(second[1:] if lost == "worker" else second)
        codes = [launcher.wait(timeout=60) for launcher in job.launchers]
        assert codes[0] > 0, job.output()
        assert codes[1] == (-signal.SIGKILL if lost == "node" else 1), job.output()
        # The workers too: one that waits for ever would keep its GPU.
        _, alive = psutil.wait_procs([*first, *second], timeout=10)
        assert not alive, job.output()
