"""Weights, gradients and optimizer on one device: whole, replicated by DDP or sharded by DeepSpeed ZeRO.

The arithmetic follows DeepSpeed 0.19.8 as `distributed.deepspeed_engine` uses it, without the padding of its buffers.
"""

from dataclasses import dataclass, replace

from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.estimate_memory.passes import Measured

_MAX_LIVE = 10**9
"""Parameters that ZeRO 3 keeps gathered at most (`stage3_max_live_parameters`)."""


@dataclass(frozen=True)
class Sharding:
    """How a run is distributed over `processes`: by ZeRO `stage` 1 to 3, or (0) replicated by DDP."""

    processes: int = 1
    stage: int = 0
    reduce_bucket: int | None = None
    """Elements of the buffer in which ZeRO reduces gradients; None = "auto", the hidden size squared."""
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


@dataclass(frozen=True)
class Held:
    """Bytes on one device beside the passes."""

    weights: float
    reference: float
    """Of a reference that is on the device only during its own pass."""
    gathered: float
    """Of the weights that ZeRO 3 gathers for a pass, at most."""
    gathered_to_sample: float
    gradients: float
    """Between the updates: DDP's buckets, ZeRO 3's buffers."""
    gradients_backward: float
    gradients_step: float
    optimizer: float
    offloaded: float
    """In host memory instead."""


def held(measured: Measured, args: PPOConfig, sharding: Sharding) -> Held:
    """What one process holds of `measured`, by the engine."""
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
    to_sample = policy if stage == 3 else 0.0
    return Held(of_weights, reference, gathers, to_sample, between, backward, step, optimizer, offloaded)
