"""The doctor's rules: all of them by name, and what they find in a run so far.

A rule is a function of a `History` that returns a `Finding` or None. It reads the last few values of a few metrics, so
that it may be called after every step, and finds nothing where a metric is missing.
"""

from collections.abc import Callable, Collection

from alpaca_ppo.doctor.critic_rules import critic_off_scale, critic_useless, returns_outside_support
from alpaca_ppo.doctor.finding import Finding, Severity, severity_rank
from alpaca_ppo.doctor.history import History
from alpaca_ppo.doctor.policy_rules import (
    all_truncated,
    clip_fraction_high,
    clip_fraction_zero,
    entropy_collapse,
    entropy_explosion,
    first_ratio_off,
    grad_norm_spike,
    kl_runaway,
    length_collapse,
    length_explosion,
    negative_kl,
    policy_does_not_move,
    sampler_mismatch,
    skipped_updates,
    update_too_large,
)
from alpaca_ppo.doctor.reward_rules import (
    constant_reward,
    duplicate_prompts,
    eval_falling,
    identical_responses,
    overoptimization,
    reward_falling,
    reward_model_out_of_range,
    source_drowned,
    uniform_groups,
)
from alpaca_ppo.doctor.speed_rules import evaluation_dominates, padding, phase_dominates
from alpaca_ppo.registry import DOCTOR_RULES

Rule = Callable[[History], Finding | None]

RULES: dict[str, Rule] = {
    rule.__name__: rule
    for rule in (
        constant_reward,
        reward_falling,
        eval_falling,
        overoptimization,
        source_drowned,
        reward_model_out_of_range,
        uniform_groups,
        identical_responses,
        duplicate_prompts,
        policy_does_not_move,
        kl_runaway,
        negative_kl,
        entropy_collapse,
        entropy_explosion,
        length_explosion,
        length_collapse,
        all_truncated,
        clip_fraction_high,
        clip_fraction_zero,
        update_too_large,
        grad_norm_spike,
        skipped_updates,
        sampler_mismatch,
        first_ratio_off,
        critic_useless,
        critic_off_scale,
        returns_outside_support,
        padding,
        phase_dominates,
        evaluation_dominates,
    )
}
"""Every rule by name, in the order in which findings of one step are reported."""

assert tuple(RULES) == DOCTOR_RULES, "the names that stop_on may take are those of the rules"


class Doctor:
    """Finds what is wrong with a run, each thing once, and again only if it becomes more severe.

    Args:
        history: of the run; the caller adds each step before `examine`.
        known: what was reported before the run was resumed.
    """

    def __init__(self, history: History, known: Collection[Finding] = ()) -> None:
        self.history = history
        self._reported: dict[str, Severity] = {}
        for finding in known:
            self._is_new(finding)

    def examine(self) -> list[Finding]:
        """Returns what is new after the history's last step."""
        found = (rule(self.history) for rule in RULES.values())
        return [finding for finding in found if finding is not None and self._is_new(finding)]

    def _is_new(self, finding: Finding) -> bool:
        before = self._reported.get(finding.rule)
        if before is not None and severity_rank(before) >= severity_rank(finding.severity):
            return False
        self._reported[finding.rule] = finding.severity
        return True


def stops(finding: Finding, stop_on: Collection[str]) -> bool:
    """Whether `finding` ends a run with that `stop_on`, a collection of rules and severities."""
    return finding.rule in stop_on or finding.severity in stop_on
