"""Whether sampler and trainer agree on the log-probs of the same tokens: the bounds, and what happens beyond them.

`exceeded_bounds` compares `mismatch/*` with the one table of bounds, `BOUNDS`. `SamplerCheck` applies it in a run: to a
few short responses before the first rollout is paid for, by which `old_policy: auto` is decided, and to the rollouts of
every step before they train the policy. How the metrics are measured is in `metrics`; the weights of
`old_policy: correct` are in `functional.policy_losses`.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from alpaca_ppo.distributed.collectives import max_over_ranks
from alpaca_ppo.functional.masked import masked_mean
from alpaca_ppo.generation import SamplingParams
from alpaca_ppo.ppo.metrics import mismatch_of, mismatch_stats
from alpaca_ppo.ppo.rollouts import POLICY_ALONE, RolloutCollector
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


# The bounds, in the units of the metrics.
#
# Rounding: sampler and trainer run the same weights on rows of other shapes, which in float32 moves a log-prob by 1e-7
# to 1e-4 nats. bfloat16 has 8 significant bits, and rounds a logit of 10 by up to 1/32: 0.001 to 0.03 nats are usual, a
# k3 of half their square, and for single unlikely tokens among many a ratio of 2 or 3.
#
# Meaningless: PPO's clip lets an update move a token's log-prob by about 0.2 nats (`cliprange`). At half of that for
# the mean token, the ratio is as much noise as signal (`old_policy: rollout`), or the gradient is computed from the
# responses of another policy (`recompute`), whose probability of ten tokens is wrong by a factor of up to e. A k3 of
# 0.1 nats is reached by a few tokens that the trainer thinks all but impossible. The ratio of a single token stops
# nothing: its gradient is clipped.
#
# The bounds are made for the thousands of tokens of a step. Among the few of the check before the first rollout, one
# token that bfloat16 sent to another expert of a mixture would exceed them, so that check ends a run only if the mean
# absolute difference exceeds `stop` with each token's difference clipped to `OUTLIER`: many tokens disagree then.
BOUNDS: Mapping[str, Bound] = {
    "mismatch/logprob_abs_mean": Bound(warn=1e-3, warn_half=0.05, stop=0.1),
    "mismatch/k3": Bound(warn=1e-4, warn_half=0.01, stop=0.1),
    "mismatch/ratio_max": Bound(warn=1.1, warn_half=10.0, stop=math.inf),
}


class SamplerMismatch(ValueError):
    """A step's responses on which an update would be meaningless. Every rank raises it, before the update."""


def exceeded_bounds(stats: Mapping[str, float], *, half_precision: bool, temperature: float = 1.0) -> dict[str, float]:
    """Returns the bound that each metric of `stats` exceeds, in the order of `BOUNDS`: `stop` if it is beyond that,
    else that of rounding. Metrics within their bounds are left out.

    A NaN exceeds none. It never reaches an update: log-probs that are not finite are refused when a rollout is made
    (`hook_checks`), and a loss that is not finite skips the optimizer step.

    Args:
        stats: `mismatch/*`; other names are ignored, and missing ones are not compared.
        half_precision: whether the policy computes in bfloat16 or float16.
        temperature: of the samples. Logits are divided by it, and so is their rounding: below 1, `warn_half` grows, at
            most to `stop`.
    """
    exceeded = {}
    for metric, bound in BOUNDS.items():
        value = stats.get(metric, 0.0)
        warn = min(bound.warn_half / min(temperature, 1.0), bound.stop) if half_precision else bound.warn
        if value > warn:
            exceeded[metric] = bound.stop if value > bound.stop else warn
    return exceeded


def clipped_difference(logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Returns the mean absolute difference in nats per token, of which a token counts at most `OUTLIER`.

    Args:
        logprobs: (B, R), from the trainer's forward pass.
        rollout_logprobs: (B, R), from the sampler.
        mask: (B, R) bool, True = a token that the policy chose.
    """
    return masked_mean((logprobs - rollout_logprobs).abs().clamp(max=OUTLIER), mask)


def spread_by_length(lengths: Sequence[int], count: int) -> list[int]:
    """Returns up to `count` positions of `lengths`, from the shortest to the longest at even distances of rank."""
    order = sorted(range(len(lengths)), key=lambda position: lengths[position])
    if len(order) <= count:
        return order
    return [order[i * (len(order) - 1) // (count - 1)] for i in range(count)]


class SamplerCheck:
    """Ends a run whose sampler is not the policy that is trained, or warns of it once, as `mismatch_action` says; and
    decides, once in a run, whether the sampler's log-probs are the old policy's.

    With `old_policy: auto` they are if sampler and trainer agree within the rounding of float32 on short responses
    before the first rollout, which saves the policy's forward pass. A checkpoint keeps the decision; it is made again
    if backend, dtype or engine have changed. Steps recompute all the same: in half precision; with a critic that shares
    the policy's hidden states, whose pass computes all of the policy but its head; with environments that answer, as
    the rounding then depends on when they do; and with a backend that has weights of its own.

    Args:
        collector: samples and evaluates. With `old_policy: correct`, whose weights are made for a mismatch, a run is
            never ended.
        answered: whether environments answer the policy.
        report: called with the decision.
    """

    def __init__(self, collector: RolloutCollector, *, answered: bool, report: Callable[[str], Any]) -> None:
        self._collector, self._args, self._report = collector, collector.args, report
        engine, backend, args = collector.engine, collector.backend, collector.args
        critic = engine.actor_critic.critic
        shared = critic is not None and critic.shares_states
        self._can_skip_pass = args.old_policy == "auto" and not (
            backend.has_own_weights or answered or shared or self.half_precision
        )
        self._conditions = [backend.name, args.dtype, engine.accelerator.mixed_precision, type(engine).__name__]
        self._skips_pass: bool | None = None
        self._warned = False

    @property
    def half_precision(self) -> bool:
        """Whether the sampler computes in less than 32 bits, or the policy: by its weights, or under autocast."""
        engine, backend = self._collector.engine, self._collector.backend
        if backend.half_precision or engine.accelerator.mixed_precision != "no":
            return True
        return any(parameter.element_size() < 4 for parameter in engine.actor_critic.policy.parameters())

    @property
    def compares(self) -> bool:
        """Whether the short responses before the first rollout are of any use."""
        return self._args.mismatch_action != "ignore" or (self._can_skip_pass and self._skips_pass is None)

    def recomputes(self, step: int) -> bool:
        """Whether the old log-probs of `step` (from 0) come from a forward pass of the trainer.

        They do in the first step that trains the policy, whatever `auto` has decided: until then policy and reference
        may be equal, and the sampler's rounding would be all of the KL, which whitening turns into advantages.
        """
        if self._args.old_policy != "auto":
            return self._args.old_policy != "rollout"
        return not self._skips_pass or step == self._args.critic_pretraining_steps

    def before_training(self, prompts: PromptBatch, sampling_params: SamplingParams) -> None:
        """Samples short responses to a few prompts with the run's generation backend, judges them, and decides `auto`.

        Every rank must call it, with the same prompts. The run ends only if many tokens disagree
        (`clipped_difference`), not for a single one among so few.

        Raises:
            ValueError: on every rank, if an update would be meaningless and `mismatch_action` is stop.
        """
        short = replace(sampling_params, max_new_tokens=min(SHORT, sampling_params.max_new_tokens))
        self._collector.sync()
        samples = self._collector.sample(prompts, short)
        logprobs = self._collector.forward(samples, POLICY_ALONE, temperature=short.temperature)["logprobs"]
        pair = samples["rollout_logprobs"], samples["response_mask"]
        measured = {**mismatch_stats(logprobs, *pair), "clipped": clipped_difference(logprobs, *pair)}
        stats = self._largest(measured)
        if self._can_skip_pass and self._skips_pass is None:
            self._skips_pass = not exceeded_bounds(stats, half_precision=False)
            difference, whose = stats["mismatch/logprob_abs_mean"], "sampler" if self._skips_pass else "trainer"
            self._report(
                f"sampler and trainer differ by {difference:.2g} nats per token: old log-probs are the {whose}'s "
                "(old_policy: auto)"
            )
        many = stats["clipped"] > BOUNDS["mismatch/logprob_abs_mean"].stop
        fault = self._judged(stats, f"in {len(logprobs)} short responses before the first rollout", may_stop=many)
        if fault is not None:
            raise ValueError(fault)

    def check_rollouts(self, rollouts: Rollouts) -> None:
        """Judges the responses of a step, if the trainer has evaluated them (`recomputed`). Every rank must call it.

        Raises:
            SamplerMismatch: as `check`.
        """
        if "recomputed" in rollouts:
            self.check(self._largest(mismatch_of(rollouts)))

    def check(self, stats: Mapping[str, float]) -> None:
        """Judges `mismatch/*` of all ranks' responses in one step.

        Raises:
            SamplerMismatch: on every rank, if an update would be meaningless and `mismatch_action` is stop.
        """
        fault = self._judged(stats, "in the responses of this step")
        if fault is not None:
            raise SamplerMismatch(fault)

    def stats(self, rollouts: Rollouts) -> dict[str, float]:
        """`mismatch/recomputed` of a step with `old_policy: auto`: 1 if the trainer computed the log-probs, else 0."""
        return {"mismatch/recomputed": float("recomputed" in rollouts)} if self._args.old_policy == "auto" else {}

    def state_dict(self) -> dict[str, Any]:
        """The decision, and what it depends on."""
        return {"spares": self._skips_pass, "conditions": self._conditions}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the decision that `state_dict` returned, if it was made under the same conditions."""
        self._skips_pass = state["spares"] if list(state["conditions"]) == self._conditions else None

    def _largest(self, stats: Mapping[str, Any]) -> dict[str, float]:
        """The largest of each number on any rank, so that all ranks decide alike."""
        return max_over_ranks({name: float(value) for name, value in stats.items()}, self._collector.accelerator)

    def _judged(self, stats: Mapping[str, float], where: str, *, may_stop: bool = True) -> str | None:
        """The message with which the run has to end; else warns, once."""
        args = self._args
        exceeded = exceeded_bounds(stats, half_precision=self.half_precision, temperature=args.temperature)
        if not exceeded or args.mismatch_action == "ignore":
            return None
        found = [f"{metric} is {stats[metric]:.3g} (bound {bound:g})" for metric, bound in exceeded.items()]
        text = (
            f"sampler and trainer disagree on the log-probs of the same tokens {where}: {', '.join(found)}; "
            "docs/troubleshooting.md#sampler-and-trainer-disagree lists the causes"
        )
        stops = may_stop and args.mismatch_action == "stop" and args.old_policy != "correct"
        if stops and any(bound == BOUNDS[metric].stop for metric, bound in exceeded.items()):
            return f"{text}. Remove the cause, set mismatch_action: warn or, in a new run, old_policy: correct"
        if not self._warned and self._collector.accelerator.is_main_process:
            self._warned = True
            warnings.warn(text, stacklevel=4)
        return None
