"""Whether a run is sharded by FSDP2, and what a launch configuration may ask for, before any model is loaded."""

import os
import re
from collections.abc import Mapping
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import DistributedType, parse_flag_from_env

from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.library_output import say

# The variables as which `accelerate launch` hands its configuration on, as far as it or this package reads them, by
# pattern: valid values, and what to do about another one.
_READ = {
    "ACCELERATE_USE_MEGATRON_LM": ("false", "set distributed_type to FSDP or DEEPSPEED"),
    "ACCELERATE_(MIXED_PRECISION|CPU_AFFINITY|USE_(FSDP|DEEPSPEED|PARALLELISM_CONFIG|SAGEMAKER))": (".*", ""),
    "ACCELERATE_(CONFIG_DS_FIELDS|SAGEMAKER_DISTRIBUTED_TYPE|BYPASS_DEVICE_MAP|INIT_INCLUDE_BUFFERS)": (".*", ""),
    "ACCELERATE_(DEBUG_(MODE|RDV_FILE)|LOG_LEVEL|ENABLE_RICH)": (".*", ""),
    "ACCELERATE_TORCH_DEVICE": ("", "unset it; use_cpu and CUDA_VISIBLE_DEVICES choose the device"),
    "ACCELERATE_DYNAMO_BACKEND": ("no", "set dynamo_backend to no"),
    "FSDP_VERSION": ("2", "set it to 2"),
    "FSDP_OFFLOAD_PARAMS": ("false|no|0", "set it to false, or use --accelerate_config zero3_offload"),
    "FSDP_SHARDING_STRATEGY": ("full_shard|1", "leave it out; fsdp_reshard_after_forward: false is like SHARD_GRAD_OP"),
    "FSDP_RESHARD_AFTER_FORWARD": ("true|false", "set it to true or false"),
    "FSDP_ACTIVATION_CHECKPOINTING": ("false|no|0", "set it to false, and gradient_checkpointing: true in the run"),
    "PARALLELISM_CONFIG_(?!DP_SHARD_).*_SIZE": ("1", "set it to 1: every process holds a part"),
}
_READ_BY_DEEPSPEED = {"ACCELERATE_(DEEPSPEED_(?!ZERO3_).*|GRADIENT_.*)": (".*", "")}
# What a run does where the launcher's default is another.
_IN_EFFECT = {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_cpu_ram_efficient_loading": "false"}


def asks_for_fsdp(args: PPOConfig) -> bool:
    """Whether the option `fsdp` or the launch configuration (`distributed_type: FSDP`) asks for FSDP2."""
    return args.fsdp or parse_flag_from_env("ACCELERATE_USE_FSDP")


def check_fsdp(args: PPOConfig, accelerator: Accelerator | None = None) -> None:
    """Checks a run that asks for FSDP2; `accelerator` is the user's, if there is one.

    Raises:
        ValueError: for an option, or an accelerator, that FSDP2 excludes.
    """
    if not asks_for_fsdp(args):
        return
    deepspeed = args.deepspeed or parse_flag_from_env("ACCELERATE_USE_DEEPSPEED")
    given = None if accelerator is None else accelerator.distributed_type
    _refuse_if(bool(deepspeed), "deepspeed", deepspeed, "use one of the two")
    _refuse_if(args.load_in_4bit, "load_in_4bit", args.load_in_4bit, "use DDP or ZeRO 2, or dtype: bfloat16")
    _refuse_if(args.teacher_dtype == "4bit", "teacher_dtype", args.teacher_dtype, "use bfloat16")
    _refuse_if(args.teacher_offloaded, "teacher_offloaded", True, "set it to false, or use ZeRO 3")
    _refuse_if(args.reference == "copy_offloaded", "reference", args.reference, "set reference: copy, or use ZeRO 3")
    _refuse_if(given == DistributedType.FSDP, "the accelerator's distributed_type", given, "pass one without FSDP")


def check_launch(args: PPOConfig) -> None:
    """Checks what the launcher hands on of its configuration, and prints in one line what has no effect on the run, if
    anything: variables that nothing reads, but for those with the launcher's default or what a run does anyway.

    Raises:
        ValueError: for an entry that the run cannot have.
    """
    on_cpu = args.use_cpu or not torch.cuda.is_available()
    in_effect = vars(launch_command_parser().parse_args(["script"])) | _IN_EFFECT
    in_effect["parallelism_config_dp_shard_size"] = os.environ.get("WORLD_SIZE")
    given = {k: v for k, v in os.environ.items() if re.match("(ACCELERATE|FSDP|PARALLELISM_CONFIG|MEGATRON_LM)_", k)}
    read = _READ | ({} if args.deepspeed or not parse_flag_from_env("ACCELERATE_USE_DEEPSPEED") else _READ_BY_DEEPSPEED)
    read["ACCELERATE_USE_CPU"] = (".*" if on_cpu else "no?|f(alse)?|off|0", "set use_cpu: true in the run's file too")
    if unread := _unread_variables(given, read, in_effect):
        say(f"settings of the launch configuration without effect on this run: {', '.join(unread)}")


def _unread_variables(
    given: Mapping[str, str], read: Mapping[str, tuple[str, str]], in_effect: Mapping[str, Any]
) -> list[str]:
    """The variables in `given` that are not `read` and differ from what is `in_effect`; raises as `check_launch`."""
    unread = []
    for name, value in given.items():
        entry = next((entry for pattern, entry in read.items() if re.fullmatch(pattern, name)), None)
        if entry is not None and not re.fullmatch(entry[0], value.lower()):
            raise ValueError(f"{name.lower()} is {value!r}, which this trainer does not support; {entry[1]}")
        usual = in_effect.get(name.removeprefix("ACCELERATE_").lower()) or False
        if entry is None and value.lower() != str(usual).lower():
            unread.append(f"{name}={value}")
    return unread


def _refuse_if(excluded: bool, name: str, value: object, remedy: str) -> None:
    if excluded:
        raise ValueError(f"{name} is {value!r}, which fsdp excludes; {remedy}")
