"""The processes of a run: its Accelerator and engine, the threads that each process computes with, and the machine.

torch and Accelerate take all cores of the machine, whatever a container's quota and other programs leave of them and,
torch, however many ranks share them. Threads without a core of their own cost far more than they bring, because each
operator waits for its slowest thread. How threads wait for each other is set in `alpaca_ppo/__init__.py`, before torch
is imported.
"""

import functools
import math
import os
import platform
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
from accelerate import Accelerator
from accelerate.utils import (
    DistributedType,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    get_cpu_distributed_information,
    parse_flag_from_env,
    patch_environment,
)
from transformers.integrations import unset_hf_deepspeed_config

from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.distributed.collectives import gather_list
from alpaca_ppo.distributed.deepspeed_config import deepspeed_plugin
from alpaca_ppo.distributed.deepspeed_engine import DeepSpeedEngine
from alpaca_ppo.distributed.engine import Engine
from alpaca_ppo.distributed.fsdp_config import asks_for_fsdp, check_fsdp
from alpaca_ppo.distributed.fsdp_engine import FSDPEngine
from alpaca_ppo.distributed.launcher import watch_launcher
from alpaca_ppo.library_output import ignore_known_lines
from alpaca_ppo.models import ActorCritic

ENGINES = {DistributedType.DEEPSPEED: DeepSpeedEngine, DistributedType.FSDP: FSDPEngine}
"""The engines of other ways to distribute than DDP. A new one is a file and an entry here."""


def make_engine(
    accelerator: Accelerator, actor_critic: ActorCritic, optimizer: torch.optim.Optimizer, args: PPOConfig
) -> Engine:
    """The engine of the accelerator's way to distribute.

    Raises:
        ValueError: under DeepSpeed, for an optimizer group with parameters of both policy and critic.
    """
    # One process has nothing to shard.
    fsdp = asks_for_fsdp(args) and accelerator.num_processes > 1
    kind = DistributedType.FSDP if fsdp else accelerator.distributed_type
    return ENGINES.get(kind, Engine)(accelerator, actor_critic, optimizer, args)


def make_accelerator(args: PPOConfig, accelerator: Accelerator | None = None) -> Accelerator:
    """An Accelerator configured by `args`, whichever launcher started the program; or the user's, after checking it.

    `sync_with_dataloader` is off because the engine counts micro-batches itself: otherwise the end of an epoch would
    cut gradient accumulation short.

    Raises:
        ValueError: when the user's accelerator has a different mixed precision from `args`, when `args.deepspeed` is
            set as well, or when its trackers are not initialized; when this process already has an Accelerator with
            other settings.
    """
    watch_launcher()
    ignore_known_lines()
    check_fsdp(args, accelerator)
    if accelerator is None:
        accelerator = _made(args)
    else:
        _check(accelerator, args)
    # Under ZeRO 3 and FSDP, Accelerate makes transformers load parts of models; the engine shards them later.
    unset_hf_deepspeed_config()
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    limit_threads(accelerator)
    return accelerator


def _made(args: PPOConfig) -> Accelerator:
    plugin = deepspeed_plugin(args)
    on_cpu = args.use_cpu or not torch.cuda.is_available()
    # With DeepSpeed and no GPU, Accelerate picks no backend, and every process runs as if it were the only one. "nccl"
    # is Accelerate's default and leaves the choice to it.
    backend = "gloo" if plugin is not None and on_cpu else "nccl"
    try:
        # Without its own FSDP, in place of which `FSDPEngine` shards.
        with patch_environment(accelerate_use_fsdp="false"):
            return Accelerator(
                # cpu=True makes Accelerate ignore DeepSpeed, but DDP without a GPU needs it to form a process group.
                cpu=on_cpu and plugin is None,
                mixed_precision="bf16" if args.bf16 else "no",
                gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1, sync_with_dataloader=False),
                deepspeed_plugin=plugin,
                kwargs_handlers=[InitProcessGroupKwargs(backend=backend, timeout=timedelta(seconds=args.ddp_timeout))],
            )
    except ValueError as error:
        # Accelerate keeps one state per process, so a second trainer (in a notebook, say) cannot have other settings.
        raise ValueError(
            f"bf16 is {args.bf16} and use_cpu is {args.use_cpu}, but this process already has an Accelerator with "
            "other settings; use the same settings, or start a new process"
        ) from error


def _check(accelerator: Accelerator, args: PPOConfig) -> None:
    if args.bf16 != (accelerator.mixed_precision == "bf16"):
        raise ValueError(
            f"bf16 is {args.bf16} but the accelerator's mixed_precision is {accelerator.mixed_precision!r}; "
            "make them agree"
        )
    if accelerator.log_with and not accelerator.trackers:
        raise ValueError(
            f"the accelerator has log_with {[str(name) for name in accelerator.log_with]} without trackers; call "
            "accelerator.init_trackers(...) first, or name them in report_to instead"
        )
    if args.deepspeed is not None:
        raise ValueError(
            f"deepspeed is {args.deepspeed!r}, but you passed your own accelerator; give that accelerator a "
            "DeepSpeedPlugin for this file, or do not pass an accelerator"
        )


def limit_threads(accelerator: Accelerator) -> None:
    """Lowers torch's number of threads to this process's share of the idle cores, and says so once on each machine.

    A number that the user chose stays as it is, and so does one that is smaller than the share. All ranks must call
    this, because a launcher need not say how many of them are on one machine.
    """
    # Sets, because a launcher may have bound each rank to cores of its own. macOS and Windows do not tell them.
    own = set(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    before = torch.get_num_threads()
    stays = before == 1 or _chosen_by_user(before, len(own))
    # No rank looks while another one still computes.
    accelerator.wait_for_everyone()
    busy = frozenset() if stays else busy_cores()
    everywhere = gather_list((platform.node(), own, busy), accelerator)
    here = {rank: sets for rank, (machine, *sets) in enumerate(everywhere) if machine == platform.node()}
    allowed, taken = (set().union(*sets) for sets in zip(*here.values(), strict=True))
    usable, idle = math.ceil(min(len(allowed), cpu_quota())), len(allowed - taken)
    share = max(1, min(len(own - taken), min(usable, idle) // len(here)))
    if before <= share or stays:
        return
    torch.set_num_threads(share)
    if accelerator.process_index == min(here):
        reason = f"other programs keep {len(taken & allowed)} of {len(allowed)} cores busy"
        if usable <= idle:
            reason = "1 core is usable" if usable == 1 else f"{usable} cores are usable"
        print(
            f"torch computes with {share} of {before} threads"
            f"{f' in each of {len(here)} processes' if len(here) > 1 else ''}, because {reason}; for another number, "
            "set OMP_NUM_THREADS"
        )


@functools.cache
def busy_cores() -> frozenset[int]:
    """The cores that are busy for most of a third of a second in which this process sleeps. It looks once, so that all
    trainers of a process round alike.
    """
    shares = psutil.cpu_percent(interval=1 / 3, percpu=True)
    return frozenset(core for core, percent in enumerate(shares) if percent > 50)


def _chosen_by_user(number: int, allowed: int) -> bool:
    """Whether torch's `number` of threads is the user's, as far as that can be told: not torch's own number on
    `allowed` cores, nor the one that Accelerate chooses for training on a CPU, both of which ignore quotas.
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
    return number not in (accelerates, cores, physical, allowed, math.ceil(allowed * physical / cores))


def cpu_quota(root: Path = Path("/")) -> float:
    """The processor time that control groups allow this process, in cores; infinite without a limit.

    A quota may be set at any level above the process; in a container, the highest visible one is the container's.
    """
    file, limits = root / "proc/self/cgroup", [math.inf]
    for line in file.read_text().splitlines() if file.exists() else ():
        # "0::/system.slice/x" in version 2 of control groups; "4:cpu,cpuacct:/system.slice/x" in version 1.
        _, controllers, group = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        # "150000 100000" or "max 100000"; in version 1 two files, of which the first has -1 for no limit.
        names = ["cpu.cfs_quota_us", "cpu.cfs_period_us"] if controllers else ["cpu.max"]
        top = root / "sys/fs/cgroup" / controllers
        innermost = top / group.lstrip("/")
        for folder in (innermost, *innermost.parents):
            if folder.is_relative_to(top) and all((folder / name).exists() for name in names):
                quota, period = " ".join((folder / name).read_text() for name in names).split()
                limits.append(math.inf if quota in ("max", "-1") else int(quota) / int(period))
    return min(limits)


def hardware(accelerator: Accelerator) -> dict[str, Any]:
    """The processes of a run, how they share the models, and the machine of the main one."""
    plugin, device = accelerator.state.deepspeed_plugin, accelerator.device
    found: dict[str, Any] = {
        "processes": accelerator.num_processes,
        "distributed": "FSDP" if parse_flag_from_env("ACCELERATE_USE_FSDP") else accelerator.distributed_type.value,
        "zero_stage": None if plugin is None else plugin.zero_stage,
        "mixed_precision": accelerator.mixed_precision,
        "device": device.type,
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
    }
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
        found["gpus_of_machine"] = torch.cuda.device_count()
        found["cuda"] = torch.version.cuda
    return found
