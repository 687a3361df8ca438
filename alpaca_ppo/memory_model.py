"""The memory of each phase of a PPO step, by cause: the arithmetic over what `fake_passes` measures.

Counts tensors. Left out: what a device and its kernels take for themselves, and the layers that ZeRO 3 gathers for a
pass.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from alpaca_ppo.config import PPOConfig
from alpaca_ppo.fake_models import Figures, Models
from alpaca_ppo.fake_passes import Sizes, measure

CAUSES = ("weights", "gradients", "optimizer", "activations", "kv_cache", "logits")
PHASES = ("load", "prefill", "sampling", "score", "log-probs", "backward", "optimizer step")
"""The rollout is the four from `prefill`, which reads the prompts, to `log-probs`; the update is the last two."""


@dataclass(frozen=True)
class Sharding:
    """How a run is spread: `processes`, and the ZeRO `stage` (0: whole copies, under DDP where there are several)."""

    processes: int = 1
    stage: int = 0


@dataclass(frozen=True)
class Moment:
    """What is in memory at once, in bytes."""

    phase: str
    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    kv_cache: float = 0.0
    logits: float = 0.0

    @property
    def total(self) -> float:
        """Bytes in all."""
        return float(sum(getattr(self, cause) for cause in CAUSES))


def sizes_of(args: PPOConfig, processes: int) -> Sizes:
    """Rows and tokens of the passes of one of `processes`, where every row is as long as it may be."""
    prompts = math.ceil(args.rollout_batch_size / processes)
    micro_batches = micro_batches_of(args, processes)
    return Sizes(
        prompts=min(prompts, max(1, args.rollout_per_device_batch_size // args.num_return_sequences)),
        samples=args.num_return_sequences,
        rows=min(prompts * args.num_return_sequences, args.rollout_per_device_batch_size),
        micro_rows=math.ceil(args.step_batch_size / (micro_batches * processes)),
        query=args.query_len,
        response=args.response_len,
    )


def micro_batches_of(args: PPOConfig, processes: int) -> int:
    """Micro-batches of an optimizer step."""
    return math.ceil(args.step_batch_size / (args.step_per_device_batch_size * processes))


def predict(models: Models, args: PPOConfig, sharding: Sharding) -> list[Moment]:
    """The highest moment of each phase, in the order of PHASES, in bytes of one process's device.

    Raises:
        ValueError: what `fake_passes.measure` raises.
    """
    figures = measure(models, args, sizes_of(args, sharding.processes))
    return spread(figures, args, sharding)


def spread(figures: Figures, args: PPOConfig, sharding: Sharding) -> list[Moment]:
    """The highest moment of each phase, of figures that were measured for `sharding.processes`."""
    moments = list(_Step(figures, args, sharding).moments())
    return [max((m for m in moments if m.phase == phase), key=lambda m: m.total) for phase in PHASES]


class _Step:
    def __init__(self, figures: Figures, args: PPOConfig, sharding: Sharding) -> None:
        self._figures, self._args, self._sharding = figures, args, sharding
        count, stage = sharding.processes, sharding.stage
        self._trained = figures["policy/weights"] + figures["critic/weights"]
        self._shard = self._trained / (count if stage == 3 else 1)
        self._frozen = sum(v for name, v in figures.items() if name.startswith("reward") and name.endswith("/weights"))
        self._reference = figures["reference/weights"]
        if args.reference != "copy_offloaded":
            self._frozen += self._reference
        whole = figures["policy/gradients"] + figures["critic/gradients"]
        # AdamW keeps two numbers for each that trains, in its own precision.
        self._optimizer = 2 * whole / (count if stage >= 1 else 1)
        # DDP reduces in buckets, which are copies.
        self._copies = 2.0 if count > 1 and stage == 0 else 1 / count if stage >= 2 else 1.0

    @property
    def _weights(self) -> float:
        return self._shard + self._frozen

    def moments(self) -> Iterator[Moment]:
        """The phases of a step, in their order, each with its bytes by cause."""
        yield Moment("load", weights=self._weights)
        yield from self._rollout()
        yield from self._score()
        yield from self._evaluation()
        yield from self._backward()
        yield self._optimizer_step()

    def _rollout(self) -> Iterator[Moment]:
        figures, cast = self._figures, self._figures["policy/cast"]
        # Sampling wants the policy whole.
        gathered = figures["policy/weights"] - figures["policy/weights"] * self._shard / self._trained
        held = {"weights": self._weights + gathered + cast, "optimizer": self._optimizer}
        unpacked = figures["policy/unpacked"]
        yield Moment("prefill", **held, activations=figures["policy/prefill"] - cast + unpacked)
        cache = figures["policy/kv_cache"]
        step = max(figures["policy/decode"], figures["policy/kv_layer"])
        yield Moment("sampling", **held, kv_cache=cache, activations=step + unpacked)
        yield Moment("sampling", **held, kv_cache=cache, logits=figures["policy/choose"])

    def _score(self) -> Iterator[Moment]:
        held = {"weights": self._weights, "optimizer": self._optimizer}
        for name, figure in self._figures.items():
            if name.endswith("/score"):
                yield Moment("score", **held, activations=figure)

    def _evaluation(self) -> Iterator[Moment]:
        casts = 0.0
        for name in ("policy", "critic", "reference"):
            if f"{name}/eval.backbone" not in self._figures:
                continue
            own = self._figures.get(f"{name}/cast", 0.0)
            # Autocast lets go of the actor's and the critic's copies before the reference's pass.
            casts = 0.0 if name == "reference" else casts
            offloaded = self._reference if name == "reference" and self._args.reference == "copy_offloaded" else 0.0
            held = {"weights": self._weights + casts + own + offloaded, "optimizer": self._optimizer}
            yield from self._pass("log-probs", f"{name}/eval", held, less=own)
            casts += own

    def _backward(self) -> Iterator[Moment]:
        figures = self._figures
        single = micro_batches_of(self._args, self._sharding.processes) == 1
        of_critic = figures["critic/gradients"] * self._copies
        everything = of_critic + figures["policy/gradients"] * self._copies
        held = {"weights": self._weights, "optimizer": self._optimizer}
        for name in ("critic", "policy"):
            if f"{name}/train.backbone" not in figures:
                continue
            if single:
                # Gradients come as activations go: one end or the other is the highest.
                before, after = (0.0, of_critic) if name == "critic" else (of_critic, everything)
                tail = figures[f"{name}/train.tail"]
                yield Moment("backward", **held, gradients=after, activations=tail)
            else:
                before = everything
            yield from self._pass("backward", f"{name}/train", held | {"gradients": before})

    def _pass(self, phase: str, name: str, held: dict[str, float], less: float = 0.0) -> Iterator[Moment]:
        """The moments of a pass; `less` is what it counts that `held` counts as weights."""
        unpacked = self._figures["policy/unpacked"]
        backbone, saved, head = (self._figures[f"{name}.{part}"] for part in ("backbone", "saved", "head"))
        yield Moment(phase, **held, activations=backbone - less + unpacked)
        yield Moment(phase, **held, activations=saved - less, logits=head - saved)

    def _optimizer_step(self) -> Moment:
        figures = self._figures
        gradients = [figures[f"{name}/gradients"] for name in ("policy", "critic")]
        if self._args.use_cpu:
            workspace = 2 * figures["policy/largest"]
        else:
            # On an accelerator all weights of a group are stepped at once, over a copy of the second moments.
            workspace = max(gradients) / (self._sharding.processes if self._sharding.stage >= 1 else 1)
        return Moment(
            "optimizer step",
            weights=self._weights,
            gradients=sum(gradients) * self._copies,
            optimizer=self._optimizer + workspace,
        )
