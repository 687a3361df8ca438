"""What lies on one process's device beside the passes: weights, gradients and the optimizer's state, whole or shared
out by DDP or DeepSpeed ZeRO.

The arithmetic follows DeepSpeed 0.19.8 as `zero` drives it. Left out: padding of its flat buffers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.estimate_memory.fake_models import Figures

_MAX_LIVE = 10**9
"""Parameters that ZeRO 3 keeps gathered at most, for the passes to come (`stage3_max_live_parameters`)."""


@dataclass(frozen=True)
class Sharding:
    """How a run is spread: `processes`, and the ZeRO `stage` (0: whole copies, under DDP where there are several)."""

    processes: int = 1
    stage: int = 0
    reduce_bucket: int | None = None
    """Elements of the buffer in which ZeRO reduces gradients; None = what `auto` stands for, hidden size squared."""
    buckets: int = 1
    """Such buffers that ZeRO 1 and 2 have: 2 with `overlap_comm`."""
    offload_optimizer: bool = False
    """Whether the optimizer's state lies in host memory."""
    offload_weights: bool = False
    """Whether the shares of the weights do, under ZeRO 3."""

    def at(self, stage: int) -> "Sharding":
        """The same with another stage: of a file of its own, its buffers and what it offloads."""
        if stage == self.stage:
            return self
        buckets = self.buckets if self.reduce_bucket else 2 if stage == 2 else 1
        return replace(self, stage=stage, buckets=buckets)


@dataclass(frozen=True)
class Gradients:
    """Bytes of gradients around one backward pass: `before` it and while its head runs, `during` the decoder's part,
    and at its end (`after`), when its activations are gone.
    """

    before: float
    during: float
    after: float


class Shares:
    """Bytes by cause of one process, beside its passes.

    Args:
        figures: what `fake_passes.measure` says, for the precision that the engine has.
        args: of the run.
        sharding: how the run is spread.
    """

    def __init__(self, figures: Figures, args: PPOConfig, sharding: Sharding) -> None:
        self._figures, self._args, self._sharding = figures, args, sharding
        self._stage, self._count = sharding.stage, sharding.processes
        # On a CPU, host memory is the device's.
        self._state_on_host = sharding.offload_optimizer and self._stage > 0 and not args.use_cpu
        self.reference_on_host = args.reference == "copy_offloaded" and not args.use_cpu
        """Whether a copied reference is on the device for its own pass alone."""
        self._weights_on_host = sharding.offload_weights and self._stage == 3 and not args.use_cpu
        self._gradients = {name: figures[f"{name}/gradients"] for name in ("policy", "critic")}
        # In float32, whatever the precision of the weights.
        self._elements = {name: figures[f"{name}/elements"] for name in ("policy", "critic")}
        self._share = sum(self._gradients.values()) / (self._count if self._stage else 1)

    @property
    def weights(self) -> float:
        """Of all models, between passes."""
        whole = self._whole_weights
        if self._stage < 3:
            return whole
        return 0.0 if self._weights_on_host else whole / self._count

    @property
    def _whole_weights(self) -> float:
        figures = self._figures
        names = ["policy", "critic", *([] if self.reference_on_host else ["reference"])]
        names += [name.split("/")[0] for name in figures if name.startswith("reward") and name.endswith("/weights")]
        return sum(figures[f"{name}/weights"] for name in names)

    @property
    def offloaded(self) -> float:
        """What DeepSpeed keeps in host memory instead."""
        state = 12 * sum(self._elements.values()) / self._count + self._share if self._state_on_host else 0.0
        return state + (self._whole_weights / self._count if self._weights_on_host else 0.0)

    @property
    def standing_gradients(self) -> float:
        """What lies there also while nothing trains: DDP's buckets, copies of all gradients; the buffers of ZeRO 3."""
        if self._stage == 3:
            return self._bucket_bytes + (0.0 if self._state_on_host else self._share)
        return self._share if self._stage == 0 and self._count > 1 else 0.0

    @property
    def master(self) -> float:
        """DeepSpeed's own float32 copy of this process's part of the weights, which the optimizer steps."""
        if not self._stage or self._state_on_host:
            return 0.0
        return 4 * sum(self._elements.values()) / self._count

    @property
    def optimizer(self) -> float:
        """AdamW's two numbers for each weight that trains, and the master copy."""
        if self._state_on_host:
            return 0.0
        return self.master + 8 * sum(self._elements.values()) / (self._count if self._stage else 1)

    @property
    def _bucket_bytes(self) -> float:
        figures, sharding = self._figures, self._sharding
        elements = sharding.reduce_bucket or figures["policy/hidden"] ** 2
        if not sum(self._elements.values()):
            return 0.0
        width = sum(self._gradients.values()) / sum(self._elements.values())
        return elements * width * (1 if self._stage == 3 else sharding.buckets)

    def gathered(self, name: str, *, sampling: bool = False, training: bool = False) -> float:
        """Whole weights beside the shares while the model `name` runs, under ZeRO 3, at most: DeepSpeed keeps them for
        the passes to come, once it has seen their order.
        """
        if self._stage < 3:
            return 0.0
        whole = self._figures[f"{name}/weights"]
        if sampling and self._args.ds3_gather_for_generation:
            return whole
        # Two passes of one base differ in their adapters: DeepSpeed sees no order in that.
        changing = training and self._args.uses_critic and self._args.critic_layout == "adapter"
        if sampling or changing:
            # Layer by layer, and what lies outside them.
            whole = self._figures["policy/outside"] + self._figures["policy/layer"]
        half = self._args.bf16 or self._args.dtype == "bfloat16"
        return min(whole, _MAX_LIVE * (2.0 if half else 4.0))

    def around(self, passes: list[str], place: int, *, single: bool) -> Gradients:
        """The gradients around the pass at `place` of `passes`, those of a micro-batch, which may be the `single` one
        of an optimizer step; the last one makes also what no other does.
        """
        made = self._made_by(passes)
        all_of_them, own = sum(made.values()), made[passes[place]]
        before = sum(made[name] for name in passes[:place]) if single else all_of_them
        after = before + own if single else before
        if self._stage == 0:
            standing = self.standing_gradients
            return Gradients(standing + before, standing + before, standing + after)
        if self._stage == 3:
            return Gradients(*[self.standing_gradients] * 3)
        if self._stage == 1:
            # Gradients stay whole until the last pass is made, and are shared out then.
            last = place == len(passes) - 1
            shared_out = (0.0 if self._state_on_host else self._share) + self._bucket_bytes if last else 0.0
            return Gradients(before, before, after + shared_out)
        return self._in_stage_2(made, passes, place, single=single)

    def _made_by(self, passes: list[str]) -> dict[str, float]:
        if "critic" in passes:
            return dict(self._gradients)
        return {"policy": sum(self._gradients.values())}

    def _in_stage_2(self, made: Mapping[str, float], passes: list[str], place: int, *, single: bool) -> Gradients:
        if self._state_on_host:
            return Gradients(*[self._bucket_bytes] * 3)
        # Each pass has a buffer for all of this process's part, and zeros for what other passes make.
        idle = [(sum(made.values()) - made[name]) / self._count for name in passes]
        before = 0.0 if single and place == 0 else self._share + idle[0]
        during = before + self._share + self._bucket_bytes
        return Gradients(before + self._bucket_bytes, during, during + idle[place])

    def at_step(self) -> tuple[float, float]:
        """Gradients and the optimizer's bytes while it steps the larger group of weights, its workspace among them."""
        if self._state_on_host:
            return self.standing_gradients, 0.0
        if self._stage:
            part = 4 * max(self._elements.values()) / self._count
            # The gradients once more, in float32; AdamW's workspace is two such copies, one on an accelerator.
            buffers = self._bucket_bytes if self._stage == 3 else 0.0
            return self._share + buffers + part, self.optimizer + part * (2 if self._args.use_cpu else 1)
        if self._args.use_cpu:
            workspace = 2 * self._figures["policy/largest"]
        else:
            # On an accelerator all weights of a group are stepped at once, over a copy of the second moments.
            workspace = max(self._gradients.values())
        return self._share + self.standing_gradients, self.optimizer + workspace
