"""Whether sampler and trainer agree on the log-probs of the same tokens: the bounds, and what happens beyond them.

`SamplerCheck` compares `mismatch/*` with `BOUNDS`: of a few short responses before the first rollout, by which
`old_policy: auto` is decided, and of the rollouts of every step before they train the policy. `last_update` compares
the policy before and after the last update of a run. The metrics are computed in `metrics`, the weights of
`old_policy: correct` in `functional.policy_losses`.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from alpaca_ppo.distributed.collectives import max_over_ranks
from alpaca_ppo.functional import kl_penalty, masked_mean
from alpaca_ppo.generation import SamplingParams
from alpaca_ppo.ppo.metrics import mismatch_of, mismatch_stats
from alpaca_ppo.ppo.rollouts import POLICY_ALONE, RolloutCollector
from alpaca_ppo.types import PromptBatch, Rollouts

# Maximal length of a response in the check before the first rollout.
SHORT = 16
# Nats at which that check clips a token's difference, so that a fifth of the tokens must differ to end a run.
OUTLIER = 0.5


class Bound(NamedTuple):
    """Bounds of a metric, in its units.

    Attributes:
        warn: more than rounding explains in float32.
        warn_half: the same in half precision.
        stop: an update is meaningless, whatever the cause.
    """

    warn: float
    warn_half: float
    stop: float


# warn: sampler and trainer run the same weights on batches of other shapes, which changes a log-prob by 1e-7 to 1e-4
# nats in float32. bfloat16, with 8 significant bits, rounds a logit of 10 by up to 1/32: differences of 0.001 to 0.07
# nats are usual, and for a few unlikely tokens a ratio of 2 or 3. A k3 of half the mean of their squares is up to twice
# the square of their mean (0.0105 at 0.076), so its bound is 0.02, where that of the mean is 0.09.
#
# stop: PPO's clip lets an update change a token's log-prob by about 0.2 nats (`cliprange`). With a mean difference of
# half of that, the ratio is as much noise as signal (`old_policy: rollout`), or the responses are from another policy
# (`recompute`). A few tokens that the trainer gives almost no probability are enough for a k3 of 0.1 nats. The ratio of
# a single token ends no run: its gradient is clipped.
#
# Among the few tokens of the check before the first rollout, one that bfloat16 routed to another expert would exceed
# them: see `OUTLIER`.
BOUNDS: Mapping[str, Bound] = {
    "mismatch/logprob_abs_mean": Bound(warn=1e-3, warn_half=0.09, stop=0.1),
    "mismatch/k3": Bound(warn=1e-4, warn_half=0.02, stop=0.1),
    "mismatch/ratio_max": Bound(warn=1.1, warn_half=10.0, stop=math.inf),
}


class SamplerMismatch(ValueError):
    """An update on the step's responses would be meaningless. Every rank raises it, before the update."""


def exceeded_bounds(stats: Mapping[str, float], *, half_precision: bool, temperature: float = 1.0) -> dict[str, float]:
    """Returns, for each metric of `stats` that exceeds a bound, the largest such bound: `stop` or that of rounding.

    A NaN exceeds none; `hook_checks` refuses log-probs that are not finite. Logits and their rounding are divided by
    the `temperature`, so below 1 `warn_half` grows, at most to `stop`.
    """
    exceeded = {}
    for metric, bound in BOUNDS.items():
        value = stats.get(metric, 0.0)
        warn = min(bound.warn_half / min(temperature, 1.0), bound.stop) if half_precision else bound.warn
        if value > warn:
            exceeded[metric] = bound.stop if value > bound.stop else warn
    return exceeded


def clipped_difference(logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Returns the mean absolute difference in nats, each token's clipped to `OUTLIER`; see `mismatch_stats`."""
    return masked_mean((logprobs - rollout_logprobs).abs().clamp(max=OUTLIER), mask)


def spread_by_length(lengths: Sequence[int], count: int) -> list[int]:
    """Returns up to `count` (at least 2) indices of `lengths` at even quantiles, from the shortest to the longest."""
    order = sorted(range(len(lengths)), key=lambda position: lengths[position])
    if len(order) <= count:
        return order
    return [order[i * (len(order) - 1) // (count - 1)] for i in range(count)]


def last_update(collector: RolloutCollector, rollouts: Rollouts) -> str:
    """Returns in a line how far the policy is from the one that gave the last `rollouts`: the KL of at most 16 of them
    (k3), with a warning above the limit of the doctor's `update_too_large`. Every rank must call it.
    """
    rows: Any = {name: tensor[:16] for name, tensor in dict[str, Any](rollouts).items()}
    after = collector.forward(rows, POLICY_ALONE, temperature=collector.args.temperature)["logprobs"]
    kl = kl_penalty(rows["logprobs"], after, "k3") * rows["response_mask"]
    per_token, per_response = kl.sum() / rows["response_mask"].sum(), kl.sum(dim=1).mean()
    text = f"the last update moved the policy by {per_token:.3g} nats per token, {per_response:.3g} per response"
    warning = ": the last metrics are not those of the saved weights; evaluate final/policy, lower learning_rate"
    return text + warning if per_token > 0.1 else text


class SamplerCheck:
    """Ends a run whose sampler and trainer disagree, or warns once (`mismatch_action`), and decides for
    `old_policy: auto` whether the sampler's log-probs are used as the old policy's, which saves a forward pass.

    They are used if sampler and trainer agree within the rounding of float32 on short responses before the first
    rollout. A checkpoint keeps the decision, unless backend, dtype or engine change. They are never used

    - in half precision;
    - with a `shared` critic: its pass computes all of the policy but the head;
    - with environments: the rounding then depends on when they reply;
    - with a backend that has its own copy of the weights.

    With `old_policy: correct`, whose weights correct a mismatch, a run is never ended.

    Args:
        collector: samples, and computes log-probs.
        multi_turn: whether environments reply to the policy.
        report: called with the decision.
    """

    def __init__(self, collector: RolloutCollector, *, multi_turn: bool, report: Callable[[str], Any]) -> None:
        engine, backend, args = collector.engine, collector.backend, collector.args
        self._collector, self._args, self._report = collector, args, report
        critic = engine.actor_critic.critic
        is_shared = critic is not None and critic.layout == "shared"
        needs_recomputing = backend.has_own_weights or multi_turn or is_shared or self.half_precision
        self._may_use_sampler_logprobs = args.old_policy == "auto" and not needs_recomputing
        self._uses_sampler_logprobs: bool | None = None
        self._conditions = [backend.name, args.dtype, engine.accelerator.mixed_precision, type(engine).__name__]
        # The mean absolute difference of log-probs, in nats, in the responses before the first rollout.
        self._at_first = math.inf
        self._warned = False

    @property
    def half_precision(self) -> bool:
        """Whether the sampler or the policy computes in less than 32 bits, by its weights or under autocast."""
        engine, backend = self._collector.engine, self._collector.backend
        if backend.half_precision or engine.accelerator.mixed_precision != "no":
            return True
        return any(parameter.element_size() < 4 for parameter in engine.actor_critic.policy.parameters())

    @property
    def compares(self) -> bool:
        """Whether `before_training` is needed."""
        return self._args.mismatch_action != "ignore" or self._is_undecided

    @property
    def _is_undecided(self) -> bool:
        return self._may_use_sampler_logprobs and self._uses_sampler_logprobs is None

    def recomputes(self, step: int) -> bool:
        """Whether the old log-probs of `step` (from 0) come from a forward pass of the trainer.

        With `auto` they do in the first step that trains the policy: policy and reference may still be equal, so that
        the sampler's rounding would be the whole KL, and whitening would turn it into advantages.
        """
        if self._args.old_policy != "auto":
            return self._args.old_policy != "rollout"
        return not self._uses_sampler_logprobs or step == self._args.critic_pretraining_steps

    def before_training(self, prompts: PromptBatch, sampling_params: SamplingParams) -> None:
        """Checks short responses to a few prompts, and decides `old_policy: auto`.

        Every rank must call it, with the same prompts. A run ends only if many tokens disagree (`clipped_difference`),
        or if a sampler's own copy of the weights in float32 differs by more than rounding.

        Raises:
            ValueError: on every rank, if an update would be meaningless and `mismatch_action` is stop.
        """
        short = replace(sampling_params, max_new_tokens=min(SHORT, sampling_params.max_new_tokens))
        self._collector.sync()
        with self._collector.preemption.rollout(can_stop=True):
            samples = self._collector.sample(prompts, short)
        self._collector.preemption.poll_all_ranks()
        logprobs = self._collector.forward(samples, POLICY_ALONE, temperature=short.temperature)["logprobs"]
        sampled, mask = samples["rollout_logprobs"], samples["response_mask"]
        measured = {**mismatch_stats(logprobs, sampled, mask), "clipped": clipped_difference(logprobs, sampled, mask)}
        stats = self._max_over_ranks(measured)
        if self._is_undecided:
            self._uses_sampler_logprobs = not exceeded_bounds(stats, half_precision=False)
            whose = "sampler" if self._uses_sampler_logprobs else "trainer"
            self._report(
                f"sampler and trainer differ by {stats['mismatch/logprob_abs_mean']:.2g} nats per token: old log-probs "
                f"are the {whose}'s (old_policy: auto)"
            )
        where = f"in {len(logprobs)} short responses before the first rollout"
        self._at_first = stats["mismatch/logprob_abs_mean"]
        self._judge(stats, where, ValueError, may_stop=stats["clipped"] > BOUNDS["mismatch/logprob_abs_mean"].stop)

    def check_rollouts(self, rollouts: Rollouts) -> None:
        """Checks a step's responses, if the trainer has recomputed their log-probs. Every rank must call it.

        Raises:
            SamplerMismatch: as `check`.
        """
        if "recomputed" in rollouts:
            self.check(self._max_over_ranks(mismatch_of(rollouts)))

    def check(self, stats: Mapping[str, float]) -> None:
        """Checks `mismatch/*` of the responses of all ranks in a step.

        Raises:
            SamplerMismatch: on every rank, if an update would be meaningless and `mismatch_action` is stop.
        """
        self._judge(stats, "in the responses of this step", SamplerMismatch)

    def stats(self, rollouts: Rollouts) -> dict[str, float]:
        """`mismatch/recomputed` with `old_policy: auto`: 1 if the trainer computed the old log-probs, else 0."""
        return {"mismatch/recomputed": float("recomputed" in rollouts)} if self._args.old_policy == "auto" else {}

    def state_dict(self) -> dict[str, Any]:
        return {"spares": self._uses_sampler_logprobs, "conditions": self._conditions}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the decision, if it was made under the same conditions."""
        self._uses_sampler_logprobs = state["spares"] if list(state["conditions"]) == self._conditions else None

    def _max_over_ranks(self, stats: Mapping[str, Any]) -> dict[str, float]:
        return max_over_ranks({name: float(value) for name, value in stats.items()}, self._collector.accelerator)

    def _judge(self, stats: Mapping[str, float], where: str, error: type[ValueError], *, may_stop: bool = True) -> None:
        """Raises `error` if the run has to end; otherwise warns of exceeded bounds, once."""
        args = self._args
        exceeded = exceeded_bounds(stats, half_precision=self.half_precision, temperature=args.temperature)
        # A copy of the weights in float32 that differs by more than rounding did at first is another version of them.
        limit = min(max(30 * self._at_first, 1e-4), BOUNDS["mismatch/logprob_abs_mean"].warn)
        has_copy = self._collector.backend.has_own_weights and not self.half_precision
        if is_stale := has_copy and stats.get("mismatch/logprob_abs_mean", 0.0) > limit:
            exceeded = {"mismatch/logprob_abs_mean": limit} | exceeded
        if not exceeded or args.mismatch_action == "ignore":
            return
        measured = [f"{metric} is {stats[metric]:.3g} (bound {bound:g})" for metric, bound in exceeded.items()]
        text = (
            f"sampler and trainer disagree on the log-probs of the same tokens {where}: {', '.join(measured)}; "
            "docs/troubleshooting.md#sampler-and-trainer-disagree lists the causes"
        )
        ruins = may_stop and any(bound == BOUNDS[metric].stop for metric, bound in exceeded.items())
        if (ruins or is_stale) and args.mismatch_action == "stop" and args.old_policy != "correct":
            raise error(f"{text}. Remove the cause, set mismatch_action: warn or, in a new run, old_policy: correct")
        if not self._warned and self._collector.accelerator.is_main_process:
            self._warned = True
            warnings.warn(text, stacklevel=4)
