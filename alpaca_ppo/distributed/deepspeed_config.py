"""DeepSpeed before there is an engine: whether it is wanted, with which configuration, and what of it a run decides."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate.utils import DeepSpeedPlugin, is_deepspeed_available, parse_flag_from_env
from transformers.integrations import unset_hf_deepspeed_config


def wants_deepspeed(file: str | None) -> bool:
    """Whether this run is to use DeepSpeed: it names a configuration, or the launcher says so."""
    return file is not None or parse_flag_from_env("ACCELERATE_USE_DEEPSPEED")


def deepspeed_plugin(file: str | None) -> DeepSpeedPlugin:
    """Accelerate's plugin for the configuration `file`, or (None) for what the launcher was told.

    Raises:
        ValueError: when DeepSpeed is not installed, `file` is no JSON file, the program was not started by a launcher,
            or the stage is not 1, 2 or 3.
    """
    if not is_deepspeed_available():
        raise ValueError("DeepSpeed is asked for but not installed; pip install 'alpaca_ppo[deepspeed]'")
    if "LOCAL_RANK" not in os.environ:
        raise ValueError(
            f"DeepSpeed is asked for (deepspeed: {file}), but this process was not started by a launcher; use "
            "accelerate launch --config_file examples/accelerate_configs/ddp.yaml, or torchrun"
        )
    if file is not None:
        try:
            json.loads(Path(file).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"deepspeed is {file!r}, which is no readable JSON file ({error})") from error
    _skip_shared_memory()
    # Models are loaded whole and spread over the ranks afterwards: their construction looks at the weights.
    plugin = DeepSpeedPlugin(hf_ds_config=file, zero3_init_flag=False)
    if plugin.zero_stage not in (1, 2, 3):
        raise ValueError(
            f"the DeepSpeed configuration has ZeRO stage {plugin.zero_stage}; set zero_optimization.stage to 1, 2 or "
            "3, or start without DeepSpeed"
        )
    return plugin


def load_whole() -> None:
    """Has transformers build and load models whole, as long as DeepSpeed has not spread them: Accelerate tells it
    otherwise under stage 3, whatever `zero3_init_flag` says.
    """
    unset_hf_deepspeed_config()


def _skip_shared_memory() -> None:
    """DeepSpeed's collective over shared memory serves inference on CPUs alone; without a GPU it would be compiled at
    every first start, and one that is killed then leaves a lock on which all later ones wait.
    """
    from deepspeed.ops import __compatible_ops__

    __compatible_ops__["deepspeed_shm_comm"] = False


def filled(
    config: Mapping[str, Any],
    *,
    hidden_size: int,
    bf16: bool,
    max_grad_norm: float,
    micro_batches: int,
    step_per_device_batch_size: int,
    world: int,
) -> dict[str, Any]:
    """A DeepSpeed configuration whose `auto` entries are what the run's own configuration says.

    Raises:
        ValueError: for an entry that says something else than the run's configuration, or asks for an optimizer or a
            schedule of its own.
    """
    for name in ("optimizer", "scheduler"):
        if name in config:
            raise ValueError(
                f"the DeepSpeed configuration has {name!r}; learning_rate, lr_scheduler_type and the adam_* fields of "
                "the run decide that: remove it"
            )
    ours = {
        "gradient_accumulation_steps": micro_batches,
        "train_micro_batch_size_per_gpu": step_per_device_batch_size,
        "train_batch_size": step_per_device_batch_size * micro_batches * world,
        "gradient_clipping": max_grad_norm,
    }
    for name, value in ours.items():
        _agree(name, config.get(name, "auto"), value)
    zero, half = dict(config.get("zero_optimization", {})), dict(config.get("bf16", {}))
    _agree("bf16.enabled", half.get("enabled", "auto"), bf16)
    # bf16 or float32: the run has no name for fp16.
    _agree("fp16.enabled", config.get("fp16", {}).get("enabled", "auto"), False)
    automatic = {
        "reduce_bucket_size": hidden_size * hidden_size,
        "stage3_prefetch_bucket_size": int(0.9 * hidden_size * hidden_size),
        "stage3_param_persistence_threshold": 10 * hidden_size,
    }
    zero |= {name: value for name, value in automatic.items() if zero.get(name) == "auto"}
    half |= {"enabled": bf16, "check_grad_overflow": bf16}
    # The optimizer is torch's own, on the host too where its state is kept there.
    rest = {"zero_optimization": zero, "bf16": half, "zero_force_ds_cpu_optimizer": False}
    return {**config, **ours, **rest, "zero_allow_untested_optimizer": True}


def _agree(name: str, said: Any, ours: Any) -> None:
    if said not in ("auto", ours):
        raise ValueError(
            f"the DeepSpeed configuration has {name} {said!r}, but the run's configuration makes it {ours!r}; write "
            '"auto" there'
        )
