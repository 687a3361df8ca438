"""The memory of each phase of a PPO step, by cause: the arithmetic over what `fake_passes` measures.

Counts tensors. Left out: what a device and its kernels take for themselves.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.estimate_memory.fake_models import Figures, Models
from alpaca_ppo.estimate_memory.measure import Sizes, measure
from alpaca_ppo.estimate_memory.sharding import Sharding, Shares

CAUSES = ("weights", "gradients", "optimizer", "activations", "kv_cache", "logits")
PHASES = ("load", "prefill", "sampling", "score", "log-probs", "backward", "optimizer step")
"""The rollout is the four from `prefill`, which reads the prompts, to `log-probs`; the update is the last two."""


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
    figures = measure(models, args, sizes_of(args, sharding.processes), zero=sharding.stage > 0)
    return spread(figures, args, sharding)


def spread(figures: Figures, args: PPOConfig, sharding: Sharding) -> list[Moment]:
    """The highest moment of each phase, of figures that were measured for `sharding.processes`."""
    moments = list(_Step(figures, args, sharding).moments())
    return [max((m for m in moments if m.phase == phase), key=lambda m: m.total) for phase in PHASES]


class _Step:
    def __init__(self, figures: Figures, args: PPOConfig, sharding: Sharding) -> None:
        self._figures, self._args, self._sharding = figures, args, sharding
        self._shares = Shares(figures, args, sharding)
        self._weights = self._shares.weights

    def moments(self) -> Iterator[Moment]:
        """The phases of a step, in their order, each with its bytes by cause."""
        shares = self._shares
        yield Moment("load", weights=self._weights, optimizer=shares.master, gradients=self._loaded_gradients)
        yield from self._rollout()
        yield from self._score()
        yield from self._evaluation()
        yield from self._backward()
        gradients, optimizer = shares.at_step()
        yield Moment("optimizer step", weights=self._weights, gradients=gradients, optimizer=optimizer)

    @property
    def _loaded_gradients(self) -> float:
        # DDP's buckets are made in the first backward pass.
        return self._shares.standing_gradients if self._sharding.stage else 0.0

    def _held(self, extra_weights: float = 0.0) -> dict[str, float]:
        """What lies there while nothing trains, by cause."""
        shares = self._shares
        weights = self._weights + extra_weights
        return {"weights": weights, "gradients": shares.standing_gradients, "optimizer": shares.optimizer}

    def _rollout(self) -> Iterator[Moment]:
        figures, cast = self._figures, self._figures["policy/cast"]
        held = self._held(self._shares.gathered("policy", sampling=True) + cast)
        unpacked = figures["policy/unpacked"]
        yield Moment("prefill", **held, activations=figures["policy/prefill"] - cast + unpacked)
        cache = figures["policy/kv_cache"]
        step = max(figures["policy/decode"], figures["policy/kv_layer"])
        yield Moment("sampling", **held, kv_cache=cache, activations=step + unpacked)
        yield Moment("sampling", **held, kv_cache=cache, logits=figures["policy/choose"])

    def _score(self) -> Iterator[Moment]:
        for name, figure in self._figures.items():
            if name.endswith("/score"):
                # Without a reward model the policy's figure is 0: it scores nothing.
                gathered = self._shares.gathered(name.split("/")[0]) if figure else 0.0
                yield Moment("score", **self._held(gathered), activations=figure)

    def _evaluation(self) -> Iterator[Moment]:
        casts = 0.0
        for name in ("policy", "critic", "reference"):
            if f"{name}/eval.backbone" not in self._figures:
                continue
            own = self._figures.get(f"{name}/cast", 0.0)
            # Autocast lets go of the actor's and the critic's copies before the reference's pass.
            casts = 0.0 if name == "reference" else casts
            held = self._held(casts + own + self._visiting(name))
            yield from self._pass("log-probs", f"{name}/eval", held, less=own)
            casts += own

    def _visiting(self, name: str) -> float:
        """Weights that are there for the pass of `name` alone."""
        shares, reference = self._shares, self._figures["reference/weights"]
        if self._sharding.stage == 3:
            # DeepSpeed keeps what the policy's pass has gathered; the critic's comes and goes by layers.
            return shares.gathered("policy") + (shares.gathered("reference") if name == "reference" else 0.0)
        return reference if name == "reference" and shares.reference_on_host else 0.0

    def _backward(self) -> Iterator[Moment]:
        figures, shares = self._figures, self._shares
        single = micro_batches_of(self._args, self._sharding.processes) == 1
        passes = [name for name in ("critic", "policy") if f"{name}/train.backbone" in figures]
        for place, name in enumerate(passes):
            gradients = shares.around(passes, place, single=single)
            held = self._held(shares.gathered(self._running(name), training=True))
            # Where gradients come as activations go, one end or the other is the highest.
            tail = figures[f"{name}/train.tail"] if single and not self._sharding.stage else 0.0
            yield Moment("backward", **held | {"gradients": gradients.after}, activations=tail)
            yield from self._pass(
                "backward",
                f"{name}/train",
                held | {"gradients": gradients.before},
                backbone_gradients=gradients.during,
            )

    def _running(self, name: str) -> str:
        """The model whose weights the pass `name` reads: a critic that is an adapter has its head alone."""
        own_backbone = name == "critic" and self._args.critic_layout == "separate"
        return "critic" if own_backbone else "policy"

    def _pass(
        self,
        phase: str,
        name: str,
        held: dict[str, float],
        *,
        less: float = 0.0,
        backbone_gradients: float | None = None,
    ) -> Iterator[Moment]:
        """The moments of a pass; `less` is what it counts that `held` counts as weights."""
        unpacked = self._figures["policy/unpacked"]
        backbone, saved, head = (self._figures[f"{name}.{part}"] for part in ("backbone", "saved", "head"))
        in_decoder = held if backbone_gradients is None else held | {"gradients": backbone_gradients}
        yield Moment(phase, **in_decoder, activations=backbone - less + unpacked)
        yield Moment(phase, **held, activations=saved - less, logits=head - saved)
