"""What a device holds beside a run's passes, for `estimate_memory`: weights, gradients and optimizer, whole, replicated
by DDP, or sharded by DeepSpeed ZeRO or FSDP2.

The arithmetic follows DeepSpeed 0.19.8 as `deepspeed_engine` uses it, without the padding of its buffers.
"""

from dataclasses import dataclass, replace

from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.distributed.deepspeed_config import check_stage, read_deepspeed_file, resolve_auto

CAUSES = ("weights", "gradients", "optimizer", "activations", "kv_cache")
PHASES = ("prefill", "sampling", "score", "log-probs", "backward", "optimizer step")
_MAX_LIVE = 10**9
"""Parameters that ZeRO 3 keeps gathered at most (`stage3_max_live_parameters`)."""


@dataclass(frozen=True)
class Sharding:
    """How a run is distributed over `processes`: by ZeRO `stage` 1 to 3, by FSDP2, or else replicated by DDP."""

    processes: int = 1
    stage: int = 0
    bucket: int = 0
    """Elements of the buffer in which ZeRO reduces gradients; 0 = "auto", which is small and left out."""
    offload_optimizer: bool = False
    """Whether the optimizer state is in host memory."""
    offload_weights: bool = False
    """Whether the shards of the weights are in host memory, under ZeRO 3."""
    fsdp: bool = False


def sharding_of(processes: int, stage: int, args: PPOConfig) -> Sharding:
    """How the run is sharded: by the file `args.deepspeed`, or like examples/deepspeed_configs for `stage`.

    Raises:
        ValueError: for a file that the run would refuse, or whose stage is not `stage` (unless that is 0).
    """
    if args.deepspeed is None:
        return Sharding(processes, stage, fsdp=args.fsdp)
    # Buckets of size 0, which means "auto" here.
    settings = resolve_auto(read_deepspeed_file(args.deepspeed), args, processes=processes, hidden_size=0)
    zero = settings["zero_optimization"]
    file_stage = zero.get("stage", 0)
    check_stage(file_stage, f"deepspeed {args.deepspeed!r}")
    if stage not in (0, file_stage):
        raise ValueError(
            f"zero_stage is {stage}, but deepspeed {args.deepspeed!r} has stage {file_stage}; leave zero_stage out"
        )
    offloads = [(zero.get(f"offload_{what}") or {}).get("device", "none") != "none" for what in ("optimizer", "param")]
    return Sharding(processes, file_stage, int(zero.get("reduce_bucket_size", 5e8)), *offloads)


@dataclass
class Measured:
    """Bytes of a run's models and passes on one device, whole; engines divide them."""

    weights: dict[str, float]
    """By model: policy, critic, reference and reward0, reward1 and so on."""
    gradients: float
    elements: float
    """The number of trained weights."""
    layer: float
    """Of one decoder layer and of what lies outside of the layers."""
    prefill: float = 0.0
    """Without the cache, as all passes."""
    sampling: float = 0.0
    kv_cache: float = 0.0
    score: float = 0.0
    logprobs: float = 0.0
    backward: float = 0.0
    """Without the gradients."""


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
        """Sum over the causes, in bytes."""
        return float(sum(getattr(self, cause) for cause in CAUSES))


def phases(measured: Measured, args: PPOConfig, sharding: Sharding) -> tuple[list[PhaseMemory], float]:
    """The peak of each phase on one device in the order of PHASES, from what `measure` returned and the engine holds
    beside it; and the bytes in host memory instead.
    """
    stage, n = sharding.stage, sharding.processes
    offloads_reference = args.reference == "copy_offloaded" and not args.use_cpu
    reference = measured.weights.get("reference", 0.0) if offloads_reference else 0.0
    weights, gradients, elements = sum(measured.weights.values()) - reference, measured.gradients, measured.elements
    policy = measured.weights["policy"]
    gathered = more = offloaded = 0.0
    if sharding.fsdp:
        # What a layer's gradients take until they are reduced, its activations have left.
        held, backward, step, optimizer = 0.0, gradients / n, gradients / n, 8 * elements / n
        weights, gathered = weights / n, measured.layer
    elif stage == 0:
        # DDP reduces gradients in buckets as large as all of them together.
        held = gradients * (n > 1)
        backward = step = gradients + held
        optimizer = 8 * elements
    else:
        share = gradients / n
        bucket = sharding.bucket * gradients / max(1.0, elements)
        held = share + bucket if stage == 3 else 0.0
        # As many buckets as with `overlap_comm`, in stage 2 also for the shares that are reduced.
        backward = {1: gradients + share + 2 * bucket, 2: 2 * share + 4 * bucket, 3: held}[stage]
        # Two moments and a master copy, all in float32; the step reads gradients in float32 too.
        optimizer, step = 12 * elements / n, held + share * (stage < 3) + 4 * elements / n
        if sharding.offload_optimizer and not args.use_cpu:
            offloaded, optimizer = optimizer + share, 0.0
            held, backward = max(0.0, held - share), backward - share
            step = held
    if stage == 3:
        weights /= n
        # Passes of one base with different adapters have no common order that DeepSpeed could record.
        unordered = args.uses_critic and args.critic_layout == "adapter"
        most = _MAX_LIVE * (2.0 if args.bf16 or args.dtype == "bfloat16" else 4.0)
        whole = min(policy + measured.weights.get("critic", 0.0), most)
        gathered = min(measured.layer, most) if unordered else whole
        # Those of the critic alone have one.
        more = (whole - gathered) * args.separate_critic_steps
        if sharding.offload_weights and not args.use_cpu:
            offloaded, weights = offloaded + weights, 0.0
    still = PhaseMemory("", weights, held, optimizer)
    sampling = replace(still, weights=weights + policy * (sharding.fsdp or stage == 3), kv_cache=measured.kv_cache)
    passing, updating = (replace(still, weights=weights + live) for live in (gathered, gathered + more))
    return [
        replace(sampling, phase="prefill", activations=measured.prefill),
        replace(sampling, phase="sampling", activations=measured.sampling),
        replace(passing, phase="score", activations=measured.score),
        # A reference that is offloaded is on the device during its own pass alone.
        replace(passing, phase="log-probs", weights=passing.weights + reference, activations=measured.logprobs),
        replace(updating, phase="backward", gradients=backward, activations=measured.backward),
        replace(still, phase="optimizer step", gradients=step),
    ], offloaded
