"""How many threads torch computes with in each process.

torch and Accelerate take all cores, whatever a container's quota, other programs and other ranks leave. Threads without
a core slow a run down, because each operator waits for its slowest thread. How threads wait is set in
`alpaca_ppo/__init__.py`.
"""

import functools
import math
import os
import platform
from pathlib import Path

import psutil
import torch
from accelerate import Accelerator
from accelerate.utils import get_cpu_distributed_information

from alpaca_ppo.distributed.collectives import gather_list


def limit_threads(accelerator: Accelerator) -> None:
    """Lowers torch's number of threads to this process's share of the idle cores, unless the user chose the number, and
    prints so once on each machine. All ranks must call this, because not all launchers say how many are on a machine.
    """
    # A launcher may have bound each rank to some cores. macOS and Windows do not tell to which ones.
    cores = set(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    threads = torch.get_num_threads()
    keep = threads == 1 or _chosen_by_user(threads, len(cores))
    # No rank measures while another one still computes.
    accelerator.wait_for_everyone()
    busy_here = frozenset() if keep else busy_cores()
    everywhere = gather_list((platform.node(), cores, busy_here), accelerator)
    machines, cores_by_rank, busy_by_rank = zip(*everywhere, strict=True)
    ranks = [rank for rank, machine in enumerate(machines) if machine == platform.node()]
    allowed = set().union(*(cores_by_rank[rank] for rank in ranks))
    busy = set().union(*(busy_by_rank[rank] for rank in ranks))
    usable = math.ceil(min(len(allowed), cpu_quota()))
    idle = len(allowed - busy)
    share = max(1, min(len(cores - busy), min(usable, idle) // len(ranks)))
    if keep or threads <= share:
        return
    torch.set_num_threads(share)
    if accelerator.process_index == ranks[0]:
        in_each = f" in each of {len(ranks)} processes" if len(ranks) > 1 else ""
        if usable <= idle:
            reason = "1 core is usable" if usable == 1 else f"{usable} cores are usable"
        else:
            reason = f"other programs keep {len(busy & allowed)} of {len(allowed)} cores busy"
        choice = f"torch computes with {share} of {threads} threads{in_each}, because {reason}"
        print(f"{choice}; for another number, set OMP_NUM_THREADS")


@functools.cache
def busy_cores() -> frozenset[int]:
    """The cores that are busy for most of a third of a second, while this process sleeps. Measured once, so that all
    trainers of a process use the same number of threads.
    """
    shares = psutil.cpu_percent(interval=1 / 3, percpu=True)
    return frozenset(core for core, percent in enumerate(shares) if percent > 50)


def _chosen_by_user(threads: int, num_allowed: int) -> bool:
    """Whether torch's number of threads seems to be the user's: neither torch's default on `num_allowed` cores nor
    Accelerate's for training on a CPU.
    """
    cores = os.cpu_count() or 1
    physical = psutil.cpu_count(logical=False) or cores
    # The launcher exports this number as OMP_NUM_THREADS if there is none; without the launcher, `PartialState` sets it
    # in torch.
    accelerates = max(1, physical // max(1, get_cpu_distributed_information().local_world_size))
    if "MKL_NUM_THREADS" in os.environ:
        return True
    if "OMP_NUM_THREADS" in os.environ:
        # Every mode of `accelerate launch` sets ACCELERATE_MIXED_PRECISION.
        exported = "ACCELERATE_MIXED_PRECISION" in os.environ and os.environ["OMP_NUM_THREADS"] == str(accelerates)
        return not (exported and threads == accelerates)
    # torch takes a thread for each physical (MKL) or logical (OpenMP) core that was allowed when it was imported.
    return threads not in (accelerates, cores, physical, num_allowed, math.ceil(num_allowed * physical / cores))


def cpu_quota(root: Path = Path("/")) -> float:
    """The processor time that control groups allow this process, in cores; infinite without a limit.

    Any group above the process may set a quota; in a container, the highest visible one is the container's.
    """
    quotas = [math.inf]
    file = root / "proc/self/cgroup"
    for line in file.read_text().splitlines() if file.exists() else ():
        # "0::/system.slice/x" in version 2 of control groups; "4:cpu,cpuacct:/system.slice/x" in version 1.
        _, controllers, group = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / controllers
        innermost = top / group.lstrip("/")
        quotas += [_quota(folder) for folder in (innermost, *innermost.parents) if folder.is_relative_to(top)]
    return min(quotas)


def _quota(folder: Path) -> float:
    """In cores. In version 2 a file holds quota and period, in version 1 each has its own; no limit is max or -1."""
    files = [folder / name for name in ("cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us")]
    quota, period = " ".join(file.read_text() for file in files if file.exists()).split() or ("max", "100000")
    return math.inf if quota in ("max", "-1") else int(quota) / int(period)
