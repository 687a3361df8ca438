"""What a run will need in memory: `python -m alpaca_ppo.estimate_memory --model_name_or_path ... --config run.yaml`.

Takes the run's own flags. Reads the models' configurations alone, runs the trainer's passes over tensors without memory
(`fake_passes`) and prints each phase's highest moment by cause; with `--device_gib`, whether that fits, and the
cheapest change that would.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any

from alpaca_ppo.adapters import read_reward_adapter
from alpaca_ppo.config.checks import REFERENCES
from alpaca_ppo.config.fields import argument, check_fields
from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.config.script_arguments import LoraArguments, ScriptArguments
from alpaca_ppo.estimate_memory.fake_models import Figures, Models
from alpaca_ppo.estimate_memory.measure import measure
from alpaca_ppo.estimate_memory.model_configs import check_run, read_config, read_policy, read_reference, sharding_of
from alpaca_ppo.estimate_memory.phases import Moment, sizes_of, spread
from alpaca_ppo.estimate_memory.recommend import PASS_SETTINGS, Settings, fitting_changes
from alpaca_ppo.estimate_memory.sharding import Shares
from alpaca_ppo.models.factory import check_merge

GIB = 2**30
RESERVE_GIB = 1.0
"""Kept free on an accelerator for its context, the workspaces of its kernels and what its allocator cannot use."""


@dataclass(frozen=True)
class EstimateArguments(ScriptArguments):
    """`ScriptArguments`, of which only the models are read, and what the plan is for.

    Raises:
        ValueError: for a missing model, or a value out of its range.
    """

    num_processes: int = argument(1, "Processes, one a device.")
    zero_stage: int = argument(0, "DeepSpeed ZeRO stage, 1 to 3; 0 = none.")
    device_gib: float | None = argument(None, "Memory of a device, in GiB: does the run fit?")
    json: bool = argument(False, "Print JSON, in bytes, instead of a table.")

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.model_name_or_path:
            raise ValueError("model_name_or_path is not set; give --model_name_or_path or put it in the --config file")
        if self.num_processes < 1:
            raise ValueError(f"num_processes is {self.num_processes}; it must be at least 1")
        if self.zero_stage not in range(4):
            raise ValueError(f"zero_stage is {self.zero_stage}; it must be 0 (none), 1, 2 or 3")
        if self.zero_stage and self.num_processes == 1:
            raise ValueError(
                f"zero_stage is {self.zero_stage} but num_processes is 1: there is nothing to share out; raise "
                "num_processes, or set zero_stage: 0"
            )
        if self.device_gib is not None and not self.device_gib > RESERVE_GIB:
            raise ValueError(
                f"device_gib is {self.device_gib}; it must be above {RESERVE_GIB:g}, which the device keeps for itself"
            )


class MemoryEstimator:
    """Predicts the memory of one run's models under changing settings.

    Raises:
        ValueError: when a configuration cannot be read, or adapters do not go together.
    """

    def __init__(self, script: EstimateArguments, args: PPOConfig, *, lora: bool) -> None:
        trust = args.trust_remote_code
        policy, self._starting_adapter = read_policy(script.model_name_or_path, trust)
        check_merge(args, has_adapters=lora or self.starts_from_adapter)
        if args.reward_adapter is not None and not (lora or self.starts_from_adapter):
            raise ValueError(
                f"reward_adapter is {args.reward_adapter!r} but the policy has no adapters; set use_peft, or give a "
                "whole reward model in reward_model_name_or_path"
            )
        if lora and self._starting_adapter:
            raise ValueError(
                f"model_name_or_path {script.model_name_or_path!r} is an adapter and use_peft asks for another; merge "
                "the first into its base, or leave use_peft out"
            )
        reference, reference_adapter = None, None
        if args.reference not in REFERENCES:
            reference, reference_adapter = read_reference(args.reference, trust)
        rewards = [read_config("reward_model_name_or_path", r, trust) for r in script.reward_model_name_or_path or []]
        value = script.value_model_name_or_path
        self._models = Models(
            policy,
            value=None if value is None else read_config("value_model_name_or_path", value, trust),
            reference=reference,
            reference_adapter=reference_adapter,
            rewards=tuple(rewards),
            reward_lora=None if args.reward_adapter is None else read_reward_adapter(args.reward_adapter),
        )
        self.sharding = sharding_of(script.num_processes, script.zero_stage, args, policy)
        self._measured: dict[str, Figures] = {}

    @property
    def starts_from_adapter(self) -> bool:
        """Whether the policy is an adapter that training goes on from."""
        return self._starting_adapter is not None

    def figures(self, settings: Settings) -> Figures:
        """What `fake_passes.measure` says of the run.

        Raises:
            ValueError: for settings that the run would refuse, and what `measure` raises.
        """
        args = settings.args
        check_run(args, settings.sharding.stage, self._models.policy)
        zero = settings.sharding.stage > 0
        # The stages differ in what they share out, not in the passes; without bf16 nor does DDP.
        key = repr((args, settings.lora, settings.sharding.processes, zero and args.bf16))
        if key not in self._measured:
            lora = self._starting_adapter or settings.lora.peft_config("CAUSAL_LM")
            sizes = sizes_of(args, settings.sharding.processes)
            models = replace(self._models, lora=lora, starts_from_adapter=self.starts_from_adapter)
            self._measured[key] = measure(models, args, sizes, zero=zero)
        return self._measured[key]

    def moments(self, settings: Settings) -> list[Moment]:
        """The highest moment of each phase."""
        return spread(self.figures(settings), settings.args, settings.sharding)

    def peak(self, settings: Settings) -> float:
        """The most bytes of all phases."""
        return max(moment.total for moment in self.moments(settings))

    def offloaded(self, settings: Settings) -> float:
        """Bytes of one process that DeepSpeed keeps in host memory."""
        return Shares(self.figures(settings), settings.args, settings.sharding).offloaded

    def advice(self, settings: Settings, limit: float) -> dict[str, Any] | None:
        """The changes after which the peak is at most `limit` bytes, `peak` with them and what they save (`saves`);
        None where no changes are enough.
        """

        too_heavy: set[str] = set()

        def fits(changed: Settings) -> bool:
            kept = _without_passes(changed)
            if kept in too_heavy:
                return False
            moments = self.moments(changed)
            # What the optimizer steps over is the same however small the passes are; they take seconds to run.
            if moments[-1].total > limit:
                too_heavy.add(kept)
            return max(moment.total for moment in moments) <= limit

        # Says at once whether smaller passes can help.
        fits(settings)

        found = fitting_changes(settings, fits)
        if found is None:
            return None
        peak = self.peak(found[1])
        return {"changes": found[0], "peak": peak, "saves": self.peak(settings) - peak}


def _without_passes(settings: Settings) -> str:
    """The settings that decide about weights, gradients and the optimizer's state, as a key."""
    args = {name: value for name, value in vars(settings.args).items() if name not in PASS_SETTINGS}
    return repr((args, settings.lora, settings.sharding))


def plan(script: EstimateArguments, lora: LoraArguments, args: PPOConfig) -> dict[str, Any]:
    """The plan as `--json` prints it: bytes of each phase by cause, the peak, peaks by ZeRO stage, and the fit.

    Raises:
        ValueError: for models that cannot be read or do not go together with the settings.
    """
    planner = MemoryEstimator(script, args, lora=lora.use_peft)
    sharding = planner.sharding
    settings = Settings(args, lora, sharding, planner.starts_from_adapter)
    moments = planner.moments(settings)
    peak = max(moments, key=lambda moment: moment.total)
    result: dict[str, Any] = {
        "model": script.model_name_or_path,
        "processes": script.num_processes,
        "zero_stage": sharding.stage,
        "phases": [{**asdict(moment), "total": moment.total} for moment in moments],
        "peak": peak.total,
        "peak_phase": peak.phase,
    }
    if script.num_processes > 1:
        result["peak_by_zero_stage"] = {str(other.sharding.stage): planner.peak(other) for other in _by_stage(settings)}
    if offloaded := planner.offloaded(settings):
        result["offloaded"] = offloaded
    if script.device_gib is not None:
        limit = (script.device_gib - (0.0 if args.use_cpu else RESERVE_GIB)) * GIB
        result |= {"device_gib": script.device_gib, "limit": limit, "fits": peak.total <= limit, "advice": None}
        if not result["fits"]:
            result["advice"] = planner.advice(settings, limit)
    return result


def _by_stage(settings: Settings) -> list[Settings]:
    """The settings with each ZeRO stage that a run would take: not the third with 4 bits."""
    last = 2 if settings.args.load_in_4bit else 3
    return [replace(settings, sharding=settings.sharding.at(stage)) for stage in range(last + 1)]
