"""Estimates the memory of a run: the peak of each phase of a PPO step by cause, and whether a device has enough.

Reads only the models' configurations and runs the trainer's passes over tensors without memory (`measure`). The command
is `alpaca_ppo/cli/estimate_memory.py`.
"""

from dataclasses import asdict, replace
from typing import Any

from alpaca_ppo.adapters import read_reward_adapter, read_value_adapter
from alpaca_ppo.config.checks import REFERENCES
from alpaca_ppo.config.estimate_arguments import RESERVE_GIB, EstimateArguments
from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.config.script_arguments import LoraArguments
from alpaca_ppo.estimate_memory.fake_models import Measurements, Models
from alpaca_ppo.estimate_memory.measure import measure
from alpaca_ppo.estimate_memory.model_configs import check_run, read_config, read_policy, read_reference, sharding_of
from alpaca_ppo.estimate_memory.phases import PhaseMemory, peak_by_phase, sizes_of
from alpaca_ppo.estimate_memory.recommend import Settings, all_changes, single_changes
from alpaca_ppo.estimate_memory.sharding import DeviceMemory

GIB = 2**30


class MemoryEstimator:
    """Estimates the memory of one run's models under various settings.

    Raises:
        ValueError: when a configuration cannot be read, or adapters cannot be combined.
    """

    def __init__(self, script: EstimateArguments, args: PPOConfig, *, lora: bool) -> None:
        trust = args.trust_remote_code
        policy, self._starting_adapter = read_policy(script.model_name_or_path, trust)
        if args.reward_adapter is not None and not (lora or self.starts_from_adapter):
            raise ValueError(
                f"reward_adapter is {args.reward_adapter!r} but the policy has no adapters; set use_peft, or use a "
                "whole reward model in reward_model_name_or_path"
            )
        if lora and self._starting_adapter:
            raise ValueError(
                f"model_name_or_path {script.model_name_or_path!r} is an adapter, but use_peft asks for another one; "
                "merge the first into its base, or leave use_peft out"
            )
        reference, reference_adapter = None, None
        if args.reference not in REFERENCES:
            reference, reference_adapter = read_reference(args.reference, trust)
        rewards = [read_config("reward_model_name_or_path", r, trust) for r in script.reward_model_name_or_path or []]
        value, value_lora = script.value_model_name_or_path, None
        if value is not None and args.critic_layout != "separate":
            # A critic without a backbone takes from it a head, and an adapter.
            value_lora, value = read_value_adapter(value) if args.critic_layout == "adapter" else None, None
        self._models = Models(
            policy,
            value=None if value is None else read_config("value_model_name_or_path", value, trust),
            value_lora=value_lora,
            reference=reference,
            reference_adapter=reference_adapter,
            rewards=tuple(rewards),
            reward_lora=None if args.reward_adapter is None else read_reward_adapter(args.reward_adapter),
        )
        self._replies = bool(script.environments or script.tools)
        self.sharding = sharding_of(script.num_processes, script.zero_stage, args, policy)
        self._measured: dict[str, Measurements] = {}

    @property
    def starts_from_adapter(self) -> bool:
        """Whether the policy is an adapter that is trained further."""
        return self._starting_adapter is not None

    def measurements(self, settings: Settings) -> Measurements:
        """What `measure` returns for the run, cached.

        Raises:
            ValueError: for settings that the run would refuse; and whatever `measure` raises.
        """
        models = self._models
        check_run(settings.args, settings.sharding.stage, models.policy, models.critic(settings.args))
        args = settings.args
        zero = settings.sharding.stage > 0
        # The ZeRO stages shard different things but make the same passes. Without bf16, DDP makes them too.
        key = repr((args, settings.lora, settings.sharding.processes, zero and args.bf16))
        if key not in self._measured:
            lora = self._starting_adapter or settings.lora.peft_config("CAUSAL_LM")
            sizes = sizes_of(args, settings.sharding.processes, replies=self._replies)
            models = replace(self._models, lora=lora, starts_from_adapter=self.starts_from_adapter)
            self._measured[key] = measure(models, args, sizes, zero=zero)
        return self._measured[key]

    def phases(self, settings: Settings) -> list[PhaseMemory]:
        """The peak of each phase."""
        return peak_by_phase(self.measurements(settings), settings.args, settings.sharding)

    def peak(self, settings: Settings) -> float:
        """The peak over all phases, in bytes."""
        return max(phase.total for phase in self.phases(settings))

    def offloaded(self, settings: Settings) -> float:
        """Bytes that DeepSpeed keeps in host memory for each process."""
        return DeviceMemory(self.measurements(settings), settings.args, settings.sharding).offloaded


def estimate(script: EstimateArguments, lora: LoraArguments, args: PPOConfig) -> dict[str, Any]:
    """The estimate as `--json` prints it, in bytes.

    Returns:
        `phases` (bytes by cause), `peak`, `peak_phase`; with several processes `peak_by_zero_stage`; with offloading
        `offloaded`. With `device_gib` also `limit` and `fits`, and if the run does not fit `changes`, the peak after
        each single change; if none of them fits, also `all_changes`, the peak after all of them.

    Raises:
        ValueError: for models that cannot be read or contradict the settings.
    """
    estimator = MemoryEstimator(script, args, lora=lora.use_peft)
    sharding = estimator.sharding
    settings = Settings(args, lora, sharding, estimator.starts_from_adapter)
    phases = estimator.phases(settings)
    peak = max(phases, key=lambda phase: phase.total)
    result: dict[str, Any] = {
        "model": script.model_name_or_path,
        "processes": script.num_processes,
        "zero_stage": sharding.stage,
        "phases": [{**asdict(phase), "total": phase.total} for phase in phases],
        "peak": peak.total,
        "peak_phase": peak.phase,
    }
    if script.num_processes > 1:
        stages = [replace(settings, sharding=sharding.at(stage)) for stage in range(3 if args.load_in_4bit else 4)]
        result["peak_by_zero_stage"] = {str(other.sharding.stage): estimator.peak(other) for other in stages}
    if offloaded := estimator.offloaded(settings):
        result["offloaded"] = offloaded
    if script.device_gib is not None:
        limit = (script.device_gib - (0.0 if args.use_cpu else RESERVE_GIB)) * GIB
        result |= {"device_gib": script.device_gib, "limit": limit, "fits": peak.total <= limit}
        if not result["fits"]:
            result["changes"] = single_changes(settings, estimator.peak, limit)
            if not any(change["fits"] for change in result["changes"]):
                result["all_changes"] = all_changes(settings, estimator.peak, limit)
    return result
