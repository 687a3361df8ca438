"""Weights, gradients and optimizer on one device: whole, replicated by DDP or sharded by DeepSpeed ZeRO.

The arithmetic follows DeepSpeed 0.19.8 as `distributed.deepspeed_engine` uses it, without the padding of its buffers.
"""

from dataclasses import dataclass, replace

from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.distributed.deepspeed_config import check_stage, read_deepspeed_file, resolve_auto
from alpaca_ppo.estimate_memory.passes import Measured

CAUSES = ("weights", "gradients", "optimizer", "activations", "kv_cache")
PHASES = ("prefill", "sampling", "score", "log-probs", "backward", "optimizer step")
_MAX_LIVE = 10**9
"""Parameters that ZeRO 3 keeps gathered at most (`stage3_max_live_parameters`)."""


@dataclass(frozen=True)
class Sharding:
    """How a run is distributed over `processes`: by ZeRO `stage` 1 to 3, or (0) replicated by DDP."""

    processes: int = 1
    stage: int = 0
    reduce_bucket: int = 0
    """Elements of the buffer in which ZeRO reduces gradients; 0 = "auto", the hidden size squared."""
    buckets: int = 1
    """Number of these buffers in ZeRO 1 and 2: 2 with `overlap_comm`."""
    offload_optimizer: bool = False
    """Whether the optimizer state is in host memory."""
    offload_weights: bool = False
    """Whether the shards of the weights are in host memory, under ZeRO 3."""

    def at(self, stage: int) -> "Sharding":
        """The same with another ZeRO stage, with that stage's default number of buffers."""
        if stage == self.stage:
            return self
        return replace(self, stage=stage, buckets=self.buckets if self.reduce_bucket else 2 if stage == 2 else 1)


def sharding_of(processes: int, stage: int, args: PPOConfig) -> Sharding:
    """How the run is sharded: by the file `args.deepspeed`, or like examples/deepspeed_configs for `stage`.

    Raises:
        ValueError: for a file that the run would refuse, or whose stage is not `stage` (unless that is 0).
    """
    if args.deepspeed is None:
        return Sharding(processes, stage, buckets=2 if stage == 2 else 1)
    settings = resolve_auto(
        read_deepspeed_file(args.deepspeed),
        args,
        processes=processes,
        # Buckets of size 0, which means "auto" here.
        hidden_size=0,
    )
    zero = settings["zero_optimization"]
    file_stage = zero.get("stage", 0)
    check_stage(file_stage, f"deepspeed {args.deepspeed!r}")
    if stage not in (0, file_stage):
        raise ValueError(
            f"zero_stage is {stage}, but deepspeed {args.deepspeed!r} has stage {file_stage}; leave zero_stage out"
        )
    offloads = {
        name: (zero.get(name) or {}).get("device", "none") != "none" for name in ("offload_optimizer", "offload_param")
    }
    return Sharding(
        processes,
        file_stage,
        reduce_bucket=int(zero.get("reduce_bucket_size", 5e8)),
        buckets=2 if zero.get("overlap_comm") else 1,
        offload_optimizer=offloads["offload_optimizer"],
        offload_weights=offloads["offload_param"],
    )


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
    # Passes of one base with different adapters have no common order that DeepSpeed could record.
    unordered = args.uses_critic and args.critic_layout == "adapter"
    half = args.bf16 or args.dtype == "bfloat16"
    gathered = min(
        measured.layer if unordered else policy + measured.weights.get("critic", 0.0),
        _MAX_LIVE * (2.0 if half else 4.0),
    )
    bucket = (sharding.reduce_bucket or measured.hidden**2) * (gradients / elements if elements else 0.0)
    buckets, share = bucket * sharding.buckets, gradients / n
    # A row for each stage: weights, gathered; gradients between the updates, during backward and the step; optimizer.
    engines = {
        0: (weights, 0.0, gradients * (n > 1), gradients * (1 + (n > 1)), gradients * (1 + (n > 1)), 8 * elements),
        1: (weights, 0.0, 0.0, gradients + share + buckets, share + 4 * elements / n, 12 * elements / n),
        2: (weights, 0.0, 0.0, 2 * share + 2 * buckets, share + 4 * elements / n, 12 * elements / n),
        3: (
            weights / n,
            gathered,
            share + bucket,
            share + bucket,
            share + bucket + 4 * elements / n,
            12 * elements / n,
        ),
    }
    of_weights, gathers, between, backward, step, optimizer = engines[stage]
    offloaded = 0.0
    if stage and sharding.offload_optimizer and not args.use_cpu:
        offloaded, optimizer = optimizer + share, 0.0
        between, backward, step = (max(0.0, size - share) for size in (between, backward, between))
    if stage == 3 and sharding.offload_weights and not args.use_cpu:
        offloaded, of_weights = offloaded + of_weights, 0.0
    still = PhaseMemory("", of_weights, between, optimizer)
    sampling = replace(still, weights=of_weights + (policy if stage == 3 else 0.0), kv_cache=measured.kv_cache)
    passing = replace(still, weights=of_weights + gathers)
    # The gradients that exist at the peak are measured with the pass, and counted as the engine holds them.
    activations = max(0.0, measured.backward - gradients)
    at_once = 0.0 if args.use_cpu or args.generation_backend == "generate" else measured.kv_cache
    return [
        replace(sampling, phase="prefill", activations=measured.prefill, kv_cache=at_once),
        replace(sampling, phase="sampling", activations=measured.sampling),
        replace(passing, phase="score", activations=measured.score),
        # A reference that is offloaded is on the device during its own pass alone.
        replace(passing, phase="log-probs", weights=passing.weights + reference, activations=measured.logprobs),
        replace(
            passing,
            phase="backward",
            gradients=min(backward, measured.backward) if n == 1 else backward,
            activations=activations,
        ),
        replace(still, phase="optimizer step", gradients=step),
    ], offloaded
