"""How many threads a process takes, and how they wait: a user's own setting stays, and no entry point is too late."""

import os
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from accelerate import PartialState
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env

import alpaca_ppo.distributed.threads as module
from alpaca_ppo.distributed.accelerator import make_accelerator
from alpaca_ppo.distributed.threads import cpu_quota, limit_threads
from tests.tiny_runs import tiny_config

ROOT = Path(__file__).resolve().parents[2]


VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "ACCELERATE_MIXED_PRECISION", "LOCAL_WORLD_SIZE")
ALL = set(range(128))


@pytest.fixture
def machine(monkeypatch):
    """A machine of 64 physical cores in 128 logical ones, where torch has `threads`, and a quota and programs that are
    `busy` on some cores leave less. It can be looked at once.
    """
    before, readings = torch.get_num_threads(), []

    def of(quota=float("inf"), *, threads=64, own=ALL, others=(), busy=(), **environment):
        torch.set_num_threads(threads)
        for name in VARIABLES:
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(os, "cpu_count", lambda: 128)
        monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 128 if logical else 64)
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: own, raising=False)
        monkeypatch.setattr(module, "cpu_quota", lambda: quota)
        readings.append([100.0 if core in busy else 49.0 for core in range(128)])
        monkeypatch.setattr(psutil, "cpu_percent", lambda interval, percpu: readings.pop())
        module.busy_cores.cache_clear()
        monkeypatch.setattr(module, "gather_list", lambda item, accelerator: [item, *others])

    yield of
    torch.set_num_threads(before)
    module.busy_cores.cache_clear()


def of_this_host(count, cores=ALL, busy=()):
    return [(platform.node(), cores, set(busy))] * count


ELSEWHERE = [("another-host", ALL, ALL)] * 3


@pytest.mark.parametrize(
    ("quota", "own", "others", "expected"),
    [
        (float("inf"), ALL, [], 64),
        (2.0, ALL, [], 2),
        (2.5, ALL, [], 3),
        # 7 / 2 = 3.5; a process has a thread even where there are more processes than cores.
        (7.0, ALL, of_this_host(1), 3),
        (2.0, ALL, of_this_host(7), 1),
        (16.0, ALL, [*ELSEWHERE, *of_this_host(3)], 4),
        (float("inf"), set(range(10)), of_this_host(2, set(range(10))), 3),
        # Each of eight ranks is bound to sixteen cores of its own: they do not share them.
        (
            float("inf"),
            set(range(16)),
            [rank for i in range(1, 8) for rank in of_this_host(1, set(range(16 * i, 16 * i + 16)))],
            16,
        ),
        # Cores 0 to 5 alone, and half of 6 to 9: 6 + 4 / 2 = 8.
        (float("inf"), set(range(10)), of_this_host(1, set(range(6, 16))), 8),
    ],
)
def test_a_process_takes_its_share_of_the_cores(machine, quota, own, others, expected, capsys):
    machine(quota, own=own, others=others)
    limit_threads(PartialState())
    assert torch.get_num_threads() == expected
    assert (f"torch computes with {expected} of 64 threads" in capsys.readouterr().out) == (expected < 64)
    limit_threads(PartialState())
    assert torch.get_num_threads() == expected and not capsys.readouterr().out


@pytest.mark.parametrize(
    ("busy", "quota", "own", "others", "expected"),
    [
        (range(100), float("inf"), ALL, [], 28),
        # At least one, where no core is idle; a quota of fewer than the idle cores counts as before.
        (range(128), float("inf"), ALL, [], 1),
        (range(100), 4.0, ALL, [], 4),
        # Cores that the process may not use do not count.
        (range(100), float("inf"), set(range(90, 128)), [], 28),
        # Two processes share 28 idle cores; a core counts that one of them saw.
        (range(100), float("inf"), ALL, of_this_host(1), 14),
        ((), float("inf"), ALL, of_this_host(1, busy=range(100)), 14),
        # On another machine everything is busy.
        ((), float("inf"), ALL, ELSEWHERE, 64),
    ],
)
def test_cores_that_other_programs_keep_busy_are_left_to_them(machine, busy, quota, own, others, expected, capsys):
    machine(quota, own=own, others=others, busy=busy)
    limit_threads(PartialState())
    assert torch.get_num_threads() == expected
    says = "other programs keep" in capsys.readouterr().out
    assert says == (expected < 64 and quota > 4)
    # A second trainer of the process computes with as many, without another look.
    limit_threads(PartialState())
    assert torch.get_num_threads() == expected


@pytest.mark.parametrize(("threads", "environment"), [(64, {"OMP_NUM_THREADS": "64"}), (8, {}), (1, {})])
def test_a_users_own_number_stays_beside_other_programs_without_a_look(machine, monkeypatch, threads, environment):
    machine(threads=threads, busy=range(127), **environment)
    monkeypatch.setattr(psutil, "cpu_percent", pytest.fail)
    limit_threads(PartialState())
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(
    ("threads", "own", "processes", "environment", "expected"),
    [
        # torch's own: a thread for each physical core or each logical one, of the machine or of those allowed.
        (64, ALL, 1, {}, 2),
        (12, set(range(12)), 2, {}, 1),
        # 5 allowed logical cores of 2 physical ones and a half.
        (3, set(range(5)), 2, {}, 1),
        # Accelerate's own where it counts four processes: 64 // 4; in the environment only from its launcher.
        (16, ALL, 4, {"LOCAL_WORLD_SIZE": "4"}, 1),
        (16, ALL, 4, {"LOCAL_WORLD_SIZE": "4", "OMP_NUM_THREADS": "16", "ACCELERATE_MIXED_PRECISION": "no"}, 1),
        # More processes than physical cores: 64 // 100 = 0, of which Accelerate makes 1.
        (1, ALL, 100, {"LOCAL_WORLD_SIZE": "100"}, 1),
        # The user's: another number in the environment, or from torch.set_num_threads.
        (16, ALL, 2, {"LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "16", "ACCELERATE_MIXED_PRECISION": "no"}, 16),
        (64, ALL, 1, {"MKL_NUM_THREADS": "64"}, 64),
        (64, ALL, 1, {"OMP_NUM_THREADS": "64"}, 64),
        (8, ALL, 1, {}, 8),
    ],
)
def test_only_numbers_of_torch_and_accelerate_are_lowered(machine, threads, own, processes, environment, expected):
    machine(2.0, threads=threads, own=own, others=of_this_host(processes - 1, own), **environment)
    limit_threads(PartialState())
    assert torch.get_num_threads() == expected


@pytest.mark.proof
@pytest.mark.parametrize("processes", [1, 3])
def test_the_number_that_accelerate_launch_exports_is_lowered_and_the_users_own_is_not(
    machine, processes, tmp_path, monkeypatch
):
    machine()
    file = tmp_path / "launch.yaml"
    text = (ROOT / "examples/accelerate_configs" / ("single.yaml" if processes == 1 else "ddp.yaml")).read_text()
    file.write_text(text.replace("num_processes: 2", f"num_processes: {processes}") + "use_cpu: true\n")

    def exported(*flags):
        arguments = ["--config_file", str(file), "--main_process_port", "0", *flags, "script.py"]
        args, *_ = _validate_launch_command(launch_command_parser().parse_args(arguments))
        return prepare_simple_launcher_cmd_env(args)[1] if processes == 1 else prepare_multi_gpu_env(args)

    def threads_after(environment):
        names = [name for name in VARIABLES if name in environment]
        machine(
            2.0,
            threads=int(environment["OMP_NUM_THREADS"]),
            others=of_this_host(processes - 1),
            **{name: environment[name] for name in names},
            LOCAL_WORLD_SIZE=str(processes),
        )
        limit_threads(PartialState())
        return torch.get_num_threads()

    launchers = exported()
    # 64 physical cores, divided by the processes.
    assert launchers["OMP_NUM_THREADS"] == {1: "64", 3: "21"}[processes]
    assert threads_after(launchers) == {1: 2, 3: 1}[processes]
    machine()
    assert threads_after(exported("--num_cpu_threads_per_process", "9")) == 9
    machine(OMP_NUM_THREADS="7")
    assert threads_after(exported()) == 7


@pytest.mark.parametrize(
    ("quota", "others", "message"),
    [
        (1.0, [], "torch computes with 1 of 64 threads, because 1 core is usable"),
        (
            float("inf"),
            of_this_host(1, busy=range(1, 121)),
            "torch computes with 4 of 64 threads in each of 2 processes, because other programs keep 120 of 128 cores "
            "busy",
        ),
        (
            7.0,
            [*ELSEWHERE, *of_this_host(1, {128})],
            "torch computes with 3 of 64 threads in each of 2 processes, because 7 cores are usable",
        ),
    ],
)
def test_the_message_is_a_sentence(machine, quota, others, message, capsys):
    machine(quota, others=others)
    limit_threads(PartialState())
    assert capsys.readouterr().out == f"{message}; for another number, set OMP_NUM_THREADS\n"


def test_only_the_first_process_of_a_machine_prints_the_message(machine, monkeypatch, capsys):
    machine(2.0)
    everywhere = [*ELSEWHERE, *of_this_host(2)]
    monkeypatch.setattr(module, "gather_list", lambda item, accelerator: everywhere)
    for rank, says in ((3, True), (4, False)):
        torch.set_num_threads(64)
        limit_threads(SimpleNamespace(process_index=rank, wait_for_everyone=lambda: None))
        assert torch.get_num_threads() == 1 and bool(capsys.readouterr().out) == says


def test_a_trainers_accelerator_limits_the_threads(machine, tmp_path):
    machine(6.0)
    accelerator = make_accelerator(tiny_config(tmp_path))
    assert torch.get_num_threads() == 6
    torch.set_num_threads(9)
    make_accelerator(tiny_config(tmp_path), accelerator)
    assert torch.get_num_threads() == 9, "chosen by the user"
    torch.set_num_threads(64)
    make_accelerator(tiny_config(tmp_path), accelerator)
    assert torch.get_num_threads() == 6


@pytest.mark.parametrize(
    ("groups", "quotas", "cores"),
    [
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
    ],
)
def test_the_quota_of_control_groups_is_read_at_every_level(groups, quotas, cores, tmp_path):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(groups)
    for name, content in quotas.items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    assert cpu_quota(tmp_path) == cores


WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
TORCH_THAT_TELLS = """
import os
print(*map(os.environ.get, ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")), flush=True)
os._exit(0)
"""


@pytest.mark.parametrize(
    "command",
    [
        ["examples/train_ppo.py", "--model_name_or_path", "m", "--dataset_name", "d", "--reward_url", "http://h"],
        ["-m", "examples.mini_farm.quickstart"],
        ["-m", "alpaca_ppo.cli", "estimate-memory", "--model_name_or_path", "m"],
    ],
    ids=" ".join,
)
def test_entry_points_set_how_threads_wait_before_torch_is_imported(command, tmp_path):
    (tmp_path / "torch.py").write_text(TORCH_THAT_TELLS)
    environment = {name: value for name, value in os.environ.items() if name not in WAITING}
    environment["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{ROOT}"
    # -P keeps the folder of a script, or the current one, from being searched before the imitation of torch.
    python = [sys.executable, "-P", *command]
    done = subprocess.run(python, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout == "None 3000 0\n", done.stderr


@pytest.mark.parametrize(
    "own", [{"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "7"}, {"KMP_BLOCKTIME": "200"}], ids=str
)
def test_a_waiting_policy_of_the_users_own_stays(own):
    environment = {name: value for name, value in os.environ.items() if name not in WAITING}
    code = f"import os, sys, alpaca_ppo; print(*map(os.environ.get, {WAITING}), 'torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**environment, **own}, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [*(own.get(name, "None") for name in WAITING), "False"]
