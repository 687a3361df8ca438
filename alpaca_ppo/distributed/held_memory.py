"""Device memory that each engine holds, for `estimate_memory`: weights, gradients and optimizer state.

The arithmetic for ZeRO follows DeepSpeed 0.19.8 as `deepspeed_engine` uses it, without the padding of its buffers.
"""

from dataclasses import dataclass, replace

from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.distributed.deepspeed_config import check_stage, offloads, read_deepspeed_file, resolve_auto

CAUSES = ("weights", "gradients", "optimizer", "activations", "kv_cache")
PHASES = ("prefill", "sampling", "score", "log-probs", "backward", "optimizer step")
# Parameters that ZeRO 3 keeps gathered at most (`stage3_max_live_parameters`).
_MAX_LIVE = 10**9


@dataclass(frozen=True)
class Sharding:
    """How a run is distributed over `processes`: by ZeRO `stage` 1 to 3, by FSDP2, or else by DDP."""

    processes: int = 1
    stage: int = 0
    # Elements of the buffer in which ZeRO reduces gradients; 0 = "auto", which is small and left out.
    bucket: int = 0
    offload_optimizer: bool = False
    offload_weights: bool = False
    fsdp: bool = False


def sharding_of(processes: int, stage: int, args: PPOConfig) -> Sharding:
    """How a run is sharded: by the file `args.deepspeed`, by FSDP2 with `args.fsdp`, else like
    examples/deepspeed_configs for `stage`. Raises a ValueError for a file that the run would refuse, or whose stage is
    not `stage` (unless that is 0).
    """
    if args.deepspeed is None:
        return Sharding(processes, 0 if args.fsdp else stage, fsdp=args.fsdp)
    # This hidden size makes "auto" buckets 0.
    settings = resolve_auto(read_deepspeed_file(args.deepspeed), args, processes=processes, hidden_size=0)
    zero = settings["zero_optimization"]
    file_stage = zero.get("stage", 0)
    check_stage(file_stage, f"deepspeed {args.deepspeed!r}")
    if stage not in (0, file_stage):
        given = f"zero_stage is {stage}, but deepspeed {args.deepspeed!r} has stage {file_stage}"
        raise ValueError(f"{given}; leave zero_stage out")
    bucket = int(zero.get("reduce_bucket_size", 5e8))
    offload_optimizer, offload_weights = offloads(zero, "optimizer"), offloads(zero, "param")
    return Sharding(processes, file_stage, bucket, offload_optimizer=offload_optimizer, offload_weights=offload_weights)


@dataclass
class Measured:
    """Bytes of a run's models and passes on one device that shards nothing. Those of passes leave out the KV cache, and
    those of the backward pass the gradients.
    """

    weights: dict[str, float]  # of policy, critic, reference, teacher, reward0, reward1 and so on
    gradients: float
    elements: float  # the number of trained weights
    layer: float  # weights of one decoder layer and of everything outside the layers
    prefill: float = 0.0
    sampling: float = 0.0
    kv_cache: float = 0.0
    score: float = 0.0
    logprobs: float = 0.0
    backward: float = 0.0
    kept_states: float = 0.0  # of the policy, for a cached critic


@dataclass(frozen=True)
class PhaseMemory:
    """What is in memory at the peak of a phase, in bytes by cause."""

    phase: str
    weights: float
    gradients: float
    optimizer: float
    activations: float = 0.0
    kv_cache: float = 0.0

    @property
    def total(self) -> float:
        """Sum over the causes."""
        return float(sum(getattr(self, cause) for cause in CAUSES))


@dataclass
class _Held:
    """Bytes that an engine holds on one device."""

    weights: float
    optimizer: float
    gradients: float  # outside of backward passes and optimizer steps
    backward_gradients: float
    step_gradients: float
    gathered: float = 0.0  # weights that a pass without gradients gathers
    backward_gathered: float = 0.0
    sampling_gathered: float = 0.0
    on_host: float = 0.0


def phases(measured: Measured, args: PPOConfig, sharding: Sharding) -> tuple[list[PhaseMemory], float]:
    """The peak of each phase on one device, in the order of PHASES; and the bytes that wait in host memory."""
    moves = {"reference": args.reference == "copy_offloaded", "teacher": args.teacher_offloaded}
    offloaded = [measured.weights.get(name, 0.0) for name in moves if moves[name] and not args.use_cpu]
    weights = sum(measured.weights.values()) - sum(offloaded)
    # FSDP2 has nothing to shard over one process.
    if sharding.fsdp and sharding.processes > 1:
        whole = measured.weights.get("critic", 0.0) if args.critic_layout == "cached" else 0.0
        held = _held_by_fsdp(measured, weights, sharding.processes, whole)
    elif sharding.stage:
        held = _held_by_zero(measured, weights, sharding, args)
    else:
        held = _held_by_ddp(measured, weights, sharding.processes)
    between = PhaseMemory("", held.weights, held.gradients, held.optimizer)
    sampling = replace(between, weights=held.weights + held.sampling_gathered, kv_cache=measured.kv_cache)
    forward = replace(between, weights=held.weights + held.gathered)
    # Each offloaded model is on the device only during its own pass.
    log_probs = replace(forward, weights=forward.weights + max(offloaded, default=0.0))
    backward = replace(between, weights=held.weights + held.backward_gathered, gradients=held.backward_gradients)
    kept = measured.kept_states if args.use_cpu else 0.0
    # ZeRO 3 shards offloaded models too.
    on_host = held.on_host + sum(offloaded) / (sharding.processes if sharding.stage == 3 else 1)
    on_host += measured.kept_states - kept
    return [
        replace(sampling, phase="prefill", activations=measured.prefill),
        replace(sampling, phase="sampling", activations=measured.sampling + kept),
        replace(forward, phase="score", activations=measured.score + kept),
        replace(log_probs, phase="log-probs", activations=measured.logprobs + kept),
        replace(backward, phase="backward", activations=measured.backward + kept),
        replace(between, phase="optimizer step", gradients=held.step_gradients),
    ], on_host


def _held_by_ddp(measured: Measured, weights: float, processes: int) -> _Held:
    # Gradients are reduced in buckets as large as all of them together.
    buckets = measured.gradients if processes > 1 else 0.0
    total = measured.gradients + buckets
    return _Held(weights, 8 * measured.elements, gradients=buckets, backward_gradients=total, step_gradients=total)


def _held_by_fsdp(measured: Measured, weights: float, processes: int, whole: float) -> _Held:
    # `whole` bytes are those of a cached critic, on every process, which has no gradients when the policy has some. The
    # whole gradients of a layer take no more memory than its activations, which are freed before.
    share = max((measured.gradients - whole) / processes, whole)
    more = whole * (1 - 1 / processes)
    optimizer = 8 * measured.elements / processes + 2 * more
    held = _Held(weights / processes + more, optimizer, gradients=0.0, backward_gradients=share, step_gradients=share)
    held.gathered = held.backward_gathered = measured.layer
    held.sampling_gathered = measured.weights["policy"]
    return held


def _held_by_zero(measured: Measured, weights: float, sharding: Sharding, args: PPOConfig) -> _Held:
    share = measured.gradients / sharding.processes
    elements = measured.elements
    bucket = sharding.bucket * measured.gradients / max(1.0, elements)
    gradients = share + bucket if sharding.stage == 3 else 0.0
    # As many buckets as with `overlap_comm`, in stage 2 also for the shares that are reduced.
    backward = {1: measured.gradients + share + 2 * bucket, 2: 2 * share + 4 * bucket, 3: gradients}[sharding.stage]
    # The step reads gradients in float32. The state is two moments and a master copy, all in float32.
    step = (gradients if sharding.stage == 3 else share) + 4 * elements / sharding.processes
    held = _Held(weights, 12 * elements / sharding.processes, gradients, backward, step_gradients=step)
    if sharding.offload_optimizer and not args.use_cpu:
        held.on_host = held.optimizer + share
        held.optimizer = 0.0
        held.gradients = held.step_gradients = max(0.0, gradients - share)
        held.backward_gradients = backward - share
    if sharding.stage == 3:
        _shard_weights(held, measured, sharding, args)
    return held


def _shard_weights(held: _Held, measured: Measured, sharding: Sharding, args: PPOConfig) -> None:
    """Sets the weights that ZeRO 3 holds, gathers and offloads."""
    held.weights /= sharding.processes
    held.sampling_gathered = measured.weights["policy"]
    most = _MAX_LIVE * (2.0 if args.bf16 or args.dtype == "bfloat16" else 4.0)
    all_models = min(measured.weights["policy"] + measured.weights.get("critic", 0.0), most)
    # Passes of one base with different adapters have no common order that DeepSpeed could record.
    unordered = args.uses_critic and args.critic_layout == "adapter"
    held.gathered = min(measured.layer, most) if unordered else all_models
    # Passes of the critic alone have such an order.
    held.backward_gathered = all_models if args.separate_critic_steps else held.gathered
    if sharding.offload_weights and not args.use_cpu:
        held.on_host += held.weights
        held.weights = 0.0
