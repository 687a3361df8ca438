"""Reads the input of an estimate: the models' configurations and DeepSpeed's file, with the run's own checks."""

import math
from collections.abc import Mapping
from typing import Any

from peft import LoraConfig, PeftConfig
from transformers import AutoConfig

from alpaca_ppo.adapters import is_adapter, read_policy_adapter
from alpaca_ppo.adapters.files import adapter_base, read_adapter
from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.damaged_files import loading
from alpaca_ppo.distributed.deepspeed_config import check_four_bit, check_stage, read_deepspeed_file, resolve_auto
from alpaca_ppo.estimate_memory.engines import Sharding
from alpaca_ppo.models.token_checks import check_positions
from alpaca_ppo.remote_code import remote_code


def read_config(field: str, name: str, trust_remote_code: bool) -> Any:
    """The configuration of the model `name` (a folder or a hub id); `field` names it in errors.

    Raises:
        ValueError: when there is none, or it comes with code that it may not run.
    """
    problem = f"{field}: no configuration can be read from {name!r}"
    remedy = "use an existing folder with config.json, or a hub id that is reachable or cached"
    with remote_code(name, trust=trust_remote_code), loading(problem, name, remedy):
        return AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)


def read_policy(name: str, trust_remote_code: bool) -> tuple[Any, LoraConfig | None]:
    """The configuration of the policy `name`; if that is an adapter, the configurations of its base and of itself.

    Raises:
        ValueError: as `read_config`; and whatever `read_policy_adapter` raises.
    """
    field = "model_name_or_path"
    if not is_adapter(name):
        return read_config(field, name, trust_remote_code), None
    adapter = read_policy_adapter(name)
    return read_config(field, adapter.base_model_name_or_path or "", trust_remote_code), adapter


def read_reference(name: str, trust_remote_code: bool) -> tuple[Any, PeftConfig | None]:
    """The configuration of the reference `name`; if that is an adapter, the configurations of its base and of itself.

    Any kind of adapter will do, because transformers loads it and nothing trains it.

    Raises:
        ValueError: as `read_config`; for an adapter that does not name its base.
    """
    if not is_adapter(name):
        return read_config("reference", name, trust_remote_code), None
    adapter = read_adapter(f"reference {name!r}", name)
    return read_config("reference", adapter_base(f"reference {name!r}", adapter), trust_remote_code), adapter


def sharding_of(processes: int, stage: int, args: PPOConfig, config: Any) -> Sharding:
    """How the run is sharded: by the file `args.deepspeed`, or like examples/deepspeed_configs for `stage`.

    Raises:
        ValueError: for a file that the run would refuse, or whose stage is not `stage` (unless that is 0).
    """
    if args.deepspeed is None:
        return Sharding(processes, stage, buckets=2 if stage == 2 else 1)
    zero = _zero_settings(read_deepspeed_file(args.deepspeed), processes, args, config)
    file_stage = zero.get("stage", 0)
    check_stage(file_stage, f"deepspeed {args.deepspeed!r}")
    if stage not in (0, file_stage):
        raise ValueError(
            f"zero_stage is {stage}, but deepspeed {args.deepspeed!r} has stage {file_stage}; leave zero_stage out, or "
            "use a file with that stage"
        )
    return Sharding(
        processes,
        file_stage,
        reduce_bucket=int(zero.get("reduce_bucket_size", 5e8)),
        buckets=2 if zero.get("overlap_comm") else 1,
        offload_optimizer=_offloads(zero, "offload_optimizer"),
        offload_weights=_offloads(zero, "offload_param"),
    )


def _zero_settings(file_content: Mapping[str, Any], processes: int, args: PPOConfig, config: Any) -> Mapping[str, Any]:
    resolved = resolve_auto(
        file_content,
        hidden_size=config.get_text_config().hidden_size,
        bf16=args.bf16,
        max_grad_norm=args.max_grad_norm,
        micro_batches=math.ceil(args.step_batch_size / (args.step_per_device_batch_size * processes)),
        step_per_device_batch_size=args.step_per_device_batch_size,
        world=processes,
    )
    zero: Mapping[str, Any] = resolved["zero_optimization"]
    return zero


def _offloads(zero: Mapping[str, Any], name: str) -> bool:
    return (zero.get(name) or {}).get("device", "none") != "none"


def check_run(args: PPOConfig, stage: int, policy: Any, critic: Any) -> None:
    """Checks what the run would check when it starts; `policy` and `critic` are the models' configurations.

    Raises:
        ValueError: for rows longer than the positions of policy or critic; for 4 bits under ZeRO 3 or on a CPU.
    """
    check_positions(policy, args)
    if args.uses_critic:
        check_positions(critic, args, owner="critic")
    check_four_bit(stage, args)
    if args.load_in_4bit and args.use_cpu:
        raise ValueError(
            "load_in_4bit and use_cpu are both True, but 4 bits need a CUDA device; use dtype: bfloat16, or leave "
            "use_cpu out"
        )
