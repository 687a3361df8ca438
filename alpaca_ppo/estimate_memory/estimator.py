"""Estimates the memory of a run: the peak of each phase of a PPO step by cause, and whether a device has enough.

The trainer's passes are run over tensors without memory (`passes`); what is held beside them is calculated
(`distributed.held_memory`). Tensors are counted, but not what a device and its kernels take.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any, NamedTuple

from alpaca_ppo.adapters.files import is_adapter
from alpaca_ppo.config.checks import REFERENCES
from alpaca_ppo.config.names import model_folder
from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.config.script_arguments import RESERVE_GIB, EstimateArguments, LoraArguments
from alpaca_ppo.distributed.deepspeed_config import check_four_bit
from alpaca_ppo.distributed.fsdp_config import check_fsdp
from alpaca_ppo.distributed.held_memory import CAUSES, Measured, PhaseMemory, Sharding, phases, sharding_of
from alpaca_ppo.estimate_memory.fake_models import Models, build, fake_runs
from alpaca_ppo.estimate_memory.passes import measure
from alpaca_ppo.models.factory import with_chosen_layout
from alpaca_ppo.models.saved_critic import has_reader

GIB = 2**30


class Prediction(NamedTuple):
    """The memory of one process: of the device in each phase, and the bytes that wait in host memory."""

    phases: list[PhaseMemory]
    on_host: float

    @property
    def peak(self) -> PhaseMemory:
        """The phase that takes most."""
        return max(self.phases, key=lambda phase: phase.total)


def predict(
    models: Models, args: PPOConfig, shardings: Sequence[Sharding], *, replies: bool = False, device_bytes: float = 0.0
) -> list[Prediction]:
    """The prediction for each of the `shardings`, which all have the same number of processes.

    `device_bytes` is the memory of a device, of which a vLLM server that the run starts takes a share; for `replies`
    see `measure`.
    """

    @cache
    def measured_passes(cast_to_bf16: bool) -> Measured:
        measured = measure(models, args, processes=shardings[0].processes, cast_to_bf16=cast_to_bf16, replies=replies)
        if args.generation_backend == "vllm" and not args.vllm_urls:
            measured.kv_cache = args.vllm_gpu_memory_utilization * device_bytes
        return measured

    # With bf16, DeepSpeed casts the models; other runs use autocast.
    return [Prediction(*phases(measured_passes(args.bf16 and s.stage > 0), args, s)) for s in shardings]


def estimate(script: EstimateArguments, lora: LoraArguments, args: PPOConfig) -> dict[str, Any]:
    """The estimate as `--json` prints it, in bytes. Raises a ValueError for what a run would refuse, and as `measure`.

    Returns:
        `model`, `processes`, `zero_stage` (0 = DDP, or FSDP2 if `fsdp`), `phases` (bytes by cause), `peak`,
        `peak_phase`; with several processes `peak_by_zero_stage`; `on_host`, if something waits in host memory. With
        `device_gib` that number, `limit` and `fits`, and if the run does not fit `changes`: the peak after each of up
        to three changes that save most, and after all of them.
    """
    run = _Run.of(script, lora, args)
    # The run's own is last: it replaces the one of its stage with default settings.
    shardings = {_name(sharding): sharding for sharding in (*run.other_shardings(), run.sharding)}
    predictions = dict(zip(shardings, run.predict(list(shardings.values())), strict=True))
    own = predictions[_name(run.sharding)]
    result: dict[str, Any] = {
        "model": script.model_name_or_path,
        "processes": script.num_processes,
        "zero_stage": run.sharding.stage,
        "fsdp": run.sharding.fsdp,
        "phases": [{**asdict(phase), "total": phase.total} for phase in own.phases],
        "peak": own.peak.total,
        "peak_phase": own.peak.phase,
    }
    if len(predictions) > 1:
        result["peak_by_zero_stage"] = {name: prediction.peak.total for name, prediction in predictions.items()}
    if own.on_host:
        result["on_host"] = own.on_host
    result |= on_device(own.peak.total, script.device_gib, use_cpu=args.use_cpu)
    if not result.get("fits", True):
        result["changes"] = [
            {"change": _in_words(change), "peak": then, "fits": then <= result["limit"]}
            for then, change in run.best_changes(below=own.peak.total)
        ]
    return result


def _in_words(change: Mapping[str, Any]) -> str:
    """Options with their values, as YAML has them."""
    values = {name: value if isinstance(value, str) else json.dumps(value) for name, value in change.items()}
    return ", ".join(f"{name}: {value}" for name, value in values.items())


def on_device(peak: float, device_gib: float | None, *, use_cpu: bool) -> dict[str, Any]:
    """Entries of an estimate: whether `peak` bytes fit into `device_gib`, of which a GPU reserves RESERVE_GIB. Empty if
    `device_gib` is None.
    """
    if device_gib is None:
        return {}
    limit = (device_gib - (0.0 if use_cpu else RESERVE_GIB)) * GIB
    return {"device_gib": device_gib, "limit": limit, "fits": peak <= limit}


@dataclass(frozen=True)
class _Run:
    """The run that is estimated, with the folders of its models."""

    script: EstimateArguments
    lora: LoraArguments
    args: PPOConfig
    models: Models
    sharding: Sharding

    @classmethod
    def of(cls, script: EstimateArguments, lora: LoraArguments, args: PPOConfig) -> "_Run":
        """The run of these options and the folders they name. `critic_layout: auto` is replaced by the layout that
        the run would choose, for which its models are built. Raises a ValueError for what a run would refuse.
        """
        args = replace(args, fsdp=args.fsdp or script.accelerate_config == "fsdp")
        stages = {None: script.zero_stage, "ddp": 0, "fsdp": 0, "zero1": 1, "zero2": 2, "zero3": 3}
        check_fsdp(args)
        sharding = sharding_of(script.num_processes, stages[script.accelerate_config], args)
        check_four_bit(sharding.stage, args)
        if args.load_in_4bit and args.use_cpu:
            raise ValueError("load_in_4bit and use_cpu are both True, but 4 bits need a CUDA device; drop one of them")
        if args.reference not in REFERENCES:
            args = replace(args, reference=model_folder("reference", args.reference))
        # Only a separate critic has another size if it starts from a value model.
        value = script.value_model_name_or_path if args.critic_layout in ("auto", "separate") else None
        value = model_folder("value_model_name_or_path", value, part="value", writes_text=False)
        policy = model_folder("model_name_or_path", script.model_name_or_path)
        models = Models(policy, lora.peft_config("CAUSAL_LM"), value, script.reward_model_name_or_path or [])
        if args.critic_layout == "auto" and value is not None and has_reader(value):
            args, models = replace(args, critic_layout="cached"), replace(models, value=None)
        if args.critic_layout == "auto":
            with fake_runs(policy):
                args = with_chosen_layout(args, build(models, args)[0])
        return cls(script, lora, args, models, sharding)

    def predict(self, shardings: Sequence[Sharding]) -> list[Prediction]:
        """See the function `predict`."""
        replies = bool(self.script.environments or self.script.tools)
        device_bytes = (self.script.device_gib or 0.0) * GIB
        return predict(self.models, self.args, shardings, replies=replies, device_bytes=device_bytes)

    def peak_after(self, change: Mapping[str, Any]) -> float:
        """The peak with the options of `change`, in bytes; infinite if such a run would be refused."""
        lora = replace(self.lora, use_peft=change.get("use_peft", self.lora.use_peft))
        value = change.get("value_model_name_or_path", self.models.value)
        models = replace(self.models, lora=lora.peft_config("CAUSAL_LM"), value=value)
        try:
            args = replace(self.args, **{name: value for name, value in change.items() if name in vars(self.args)})
            [prediction] = replace(self, args=args, models=models).predict([self.sharding])
        except ValueError:
            return float("inf")
        return prediction.peak.total

    def other_shardings(self) -> list[Sharding]:
        """The ways to share the memory between several processes that the options allow; one may be the run's own."""
        processes, args = self.script.num_processes, self.args
        if processes == 1:
            return []
        # As `check_four_bit` and `check_fsdp` have it.
        four_bit = args.load_in_4bit or args.teacher_dtype == "4bit"
        offloaded = args.teacher_offloaded or args.reference == "copy_offloaded"
        shardings = [Sharding(processes, stage) for stage in range(3 if four_bit else 4)]
        return shardings if four_bit or offloaded else [*shardings, Sharding(processes, fsdp=True)]

    def best_changes(self, *, below: float) -> list[tuple[float, Mapping[str, Any]]]:
        """The peak after each of up to three changes that save most and, of several, after all of them together."""
        tried = [(self.peak_after(change), change) for change in self.changes()]
        best = sorted((pair for pair in tried if pair[0] < below), key=lambda pair: pair[0])[:3]
        if len(best) > 1:
            together: dict[str, Any] = {}
            for name, value in (item for _, change in best for item in change.items()):
                # Where two of them set an option, the one that saves more.
                together.setdefault(name, value)
            best.append((self.peak_after(together), together))
        return best

    def changes(self) -> list[Mapping[str, Any]]:
        """Changes of options that may save memory."""
        args = self.args
        # One change, because only together do policy, critic and reference share one frozen bfloat16 base.
        shared_base: dict[str, Any] = {} if is_adapter(self.models.policy) else {"use_peft": True}
        own_backbone = args.uses_critic and args.critic_layout == "separate"
        from_policy = {"init_value_with_reward": False, "value_model_name_or_path": None}
        if own_backbone:
            shared_base |= {"critic_layout": "adapter", **from_policy}
        shared_base |= {"dtype": "bfloat16", "bf16": True}
        if args.reference in ("copy", "copy_offloaded"):
            shared_base["reference"] = "auto"
        if args.max_tokens_per_micro_batch is None:
            one_row = {"step_per_device_batch_size": 1}
        else:
            one_row = {"max_tokens_per_micro_batch": args.longest_row}
        names = ("rollout_per_device_batch_size", "logprob_chunk_size")
        quarters = [{name: max(1, getattr(args, name) // 4)} for name in names]
        changes: list[dict[str, Any]] = [shared_base, {"gradient_checkpointing": True}, one_row, *quarters]
        if own_backbone:
            # A rate and epochs that were chosen for a whole backbone are none for such a critic.
            own_steps = {"critic_learning_rate": None, "critic_epochs": "auto", "critic_step_batch_size": None}
            changes.append({"critic_layout": "cached", **from_policy, **own_steps})
        if not (args.use_cpu or self.sharding.fsdp or self.sharding.stage == 3):
            changes.append({"load_in_4bit": True})
        current = {**vars(self.script), **vars(self.lora), **vars(args)}
        differing = [{name: value for name, value in change.items() if current[name] != value} for change in changes]
        return [change for change in differing if change]


def _name(sharding: Sharding) -> str:
    """The ZeRO stage (0 = DDP), or "fsdp"."""
    return "fsdp" if sharding.fsdp else str(sharding.stage)


def table(result: dict[str, Any]) -> str:
    """The result of `estimate` as text, in GiB."""
    step = "PPO step" if "processes" in result else "training step"
    lines = [f"{result['model']}: peak memory of one device in each phase of a {step}, in GiB", ""]
    rows = [["phase", *(cause.replace("kv_cache", "KV cache") for cause in CAUSES), "total"]]
    for phase in result["phases"]:
        rows.append([phase["phase"], *(f"{phase[cause] / GIB:.2f}" for cause in (*CAUSES, "total"))])
    lines += [f"{name:<15}" + "".join(f"{cell:>13}" for cell in cells) for name, *cells in rows]
    lines += ["", f"peak: {result['peak'] / GIB:.2f} GiB ({result['peak_phase']})"]
    if "peak_by_zero_stage" in result:
        stages = result["peak_by_zero_stage"].items()
        names = {"0": "DDP", "fsdp": "FSDP2"}
        peaks = [f"{value / GIB:.2f} ({names.get(stage, f'ZeRO {stage}')})" for stage, value in stages]
        lines.append(f"on {result['processes']} processes: {', '.join(peaks)}")
    if "on_host" in result:
        lines.append(f"host memory: another {result['on_host'] / GIB:.2f} GiB per process")
    if "fits" in result:
        available = f"{result['limit'] / GIB:.2f} of {result['device_gib']:g} GiB are available for tensors"
        lines.append(f"{'fits' if result['fits'] else 'does not fit'}: {available}")
    if changes := result.get("changes"):
        lines += ["", "peak in GiB after each change:"]
        for change in changes:
            lines.append(f"  {change['peak'] / GIB:>8.2f}  {change['change']}{'  (fits)' if change['fits'] else ''}")
    return "\n".join(lines)
