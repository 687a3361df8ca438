"""Every rule names the fault that it is made for, and keeps silent where the run is meant to be so."""

import math
import re
from dataclasses import asdict

import pytest

from alpaca_ppo import PPOConfig
from alpaca_ppo.doctor import RULES, Doctor, Finding, History
from tests.docs.markdown import ROOT, table_rows

DEFAULTS = {field: None for field in PPOConfig.__dataclass_fields__} | {
    "rollout_batch_size": 32,
    "num_return_sequences": 1,
    "kl_coef": 0.1,
    "learning_rate": 1e-5,
    "policy_loss": "clip",
    "temperature": 1.0,
    "old_policy": "auto",
    "reference": "auto",
    "dtype": "float32",
}


def healthy(t: int) -> dict[str, float]:
    """Metrics of step `t` (from 1) of a run that learns."""
    return {
        "objective/scores": 0.02 * t,
        "objective/scores/grade": 0.02 * t,
        "objective/scores_std": 0.8,
        "objective/scores_std/grade": 0.8,
        "objective/kl_avg_seq": 0.002 * t,
        "objective/entropies": max(1.0 - 0.005 * t, 0.5),
        "objective/response_length": 20.0,
        "objective/truncated_fraction": 0.01,
        "objective/lr": 1e-5,
        "ppo/policy/clipfrac": 0.03,
        "ppo/policy/approx_kl_k3": 0.004,
        "ppo/policy/grad_norm": 0.5 + 0.01 * (t % 3),
        "ppo/policy/optimizer_steps": 4.0,
        "ppo/policy/skipped_updates": 0.0,
        "ppo/policy/first_ratio_error_max": 1e-5,
        "mismatch/logprob_abs_mean": 1e-6,
        "ppo/val/explained_variance": 0.4,
    }


def examined(fault=None, *, steps=40, without=(), before=None, **config) -> dict[str, Finding]:
    """The last finding of each rule in a run whose metrics `fault`, a function of the step, has changed; `before` are
    those of step 0.
    """
    doctor, found = Doctor(History(DEFAULTS | config)), {}
    doctor.history.add(0, before or {})
    for t in range(1, steps + 1):
        metrics = {name: value for name, value in healthy(t).items() if not name.startswith(tuple(without))}
        doctor.history.add(t, metrics | (fault(t) if fault else {}))
        found |= {finding.rule: finding for finding in doctor.examine()}
    return found


def ramp(t: int, start: float, end: float, *, steps: int = 40) -> float:
    return start + (end - start) * (t - 1) / (steps - 1)


def evaluated(score: float, error: float | None = 0.05) -> dict[str, float | None]:
    return {"eval/scores": score, "eval/scores_std": 1.0, "eval/scores_se": error}


def evaluations(*scores, error=None):
    """A fault with evaluations at steps 10, 20 and so on."""
    return lambda t: evaluated(scores[t // 10 - 1], error) if t % 10 == 0 else {}


FLAT = {"objective/scores": 1.0, "objective/scores_std": 0.0, "objective/scores_std/grade": 0.0}
FAULTS = {
    "empty_answers warning": lambda t: {"objective/empty_fraction": 0.25},
    "empty_answers error": lambda t: {"objective/empty_fraction": 0.6},
    # A constant reward: no spread, no advantages, no gradient, so that the policy stays where it is.
    "constant_reward error": lambda t: FLAT,
    "constant_reward warning": lambda t: {"objective/scores_std": 0.0 if t > 20 else 0.8},
    # 1.0 to 0.0: 5 steps at the start have mean 0.95, the last five 0.05; 0.9 is more than 0.5 * 0.8.
    "reward_falling warning": lambda t: {"objective/scores": ramp(t, 1.0, 0.0)},
    # From 1 to 0.6 and to 0.4; the standard deviation is 1, the standard error of the difference 0.05 * 1.41.
    "eval_falling warning": lambda t: evaluated(0.6) if t == 40 else {},
    "eval_falling error": lambda t: evaluated(0.4) if t == 40 else {},
    # gold rises to 1 by step 10, and falls to -2 at step 40; or to 0.6, which is above its start.
    "overoptimization error": lambda t: {"objective/scores/gold": t / 10 if t <= 10 else 1 - (t - 10) / 10},
    "overoptimization warning": lambda t: {"objective/scores/gold": t / 10 if t <= 10 else max(1 - (t - 10) / 10, 0.4)},
    "uniform_groups warning": lambda t: {"objective/uniform_groups": 0.95},
    # A learning rate of nearly nothing, and one of a tenth of what it should be.
    "policy_does_not_move error": lambda t: {"ppo/policy/approx_kl_k3": 1e-12, "objective/kl_avg_seq": 1e-9},
    "policy_does_not_move warning": lambda t: {"ppo/policy/approx_kl_k3": 1e-6, "objective/kl_avg_seq": 1e-5 * t},
    "kl_runaway warning": lambda t: {"objective/kl_avg_seq": ramp(t, 0.3, 0.7)},
    "kl_runaway error": lambda t: {"objective/kl_avg_seq": ramp(t, 0.0, 2.0)},
    "entropy_collapse warning": lambda t: {"objective/entropies": 0.9**t},
    # The score stays at 0, and the entropy ends at 0.8**40 = 0.0001.
    "entropy_collapse error": lambda t: {"objective/entropies": 0.8**t, "objective/scores": 0.0},
    "length_collapse warning": lambda t: {"objective/response_length": ramp(t, 20, 3)},
    "length_collapse error": lambda t: {"objective/response_length": 20.0 if t < 10 else 1.2},
    "all_truncated error": lambda t: {"objective/truncated_fraction": 0.0 if t < 20 else 0.95},
    "all_truncated warning": lambda t: {"objective/truncated_fraction": 1.0},
    "update_too_large warning": lambda t: {"ppo/policy/approx_kl_k3": 0.12},
    "update_too_large error": lambda t: {"ppo/policy/clipfrac": 0.7},
    "skipped_updates warning": lambda t: {"ppo/policy/skipped_updates": float(t == 30)},
    "logprobs_disagree warning": lambda t: {"mismatch/logprob_abs_mean": 0.01},
    "logprobs_disagree error": lambda t: {"mismatch/logprob_abs_mean": 0.2},
    "critic_useless warning": lambda t: {"ppo/val/explained_variance": -0.3},
    "critic_useless error": lambda t: {"ppo/val/explained_variance": -3.0},
}
SETTINGS = {"eval_falling": {"before": evaluated(1.0)}}


def test_a_run_that_learns_has_no_findings():
    assert examined(steps=200) == {}


@pytest.mark.parametrize("named", FAULTS)
def test_the_fault_is_named_with_numbers_and_remedy(named):
    rule, severity = named.split()
    found = examined(FAULTS[named], **SETTINGS.get(rule, {}))
    assert {name: finding.severity for name, finding in found.items()} == {rule: severity}
    finding = found[rule]
    assert any(character.isdigit() for character in finding.sentence) and finding.remedy
    assert Finding(**asdict(finding)) == finding
    assert str(finding).startswith(f"step {finding.step}: {severity} [{rule}] {finding.sentence}")


@pytest.mark.parametrize(
    ("metrics", "config", "rate"),
    [
        # The square root of 0.01 / 0.16 is a quarter, of 0.01 / 1 a tenth.
        ({"objective/lr": 4e-5, "ppo/policy/approx_kl_k3": 0.16}, {}, "1e-05"),
        ({"objective/lr": 1e-3, "ppo/policy/approx_kl_k3": 1.0}, {}, "0.0001"),
        # At most a third, as clipping hides how far the policy would go.
        ({"objective/lr": 9e-6, "ppo/policy/clipfrac": 0.7}, {}, "3e-06"),
        ({"ppo/policy/clipfrac": 0.7}, {"learning_rate": 6e-5}, "2e-05"),
        ({"ppo/policy/clipfrac": 0.7}, {}, "a third"),
    ],
)
def test_updates_that_are_too_large_name_the_rate_to_try(metrics, config, rate):
    doctor = Doctor(History(config))
    for step in range(1, 6):
        doctor.history.add(step, metrics)
    (finding,) = doctor.examine()
    assert finding.rule == "update_too_large" and finding.remedy.startswith(f"try learning_rate: {rate}, ")


@pytest.mark.parametrize(("metrics", "rate"), [({"objective/critic_lr": 3e-4}, "0.0009"), ({}, "three times its rate")])
def test_a_critic_that_does_not_learn_gets_three_times_its_rate(metrics, rate):
    found = examined(lambda t: {"ppo/val/explained_variance": -0.3, **metrics})
    assert f" set critic_learning_rate: {rate} or " in found["critic_useless"].remedy


def test_every_rule_has_a_fault_and_a_row_on_the_page_that_links_the_section_of_its_remedy():
    rows = table_rows((ROOT / "docs/doctor.md").read_text(), "rule")
    assert {named.split()[0] for named in FAULTS} == set(RULES)
    assert [row["rule"] for row in rows] == [f"`{name}`" for name in RULES]
    for row, rule in zip(rows, RULES.values(), strict=True):
        assert row["severity"].startswith(("error", "warning"))
        (section,) = re.findall(r"\]\((troubleshooting\.md#[\w-]+)\)$", row["what to do"])
        assert rule.remedy.endswith(f"; see docs/{section}")


@pytest.mark.parametrize(
    ("fault", "settings"),
    [
        ("reward_falling warning", {"dynamic_sampling": True}),
        ("constant_reward error", {"rollout_batch_size": 1}),
        ("overoptimization error", {"reward_weights": [1.0, -1.0]}),
        ("kl_runaway error", {"reference": "none"}),
        ("update_too_large error", {"policy_loss": "gspo"}),
        ("logprobs_disagree warning", {"bf16": True}),
    ],
)
def test_what_the_run_is_meant_to_be_is_no_finding(fault, settings):
    assert fault.split()[0] not in examined(FAULTS[fault], **settings)


@pytest.mark.parametrize(
    "fault",
    [
        # A fall by 0.35 is not more than half of 0.8.
        lambda t: {"objective/scores": 1.0 if t < 21 else 0.65},
        lambda t: {"objective/scores/gold": 0.4 if t < 11 else 0.2},
        lambda t: {"objective/empty_fraction": 0.1},
        # It has learned to answer with nothing: its length and its reward tell.
        lambda t: {"objective/empty_fraction": 0.0 if t == 1 else 0.6},
        lambda t: {"objective/uniform_groups": 0.9},
        lambda t: {"ppo/policy/approx_kl_k3": 2e-5, "objective/kl_avg_seq": 0.0},
        lambda t: {"ppo/policy/approx_kl_k3": 0.0, "objective/kl_avg_seq": 2e-3},
        lambda t: {"objective/kl_avg_seq": 0.5},
        lambda t: {"objective/kl_avg_seq": 0.04 if t < 20 else 0.24},
        lambda t: {"objective/entropies": 1.0 if t < 20 else 0.21},
        lambda t: {"objective/entropies": 0.009 if t < 20 else 0.0001},
        lambda t: {"objective/response_length": 20.0 if t < 20 else 5.1},
        lambda t: {"objective/truncated_fraction": 1.0 if t % 5 else 0.89},
        lambda t: {"ppo/policy/approx_kl_k3": 0.09, "ppo/policy/clipfrac": 0.29},
        lambda t: {"mismatch/logprob_abs_mean": 0.001},
        lambda t: {"ppo/policy/first_ratio_error_max": 0.001},
        lambda t: {"ppo/val/explained_variance": -0.3 if t % 20 else 0.1},
        lambda t: FLAT if t < 3 or 20 < t < 25 else {},
        # The fall of 0.4 is within 3 standard errors.
        evaluations(1.0, 1.0, 0.6, 0.6, error=0.2),
        # The reward does not rise meanwhile.
        lambda t: {"objective/scores": 0.0, "objective/scores/gold": 1.0 if t < 20 else 0.0},
    ],
)
def test_what_is_within_the_limits_is_no_finding(fault):
    assert examined(fault) == {}


def test_an_evaluation_that_falls_while_the_reward_rises_is_over_optimization():
    found = examined(evaluations(0.5, 1.0, 0.2, 0.2))["overoptimization"]
    assert "eval/scores falls" in found.sentence
    # The reward has risen by 0.02 * 11 since step 20: more than a quarter of 0.8, which 0.02 * 10 is not.
    assert found.step == 31
    # 0.5 at the start and 0.2 now is not more than 0.3 of a standard deviation of 1.
    assert found.severity == "warning"
    # With a standard error of 0.3, the fall of 0.8 is less than three of them.
    assert examined(evaluations(0.5, 1.0, 0.2, 0.2, error=0.3)) == {}


def test_a_source_is_compared_by_whole_windows_in_long_runs_too():
    # The window of steps 1001 to 1005 has a mean of 0.4; that of 1000 to 1004, of 0.6, is none.
    found = examined(lambda t: {"objective/scores/gold": 1.0 if t < 1003 else 0.0}, steps=1005)["overoptimization"]
    assert (found.step, found.severity) == (1005, "error") and "is 0.4" in found.sentence


def test_scores_that_are_missing_or_begin_late_are_no_finding():
    assert "constant_reward" not in examined(lambda t: {"objective/scores_std": 0.0}, without=["objective/scores"])
    fall = evaluations(0.2, 0.2, 0.2, 0.2)
    late = examined(lambda t: fall(t) | ({"objective/scores": None} if t == 1 else {}), before=evaluated(1.0))
    assert "overoptimization" not in late and "eval_falling" in late


def test_an_evaluation_that_ends_below_its_start_is_found_as_far_as_its_errors_tell():
    # A fall of 0.23 with a standard deviation of 0.37: 0.62 of it; its standard error is 0.046.
    history = History(DEFAULTS)
    for step, score, error in ((0, 0.484, 0.033), (25, 0.254, 0.032)):
        history.add(step, {"eval/scores": score, "eval/scores_se": error, "eval/scores_std": 0.37})
    (found,) = Doctor(history).examine()
    assert (found.rule, found.severity) == ("eval_falling", "error") and "0.62 standard" in found.sentence

    def end(before, *scores, error):
        still = evaluations(*scores, error=error)
        return examined(lambda t: {"objective/scores": 0.0} | still(t), before=evaluated(before, error))

    # A fall by 0.6, with a standard error of 0.2 * 1.41 = 0.28 for the difference: 2.1 of them.
    assert end(1.0, 0.4, 0.4, 0.4, 0.4, error=0.2) == {}
    # Without standard errors the third evaluation is the first to count; the fall is 0.4.
    unsure = end(1.0, 0.6, 0.6, 0.6, 0.6, error=None)["eval_falling"]
    assert (unsure.step, unsure.severity) == (20, "warning")
    # It recovered.
    assert end(1.0, 0.9, 0.9, 0.9, 0.9, error=0.01) == {}
    # Without any spread there is no scale to judge by.
    alone = History(DEFAULTS)
    alone.add(0, {"eval/scores": 1.0, "eval/scores_se": 0.01})
    alone.add(9, {"eval/scores": 0.0, "eval/scores_se": 0.01})
    assert Doctor(alone).examine() == []


def test_a_ratio_that_is_off_before_any_update_is_a_disagreement_too():
    def found(ratio, mismatch=1e-6, **settings):
        fault = {"ppo/policy/first_ratio_error_max": ratio, "mismatch/logprob_abs_mean": mismatch}
        return [(each.severity, each.sentence) for each in examined(lambda t: fault, **settings).values()]

    ((severity, sentence),) = found(0.05)
    assert severity == "warning" and "ratio" in sentence and "0.05" in sentence
    assert found(0.5)[0][0] == "error" and found(0.5, dtype="bfloat16") == []
    # Of two that are found, the worse one is told.
    ((severity, sentence),) = found(0.5, mismatch=0.01)
    assert severity == "error" and "0.5" in sentence


def test_a_policy_that_starts_with_empty_answers_is_found_by_its_first_evaluation():
    start = {"eval/hard/empty_fraction": 0.25, "eval/empty_fraction": 0.0}
    (finding,) = examined(before=start).values()
    assert (finding.rule, finding.severity, finding.step) == ("empty_answers", "warning", 1)
    assert "25%" in finding.sentence and "eval/hard/empty_fraction" in finding.sentence
    assert examined(lambda t: start if t == 10 else {}) == {}, "what comes later is not the start"


@pytest.mark.parametrize(
    ("share", "settings", "severity"),
    [(1.0, {}, "error"), (0.95, {}, "warning"), (0.95, {"mask_truncated": True}, "error"), (0.85, {}, None)],
)
def test_a_policy_that_does_not_stop_before_training_is_found_by_its_first_evaluation(share, settings, severity):
    start = {"eval/hard/truncated_fraction": share, "eval/easy/truncated_fraction": 0.5}
    # From the second step on, the rollouts are cut off as well.
    found = examined(
        lambda t: {"objective/truncated_fraction": 0.95} if t > 1 else {}, before=start, steps=3, **settings
    )
    assert [(finding.rule, finding.severity, finding.step) for finding in found.values()] == (
        [("all_truncated", severity, 1)] if severity else []
    )
    for finding in found.values():
        assert f"eval/hard/truncated_fraction is {share:.0%} before training" in finding.sentence
    assert examined(lambda t: start if t == 10 else {}) == {}, "what comes later is not the start"


def test_one_cause_is_one_finding():
    def constant(t):
        return FLAT | {"objective/uniform_groups": 1.0, **FAULTS["policy_does_not_move error"](t)}

    assert list(examined(constant)) == ["constant_reward"]


def test_a_policy_that_one_step_moves_is_judged_by_its_reference():
    single = {"ppo/policy/optimizer_steps": 1.0, "ppo/policy/approx_kl_k3": 0.0}
    still = single | {"objective/kl_avg_seq": 0.0}
    assert examined(lambda t: single) == {}
    assert examined(lambda t: still)["policy_does_not_move"].severity == "error"
    assert examined(lambda t: still, reference="none") == {}
    # The noise of k1 belongs to a policy that stands still only where updates are measured, too.
    noise = lambda t: {"objective/kl_avg_seq": 2e-5 * (-1) ** t}  # noqa: E731
    measured = examined(lambda t: noise(t) | {"ppo/policy/approx_kl_k3": 3e-9})
    assert measured["policy_does_not_move"].severity == "error"
    assert examined(lambda t: noise(t) | single)["policy_does_not_move"].severity == "warning"


@pytest.mark.parametrize(
    ("use_peft", "rate", "names_it"),
    [(True, 2e-6, True), (True, 1e-5, False), (True, None, False), (False, 2e-6, False)],
)
def test_an_adapter_that_stands_still_is_told_the_rate_of_adapters(use_peft, rate, names_it):
    still = FAULTS["policy_does_not_move error"](1)
    # By the option: the rate itself falls.
    decaying = examined(lambda t: still | {"objective/lr": 1e-5 - 5e-8 * t}, use_peft=use_peft, learning_rate=rate)
    remedy = decaying["policy_does_not_move"].remedy
    assert remedy.startswith("set learning_rate: 1e-5 or more" if names_it else "raise learning_rate tenfold")


def test_neither_a_warm_up_nor_the_end_of_a_schedule_is_a_policy_that_does_not_move():
    still = FAULTS["policy_does_not_move error"](1)
    # Steps 1 to 9 are below half of the rate.
    assert examined(lambda t: still | {"objective/lr": 1e-6} if t < 10 else {}, warmup_steps=10) == {}
    assert examined(lambda t: still | {"objective/lr": 1e-8} if t > 20 else {}) == {}


def test_options_decide_how_severe_a_finding_is():
    for settings in ({"kl_coef": 0.0},):
        assert examined(FAULTS["kl_runaway error"], **settings)["kl_runaway"].severity == "warning"
    held = examined(FAULTS["kl_runaway error"], kl_coef=0.0, kl_loss_coef=0.1)
    assert held["kl_runaway"].severity == "error"
    corrected = examined(FAULTS["logprobs_disagree error"], old_policy="correct")
    assert corrected["logprobs_disagree"].severity == "warning"
    assert examined(FAULTS["all_truncated warning"], mask_truncated=True)["all_truncated"].severity == "error"


def test_critic_pretraining_and_runs_without_a_critic_lack_metrics_and_nothing_is_found():
    for without in (("ppo/val/",), ("ppo/policy/", "mismatch/"), ("ppo/", "objective/kl", "objective/entropies")):
        assert examined(without=without) == {}
    assert examined(lambda t: dict.fromkeys(healthy(t), None), steps=3) == {}


def test_a_finding_comes_once_and_again_if_it_is_worse_and_what_is_known_not_at_all():
    def found(known=()):
        doctor, findings = Doctor(History(DEFAULTS), known), []
        for t in range(1, 41):
            doctor.history.add(t, healthy(t) | {"objective/kl_avg_seq": ramp(t, 0.0, 2.0)})
            findings += doctor.examine()
        return findings

    findings = found()
    assert [(f.rule, f.severity) for f in findings] == [("kl_runaway", "warning"), ("kl_runaway", "error")]
    assert found(findings[1:]) == [] and found(findings[:1]) == findings[1:]


def test_a_step_that_is_added_twice_counts_once_and_numbers_that_are_not_finite_are_left_out():
    history = History({})
    history.add(1, {"a": 1.0, "b": math.nan})
    history.add(2, {"a": 2.0, "c": None})
    history.add(2, {"a": 3.0, "b": 5.0})
    assert history.series("a") == [(1, 1.0), (2, 3.0)] and history.series("b") == [(2, 5.0)]
    assert history.series("c") == [] and history.last("a", 3) == [] and history.step == 2
