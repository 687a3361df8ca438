"""Builds the run's Accelerator from its configuration, and describes the processes and their machine."""

import os
import platform
from datetime import timedelta
from typing import Any

import psutil
import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin, InitProcessGroupKwargs

from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.distributed.deepspeed_config import deepspeed_plugin, disable_zero3_init, wants_deepspeed
from alpaca_ppo.distributed.launcher import watch_launcher
from alpaca_ppo.distributed.threads import limit_threads
from alpaca_ppo.library_output import ignore_known_lines


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
    if accelerator is None:
        accelerator = _made(args)
    else:
        _check(accelerator, args)
    disable_zero3_init()
    limit_threads(accelerator)
    return accelerator


def _made(args: PPOConfig) -> Accelerator:
    plugin = deepspeed_plugin(args) if wants_deepspeed(args.deepspeed) else None
    on_cpu = args.use_cpu or not torch.cuda.is_available()
    # With DeepSpeed and no GPU, Accelerate picks no backend, and every process runs as if it were the only one. "nccl"
    # is Accelerate's default and leaves the choice to it.
    backend = "gloo" if plugin is not None and on_cpu else "nccl"
    try:
        return Accelerator(
            # cpu=True makes Accelerate ignore DeepSpeed, but plain DDP without a GPU needs it to form a process group.
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


def hardware(accelerator: Accelerator) -> dict[str, Any]:
    """The processes of a run, how they share the models, and the machine of the main one."""
    plugin, device = accelerator.state.deepspeed_plugin, accelerator.device
    found: dict[str, Any] = {
        "processes": accelerator.num_processes,
        "distributed": accelerator.distributed_type.value,
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
