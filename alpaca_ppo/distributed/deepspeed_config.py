"""What happens before a DeepSpeed engine exists: Accelerate's plugin, and a configuration's "auto" values."""

import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DeepSpeedPlugin, get_int_from_env, is_deepspeed_available, parse_flag_from_env

from alpaca_ppo.config.fields import shown
from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.library_output import say

# Entries with an effect under this trainer, besides precisions. DeepSpeed ignores names that it does not know.
_ENTRIES = """
train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping gradient_predivide_factor
prescale_gradients zero_optimization zero_allow_untested_optimizer zero_force_ds_cpu_optimizer communication_data_type
data_types aio wall_clock_breakdown dump_state comms_logger flops_profiler tensorboard wandb steps_per_print
data_types.grad_accum_dtype data_types.param_dtype data_types.buffer_dtype data_types.keep_in_fp32_modules
aio.block_size aio.queue_depth aio.intra_op_parallelism aio.single_submit aio.overlap_events aio.use_gds""".split()
# What a stage, after the name, does not read of zero_optimization, by pattern.
_UNREAD = r"""(?x)(stage3_gather_\w+|allgather_partitions|load_from_fp32_weights|elastic_checkpoint|pipeline_\w+)\ .
|(stage3_\w+|sub_group_size|zero_\w+|memory_efficient_linear|override_module_apply|leaf_module|log_trace_\w+)\ [12]
|(allgather_bucket_size|use_multi_rank_\w+|ignore_unused_\w+|round_robin_gradients|parameter_alignment)\ 3"""
# DeepSpeed's sections of precisions, and whether the run's bf16 decides them; the others stay off.
_PRECISIONS = {"bf16": True, "bfloat16": True, "fp16": False, "torch_autocast": False, "amp": False}


def deepspeed_plugin(args: PPOConfig) -> DeepSpeedPlugin | None:
    """Accelerate's plugin for the file `args.deepspeed`, or for that of `accelerate launch`; None without either.

    Raises:
        ValueError: when DeepSpeed is not installed, the file is not valid, no launcher started the program, or `args`
            ask for what DeepSpeed cannot do; see also `resolve_auto`.
    """
    file = args.deepspeed
    if file is None and not parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"):
        return None
    if not is_deepspeed_available():
        raise ValueError("DeepSpeed is requested but not installed; pip install 'alpaca_ppo[deepspeed]'")
    if "LOCAL_RANK" not in os.environ:
        raise ValueError(f"DeepSpeed ({file}) is set, but no launcher started this process; use accelerate launch")
    file = file or os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    # Accelerate would write 1 for an absent number of accumulation steps.
    content = None if file is None else {"gradient_accumulation_steps": "auto", **read_deepspeed_file(file)}
    from deepspeed.ops import __compatible_ops__

    # Without a GPU, DeepSpeed would compile this collective for inference at the first start (`build_shm_op` in
    # https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/deepspeed/comm/torch.py). A start that is killed meanwhile
    # leaves a lock file on which all later ones wait. Delete this once DeepSpeed compiles it only when it is used.
    __compatible_ops__["deepspeed_shm_comm"] = False
    # Models are sharded after they are built, because building them reads the weights.
    plugin = DeepSpeedPlugin(hf_ds_config=content, zero3_init_flag=False)
    check_stage(plugin.zero_stage, "the DeepSpeed configuration")
    check_four_bit(plugin.zero_stage, args)
    # Only for its errors: the engine, which is made once models are loaded, does the same.
    resolve_auto(plugin.deepspeed_config, args, processes=get_int_from_env(["WORLD_SIZE"], 1), hidden_size=0)
    # Accelerate overwrites this one.
    unread = {"steps_per_print"} & set(content or {})
    for name, value in (content or {}).get("zero_optimization", {}).items():
        if value is not False and value != "auto" and re.fullmatch(_UNREAD, f"{name} {plugin.zero_stage}"):
            unread.add(f"zero_optimization.{name}")
    if unread:
        say(f"settings of the DeepSpeed configuration without effect on this run: {', '.join(sorted(unread))}")
    if args.use_cpu and torch.cuda.is_available():
        raise ValueError("use_cpu is True, but DeepSpeed takes GPUs; set CUDA_VISIBLE_DEVICES= DS_ACCELERATOR=cpu")
    return plugin


def check_four_bit(stage: int, args: PPOConfig) -> None:
    """Raises a ValueError for 4-bit weights under ZeRO 3."""
    if stage == 3 and (args.load_in_4bit or args.teacher_dtype == "4bit"):
        option = "load_in_4bit is True" if args.load_in_4bit else "teacher_dtype is '4bit'"
        # It would shard the weights without their scales.
        raise ValueError(f"{option}, which ZeRO 3 excludes; use ZeRO 1 or 2, or bfloat16")


def read_deepspeed_file(file: str) -> dict[str, Any]:
    """The content of a DeepSpeed configuration file.

    Raises:
        ValueError: when it is missing or not JSON, or the file or one of its sections is not a JSON object.
    """
    try:
        content = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"deepspeed is {file!r}, which is not a readable JSON file ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"deepspeed is {file!r}, which holds {shown(content)}; make it an object, such as {{}}")
    sections = {name: content.get(name, {}) for name in ("zero_optimization", "data_types", "aio", *_PRECISIONS)}
    zero = sections["zero_optimization"] if isinstance(sections["zero_optimization"], Mapping) else {}
    sections |= {name: zero.get(name) or {} for name in ("offload_param", "offload_optimizer")}
    for name, section in sections.items():
        if not isinstance(section, Mapping):
            raise ValueError(f"deepspeed {file!r} has {name} {shown(section)}; make it an object, such as {{}}")
    return content


def check_stage(stage: Any, source: str) -> None:
    """Raises a ValueError, in which `source` names the configuration, for a ZeRO stage that is not 1, 2 or 3."""
    if stage not in (1, 2, 3):
        raise ValueError(f"{source} has ZeRO stage {shown(stage)}; set zero_optimization.stage to 1, 2 or 3")


def resolve_auto(config: Mapping[str, Any], args: PPOConfig, *, processes: int, hidden_size: int) -> dict[str, Any]:
    """A DeepSpeed configuration with "auto" and missing entries set from the run's options.

    Raises:
        ValueError: for an entry that contradicts these or is unknown, such as an optimizer, for offload_param below
            stage 3, and for float32 gradients under ZeRO 1 in bf16.
    """
    rows = args.step_per_device_batch_size
    # Only for DeepSpeed's check of the batch size; optimizer steps may have other numbers of micro-batches.
    micro_batches = math.ceil(args.step_batch_size / (rows * processes))
    from_run = {
        "gradient_accumulation_steps": micro_batches,
        "train_micro_batch_size_per_gpu": rows,
        "train_batch_size": rows * micro_batches * processes,
        "gradient_clipping": args.max_grad_norm,
    }
    # Keeps torch's optimizer, even if its state is offloaded.
    optimizer = {"zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True}
    _check_entries(config, from_run | optimizer, args)
    zero: dict[str, Any] = dict(config.get("zero_optimization", {}))
    automatic = {
        "reduce_bucket_size": hidden_size * hidden_size,
        "stage3_prefetch_bucket_size": int(0.9 * hidden_size * hidden_size),
        "stage3_param_persistence_threshold": 10 * hidden_size,
    }
    zero |= {name: value for name, value in automatic.items() if zero.get(name) == "auto"}
    bf16 = {**config.get("bf16", {}), "enabled": args.bf16, "check_grad_overflow": args.bf16}
    return {**config, **from_run, "zero_optimization": zero, "bf16": bf16, **optimizer}


def _check_entries(config: Mapping[str, Any], from_run: Mapping[str, Any], args: PPOConfig) -> None:
    """Raises as `resolve_auto`; `from_run` are the entries that the run decides."""
    nested = (f"{section}.{key}" for section in ("data_types", "aio") for key in config.get(section, {}))
    for name in (*config, *nested):
        if name not in (*_PRECISIONS, *_ENTRIES):
            raise ValueError(f"the DeepSpeed configuration has {name!r}; remove it: misspelt, or an option decides it")
    given = {name: config.get(name, "auto") for name in from_run}
    given |= {f"{name}.enabled": config.get(name, {}).get("enabled", "auto") for name in _PRECISIONS}
    precisions = {f"{name}.enabled": is_bf16 and args.bf16 for name, is_bf16 in _PRECISIONS.items()}
    for name, expected in {**from_run, **precisions}.items():
        if given[name] not in ("auto", expected):
            found = f"the DeepSpeed configuration has {name} {shown(given[name])}"
            raise ValueError(f'{found}, but the run makes it {expected!r}; write "auto" there')
    zero = config.get("zero_optimization", {})
    if zero.get("stage") != 3 and offloads(zero, "param"):
        raise ValueError("the DeepSpeed configuration has offload_param, which needs stage 3; remove one of them")
    gradient_dtype = config.get("data_types", {}).get("grad_accum_dtype")
    if args.bf16 and zero.get("stage") == 1 and gradient_dtype == "fp32" and not offloads(zero, "optimizer"):
        # Its optimizer cannot be read.
        raise ValueError("DeepSpeed's grad_accum_dtype 'fp32' excludes ZeRO 1 in bf16; remove it, or set stage to 2")


def offloads(zero: Mapping[str, Any], part: str) -> bool:
    """Whether `zero`, the section zero_optimization, offloads `part`: optimizer or param."""
    return (zero.get(f"offload_{part}") or {}).get("device") not in (None, "none")
