"""Where each step's old log-probs come from: the trainer's own forward pass, or the sampler (`old_policy`).

With `auto` that is decided step by step. The bounds within which sampler and trainer agree are those of `mismatch`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.functional.masked import masked_mean
from alpaca_ppo.ppo.critic_pretraining import CriticPretraining
from alpaca_ppo.ppo.mismatch import MismatchGuard, judge
from alpaca_ppo.types import Rollouts

AGREEMENTS = 2
"""Comparisons that must agree before the sampler's log-probs are used. The policy has moved in between, so a sampler
that kept older weights is found."""
SHARE_OF_KL = 0.01
"""The difference of sampler and trainer must be below this share of the policy's distance to its reference."""


class OldPolicySource:
    """Decides whether a step recomputes the old log-probs, and judges the step's sampler.

    With `old_policy: auto` a step recomputes, unless `AGREEMENTS` comparisons of earlier steps have agreed, between
    each two of which an optimizer step has moved the policy. (A move too small to exceed the bounds shows no stale
    sampler, and harms as little. Once it has grown beyond them, the next comparison finds it.)

    A comparison agrees if `mismatch/*` is within the bounds of float32 and, with a reference, the mean difference of
    sampler and trainer is below `SHARE_OF_KL` of the mean difference of policy and reference. The reason: the KL in the
    reward is measured on the old log-probs. While the two models are equal, recomputed ones are exactly the
    reference's, but the sampler's differ by rounding, which whitening would turn into advantages. So steps recompute
    until the policy has moved well beyond rounding.

    Every `mismatch_check_steps`-th step recomputes and compares again. A step that does not is compared on the rows of
    its first optimizer step. One comparison beyond the bounds, and the rest of the run recomputes. If a check finds the
    policy too close to its reference, steps recompute until comparisons agree once more.

    Half precision always recomputes, as does a critic that shares the policy's hidden states, because the critic's pass
    computes all of the policy but its head. So does a run whose environments answer: which rows the sampler reads
    together depends on when they do, and the rounding of its log-probs with it.

    While the critic is pretrained, the policy is frozen and its update has no ratio: the old log-probs only measure the
    KL. So there, whatever `old_policy` is, the first step and every `mismatch_check_steps`-th one recompute and
    compare, and the others do without the pass where that leaves the KL as it is: if the policy equalled its reference
    bit for bit, whose pass then serves for both; without a reference; and with `auto` once the sampler's log-probs
    agreed as above, for which one comparison is enough, as no weights move. Agreement with a frozen policy does not
    count later.

    The decision depends on nothing but the configuration, the step and what is recorded of earlier steps, which is the
    same on every rank and stored in checkpoints.

    Args:
        guard: judges what is measured, whether or not the run is `auto`.
        args: of the run.
        pretraining: tells which steps pretrain the critic.
        has_reference: whether there is a reference policy.
        report: called with a message for the user the first time that the sampler's log-probs begin to be used, that
            they no longer are for a while, and that they no longer are for good.
        sampler_repeats: whether the sampler computes the same log-probs to the last bit when a step is repeated.
    """

    def __init__(
        self,
        guard: MismatchGuard,
        args: PPOConfig,
        pretraining: CriticPretraining,
        *,
        has_reference: bool,
        report: Callable[[str], Any],
        sampler_repeats: bool = True,
    ) -> None:
        self._guard, self._args, self._pretraining = guard, args, pretraining
        self._has_reference, self._report = has_reference, report
        serves = sampler_repeats and not guard.half_precision and not guard.shares_states
        self._decides = args.old_policy == "auto" and serves
        self._agreed_at: list[int] = []
        self._disagreed_at: int | None = None
        self._moved_at: int | None = None
        # The pretraining steps since which the sampler's log-probs, or the reference's, serve by every comparison.
        self._sampler_serves_at: int | None = None
        self._reference_serves_at: int | None = None
        self._said: list[str] = []

    def recomputes(self, step: int) -> bool:
        """Whether the old log-probs of `step` (from 0) come from a forward pass of the trainer."""
        if self._args.old_policy == "rollout":
            return False
        compares = (step + 1) % self._args.mismatch_check_steps == 0
        if self._pretraining.includes(step):
            return compares or self.reads_reference(step) or not _before(self._sampler_serves_at, step)
        if not self._decides or compares:
            return True
        # Comparisons of this step itself, recorded before an interruption, must not change how it is repeated.
        agreed = sum(earlier < step for earlier in self._agreed_at) >= AGREEMENTS
        return not agreed or _before(self._disagreed_at, step)

    def reads_reference(self, step: int) -> bool:
        """Whether that pass is the reference's, which equals the policy while the critic is pretrained."""
        compares = (step + 1) % self._args.mismatch_check_steps == 0
        return self._pretraining.includes(step) and not compares and _before(self._reference_serves_at, step)

    def check_rollouts(self, rollouts: Rollouts, step: int) -> None:
        """Compares sampler and trainer on the global rollouts of `step`, before the update, if the trainer has
        evaluated them. Every rank must call it.

        Raises:
            SamplerMismatch: as `MismatchGuard.check`.
        """
        if "recomputed" not in rollouts:
            return
        stats = self._guard.stats(rollouts)
        self._guard.check(stats)
        agrees = self._decides and not self._disagrees(stats, step) and self._disagreed_at is None
        mask = rollouts["response_mask"]
        from_reference = masked_mean((rollouts["logprobs"] - rollouts["ref_logprobs"]).abs(), mask)
        # Each rank computes it, on a CPU that may round in another way.
        distance = self._guard.largest({"distance": from_reference})["distance"]
        difference = stats["mismatch/logprob_abs_mean"]
        too_close = self._has_reference and difference >= SHARE_OF_KL * distance
        if self._pretraining.includes(step):
            equal = self._has_reference and torch.equal(rollouts["logprobs"], rollouts["ref_logprobs"])
            serves = not self._has_reference or (agrees and not too_close)
            self._reference_serves_at = _since(self._reference_serves_at, step) if equal else None
            self._sampler_serves_at = _since(self._sampler_serves_at, step) if serves else None
        elif agrees and too_close:
            self._start_again(difference, distance, step)
        elif agrees and len(self._agreed_at) < AGREEMENTS and self._moved_since_agreement(step):
            self._agreed_at.append(step)
            if len(self._agreed_at) == AGREEMENTS:
                self._say_once(
                    "agreed",
                    f"step {step + 1}: sampler and trainer agree ({difference:.2g} nats per token), so from now on the "
                    "sampler's log-probs are the old policy's, which saves a forward pass; every "
                    f"{self._args.mismatch_check_steps}th step compares the two again (old_policy: auto)",
                )

    def record_optimizer_step(self, step: int, *, moved_policy: bool) -> None:
        """Records whether an optimizer step of `step` moved the policy, which is the same on every rank."""
        if moved_policy:
            self._moved_at = step

    def check_first(self, rollouts: Rollouts, step: int) -> Callable[[Mapping[str, float]], None] | None:
        """What `Updater.step` calls with `mismatch/*` of the first optimizer step of `step`; None if `check_rollouts`
        has compared all of `rollouts`, or if nothing is to be compared.
        """
        spared = "recomputed" not in rollouts and self._args.old_policy in ("auto", "rollout")
        if not spared or self._pretraining.includes(step):
            return None

        def check(stats: Mapping[str, float]) -> None:
            self._guard.check(stats)
            if self._decides:
                self._disagrees(stats, step)

        return check

    def stats(self, rollouts: Rollouts) -> dict[str, float]:
        """`mismatch/recomputed` of a step with `old_policy: auto`: 1 if the trainer computed the log-probs, else 0."""
        return {"mismatch/recomputed": float("recomputed" in rollouts)} if self._args.old_policy == "auto" else {}

    def state_dict(self) -> dict[str, Any]:
        """The recorded comparisons, the last step that moved the policy, and which messages have been said."""
        return {
            "agreed_at": list(self._agreed_at),
            "disagreed_at": self._disagreed_at,
            "moved_at": self._moved_at,
            "sampler_serves_at": self._sampler_serves_at,
            "reference_serves_at": self._reference_serves_at,
            "said": list(self._said),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        self._agreed_at, self._disagreed_at = list(state["agreed_at"]), state["disagreed_at"]
        self._moved_at, self._said = state["moved_at"], list(state["said"])
        self._sampler_serves_at = state["sampler_serves_at"]
        self._reference_serves_at = state["reference_serves_at"]

    def _moved_since_agreement(self, step: int) -> bool:
        """Whether an update after the last agreement, and before `step`, has moved the policy; True without any."""
        if not self._agreed_at:
            return True
        # An interrupted update of `step` itself, which is being resumed, may have moved the policy too.
        return self._moved_at is not None and self._agreed_at[-1] <= self._moved_at < step

    def _start_again(self, difference: float, distance: float, step: int) -> None:
        if len(self._agreed_at) == AGREEMENTS:
            self._say_once(
                "too close",
                f"step {step + 1}: sampler and trainer differ by {difference:.2g} nats per token, which is "
                f"{SHARE_OF_KL:.0%} or more of the policy's distance to its reference ({distance:.2g}), so steps "
                "compute the old policy's log-probs again until two comparisons agree; mismatch/recomputed tells of "
                "each step what it did (old_policy: auto)",
            )
        self._agreed_at = []

    def _say_once(self, what: str, text: str) -> None:
        """Reports a change that is the first of its kind in the run, unless all steps recompute to compare."""
        if what not in self._said and self._args.mismatch_check_steps > 1:
            self._said.append(what)
            self._report(text)

    def _disagrees(self, stats: Mapping[str, float], step: int) -> bool:
        """Whether `stats` exceed a bound of float32; the first time, the rest of the run is made to recompute."""
        findings = judge(stats, half_precision=False)
        if findings and self._disagreed_at is None:
            self._disagreed_at = step
            self._report(
                f"step {step + 1}: sampler and trainer disagree, {', '.join(map(str, findings))}: the rest of the run "
                "computes the old policy's log-probs itself (old_policy: auto)"
            )
        return bool(findings)


def _before(recorded: int | None, step: int) -> bool:
    """Whether something was recorded of an earlier step: what `step` itself has recorded before an interruption must
    not change how it is repeated.
    """
    return recorded is not None and recorded < step


def _since(recorded: int | None, step: int) -> int:
    return step if recorded is None else recorded
