"""What a run will need in memory: `python -m alpaca_ppo.plan --model_name_or_path ... --config run.yaml`.

Takes the run's own flags. Reads the models' configurations alone, runs the trainer's passes over tensors without memory
(`fake_passes`) and prints each phase's highest moment by cause; with `--device_gib`, whether that fits, and the
cheapest change that would.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from alpaca_ppo.arguments import LoraArguments, ScriptArguments, parse_args
from alpaca_ppo.config import PPOConfig
from alpaca_ppo.fake_models import Figures, Models
from alpaca_ppo.fake_passes import measure
from alpaca_ppo.fitting import PASS_SETTINGS, Settings, fitting_changes
from alpaca_ppo.memory_model import CAUSES, Moment, sizes_of, spread
from alpaca_ppo.memory_shares import Shares
from alpaca_ppo.model_construction import check_merge
from alpaca_ppo.models import read_reward_adapter
from alpaca_ppo.planned_run import check_run, read_config, read_policy, read_reference, sharding_of
from alpaca_ppo.validation import REFERENCES, argument, check_types

GIB = 2**30
RESERVE_GIB = 1.0
"""Kept free on an accelerator for its context, the workspaces of its kernels and what its allocator cannot use."""


@dataclass(frozen=True)
class PlanArguments(ScriptArguments):
    """`ScriptArguments`, of which only the models are read, and what the plan is for.

    Raises:
        ValueError: for a missing model, or a value out of its range.
    """

    num_processes: int = argument(1, "Processes, one a device.")
    zero_stage: int = argument(0, "DeepSpeed ZeRO stage, 1 to 3; 0 = none.")
    device_gib: float | None = argument(None, "Memory of a device, in GiB: does the run fit?")
    json: bool = argument(False, "Print JSON, in bytes, instead of a table.")

    def __post_init__(self) -> None:
        check_types(self)
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


class Planner:
    """Predicts the memory of one run's models under changing settings.

    Raises:
        ValueError: when a configuration cannot be read, or adapters do not go together.
    """

    def __init__(self, script: PlanArguments, args: PPOConfig, *, lora: bool) -> None:
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


def plan(script: PlanArguments, lora: LoraArguments, args: PPOConfig) -> dict[str, Any]:
    """The plan as `--json` prints it: bytes of each phase by cause, the peak, peaks by ZeRO stage, and the fit.

    Raises:
        ValueError: for models that cannot be read or do not go together with the settings.
    """
    planner = Planner(script, args, lora=lora.use_peft)
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


def table(result: dict[str, Any]) -> str:
    """`plan`'s result as text, in GiB."""
    heads = [cause.replace("kv_cache", "KV cache") for cause in CAUSES]
    lines = [f"{result['model']}: the most on one device in each phase of a PPO step, in GiB", ""]
    lines.append(f"{'phase':<15}" + "".join(f"{head:>13}" for head in (*heads, "total")))
    for phase in result["phases"]:
        numbers = "".join(f"{phase[cause] / GIB:>13.2f}" for cause in (*CAUSES, "total"))
        lines.append(f"{phase['phase']:<15}{numbers}")
    lines += ["", f"peak: {result['peak'] / GIB:.2f} GiB ({result['peak_phase']})"]
    if "peak_by_zero_stage" in result:
        peaks = [f"{value / GIB:.2f} ({f'ZeRO {s}' if s != '0' else 'DDP'})" for s, value in _stages(result)]
        lines.append(f"on {result['processes']} processes: {', '.join(peaks)}")
    if "offloaded" in result:
        lines.append(f"in host memory: {result['offloaded'] / GIB:.2f} GiB of each process, beside that")
    return "\n".join([*lines, *_verdict(result)])


def _stages(result: dict[str, Any]) -> list[tuple[str, float]]:
    return list(result["peak_by_zero_stage"].items())


def _verdict(result: dict[str, Any]) -> list[str]:
    if "fits" not in result:
        return []
    room = f"{result['limit'] / GIB:.2f} of {result['device_gib']:g} GiB are for tensors"
    if result["fits"]:
        return [f"fits: {room}"]
    if result["advice"] is None:
        return [f"does not fit: {room}; no change of settings that the plan knows is enough, use a smaller model"]
    advice = result["advice"]
    what = "cheapest change that fits" if len(advice["changes"]) == 1 else "cheapest changes that fit, together"
    saved = f"saves {advice['saves'] / GIB:.2f} GiB, peak {advice['peak'] / GIB:.2f}"
    return [f"does not fit: {room}", f"{what}: {'; '.join(advice['changes'])} ({saved})"]


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the plan of the command line `argv`."""
    script, lora, args = parse_args([PlanArguments, LoraArguments, PPOConfig], argv)
    result = plan(script, lora, args)
    print(json.dumps(result, indent=2) if script.json else table(result))


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"error: {error}")
