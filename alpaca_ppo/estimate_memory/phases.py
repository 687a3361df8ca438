"""Peak memory of each phase of a PPO step, by cause: the arithmetic on what `measure` returns.

Counts tensors only, not what a device and its kernels need for themselves.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.estimate_memory.fake_models import Measurements, Models
from alpaca_ppo.estimate_memory.measure import Sizes, measure
from alpaca_ppo.estimate_memory.sharding import DeviceMemory, Sharding

CAUSES = ("weights", "gradients", "optimizer", "activations", "kv_cache", "logits")
PHASES = ("load", "prefill", "sampling", "score", "log-probs", "backward", "optimizer step")
"""The rollout is `prefill` (of the prompts) to `log-probs`; the update is `backward` and `optimizer step`."""


@dataclass(frozen=True)
class PhaseMemory:
    """What is in memory at one moment of a phase, in bytes by cause."""

    phase: str
    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    kv_cache: float = 0.0
    logits: float = 0.0

    @property
    def total(self) -> float:
        """Sum over the causes, in bytes."""
        return float(sum(getattr(self, cause) for cause in CAUSES))


def sizes_of(args: PPOConfig, processes: int, *, replies: bool = False) -> Sizes:
    """Batch sizes and lengths of one process's passes, if every row has full length.

    With `replies`, something may answer the policy in the middle of a response; then all rows read replies that fill
    their responses at the same time, because no option bounds a reply.

    Whether a model's rows can be without padding is not known without its weights; it is assumed if the option allows
    it, which changes these sizes by less than a row.
    """
    prompts = math.ceil(args.rollout_batch_size / processes)
    micro_rows, micro_tokens = _micro_batch(args, processes)
    return Sizes(
        prompts=min(prompts, max(1, args.rollout_per_device_batch_size // args.num_return_sequences)),
        samples=args.num_return_sequences,
        rows=min(prompts * args.num_return_sequences, args.rollout_per_device_batch_size),
        micro_rows=micro_rows,
        micro_tokens=micro_tokens,
        query=args.query_len,
        response=args.response_len,
        # A response of one column has no room for a reply.
        replies=replies and args.response_len > 1 and args.generation_backend != "generate",
    )


def micro_batches_of(args: PPOConfig, processes: int) -> int:
    """Micro-batches per optimizer step and process, if rows are not divided by tokens; DeepSpeed is told so many."""
    return math.ceil(args.step_batch_size / (args.step_per_device_batch_size * processes))


def _micro_batch(args: PPOConfig, processes: int) -> tuple[int, int]:
    """Rows and tokens (in the pass that reads the most) of the largest micro-batch."""
    longest = args.longest_row
    own = math.ceil(args.step_batch_size / processes)
    if args.padding_free is False and args.max_tokens_per_micro_batch is None and processes == 1:
        rows = math.ceil(args.step_batch_size / micro_batches_of(args, processes))
        return rows, rows * longest
    tokens = min(args.micro_batch_tokens, own * longest)
    return math.ceil(tokens / longest), tokens


def has_one_micro_batch(args: PPOConfig, processes: int) -> bool:
    """Whether an optimizer step has a single micro-batch on each process."""
    return _micro_batch(args, processes)[1] >= math.ceil(args.step_batch_size / processes) * args.longest_row


def predict(models: Models, args: PPOConfig, sharding: Sharding) -> list[PhaseMemory]:
    """The peak of each phase on one device, in the order of PHASES.

    Raises:
        ValueError: whatever `measure` raises.
    """
    measured = measure(models, args, sizes_of(args, sharding.processes), zero=sharding.stage > 0)
    return peak_by_phase(measured, args, sharding)


def peak_by_phase(measured: Measurements, args: PPOConfig, sharding: Sharding) -> list[PhaseMemory]:
    """The peak of each phase, from what `measure` returned for `sharding.processes`."""
    moments = list(_Step(measured, args, sharding).moments())
    return [max((m for m in moments if m.phase == phase), key=lambda m: m.total) for phase in PHASES]


class _Step:
    def __init__(self, measured: Measurements, args: PPOConfig, sharding: Sharding) -> None:
        self._measured, self._args, self._sharding = measured, args, sharding
        self._device = DeviceMemory(measured, args, sharding)
        self._weights = self._device.weights

    def moments(self) -> Iterator[PhaseMemory]:
        """The moments of a step that can be a phase's peak, in order of time."""
        device = self._device
        yield PhaseMemory("load", weights=self._weights, optimizer=device.master, gradients=self._loaded_gradients)
        yield from self._rollout()
        yield from self._score()
        yield from self._evaluation()
        yield from self._backward()
        gradients, optimizer = device.during_step()
        held = self._held("optimizer step")
        yield replace(held, gradients=gradients, optimizer=optimizer)

    @property
    def _loaded_gradients(self) -> float:
        # DDP allocates its buckets in the first backward pass.
        return self._device.gradient_buffers if self._sharding.stage else 0.0

    def _held(self, phase: str, extra_weights: float = 0.0) -> PhaseMemory:
        """What is in memory during `phase` without its passes."""
        device, weights = self._device, self._weights + extra_weights
        return PhaseMemory(
            phase,
            weights=weights,
            gradients=device.gradient_buffers,
            optimizer=device.optimizer,
        )

    def _rollout(self) -> Iterator[PhaseMemory]:
        measured, cast = self._measured, self._measured["policy/sampling_cast"]
        held = self._held("prefill", self._device.gathered("policy", sampling=True) + cast)
        unpacked = measured["policy/unpacked"]
        prefill = replace(held, activations=measured["policy/prefill"] - cast + unpacked)
        if not self._args.use_cpu and self._args.generation_backend != "generate":
            # The cache has its full size from the start; `measure` has seen one of the prompts' size.
            activations = prefill.activations - measured["policy/prompt_cache"]
            prefill = replace(prefill, kv_cache=measured["policy/kv_cache"], activations=activations)
        yield prefill
        cached = replace(held, phase="sampling", kv_cache=measured["policy/kv_cache"])
        step = max(measured["policy/decode"], measured["policy/kv_layer"])
        yield replace(cached, activations=step + unpacked)
        yield replace(cached, activations=measured["policy/replies"] + unpacked)
        yield replace(cached, logits=measured["policy/choose"])

    def _score(self) -> Iterator[PhaseMemory]:
        for name, size in self._measured.items():
            if name.endswith("/score"):
                # policy/score is 0 unless there is a reward adapter on the policy's base.
                gathered = self._device.gathered(name.split("/")[0]) if size else 0.0
                yield replace(self._held("score", gathered), activations=size)

    def _evaluation(self) -> Iterator[PhaseMemory]:
        casts = 0.0
        for name in ("policy", "critic", "reference"):
            if f"{name}/eval.backbone" not in self._measured:
                continue
            own = self._measured.get(f"{name}/cast", 0.0)
            # Autocast drops its copies of policy and critic before the reference's pass.
            casts = 0.0 if name == "reference" else casts
            held = self._held("log-probs", casts + own + self._only_during(name))
            yield from self._pass(f"{name}/eval", held, double_counted=own)
            casts += own

    def _only_during(self, name: str) -> float:
        """Bytes of weights that are on the device only during the pass of `name`."""
        device, reference = self._device, self._measured["reference/weights"]
        if self._sharding.stage == 3:
            # DeepSpeed keeps the policy's gathered weights; those of the critic are gathered and released by layer.
            return device.gathered("policy") + (device.gathered("reference") if name == "reference" else 0.0)
        return reference if name == "reference" and device.reference_on_host else 0.0

    def _backward(self) -> Iterator[PhaseMemory]:
        measured, device = self._measured, self._device
        single = has_one_micro_batch(self._args, self._sharding.processes)
        passes = [name for name in ("critic", "policy") if f"{name}/train.backbone" in measured]
        for place, name in enumerate(passes):
            gradients = device.gradients_around(passes, place, single=single)
            held = self._held("backward", device.gathered(self._running(name), training=True))
            # Gradients are allocated while activations are freed, so the peak is at one end of the pass or the other.
            tail = measured[f"{name}/train.tail"] if single and not self._sharding.stage else 0.0
            yield replace(held, gradients=gradients.after, activations=tail)
            yield from self._pass(
                f"{name}/train", replace(held, gradients=gradients.before), backbone_gradients=gradients.during
            )

    def _running(self, name: str) -> str:
        """The model whose weights the pass `name` reads: a critic without its own backbone reads the policy's."""
        own_backbone = name == "critic" and self._args.critic_layout == "separate"
        return "critic" if own_backbone else "policy"

    def _pass(
        self, name: str, held: PhaseMemory, *, double_counted: float = 0.0, backbone_gradients: float | None = None
    ) -> Iterator[PhaseMemory]:
        """The moments of a pass; `double_counted` bytes are included both in the pass and in the weights of `held`."""
        unpacked = self._measured["policy/unpacked"]
        backbone, saved, head = (self._measured[f"{name}.{part}"] for part in ("backbone", "saved", "head"))
        in_decoder = held if backbone_gradients is None else replace(held, gradients=backbone_gradients)
        yield replace(in_decoder, activations=backbone - double_counted + unpacked)
        yield replace(held, activations=saved - double_counted, logits=head - saved)
