"""The Accelerator of a run, and its engine."""

import os
import platform
from datetime import timedelta
from typing import Any

import psutil
import torch
from accelerate import Accelerator, DistributedType, InitProcessGroupKwargs
from accelerate.utils import GradientAccumulationPlugin, patch_environment
from torch.optim import Optimizer
from transformers.integrations import unset_hf_deepspeed_config

from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.distributed.collectives import drain_at_exit
from alpaca_ppo.distributed.deepspeed_config import check_four_bit, check_stage, deepspeed_plugin
from alpaca_ppo.distributed.engine import Engine
from alpaca_ppo.distributed.fsdp_config import asks_for_fsdp, check_fsdp, check_launch
from alpaca_ppo.distributed.fsdp_engine import FSDPEngine
from alpaca_ppo.distributed.launcher import watch_launcher
from alpaca_ppo.distributed.threads import limit_threads
from alpaca_ppo.library_output import ignore_known_lines
from alpaca_ppo.models import ActorCritic


def make_engine(accelerator: Accelerator, actor_critic: ActorCritic, optimizer: Optimizer, args: PPOConfig) -> Engine:
    """The engine of a run; raises what its class does. `make_accelerator` has refused options that the engine excludes,
    and has kept Accelerate from sharding.
    """
    engine = Engine
    if _shards_by_fsdp(accelerator, args):
        engine = FSDPEngine
    elif accelerator.distributed_type == DistributedType.DEEPSPEED:
        # Only now, because DeepSpeed is optional.
        from alpaca_ppo.distributed.deepspeed_engine import DeepSpeedEngine

        engine = DeepSpeedEngine
    return engine(accelerator, actor_critic, optimizer, args)


def _shards_by_fsdp(accelerator: Accelerator, args: PPOConfig) -> bool:
    # One process has nothing to shard.
    return asks_for_fsdp(args) and accelerator.num_processes > 1


def make_accelerator(args: PPOConfig, accelerator: Accelerator | None = None) -> Accelerator:
    """An Accelerator configured by `args`, whichever launcher started the program; or the user's, after checking it.

    Raises:
        ValueError: for a precision, of the launcher or the user's accelerator, that is not that of `args.bf16`; for a
            user's accelerator with `log_with` but no trackers, beside `args.deepspeed`, or with a ZeRO stage that
            `check_stage` or `check_four_bit` refuses; when this process already has an Accelerator with other settings;
            see also `check_fsdp`, `check_launch` and `deepspeed_plugin`.
    """
    watch_launcher()
    ignore_known_lines()
    check_fsdp(args, accelerator)
    check_launch(args)
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION") or "no"
    has = launched if accelerator is None else accelerator.mixed_precision
    expected = "bf16" if args.bf16 else "no"
    # A launch configuration that says nothing of a precision has "no", which contradicts no option.
    if has != expected and (accelerator is not None or has != "no"):
        raise ValueError(f"bf16 is {args.bf16} but the accelerator's mixed_precision is {has!r}; use bf16: true or no")
    if accelerator is None:
        accelerator = _new_accelerator(args)
    elif accelerator.log_with and not accelerator.trackers:
        names = [str(name) for name in accelerator.log_with]
        raise ValueError(f"the accelerator has log_with {names} without trackers; call init_trackers, or set report_to")
    elif args.deepspeed is not None:
        raise ValueError(f"deepspeed is {args.deepspeed!r}, but you passed your own accelerator; leave one out")
    elif (plugin := accelerator.deepspeed_plugin) is not None:
        check_stage(plugin.zero_stage, "your own accelerator")
        check_four_bit(plugin.zero_stage, args)
    # Otherwise transformers would load parts of models under ZeRO 3 and FSDP. The engine shards them later.
    unset_hf_deepspeed_config()
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    limit_threads(accelerator)
    drain_at_exit()
    return accelerator


def _new_accelerator(args: PPOConfig) -> Accelerator:
    plugin = deepspeed_plugin(args)
    on_cpu = args.use_cpu or not torch.cuda.is_available()
    # "nccl", the default, leaves the choice to Accelerate, which forms no process group for DeepSpeed without a GPU.
    backend = "gloo" if plugin is not None and on_cpu else "nccl"
    try:
        # `FSDPEngine` shards in place of Accelerate.
        with patch_environment(accelerate_use_fsdp="false", accelerate_use_parallelism_config="false"):
            return Accelerator(
                # DDP without a GPU needs cpu=True to form a process group, but Accelerate then ignores DeepSpeed.
                cpu=on_cpu and plugin is None,
                mixed_precision="bf16" if args.bf16 else "no",
                # The engine counts micro-batches; the end of a dataloader must not cut an accumulation short.
                gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1, sync_with_dataloader=False),
                deepspeed_plugin=plugin,
                kwargs_handlers=[InitProcessGroupKwargs(backend=backend, timeout=timedelta(seconds=args.ddp_timeout))],
            )
    except ValueError as error:
        # The only one that these arguments can raise: Accelerate keeps one state per process, so a second trainer in it
        # cannot have other settings.
        problem = f"bf16 is {args.bf16} and use_cpu is {args.use_cpu}, but this process already has an Accelerator"
        raise ValueError(f"{problem} with other settings; start a new process") from error


def hardware(accelerator: Accelerator, args: PPOConfig) -> dict[str, Any]:
    """The run's processes, how they share the models, and the machine of this one."""
    plugin, device = accelerator.state.deepspeed_plugin, accelerator.device
    described: dict[str, Any] = {
        "processes": accelerator.num_processes,
        "distributed": "FSDP" if _shards_by_fsdp(accelerator, args) else accelerator.distributed_type.value,
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
        described["gpu"] = torch.cuda.get_device_name(device)
        described["gpus_of_machine"] = torch.cuda.device_count()
        described["cuda"] = torch.version.cuda
    return described
