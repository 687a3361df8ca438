"""What the scripts of examples/multi_node start, with programs that record the calls of accelerate and Slurm."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples/multi_node"
CONFIGS = "examples/accelerate_configs"
RUN = "examples/train_ppo.py --config run.yaml --seed 1"


@pytest.fixture
def start(tmp_path):
    """Runs a script as a user does; returns its exit code and the arguments of accelerate on each node."""
    programs = {
        "accelerate": f'echo "$*" >> {tmp_path}/calls',
        "scontrol": f'echo "$*" > {tmp_path}/asked; echo node7; echo node9',
        # Removes its own flags, and runs the rest as the tasks of two nodes.
        "srun": 'while [[ $1 == --* ]]; do shift; done; for i in 0 1; do SLURM_NODEID=$i "$@"; done',
    }
    for name, body in programs.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)

    def run(script: str, **variables: str) -> tuple[int, list[str]]:
        environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **variables}
        command = [str(FOLDER / script), *RUN.split()[1:]]
        outcome = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        calls = tmp_path / "calls"
        return outcome.returncode, calls.read_text().splitlines() if calls.exists() else [outcome.stderr]

    return run


def test_a_node_starts_its_processes(start):
    code, calls = start("launch.sh", MACHINE_RANK="1", MAIN_IP="10.0.0.1", PROCESSES_PER_NODE="8")
    assert code == 0
    assert calls == [
        f"launch --config_file {CONFIGS}/two_nodes.yaml --num_machines 2 --num_processes 16 --machine_rank 1 "
        f"--main_process_ip 10.0.0.1 --main_process_port 29500 {RUN}"
    ]


@pytest.mark.parametrize("missing", ["MACHINE_RANK", "MAIN_IP"])
def test_a_node_without_rank_or_address_is_refused_with_the_missing_variable(start, missing):
    given = {name: "0" for name in ("MACHINE_RANK", "MAIN_IP") if name != missing}
    code, (message,) = start("launch.sh", **given)
    assert code != 0 and f"{missing}: " in message


def test_slurm_starts_one_launcher_per_node(start, tmp_path):
    slurm = {"SLURM_JOB_NODELIST": "node[7,9]", "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "4"}
    code, calls = start("slurm.sh", **slurm, SLURM_JOB_ID="1234567", CONFIG_FILE=f"{CONFIGS}/zero3.yaml")
    assert code == 0
    assert (tmp_path / "asked").read_text() == "show hostnames node[7,9]\n"
    assert calls == [
        f"launch --config_file {CONFIGS}/zero3.yaml --num_machines 2 --num_processes 8 --machine_rank {rank} "
        f"--main_process_ip node7 --main_process_port 24567 {RUN}"
        for rank in (0, 1)
    ]
