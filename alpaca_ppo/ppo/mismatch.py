"""Whether sampler and trainer agree on the log-probs of the same tokens: the bounds, and what happens beyond them.

`judge` compares `mismatch/*` with the one table of bounds, `BOUNDS`. `MismatchGuard` applies it in a run: to a few
short responses before the first rollout is paid for, and to the rollouts of every step before they train the policy.
How the metrics are measured is in `metrics`, what `old_policy: auto` concludes from them in `old_policy`; the weights
of `old_policy: correct` are in `functional.policy_losses`.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from accelerate import Accelerator
from torch import Tensor

from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.distributed.collectives import max_over_ranks
from alpaca_ppo.distributed.engine import Engine
from alpaca_ppo.distributed.preemption import RolloutPoll
from alpaca_ppo.functional.masked import masked_mean
from alpaca_ppo.generation.sampling_params import SamplingParams
from alpaca_ppo.models import ActorCritic
from alpaca_ppo.models.packed_attention import underlying_attention
from alpaca_ppo.ppo.metrics import mismatch_stats
from alpaca_ppo.ppo.rollouts import RolloutCollector, evaluate_responses
from alpaca_ppo.types import PromptBatch, Rollouts

SHORT = 16
"""The most tokens of a response in the check before the first rollout."""
OUTLIER = 0.5
"""The most nats by which a token can count towards ending a run in that check: a fifth of the tokens must differ so."""


@dataclass(frozen=True)
class Bound:
    """What a metric of the mismatch may be."""

    warn: float
    """More than rounding explains if everything is computed in float32."""
    warn_half: float
    """The same where the policy computes in half precision."""
    stop: float
    """An update on such rollouts is meaningless, whatever causes the difference."""


BOUNDS: Mapping[str, Bound] = {
    "mismatch/logprob_abs_mean": Bound(warn=1e-3, warn_half=0.05, stop=0.1),
    "mismatch/k3": Bound(warn=1e-4, warn_half=0.01, stop=0.1),
    "mismatch/ratio_max": Bound(warn=1.1, warn_half=10.0, stop=math.inf),
}
"""The bounds, in the units of the metrics.

Rounding: sampler and trainer run the same weights on rows of other shapes, which in float32 moves a log-prob by 1e-7 to
1e-4 nats. bfloat16 has 8 significant bits, and rounds a logit of 10 by up to 1/32: 0.001 to 0.03 nats are usual, a k3
of half their square, and for single unlikely tokens among many a ratio of 2 or 3.

Meaningless: PPO's clip lets an update move a token's log-prob by about 0.2 nats (`cliprange`). At half of that for the
mean token, the ratio is as much noise as signal (`old_policy: rollout`), or the gradient is computed from the responses
of another policy (`recompute`), whose probability of ten tokens is wrong by a factor of up to e. A k3 of 0.1 nats is
reached by a few tokens that the trainer thinks all but impossible. The ratio of a single token stops nothing: its
gradient is clipped.

The bounds are made for the thousands of tokens of a step. Among the few of the check before the first rollout, one
token that bfloat16 sent to another expert of a mixture would exceed them, so that check ends a run only if the mean
absolute difference exceeds `stop` with each token's difference clipped to `OUTLIER`: many tokens disagree then.
"""


@dataclass(frozen=True)
class Finding:
    """A metric beyond its bound."""

    metric: str
    value: float
    bound: float
    """The one that `value` exceeds."""
    meaningless: bool
    """Whether `bound` is that of an update without meaning, rather than that of rounding."""

    def __str__(self) -> str:
        return f"{self.metric} is {self.value:.3g} (bound {self.bound:g})"


class SamplerMismatch(ValueError):
    """A step's responses on which an update would be meaningless. Every rank raises it, before the update."""


def judge(stats: Mapping[str, float], *, half_precision: bool, temperature: float = 1.0) -> list[Finding]:
    """Returns the metrics of `stats` that exceed a bound, in the order of `BOUNDS`.

    A NaN exceeds none. It never reaches an update: log-probs that are not finite are refused when a rollout is made
    (`hook_checks`), and a loss that is not finite skips the optimizer step.

    Args:
        stats: `mismatch/*`; other names are ignored, and missing ones are not judged.
        half_precision: whether the policy computes in bfloat16 or float16.
        temperature: of the samples. Logits are divided by it, and so is their rounding: below 1, `warn_half` grows, at
            most to `stop`.
    """
    findings = []
    for metric, bound in BOUNDS.items():
        value = stats.get(metric, 0.0)
        warn = min(bound.warn_half / min(temperature, 1.0), bound.stop) if half_precision else bound.warn
        if value > warn:
            meaningless = value > bound.stop
            findings.append(Finding(metric, value, bound.stop if meaningless else warn, meaningless))
    return findings


def in_half_precision(actor_critic: ActorCritic, accelerator: Accelerator) -> bool:
    """Whether the policy has weights of less than 32 bits, or computes in less under autocast."""
    narrow = any(parameter.element_size() < 4 for parameter in actor_critic.policy.parameters())
    return narrow or accelerator.mixed_precision != "no"


def clipped_difference(logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> float:
    """Returns the mean absolute difference in nats per token, of which a token counts at most `OUTLIER`.

    Args:
        logprobs: (B, R), from the trainer's forward pass.
        rollout_logprobs: (B, R), from the sampler.
        mask: (B, R) bool, True = a token that the policy chose.
    """
    return float(masked_mean((logprobs - rollout_logprobs).abs().clamp(max=OUTLIER), mask))


def spread_by_length(lengths: Sequence[int], count: int) -> list[int]:
    """Returns up to `count` positions of `lengths`, from the shortest to the longest at even distances of rank."""
    order = sorted(range(len(lengths)), key=lambda position: lengths[position])
    if len(order) <= count:
        return order
    return [order[i * (len(order) - 1) // (count - 1)] for i in range(count)]


class MismatchGuard:
    """Ends a run whose sampler is not the policy that is trained, or warns of it once, as `mismatch_action` says.

    Args:
        engine: of the policy.
        args: of the run. With `old_policy: correct`, whose weights are made for a mismatch, a run is never ended.
    """

    def __init__(self, engine: Engine, args: PPOConfig) -> None:
        self._engine, self._accelerator, self._args = engine, engine.accelerator, args
        self._warned = self._short_agreed = False

    @property
    def active(self) -> bool:
        """Whether a mismatch is reported at all."""
        return self._args.mismatch_action != "ignore"

    def check_short_responses(
        self, collector: RolloutCollector, prompts: PromptBatch, sampling_params: SamplingParams
    ) -> None:
        """Samples short responses to a few prompts with the run's generation backend, and judges them.

        Every rank must call it, with equally many prompts. Beyond a bound, two experiments look for the cause.
        The run ends only if many tokens disagree (`clipped_difference`), not for a single one among so few.

        Args:
            collector: samples and evaluates.
            prompts: a few, of different lengths.
            sampling_params: of the run; at most `SHORT` tokens are sampled.

        Raises:
            ValueError: on every rank, if an update would be meaningless and `mismatch_action` is stop.
        """
        n = sampling_params.num_return_sequences
        short = replace(sampling_params, max_new_tokens=min(SHORT, sampling_params.max_new_tokens))
        samples, logprobs = self._sample(collector, prompts, short)
        rollout_logprobs, mask = samples["rollout_logprobs"], samples["response_mask"]
        stats = self.largest(mismatch_stats(logprobs, rollout_logprobs, mask))
        clipped = clipped_difference(logprobs, rollout_logprobs, mask)
        clipped = max_over_ranks({"clipped": clipped}, self._accelerator)["clipped"]
        self._short_agreed = not self._judge(stats)
        if self._short_agreed:
            return
        again = self._logprobs(collector, samples, short)
        repeated = self.largest(mismatch_stats(again, logprobs, mask))
        alone, logprobs = self._sample(replace(collector, per_device_batch_size=n), prompts, short)
        one_at_a_time = self.largest(mismatch_stats(logprobs, alone["rollout_logprobs"], alone["response_mask"]))
        if self._judge(repeated):
            difference = repeated["mismatch/logprob_abs_mean"]
            cause = (
                f"two forward passes of the trainer over the same tokens differ by {difference:.3g} nats per token, as "
                "with dropout in a custom model; switch it off"
            )
        elif not self._judge(one_at_a_time):
            cause = (
                "one prompt at a time they agree, so what the model computes for a row depends on padding or on the "
                "other rows of its batch, as with learned positions or some recurrent states; set "
                f"rollout_per_device_batch_size: {n} (num_return_sequences), which samples one prompt at a time"
            )
        else:
            cause = self._likely_causes()
        where = f"in {len(logprobs)} short responses before the first rollout"
        fault = self._report(stats, where, cause, may_stop=clipped > BOUNDS["mismatch/logprob_abs_mean"].stop)
        if fault is not None:
            raise ValueError(fault)

    @property
    def half_precision(self) -> bool:
        """Whether the policy computes in less than 32 bits."""
        return in_half_precision(self._engine.actor_critic, self._accelerator)

    @property
    def shares_states(self) -> bool:
        """Whether the critic reads the policy's hidden states, so that its pass is one of the policy too."""
        critic = self._engine.actor_critic.critic
        return critic is not None and critic.shares_states

    def stats(self, rollouts: Rollouts) -> dict[str, float]:
        """`mismatch/*` of global rollouts that the trainer has evaluated (`recomputed`). Every rank must call it."""
        mask = rollouts["response_mask"]
        return self.largest(mismatch_stats(rollouts["logprobs"], rollouts["rollout_logprobs"], mask))

    def largest(self, stats: Mapping[str, Tensor]) -> dict[str, float]:
        """The largest of each number on any rank, so that all ranks decide alike. Every rank must call it."""
        return max_over_ranks({name: float(value) for name, value in stats.items()}, self._accelerator)

    def check(self, stats: Mapping[str, float]) -> None:
        """Judges `mismatch/*` of all ranks' responses in one step.

        Raises:
            SamplerMismatch: on every rank, if an update would be meaningless and `mismatch_action` is stop.
        """
        if self.active and self._judge(stats):
            fault = self._report(stats, "in the responses of this step", self._likely_causes(), may_stop=True)
            if fault is not None:
                raise SamplerMismatch(fault)

    def _judge(self, stats: Mapping[str, float]) -> list[Finding]:
        return judge(stats, half_precision=self.half_precision, temperature=self._args.temperature)

    def _sample(
        self, collector: RolloutCollector, prompts: PromptBatch, sampling_params: SamplingParams
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Samples, and the trainer's log-probs (B, R) of their tokens."""
        samples = collector.sample(self._engine, prompts, sampling_params, RolloutPoll())
        return samples, self._logprobs(collector, samples, sampling_params)

    def _logprobs(
        self, collector: RolloutCollector, samples: dict[str, Tensor], sampling_params: SamplingParams
    ) -> Tensor:
        settings = collector.evaluation_settings(self._engine, sampling_params.temperature)
        model, device = self._engine.actor_critic, self._accelerator.device
        with self._engine.autocast():
            outputs = evaluate_responses(model, samples, settings, device=device, with_policy=True, with_critic=False)
        return outputs["logprobs"]

    def _likely_causes(self) -> str:
        model, args = self._engine.actor_critic.policy.model, self._args
        if model._is_stateful:
            return (
                f"{type(model).__name__} keeps a recurrent state, and sampling with it token by token gives other "
                "numbers than one pass over the whole row; use a model without one"
            )
        if self._short_agreed:
            return (
                f"something that depends on the length or on trained weights, as responses of {SHORT} tokens agreed "
                "before the run: rotations or windows that change with the length, an attention implementation (here "
                f"{underlying_attention(model)}), a sampler that still has older weights"
            )
        return (
            "a generation_backend or _generate that changes the logits (top_k, top_p, a penalty, the model's "
            f"generation_config, a temperature other than {args.temperature:g}) or has other weights or another dtype; "
            f"or an attention implementation (here {underlying_attention(model)}) that reads padding"
        )

    def _report(self, stats: Mapping[str, float], where: str, cause: str, *, may_stop: bool) -> str | None:
        """Returns the message with which the run has to end; else warns once, and returns None."""
        findings, args = self._judge(stats), self._args
        corrected = args.old_policy == "correct"
        what = ", ".join(map(str, findings))
        text = (
            f"sampler and trainer disagree on the log-probs of the same tokens {where}: {what}. Likely cause: {cause}"
        )
        may_stop = may_stop and args.mismatch_action == "stop" and not corrected
        if may_stop and any(finding.meaningless for finding in findings):
            # A resumed run may change mismatch_action, but not old_policy.
            return (
                f"{text}. The update would be meaningless: remove the cause, or set mismatch_action: warn, which "
                "trains all the same, or, in a new run, old_policy: correct, which weights the loss by the ratio of "
                "the two"
            )
        if not self._warned and self._accelerator.is_main_process:
            self._warned = True
            more = "" if corrected else ". In a new run, old_policy: correct weights the loss by it"
            warnings.warn(text + more, stacklevel=4)
        return None
