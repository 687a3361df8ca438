"""How many threads a process computes with on the CPU: the cores that it may use, divided by the processes beside it.

torch takes all cores of the machine, whatever a container's quota leaves of them and however many ranks share them.
Threads without a core of their own cost far more than they bring, because each operator waits for its slowest thread.
How threads wait for each other is set in `alpaca_ppo/__init__.py`, because OpenMP reads it when torch is imported.
"""

import math
import os
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import get_int_from_env

_NUMBER_GIVEN = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""By the user, or by torchrun and `accelerate launch` in the user's place."""
_LOCAL_PROCESSES = ("LOCAL_WORLD_SIZE", "MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE")
"""Where Accelerate looks for the number of processes on this machine."""


def limit_threads(accelerator: Accelerator) -> None:
    """Lowers torch's number of threads to this process's share of the cores, and says so once on each machine.

    A number in the environment stays as it is, and so does a smaller one that was set with `torch.set_num_threads`.
    """
    if any(name in os.environ for name in _NUMBER_GIVEN):
        return
    cores, processes = usable_cores(), max(1, get_int_from_env(_LOCAL_PROCESSES, 1))
    share, before = max(1, cores // processes), torch.get_num_threads()
    if before <= share:
        return
    torch.set_num_threads(share)
    if accelerator.is_local_main_process:
        print(
            f"each process computes with {share} of torch's {before} threads, because {processes} share {cores} usable "
            "cores; for another number, set OMP_NUM_THREADS"
        )


def usable_cores() -> int:
    """The cores on which this process may run, or as many as the quota of its control groups is worth if that is less;
    a part of a core counts as one.
    """
    # Not on macOS and Windows.
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return math.ceil(min(allowed, _quota(Path("/"))))


def _quota(root: Path) -> float:
    """The processor time that the control groups of this process allow, in cores; infinite without a limit.

    A quota may be set at any level above the process; in a container, the highest visible one is the container's.

    Args:
        root: the root of the file system.
    """
    file = root / "proc/self/cgroup"
    limits = [math.inf]
    for line in file.read_text().splitlines() if file.exists() else ():
        # "0::/system.slice/x" in version 2 of control groups; "4:cpu,cpuacct:/system.slice/x" in version 1.
        _, controllers, group = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / controllers
        for folder in (top, *(top / Path(*parts) for parts in _prefixes(group))):
            limits.append(_quota_of(folder, ["cpu.cfs_quota_us", "cpu.cfs_period_us"] if controllers else ["cpu.max"]))
    return min(limits)


def _prefixes(group: str) -> list[tuple[str, ...]]:
    """("a",), ("a", "b") of the control group /a/b."""
    parts = Path(group).parts[1:]
    return [parts[: i + 1] for i in range(len(parts))]


def _quota_of(folder: Path, files: list[str]) -> float:
    """The cores that a control group's own quota is worth; infinite if its `files` are missing or set no limit."""
    if not all((folder / name).exists() for name in files):
        return math.inf
    # "150000 100000" or "max 100000"; in version 1 two files, of which the first has -1 for no limit.
    quota, period = " ".join((folder / name).read_text() for name in files).split()
    return math.inf if quota in ("max", "-1") else int(quota) / int(period)
