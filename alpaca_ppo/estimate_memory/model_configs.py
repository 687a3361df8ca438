"""What the planner reads of a run before it plans: configurations of models, DeepSpeed's file, and the run's own checks
that need no weights.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peft import LoraConfig, PeftConfig
from transformers import AutoConfig

from alpaca_ppo.adapters import is_adapter, read_policy_adapter
from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.distributed.accelerator import check_four_bit
from alpaca_ppo.distributed.deepspeed_config import resolve_auto
from alpaca_ppo.estimate_memory.phases import micro_batches_of
from alpaca_ppo.estimate_memory.sharding import Sharding
from alpaca_ppo.models.token_checks import check_positions


def read_config(field: str, name: str, trust_remote_code: bool) -> Any:
    """The configuration of the model `name`, a folder or a hub id, that `field` of the run names.

    Raises:
        ValueError: when there is none.
    """
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{field}: no configuration can be read from {name!r} ({error}); give an existing folder with config.json, "
            "or a hub id within reach"
        ) from error


def read_policy(name: str, trust_remote_code: bool) -> tuple[Any, LoraConfig | None]:
    """The configuration of the policy `name`, a language model, and that of its adapter where it is one.

    Raises:
        ValueError: as `read_config`, and what `read_policy_adapter` raises.
    """
    field = "model_name_or_path"
    if not is_adapter(name):
        return read_config(field, name, trust_remote_code), None
    adapter = read_policy_adapter(name)
    return read_config(field, adapter.base_model_name_or_path or "", trust_remote_code), adapter


def read_reference(name: str, trust_remote_code: bool) -> tuple[Any, PeftConfig | None]:
    """The configuration of the reference `name`, and that of its adapter where it is one: of any kind, since
    transformers loads it and nothing trains it.

    Raises:
        ValueError: as `read_config`; for an adapter that does not name its base.
    """
    if not is_adapter(name):
        return read_config("reference", name, trust_remote_code), None
    adapter = PeftConfig.from_pretrained(name)
    if not adapter.base_model_name_or_path:
        raise ValueError(
            f"reference {name!r} is an adapter that names no base (base_model_name_or_path in its adapter_config.json);"
            " write the base's folder or hub id there"
        )
    return read_config("reference", adapter.base_model_name_or_path, trust_remote_code), adapter


def sharding_of(processes: int, stage: int, args: PPOConfig, config: Any) -> Sharding:
    """How `args.deepspeed`, or the example's file of `stage`, spreads a policy of `config`.

    Raises:
        ValueError: for a file that the run would refuse, or whose stage is another than `stage`, where that is not 0.
    """
    if args.deepspeed is None:
        # As in examples/deepspeed_configs.
        return Sharding(processes, stage, buckets=2 if stage == 2 else 1)
    zero = _zero_settings(_read_json(args.deepspeed), processes, args, config)
    said = zero.get("stage", 0)
    if said not in (1, 2, 3):
        raise ValueError(
            f"deepspeed {args.deepspeed!r} has ZeRO stage {said!r}; set zero_optimization.stage to 1, 2 or 3"
        )
    if stage not in (0, said):
        raise ValueError(
            f"zero_stage is {stage}, but deepspeed {args.deepspeed!r} has stage {said}; leave zero_stage out, or name "
            "the file of that stage"
        )
    return Sharding(
        processes,
        said,
        reduce_bucket=int(zero.get("reduce_bucket_size", 5e8)),
        buckets=2 if zero.get("overlap_comm") else 1,
        offload_optimizer=_offloads(zero, "offload_optimizer"),
        offload_weights=_offloads(zero, "offload_param"),
    )


def _read_json(file: str) -> Any:
    try:
        written = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"deepspeed is {file!r}, which is no readable JSON file ({error})") from error
    if not isinstance(written, dict):
        raise ValueError(
            f"deepspeed {file!r} holds {str(written)[:50]}; write an object of settings there, such as those in "
            "examples/deepspeed_configs"
        )
    return written


def _zero_settings(written: Any, processes: int, args: PPOConfig, config: Any) -> Mapping[str, Any]:
    whole = resolve_auto(
        written,
        hidden_size=config.get_text_config().hidden_size,
        bf16=args.bf16,
        max_grad_norm=args.max_grad_norm,
        micro_batches=micro_batches_of(args, processes),
        step_per_device_batch_size=args.step_per_device_batch_size,
        world=processes,
    )
    zero: Mapping[str, Any] = whole["zero_optimization"]
    return zero


def _offloads(zero: Mapping[str, Any], name: str) -> bool:
    return (zero.get(name) or {}).get("device", "none") != "none"


def check_run(args: PPOConfig, stage: int, config: Any) -> None:
    """What a run of a policy of `config` would refuse as it starts.

    Raises:
        ValueError: for prompts and responses longer than the policy's positions, and for 4 bits under ZeRO 3 or on a
            CPU.
    """
    check_positions(config, args)
    check_four_bit(stage, args)
    if args.load_in_4bit and args.use_cpu:
        raise ValueError(
            "load_in_4bit is True, but use_cpu too, and 4 bits need a CUDA device; use dtype: bfloat16, or leave "
            "use_cpu out"
        )
