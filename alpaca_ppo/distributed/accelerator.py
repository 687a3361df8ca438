"""Builds the run's Accelerator from its configuration."""

from datetime import timedelta

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
    made = _made(args) if accelerator is None else _checked(accelerator, args)
    limit_threads(made)
    return made


def _made(args: PPOConfig) -> Accelerator:
    plugin = deepspeed_plugin(args.deepspeed) if wants_deepspeed(args.deepspeed) else None
    on_cpu = args.use_cpu or not torch.cuda.is_available()
    if plugin is not None:
        _check_deepspeed(plugin.zero_stage, args)
    # With DeepSpeed and no GPU, Accelerate picks no backend, and every process runs as if it were the only one. "nccl"
    # is Accelerate's default and leaves the choice to it.
    backend = "gloo" if plugin is not None and on_cpu else "nccl"
    try:
        made = Accelerator(
            # cpu=True makes Accelerate ignore DeepSpeed, but plain DDP without a GPU needs it to form a process group.
            cpu=on_cpu and plugin is None,
            mixed_precision="bf16" if args.bf16 else "no",
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1, sync_with_dataloader=False),
            deepspeed_plugin=plugin,
            kwargs_handlers=[InitProcessGroupKwargs(backend=backend, timeout=timedelta(seconds=args.ddp_timeout))],
        )
        disable_zero3_init()
        return made
    except ValueError as error:
        # Accelerate keeps one state per process, so a second trainer (in a notebook, say) cannot have other settings.
        raise ValueError(
            f"bf16 is {args.bf16} and use_cpu is {args.use_cpu}, but this process already has an Accelerator with "
            "other settings; use the same settings, or start a new process"
        ) from error


def _check_deepspeed(stage: int, args: PPOConfig) -> None:
    if args.use_cpu and torch.cuda.is_available():
        raise ValueError(
            "use_cpu is True, but DeepSpeed uses any GPU it finds; hide the GPU by starting with "
            "CUDA_VISIBLE_DEVICES= DS_ACCELERATOR=cpu, or leave use_cpu out"
        )
    check_four_bit(stage, args)


def check_four_bit(stage: int, args: PPOConfig) -> None:
    """Checks that 4-bit weights are not combined with ZeRO 3.

    Raises:
        ValueError: when they are.
    """
    if args.load_in_4bit and stage == 3:
        raise ValueError(
            "load_in_4bit is True, but ZeRO 3 would shard the 4-bit weights without their scales; use ZeRO 1 or 2, or "
            "dtype: bfloat16"
        )


def _checked(accelerator: Accelerator, args: PPOConfig) -> Accelerator:
    if args.bf16 != (accelerator.mixed_precision == "bf16"):
        raise ValueError(
            f"bf16 is {args.bf16} but the accelerator's mixed_precision is {accelerator.mixed_precision!r}; "
            "make them agree"
        )
    if accelerator.log_with and not accelerator.trackers:
        raise ValueError(
            f"the accelerator has log_with {[str(name) for name in accelerator.log_with]}, but its trackers are not "
            "initialized; call accelerator.init_trackers(...) first, or name them in report_to instead"
        )
    if args.deepspeed is not None:
        raise ValueError(
            f"deepspeed is {args.deepspeed!r}, but you passed your own accelerator; either give that accelerator a "
            "DeepSpeedPlugin for this file and leave deepspeed out, or do not pass an accelerator"
        )
    disable_zero3_init()
    return accelerator
