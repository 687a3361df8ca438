"""Estimates the memory of a run: the peak of each phase of a PPO step by cause, and whether a device has enough.

Reads only the models' configurations and runs the trainer's passes over tensors without memory (`passes`); what is held
beside them is arithmetic (`engines`). It counts tensors, not what a device and its kernels need for themselves.
"""

from dataclasses import asdict, replace
from typing import Any

from alpaca_ppo.adapters.files import is_adapter
from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.config.script_arguments import RESERVE_GIB, EstimateArguments, LoraArguments
from alpaca_ppo.distributed.deepspeed_config import check_four_bit
from alpaca_ppo.estimate_memory.engines import CAUSES, PhaseMemory, Sharding, phases, sharding_of
from alpaca_ppo.estimate_memory.fake_models import Models
from alpaca_ppo.estimate_memory.passes import Measured, measure

GIB = 2**30


def predict(models: Models, args: PPOConfig, sharding: Sharding, *, replies: bool = False) -> list[PhaseMemory]:
    """The peak of each phase on one device, in the order of PHASES.

    Raises:
        ValueError: whatever `measure` raises.
    """
    measured = measure(models, args, processes=sharding.processes, zero=sharding.stage > 0, replies=replies)
    return phases(measured, args, sharding)[0]


def estimate(script: EstimateArguments, lora: LoraArguments, args: PPOConfig) -> dict[str, Any]:
    """The estimate as `--json` prints it, in bytes.

    Returns:
        `phases` (bytes by cause), `peak`, `peak_phase`; with several processes `peak_by_zero_stage`; with offloading
        `offloaded`. With `device_gib` also `limit` and `fits`, and if the run does not fit `changes`: the peak after
        each of the three changes that save most, and after all of them.

    Raises:
        ValueError: for models that cannot be read or contradict the settings.
    """
    run = _Run(script, args)
    own, offloaded = run.phases(args, lora, run.sharding)
    peak = max(own, key=lambda phase: phase.total)
    result: dict[str, Any] = {
        "model": script.model_name_or_path,
        "processes": script.num_processes,
        "zero_stage": run.sharding.stage,
        "phases": [{**asdict(phase), "total": phase.total} for phase in own],
        "peak": peak.total,
        "peak_phase": peak.phase,
    }
    if script.num_processes > 1:
        stages = [run.sharding.at(stage) for stage in range(3 if args.load_in_4bit else 4)]
        result["peak_by_zero_stage"] = {str(other.stage): run.peak(args, lora, other) for other in stages}
    if offloaded:
        result["offloaded"] = offloaded
    if script.device_gib is not None:
        limit = (script.device_gib - (0.0 if args.use_cpu else RESERVE_GIB)) * GIB
        result |= {"device_gib": script.device_gib, "limit": limit, "fits": peak.total <= limit}
        if not result["fits"]:
            result["changes"] = [{**change, "fits": change["peak"] <= limit} for change in run.changes(args, lora)]
    return result


class _Run:
    """The models of one run, measured under various settings."""

    def __init__(self, script: EstimateArguments, args: PPOConfig) -> None:
        # A critic without a backbone takes a head and an adapter from a value model, which weigh as much as its own.
        value = script.value_model_name_or_path if args.critic_layout == "separate" else None
        self._models = Models(script.model_name_or_path, None, value, script.reward_model_name_or_path or [])
        self._replies = bool(script.environments or script.tools)
        self.sharding = sharding_of(script.num_processes, script.zero_stage, args)
        self._measured: dict[str, Measured] = {}

    def phases(self, args: PPOConfig, lora: LoraArguments, sharding: Sharding) -> tuple[list[PhaseMemory], float]:
        """What `engines.phases` returns; passes are measured once for the stages that make the same."""
        check_four_bit(sharding.stage, args)
        if args.load_in_4bit and args.use_cpu:
            raise ValueError("load_in_4bit and use_cpu are both True, but 4 bits need a CUDA device; drop one of them")
        key = repr((args, lora, sharding.stage > 0 and args.bf16))
        if key not in self._measured:
            models = replace(self._models, lora=lora.peft_config("CAUSAL_LM"))
            self._measured[key] = measure(
                models, args, processes=sharding.processes, zero=sharding.stage > 0, replies=self._replies
            )
        return phases(self._measured[key], args, sharding)

    def peak(self, args: PPOConfig, lora: LoraArguments, sharding: Sharding) -> float:
        """The peak over all phases, in bytes."""
        return max(phase.total for phase in self.phases(args, lora, sharding)[0])

    def changes(self, args: PPOConfig, lora: LoraArguments) -> list[dict[str, Any]]:
        """Text and peak of each of the three changes that save most, and of all of them; without those that the run has
        made or would refuse.
        """
        one_row = {"step_per_device_batch_size": 1}
        if args.max_tokens_per_micro_batch is not None:
            one_row = {"max_tokens_per_micro_batch": args.longest_row}
        options: list[dict[str, Any]] = [{"gradient_checkpointing": True}, one_row]
        if not lora.use_peft and not is_adapter(self._models.policy):
            layout = {"critic_layout": "adapter"} if args.uses_critic and not args.init_value_with_reward else {}
            options.append({"use_peft": True, "dtype": "bfloat16", "bf16": False, "reference": "auto", **layout})
        options = [change for change in options if any(getattr(args, name, None) != v for name, v in change.items())]
        together: dict[str, Any] = {}
        for change in options:
            together |= change
        found = []
        for change in [*options, *([together] if len(options) > 1 else [])]:
            own = {name: value for name, value in change.items() if name != "use_peft"}
            with_lora = replace(lora, use_peft=True) if "use_peft" in change else lora
            try:
                peak = self.peak(replace(args, **own), with_lora, self.sharding)
            except ValueError:
                continue
            text = ", ".join(f"{n}: {str(v).lower() if isinstance(v, bool) else v}" for n, v in change.items())
            found.append({"change": text, "peak": peak})
        return found


def table(result: dict[str, Any]) -> str:
    """The result of `estimate` as text, in GiB."""
    lines = [f"{result['model']}: peak memory of one device in each phase of a PPO step, in GiB", ""]
    heads = (*[cause.replace("kv_cache", "KV cache") for cause in CAUSES], "total")
    lines.append(f"{'phase':<15}" + "".join(f"{head:>13}" for head in heads))
    for phase in result["phases"]:
        numbers = "".join(f"{phase[cause] / GIB:>13.2f}" for cause in (*CAUSES, "total"))
        lines.append(f"{phase['phase']:<15}{numbers}")
    lines += ["", f"peak: {result['peak'] / GIB:.2f} GiB ({result['peak_phase']})"]
    if "peak_by_zero_stage" in result:
        stages = result["peak_by_zero_stage"].items()
        peaks = [f"{value / GIB:.2f} ({f'ZeRO {stage}' if stage != '0' else 'DDP'})" for stage, value in stages]
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
