"""The Accelerator that a run's configuration asks for."""

from datetime import timedelta
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin, InitProcessGroupKwargs

from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.distributed.deepspeed_config import deepspeed_plugin, load_whole, wants_deepspeed


def make_accelerator(args: PPOConfig, accelerator: Accelerator | None = None) -> Accelerator:
    """An Accelerator that does what `args` says, however the program was started; the user's own if it agrees.

    It counts micro-batches by itself: `sync_with_dataloader=False`, or the last prompts of an epoch would end every
    accumulation early.

    Raises:
        ValueError: when the user's accelerator computes in another precision than `args` names, or has trackers that
            were not started; when this process has an accelerator of other settings.
    """
    if accelerator is not None:
        return _checked(accelerator, args)
    plugin = deepspeed_plugin(args.deepspeed) if wants_deepspeed(args.deepspeed) else None
    on_cpu = args.use_cpu or not torch.cuda.is_available()
    if plugin is not None:
        _check_deepspeed(plugin.zero_stage, args)
    # With DeepSpeed and without a GPU, Accelerate finds no backend, and every process believes it is alone.
    backend: dict[str, Any] = {"backend": "gloo"} if plugin is not None and on_cpu else {}
    try:
        made = Accelerator(
            # Accelerate takes True for "no DeepSpeed"; without it and a GPU, processes would not find each other.
            cpu=on_cpu and plugin is None,
            mixed_precision="bf16" if args.bf16 else "no",
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1, sync_with_dataloader=False),
            deepspeed_plugin=plugin,
            kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=args.ddp_timeout), **backend)],
        )
        load_whole()
        return made
    except ValueError as error:
        # Accelerate keeps one state a process: a second trainer, in a notebook for instance, cannot have another.
        raise ValueError(
            f"bf16 is {args.bf16} and use_cpu {args.use_cpu}, but this process has an Accelerator of other settings; "
            "use the same settings, or a new process"
        ) from error


def _check_deepspeed(stage: int, args: PPOConfig) -> None:
    if args.use_cpu and torch.cuda.is_available():
        raise ValueError(
            "use_cpu is True and DeepSpeed is on, which takes the GPU it finds; hide the GPU instead: start with "
            "CUDA_VISIBLE_DEVICES= DS_ACCELERATOR=cpu, or leave use_cpu out"
        )
    check_four_bit(stage, args)


def check_four_bit(stage: int, args: PPOConfig) -> None:
    """Checks that ZeRO leaves weights of 4 bits whole.

    Raises:
        ValueError: under stage 3.
    """
    if args.load_in_4bit and stage == 3:
        raise ValueError(
            "load_in_4bit is True, but ZeRO 3 would divide the weights without their scales; use ZeRO 1 or 2, or "
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
            f"the accelerator has log_with {[str(name) for name in accelerator.log_with]} but its trackers "
            "were not started; call accelerator.init_trackers(...) first, or name them in report_to instead"
        )
    if args.deepspeed is not None:
        raise ValueError(
            f"deepspeed is {args.deepspeed!r}, but the accelerator is your own; give it a DeepSpeedPlugin of that file "
            "and leave deepspeed out, or leave accelerator out"
        )
    load_whole()
    return accelerator
