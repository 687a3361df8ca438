"""How many threads a process takes, and how they wait: a user's own setting stays, and no entry point is too late."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate import PartialState

from alpaca_ppo.distributed import threads
from alpaca_ppo.distributed.accelerator import make_accelerator
from tests.tiny_runs import tiny_config

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def machine(monkeypatch):
    """Sets up a machine of some cores for a launcher's processes, on which torch would take eight threads."""
    before = torch.get_num_threads()

    def of(cores, **environment):
        torch.set_num_threads(8)
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", *threads._LOCAL_PROCESSES):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)), raising=False)
        monkeypatch.setattr(threads, "_quota", lambda root: float("inf"))

    yield of
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("cores", "environment", "expected"),
    [
        (4, {}, 4),
        (7, {"LOCAL_WORLD_SIZE": "2"}, 3),
        (4, {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 1),
        (2, {"LOCAL_WORLD_SIZE": "8"}, 1),
        (16, {"LOCAL_WORLD_SIZE": "2"}, 8),
        (64, {}, 8),
        (1, {"OMP_NUM_THREADS": "8"}, 8),
        (1, {"MKL_NUM_THREADS": "8", "LOCAL_WORLD_SIZE": "2"}, 8),
    ],
)
def test_a_process_takes_its_share_of_the_cores_and_no_more_threads_than_it_had(
    machine, cores, environment, expected, capsys
):
    machine(cores, **environment)
    threads.limit_threads(PartialState())
    assert torch.get_num_threads() == expected
    said = capsys.readouterr().out
    assert (f"computes with {expected} of torch's 8 threads" in said) == (expected < 8)
    threads.limit_threads(PartialState())
    assert torch.get_num_threads() == expected and not capsys.readouterr().out


def test_a_trainers_accelerator_limits_the_threads(machine, tmp_path, capsys):
    machine(6, LOCAL_WORLD_SIZE="2")
    accelerator = make_accelerator(tiny_config(tmp_path))
    assert torch.get_num_threads() == 3
    message = (
        "each process computes with 3 of torch's 8 threads, because 2 share 6 usable cores; for another number, set "
        "OMP_NUM_THREADS\n"
    )
    assert capsys.readouterr().out == message
    torch.set_num_threads(5)
    make_accelerator(tiny_config(tmp_path), accelerator)
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize(
    ("groups", "quotas", "cores"),
    [
        ("0::/\n", {}, float("inf")),
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/a/b\n", {"cpu.max": "max 100000\n", "a/cpu.max": "400000 100000\n", "a/b/cpu.max": "max 100000\n"}, 4.0),
        # Of a container that sees its own group as the root, whatever path the host gave it.
        ("0::/docker/123\n", {"cpu.max": "200000 100000\n"}, 2.0),
        (
            "5:memory:/m\n4:cpu,cpuacct:/d\n0::/x\n",
            {"cpu,cpuacct/d/cpu.cfs_quota_us": "50000\n", "cpu,cpuacct/d/cpu.cfs_period_us": "100000\n"},
            0.5,
        ),
        ("1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, float("inf")),
        (None, {"cpu.max": "100000 100000\n"}, float("inf")),
    ],
)
def test_the_quota_of_control_groups_is_read_at_every_level(groups, quotas, cores, tmp_path):
    if groups is not None:
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/cgroup").write_text(groups)
    for name, content in quotas.items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    assert threads._quota(tmp_path) == cores


def test_half_a_core_counts_as_one(machine, monkeypatch):
    machine(8)
    for quota, cores in ((0.5, 1), (2.5, 3), (9.0, 8)):
        monkeypatch.setattr(threads, "_quota", lambda root, quota=quota: quota)
        assert threads.usable_cores() == cores
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    assert threads.usable_cores() == 5


WAITING = ("OMP_WAIT_POLICY", "KMP_BLOCKTIME")
TORCH_THAT_TELLS = """
import os
print(os.environ.get("OMP_WAIT_POLICY"), os.environ.get("KMP_BLOCKTIME"), flush=True)
os._exit(0)
"""


@pytest.mark.parametrize(
    "command",
    [
        ["examples/train_ppo.py"],
        ["examples/train_sft.py"],
        ["examples/train_reward_model.py"],
        ["-m", "examples.gsm8k_tiny"],
        ["-m", "examples.mini_farm.quickstart"],
        ["-m", "alpaca_ppo.estimate_memory"],
    ],
    ids=lambda command: command[-1],
)
def test_entry_points_set_how_threads_wait_before_torch_is_imported(command, tmp_path):
    (tmp_path / "torch.py").write_text(TORCH_THAT_TELLS)
    environment = {
        name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "KMP_BLOCKTIME")
    }
    environment["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{ROOT}"
    # -P keeps the folder of a script, or the current one, from being searched before the imitation of torch.
    python = [sys.executable, "-P", *command]
    done = subprocess.run(python, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout == "PASSIVE 0\n", done.stderr


@pytest.mark.parametrize("own", [{"OMP_WAIT_POLICY": "ACTIVE"}, {"KMP_BLOCKTIME": "200"}], ids=str)
def test_a_waiting_policy_of_the_users_own_stays(own):
    environment = {
        name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "KMP_BLOCKTIME")
    }
    code = f"import os, sys, alpaca_ppo; print(*map(os.environ.get, {WAITING}), 'torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**environment, **own}, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [own.get("OMP_WAIT_POLICY", "None"), own.get("KMP_BLOCKTIME", "None"), "False"]
