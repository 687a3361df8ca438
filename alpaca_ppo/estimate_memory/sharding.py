"""Weights, gradients and optimizer state on one device: complete, replicated by DDP or sharded by DeepSpeed ZeRO.

The arithmetic follows DeepSpeed 0.19.8 as `distributed.deepspeed_engine` uses it, without the padding of its buffers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.estimate_memory.fake_models import Measurements

_MAX_LIVE = 10**9
"""Parameters that ZeRO 3 keeps gathered at most (`stage3_max_live_parameters`)."""


@dataclass(frozen=True)
class Sharding:
    """How a run is distributed over `processes` by ZeRO `stage` 1 to 3, or (0) replicated by DDP."""

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
        buckets = self.buckets if self.reduce_bucket else 2 if stage == 2 else 1
        return replace(self, stage=stage, buckets=buckets)


@dataclass(frozen=True)
class Gradients:
    """Bytes of gradients around one backward pass.

    Attributes:
        before: before the backward pass, and while it goes through the head.
        during: while it goes through the decoder.
        after: at its end, when its activations have been freed.
    """

    before: float
    during: float
    after: float


class DeviceMemory:
    """Bytes on one process's device, by cause, without the passes.

    Args:
        measured: what `measure` returned, with `zero` as in `sharding`.
        args: of the run.
        sharding: how the run is distributed.
    """

    def __init__(self, measured: Measurements, args: PPOConfig, sharding: Sharding) -> None:
        self._measured, self._args, self._sharding = measured, args, sharding
        self._stage, self._processes = sharding.stage, sharding.processes
        # On a CPU, host memory is device memory.
        self._state_on_host = sharding.offload_optimizer and self._stage > 0 and not args.use_cpu
        self.reference_on_host = args.reference == "copy_offloaded" and not args.use_cpu
        """Whether a copied reference is on the device only during its own pass."""
        self._weights_on_host = sharding.offload_weights and self._stage == 3 and not args.use_cpu
        self._gradients = {name: measured[f"{name}/gradients"] for name in ("policy", "critic")}
        # Optimizer state is in float32, whatever the precision of the weights.
        self._elements = {name: measured[f"{name}/elements"] for name in ("policy", "critic")}
        self._gradient_share = sum(self._gradients.values()) / (self._processes if self._stage else 1)

    @property
    def weights(self) -> float:
        """Bytes of the weights of all models, between passes."""
        total = self._total_weights
        if self._stage < 3:
            return total
        return 0.0 if self._weights_on_host else total / self._processes

    @property
    def _total_weights(self) -> float:
        measured = self._measured
        names = ["policy", "critic", *([] if self.reference_on_host else ["reference"])]
        names += [name.split("/")[0] for name in measured if name.startswith("reward") and name.endswith("/weights")]
        return sum(measured[f"{name}/weights"] for name in names)

    @property
    def offloaded(self) -> float:
        """Bytes that DeepSpeed keeps in host memory instead."""
        state = (
            12 * sum(self._elements.values()) / self._processes + self._gradient_share if self._state_on_host else 0.0
        )
        return state + (self._total_weights / self._processes if self._weights_on_host else 0.0)

    @property
    def gradient_buffers(self) -> float:
        """Bytes of gradient buffers that are also allocated during rollouts: DDP's buckets, ZeRO 3's buffers."""
        if self._stage == 3:
            return self._bucket_bytes + (0.0 if self._state_on_host else self._gradient_share)
        return self._gradient_share if self._stage == 0 and self._processes > 1 else 0.0

    @property
    def master(self) -> float:
        """Bytes of DeepSpeed's float32 master copy of this process's part of the weights."""
        if not self._stage or self._state_on_host:
            return 0.0
        return 4 * sum(self._elements.values()) / self._processes

    @property
    def optimizer(self) -> float:
        """Bytes of AdamW's two moments of each trained weight, and of the master copy."""
        if self._state_on_host:
            return 0.0
        return self.master + 8 * sum(self._elements.values()) / (self._processes if self._stage else 1)

    @property
    def _bucket_bytes(self) -> float:
        measured, sharding = self._measured, self._sharding
        elements = sharding.reduce_bucket or measured["policy/hidden"] ** 2
        if not sum(self._elements.values()):
            return 0.0
        width = sum(self._gradients.values()) / sum(self._elements.values())
        return elements * width * (1 if self._stage == 3 else sharding.buckets)

    def gathered(self, name: str, *, sampling: bool = False, training: bool = False) -> float:
        """Maximum bytes of gathered weights beside the shards while the model `name` runs, under ZeRO 3.

        DeepSpeed keeps gathered weights for later passes once it has recorded the order of the modules.
        """
        if self._stage < 3:
            return 0.0
        gathered = self._measured[f"{name}/weights"]
        if sampling:
            return gathered
        # Passes of one base with different adapters have no common order that DeepSpeed could record.
        unordered = training and self._args.uses_critic and self._args.critic_layout == "adapter"
        if unordered:
            # One layer at a time, and the weights outside the layers.
            gathered = self._measured["policy/outside"] + self._measured["policy/layer"]
        half = self._args.bf16 or self._args.dtype == "bfloat16"
        return min(gathered, _MAX_LIVE * (2.0 if half else 4.0))

    def gradients_around(self, passes: list[str], place: int, *, single: bool) -> Gradients:
        """The gradients around one of the backward passes of a micro-batch.

        Args:
            passes: of a micro-batch, in order: "critic" and "policy", or only "policy", which then has all gradients.
            place: index of the pass.
            single: whether the micro-batch is the only one of its optimizer step.
        """
        by_pass = self._gradients_of(passes)
        total, own = sum(by_pass.values()), by_pass[passes[place]]
        before = sum(by_pass[name] for name in passes[:place]) if single else total
        after = before + own if single else before
        if self._stage == 0:
            standing = self.gradient_buffers
            return Gradients(standing + before, standing + before, standing + after)
        if self._stage == 3:
            return Gradients(*[self.gradient_buffers] * 3)
        if self._stage == 1:
            # Gradients stay complete until the last pass, and are sharded then.
            last = place == len(passes) - 1
            shards = (0.0 if self._state_on_host else self._gradient_share) + self._bucket_bytes if last else 0.0
            return Gradients(before, before, after + shards)
        return self._in_stage_2(by_pass, passes, place, single=single)

    def _gradients_of(self, passes: list[str]) -> dict[str, float]:
        if "critic" in passes:
            return dict(self._gradients)
        return {"policy": sum(self._gradients.values())}

    def _in_stage_2(self, by_pass: Mapping[str, float], passes: list[str], place: int, *, single: bool) -> Gradients:
        if self._state_on_host:
            return Gradients(*[self._bucket_bytes] * 3)
        # Each pass allocates a buffer for this process's whole part, with zeros for the gradients of other passes.
        idle = [(sum(by_pass.values()) - by_pass[name]) / self._processes for name in passes]
        before = 0.0 if single and place == 0 else self._gradient_share + idle[0]
        during = before + self._gradient_share + self._bucket_bytes
        return Gradients(before + self._bucket_bytes, during, during + idle[place])

    def during_step(self) -> tuple[float, float]:
        """Bytes of gradients, and of optimizer state and workspace, while the larger group of weights is updated."""
        if self._state_on_host:
            return self.gradient_buffers, 0.0
        if self._stage:
            part = 4 * max(self._elements.values()) / self._processes
            # A float32 copy of the gradients.
            buffers = self._bucket_bytes if self._stage == 3 else 0.0
            return self._gradient_share + buffers + part, self.optimizer
        return self._gradient_share + self.gradient_buffers, self.optimizer
