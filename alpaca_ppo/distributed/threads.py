"""How many threads a process computes with on the CPU: the cores that it may use, divided by the processes beside it.

torch and Accelerate take all cores of the machine, whatever a container's quota leaves of them; torch also however many
ranks share them.
Threads without a core of their own cost far more than they bring, because each operator waits for its slowest thread.
How threads wait for each other is set in `alpaca_ppo/__init__.py`, because OpenMP reads it when torch is imported.
"""

import math
import os
import platform
from collections.abc import Collection
from fractions import Fraction
from pathlib import Path

import psutil
import torch
from accelerate import Accelerator
from accelerate.utils import get_cpu_distributed_information

from alpaca_ppo.distributed.collectives import gather_list


def limit_threads(accelerator: Accelerator) -> None:
    """Lowers torch's number of threads to this process's share of the cores, and says so once on each machine.

    A number that the user chose stays as it is, and so does one that is smaller than the share. All ranks must call
    this, because a launcher need not say how many of them are on one machine.
    """
    # Sets, because a launcher may have bound each rank to cores of its own.
    machine, own = platform.node(), _allowed_cores()
    everywhere = gather_list((machine, own), accelerator)
    here = {rank: cores for rank, (name, cores) in enumerate(everywhere) if name == machine}
    quota, before = _quota(Path("/")), torch.get_num_threads()
    share = _share(own, here.values(), quota)
    if before <= share or _chosen_by_user(before, len(own)):
        return
    torch.set_num_threads(share)
    if accelerator.process_index == min(here):
        cores = math.ceil(min(len(set().union(*here.values())), quota))
        print(
            f"torch computes with {share} of {before} threads"
            f"{f' in each of {len(here)} processes' if len(here) > 1 else ''}, because "
            f"{'1 core is' if cores == 1 else f'{cores} cores are'} usable; for another number, set OMP_NUM_THREADS"
        )


def _allowed_cores() -> set[int]:
    """The cores on which this process may run."""
    # Not on macOS and Windows.
    return set(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _share(own: Collection[int], here: Collection[Collection[int]], quota: float) -> int:
    """The threads of a process: its part of each core that it may use, and at most its part of the quota; at least 1.

    Args:
        own: the cores on which it may run.
        here: those of each process on this machine, itself included.
        quota: what the control groups allow all of them together, in cores; a part of a core counts as one.
    """
    threads = math.floor(sum(Fraction(1, sum(core in cores for cores in here)) for core in own))
    if quota < math.inf:
        threads = min(threads, math.ceil(quota) // len(here))
    return max(1, threads)


def _chosen_by_user(number: int, allowed: int) -> bool:
    """Whether torch's `number` of threads is the user's, as far as that can be told: not torch's own number, nor the
    one that Accelerate chooses for training on a CPU, both of which ignore quotas.

    Args:
        number: what torch has now.
        allowed: the number of cores on which this process may run.
    """
    cores = os.cpu_count() or 1
    physical = psutil.cpu_count(logical=False) or cores
    # The launcher exports it where OMP_NUM_THREADS is missing; without the launcher, `PartialState` sets it in torch.
    accelerates = max(1, physical // max(1, get_cpu_distributed_information().local_world_size))
    if "MKL_NUM_THREADS" in os.environ:
        return True
    if "OMP_NUM_THREADS" in os.environ:
        # The other variable is set by `accelerate launch` in each of its modes.
        exported = "ACCELERATE_MIXED_PRECISION" in os.environ and os.environ["OMP_NUM_THREADS"] == str(accelerates)
        return not (exported and number == accelerates)
    # torch takes one thread for each core, physical (MKL) or logical (OpenMP), of those allowed when it was imported.
    allowed_physical = math.ceil(allowed * physical / cores)
    return number not in (accelerates, cores, physical, allowed, allowed_physical)


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
