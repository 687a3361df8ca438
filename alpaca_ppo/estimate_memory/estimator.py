"""Estimates the memory of a run: the peak of each phase of a PPO step by cause, and whether a device has enough.

Reads only the models' configurations and runs the trainer's passes over tensors without memory (`passes`); what is held
beside them is arithmetic (`distributed.held_memory`). It counts tensors, not what a device and its kernels take.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cache
from typing import Any

from alpaca_ppo.adapters.files import is_adapter
from alpaca_ppo.config.checks import REFERENCES
from alpaca_ppo.config.names import model_folder
from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.config.script_arguments import RESERVE_GIB, EstimateArguments, LoraArguments
from alpaca_ppo.distributed.deepspeed_config import check_four_bit
from alpaca_ppo.distributed.fsdp_config import check_fsdp
from alpaca_ppo.distributed.held_memory import CAUSES, Measured, PhaseMemory, Sharding, phases, sharding_of
from alpaca_ppo.estimate_memory.fake_models import Models
from alpaca_ppo.estimate_memory.passes import measure

GIB = 2**30


def predict(
    models: Models, args: PPOConfig, shardings: Sequence[Sharding], *, replies: bool = False, device: float = 0.0
) -> list[tuple[list[PhaseMemory], float]]:
    """What `phases` returns for each of the `shardings` over as many processes, from passes that are measured once
    where they are the same. A vLLM server of the run's own has its share of `device`, in bytes, while it samples.

    Raises:
        ValueError: whatever `measure` raises.
    """

    @cache
    def passes(half: bool) -> Measured:
        measured = measure(models, args, processes=shardings[0].processes, half=half, replies=replies)
        if args.generation_backend == "vllm" and not args.vllm_urls:
            measured.kv_cache = args.vllm_gpu_memory_utilization * device
        return measured

    # DeepSpeed casts the models, where other runs have autocast.
    return [phases(passes(args.bf16 and sharding.stage > 0), args, sharding) for sharding in shardings]


def estimate(script: EstimateArguments, lora: LoraArguments, args: PPOConfig) -> dict[str, Any]:
    """The estimate as `--json` prints it, in bytes.

    Returns:
        `phases` (bytes by cause), `peak`, `peak_phase`; with several processes `peak_by_zero_stage`; with offloading
        `offloaded`. With `device_gib` also `limit` and `fits`, and if the run does not fit `changes`: the peak after
        each of the three changes that save most, and after all of them.

    Raises:
        ValueError: for models that cannot be read or contradict the settings.
    """
    named = script.accelerate_config or "ddp"
    stage = int(named.removeprefix("zero")) if named.startswith("zero") else script.zero_stage
    args = replace(args, fsdp=args.fsdp or named == "fsdp")
    check_fsdp(args)
    sharding = sharding_of(script.num_processes, stage, args)
    check_four_bit(sharding.stage, args)
    if args.load_in_4bit and args.use_cpu:
        raise ValueError("load_in_4bit and use_cpu are both True, but 4 bits need a CUDA device; drop one of them")
    # Neither ZeRO 3 nor FSDP2 shards 4-bit weights.
    names = ["0", "1", "2"] if args.load_in_4bit else ["0", "1", "2", "3", "fsdp"]
    n, own_name = script.num_processes, "fsdp" if sharding.fsdp else str(sharding.stage)
    by_name = {k: Sharding(n, fsdp=True) if k == "fsdp" else Sharding(n, int(k)) for k in names if n > 1}
    by_name[own_name] = sharding
    # A critic without a backbone takes a head and an adapter from a value model, which weigh as much as its own.
    value = script.value_model_name_or_path if args.critic_layout == "separate" else None
    value = model_folder("value_model_name_or_path", value, part="value", writes_text=False)
    if args.reference not in REFERENCES:
        args = replace(args, reference=model_folder("reference", args.reference))
    policy, rewards = model_folder("model_name_or_path", script.model_name_or_path), script.reward_model_name_or_path
    models = Models(policy, lora.peft_config("CAUSAL_LM"), value, rewards or [])
    replies = bool(script.environments or script.tools)
    how: dict[str, Any] = {"replies": replies, "device": (script.device_gib or 0.0) * GIB}
    found = dict(zip(by_name, predict(models, args, list(by_name.values()), **how), strict=True))
    own, offloaded = found[own_name]
    peak = max(own, key=lambda phase: phase.total)
    result: dict[str, Any] = {
        "model": script.model_name_or_path,
        "processes": script.num_processes,
        "zero_stage": sharding.stage,
        "phases": [{**asdict(phase), "total": phase.total} for phase in own],
        "peak": peak.total,
        "peak_phase": peak.phase,
    }
    if len(found) > 1:
        peaks = {name: max(phase.total for phase in its_phases) for name, (its_phases, _) in found.items()}
        result["peak_by_zero_stage"] = peaks
    if offloaded:
        result["offloaded"] = offloaded
    if script.device_gib is None:
        return result
    limit = (script.device_gib - (0.0 if args.use_cpu else RESERVE_GIB)) * GIB
    result |= {"device_gib": script.device_gib, "limit": limit, "fits": peak.total <= limit}
    if not result["fits"]:
        result["changes"] = []
        for change in _changes(models, args):
            with_lora = replace(lora, use_peft=lora.use_peft or "use_peft" in change).peft_config("CAUSAL_LM")
            try:
                changed = replace(args, **{name: value for name, value in change.items() if name != "use_peft"})
                ((changed_phases, _),) = predict(replace(models, lora=with_lora), changed, [sharding], **how)
            except ValueError:
                # The run would refuse it.
                continue
            text = ", ".join(f"{n}: {str(v).lower() if isinstance(v, bool) else v}" for n, v in change.items())
            after = max(phase.total for phase in changed_phases)
            result["changes"].append({"change": text, "peak": after, "fits": after <= limit})
    return result


def _changes(models: Models, args: PPOConfig) -> list[dict[str, Any]]:
    """The options of each of the three changes that save most, without those that the run has made, and of all."""
    one_row = {"step_per_device_batch_size": 1}
    if args.max_tokens_per_micro_batch is not None:
        one_row = {"max_tokens_per_micro_batch": args.longest_row}
    changes: list[dict[str, Any]] = [{"gradient_checkpointing": True}, one_row]
    if models.lora is None and not is_adapter(models.policy):
        layout = {"critic_layout": "adapter"} if args.uses_critic and not args.init_value_with_reward else {}
        changes.append({"use_peft": True, "dtype": "bfloat16", "bf16": False, "reference": "auto", **layout})
    changes = [change for change in changes if any(getattr(args, name, None) != v for name, v in change.items())]
    return [*changes, {name: v for change in changes for name, v in change.items()}] if len(changes) > 1 else changes


def table(result: dict[str, Any]) -> str:
    """The result of `estimate` as text, in GiB."""
    lines = [f"{result['model']}: peak memory of one device in each phase of a PPO step, in GiB", ""]
    rows = [["phase", *(cause.replace("kv_cache", "KV cache") for cause in CAUSES), "total"]]
    rows += [[p["phase"], *(f"{p[cause] / GIB:.2f}" for cause in (*CAUSES, "total"))] for p in result["phases"]]
    lines += [f"{phase:<15}" + "".join(f"{cell:>13}" for cell in cells) for phase, *cells in rows]
    lines += ["", f"peak: {result['peak'] / GIB:.2f} GiB ({result['peak_phase']})"]
    if "peak_by_zero_stage" in result:
        stages = result["peak_by_zero_stage"].items()
        names = {"0": "DDP", "fsdp": "FSDP2"}
        peaks = [f"{value / GIB:.2f} ({names.get(stage, f'ZeRO {stage}')})" for stage, value in stages]
        lines.append(f"on {result['processes']} processes: {', '.join(peaks)}")
    if "offloaded" in result:
        lines.append(f"offloaded: another {result['offloaded'] / GIB:.2f} GiB of host memory per process")
    if "fits" in result:
        available = f"{result['limit'] / GIB:.2f} of {result['device_gib']:g} GiB are available for tensors"
        lines.append(f"{'fits' if result['fits'] else 'does not fit'}: {available}")
    if "changes" in result:
        lines += ["", "peak in GiB after each change:"]
        for change in result["changes"]:
            lines.append(f"  {change['peak'] / GIB:>8.2f}  {change['change']}{'  (fits)' if change['fits'] else ''}")
    return "\n".join(lines)
