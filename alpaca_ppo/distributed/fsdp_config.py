"""Whether a run is sharded by FSDP2, and what is refused then, before any model is loaded."""

import os

from accelerate import Accelerator
from accelerate.utils import DistributedType, parse_flag_from_env

from alpaca_ppo.config.ppo_config import PPOConfig


def asks_for_fsdp(args: PPOConfig) -> bool:
    """Whether the option `fsdp` or the launch configuration (`distributed_type: FSDP`) asks for FSDP2."""
    return args.fsdp or parse_flag_from_env("ACCELERATE_USE_FSDP")


def check_fsdp(args: PPOConfig, accelerator: Accelerator | None = None) -> None:
    """Checks a run that asks for FSDP2; `accelerator` is the user's, if there is one.

    Raises:
        ValueError: for an option, or an entry of the launch configuration, that FSDP2 excludes.
    """
    if not asks_for_fsdp(args):
        return
    launched = parse_flag_from_env("ACCELERATE_USE_FSDP")
    deepspeed = args.deepspeed or parse_flag_from_env("ACCELERATE_USE_DEEPSPEED")
    offloads = launched and parse_flag_from_env("FSDP_OFFLOAD_PARAMS")
    version = os.environ.get("FSDP_VERSION", "1") if launched else "2"
    given = None if accelerator is None else accelerator.distributed_type
    _refuse_if(bool(deepspeed), "deepspeed", deepspeed, "use one of the two")
    _refuse_if(args.load_in_4bit, "load_in_4bit", args.load_in_4bit, "use DDP or ZeRO 2, or dtype: bfloat16")
    _refuse_if(args.reference == "copy_offloaded", "reference", args.reference, "set reference: copy, or use ZeRO 3")
    _refuse_if(version != "2", "fsdp_version", version, "set it to 2")
    _refuse_if(offloads, "fsdp_offload_params", offloads, "set it to false, or use --accelerate_config zero3_offload")
    is_fsdp = given == DistributedType.FSDP
    _refuse_if(is_fsdp, "the accelerator's distributed_type", given, "pass one without FSDP, or none")
    for name in ("dp_replicate_size", "tp_size", "cp_size", "sp_size"):
        size = int(os.environ.get(f"PARALLELISM_CONFIG_{name.upper()}", "1"))
        _refuse_if(size > 1, f"parallelism_config_{name}", size, "set it to 1: every process holds a part")


def _refuse_if(excluded: bool, name: str, value: object, remedy: str) -> None:
    if excluded:
        raise ValueError(f"{name} is {value!r}, which fsdp excludes; {remedy}")
