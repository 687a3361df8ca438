"""Every rule names the fault that it is made for, and keeps silent where the run is meant to be so."""

import math
import re
from pathlib import Path

import pytest

from alpaca_ppo import PPOConfig
from alpaca_ppo.doctor import LIMITS, RULES, Doctor, Finding, History, RunFacts, stops
from alpaca_ppo.doctor.finding import finding_from
from alpaca_ppo.doctor.limits import Limit
from alpaca_ppo.ppo.mismatch import BOUNDS
from alpaca_ppo.registry import DOCTOR_RULES

DEFAULTS = {field: None for field in PPOConfig.__dataclass_fields__} | {
    "rollout_batch_size": 32,
    "num_return_sequences": 1,
    "use_kl_in_reward": True,
    "kl_coef": 0.1,
    "learning_rate": 1e-5,
    "max_grad_norm": 1.0,
    "policy_loss": "clip",
    "kl_estimator": "k1",
    "temperature": 1.0,
    "old_policy": "auto",
    "reference": "auto",
    "dtype": "float32",
    "response_len": 64,
}


def healthy(t: int) -> dict[str, float]:
    """Metrics of step `t` (from 1) of a run that learns."""
    return {
        "objective/scores": 0.02 * t,
        "objective/scores/grade": 0.02 * t,
        "objective/scores_std": 0.8,
        "objective/scores_std/grade": 0.8,
        "objective/non_score_rewards": -0.1,
        "objective/kl_avg_seq": 0.002 * t,
        "objective/kl_sum_seq": 0.04 * t,
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
        "mismatch/recomputed": 1.0,
        "ppo/padding_fraction": 0.1,
        "ppo/returns/mean": 0.02 * t,
        "ppo/returns/var": 0.6,
        "ppo/val/mean": 0.02 * t - 0.1,
        "ppo/val/var": 0.4,
        "ppo/val/grad_norm": 1.0,
        "ppo/val/explained_variance": 0.4,
        "ppo/val/outside_support": 0.0,
        "ppo/val/edge_mass": 0.01,
        "time/step": 10.0,
        "time/rollout": 5.0,
        "time/score": 1.0,
        "time/logprobs": 1.0,
        "time/update": 3.0,
    }


def examined(fault=None, *, steps=40, facts=None, without=(), before=None, **config) -> dict[str, Finding]:
    """The last finding of each rule in a run whose metrics `fault`, a function of the step, has changed; `before` are
    those of step 0.
    """
    doctor, found = Doctor(History(DEFAULTS | config, facts)), {}
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


FAULTS = {
    # A constant reward: no spread, no advantages, no gradient, so that the policy stays where it is.
    "constant_reward error": lambda t: {
        "objective/scores": 1.0,
        "objective/scores_std": 0.0,
        "objective/scores_std/grade": 0.0,
    },
    "constant_reward warning": lambda t: {"objective/scores_std": 0.0 if t > 20 else 0.8},
    # 1.0 to 0.0: 5 steps at the start have mean 0.95, the last five 0.05; 0.9 is more than 0.5 * 0.8.
    "reward_falling warning": lambda t: {"objective/scores": ramp(t, 1.0, 0.0)},
    # From 1 to 0.6 and to 0.4; the standard deviation is 1, the standard error of the difference 0.05 * 1.41.
    "eval_falling warning": lambda t: evaluated(0.6) if t == 40 else {},
    "eval_falling error": lambda t: evaluated(0.4) if t == 40 else {},
    # gold rises to 1 by step 10, and falls to -2 at step 40.
    "overoptimization error": lambda t: {"objective/scores/gold": t / 10 if t <= 10 else 1 - (t - 10) / 10},
    "overoptimization warning": lambda t: {"objective/scores/gold": t / 10 if t <= 10 else max(1 - (t - 10) / 10, 0.6)},
    "source_drowned warning": lambda t: {"objective/scores/format": 0.5, "objective/scores_std/format": 0.01},
    # From 0 to 3.9 by 0.1 a step: the last five have mean 3.7, the first 0.2: 4.4 standard deviations of 0.8.
    "reward_model_out_of_range warning": lambda t: {"objective/scores/grade": 0.1 * (t - 1)},
    "reward_model_out_of_range error": lambda t: {"objective/scores/grade": 0.3 * (t - 1)},
    "uniform_groups warning": lambda t: {"objective/uniform_groups": 0.95},
    "identical_responses warning": lambda t: {"objective/identical_responses": 0.9},
    "identical_responses error": lambda t: {"objective/identical_responses": 1.0, "objective/scores": 0.5},
    # A learning rate of nearly nothing, and one of a tenth of what it should be.
    "policy_does_not_move error": lambda t: {"ppo/policy/approx_kl_k3": 1e-12, "objective/kl_avg_seq": 1e-9},
    "policy_does_not_move warning": lambda t: {"ppo/policy/approx_kl_k3": 1e-6, "objective/kl_avg_seq": 1e-5 * t},
    "kl_runaway warning": lambda t: {"objective/kl_avg_seq": ramp(t, 0.3, 0.7)},
    "kl_runaway error": lambda t: {"objective/kl_avg_seq": ramp(t, 0.0, 2.0)},
    "negative_kl warning": lambda t: {"objective/kl_avg_seq": -0.05},
    "entropy_collapse warning": lambda t: {"objective/entropies": 0.9**t},
    # The score stays at 0, and the entropy ends at 0.8**40 = 0.0001.
    "entropy_collapse error": lambda t: {"objective/entropies": 0.8**t, "objective/scores": 0.0},
    "entropy_explosion warning": lambda t: {"objective/entropies": ramp(t, 1.0, 3.0)},
    "length_explosion warning": lambda t: {
        "objective/response_length": ramp(t, 20, 64),
        "objective/truncated_fraction": ramp(t, 0.0, 0.6),
    },
    "length_collapse warning": lambda t: {"objective/response_length": ramp(t, 20, 3)},
    "length_collapse error": lambda t: {"objective/response_length": 20.0 if t < 10 else 1.2},
    "all_truncated error": lambda t: {"objective/truncated_fraction": 0.0 if t < 20 else 0.95},
    "all_truncated warning": lambda t: {"objective/truncated_fraction": 1.0},
    "clip_fraction_high warning": lambda t: {"ppo/policy/clipfrac": 0.4},
    "clip_fraction_high error": lambda t: {"ppo/policy/clipfrac": 0.7},
    "clip_fraction_zero info": lambda t: {"ppo/policy/clipfrac": 0.0},
    "update_too_large warning": lambda t: {"ppo/policy/approx_kl_k3": 0.3},
    # The median is about 0.5.
    "grad_norm_spike warning": lambda t: {"ppo/policy/grad_norm": 6.0 if t == 30 else 0.5},
    "grad_norm_spike error": lambda t: {"ppo/val/grad_norm": 200.0 if t == 30 else 1.0},
    "skipped_updates warning": lambda t: {"ppo/policy/skipped_updates": float(t == 30)},
    "sampler_mismatch warning": lambda t: {"mismatch/logprob_abs_mean": 0.01},
    "sampler_mismatch error": lambda t: {"mismatch/logprob_abs_mean": 0.2},
    "first_ratio_off warning": lambda t: {"ppo/policy/first_ratio_error_max": 0.05},
    "first_ratio_off error": lambda t: {"ppo/policy/first_ratio_error_max": 0.5},
    "critic_useless warning": lambda t: {"ppo/val/explained_variance": -0.3},
    "critic_useless error": lambda t: {"ppo/val/explained_variance": -3.0},
    # 3 is more than 2 standard deviations of 0.77 from 0.4.
    "critic_off_scale warning": lambda t: {"ppo/val/mean": 3.0},
    "returns_outside_support warning": lambda t: {"ppo/val/outside_support": 0.1},
    "returns_outside_support error": lambda t: {"ppo/val/outside_support": 0.9},
    "padding warning": lambda t: {"ppo/padding_fraction": 0.7},
    "phase_dominates info": lambda t: {"time/score": 8.0, "time/rollout": 1.0},
    # 4 steps of 10 s between two evaluations of 50 s.
    "evaluation_dominates info": lambda t: {"time/eval": 50.0} if t % 4 == 0 else {},
}
TWO_SOURCES = RunFacts(source_weights={"grade": 1.0, "gold": 0.0})
SETTINGS = {
    "overoptimization": {"facts": TWO_SOURCES},
    "reward_model_out_of_range": {"facts": RunFacts(model_sources=("grade",))},
    "evaluation_dominates": {"eval_steps": 4},
    "eval_falling": {"before": evaluated(1.0)},
}


def test_a_run_that_learns_has_no_findings():
    assert examined() == {}
    assert examined(facts=TWO_SOURCES, steps=200) == {}


@pytest.mark.parametrize("named", FAULTS)
def test_the_fault_is_named_with_numbers_cause_and_remedy(named):
    rule, severity = named.split()
    found = examined(FAULTS[named], **SETTINGS.get(rule, {}))
    assert {name: finding.severity for name, finding in found.items()} == {rule: severity}
    finding = found[rule]
    assert any(character.isdigit() for character in finding.evidence)
    assert finding.title and finding.cause and finding.remedy
    assert finding_from(finding.row()) == finding
    assert str(finding).startswith(f"step {finding.step}: {severity} [{rule}] {finding.title}: ")


def test_every_rule_has_a_fault():
    of_facts = {"duplicate_prompts"}
    assert {named.split()[0] for named in FAULTS} | of_facts == set(RULES) == set(DOCTOR_RULES)


def test_repeated_prompts_are_counted():
    found = examined(steps=1, facts=RunFacts(num_prompts=100, num_distinct_prompts=80))
    assert {name: finding.evidence for name, finding in found.items()} == {
        "duplicate_prompts": "only 80 of 100 prompts are distinct"
    }
    assert examined(steps=1, facts=RunFacts(num_prompts=100, num_distinct_prompts=95)) == {}
    assert examined(steps=1, facts=RunFacts(num_prompts=10, num_distinct_prompts=1)) == {}
    episodes = lambda t: {"objective/turns": 1.5}  # noqa: E731
    assert examined(episodes, steps=1, facts=RunFacts(num_prompts=100, num_distinct_prompts=1)) == {}


def falling_evaluations(t):
    # 0.5, 1.0, then 0.2: at steps 10, 20 and 30.
    return {"eval/scores": {10: 0.5, 20: 1.0, 30: 0.2}[t], "eval/scores_std": 1.0} if t in (10, 20, 30) else {}


def test_an_evaluation_that_falls_while_the_reward_rises_is_over_optimization():
    found = examined(falling_evaluations)
    assert found["overoptimization"].title == "the reward rises while eval/scores falls"
    # The reward has risen by 0.02 * 11 since step 20: more than a quarter of 0.8, which 0.02 * 10 is not.
    assert found["overoptimization"].step == 31
    # 0.5 at the start and 0.2 now is not more than 0.3 of a standard deviation of 1.
    assert found["overoptimization"].severity == "warning"
    # With a standard error of 0.3, the fall of 0.8 is less than three of them.
    noisy = examined(lambda t: {**falling_evaluations(t), "eval/scores_se": 0.3} if t in (10, 20, 30) else {})
    assert noisy == {}
    named = examined(
        lambda t: (
            {k.replace("eval/", "eval/hard/"): v - t / 20 for k, v in falling_evaluations(t).items()}
            | ({"eval/hard/scores_std": 1.0} if t in (10, 20, 30) else {})
        )
    )
    assert named["overoptimization"].severity == "error"


def evaluations(scores, error):
    """A fault with evaluations from step 10 on, every ten steps, of a reward that does not rise."""
    return lambda t: {"objective/scores": 0.0} | (evaluated(scores[t // 10 - 1], error) if t % 10 == 0 else {})


def test_an_evaluation_that_ends_below_its_start_is_found_as_far_as_its_errors_tell():
    # A fall of 0.23 with a standard deviation of 0.37: 0.62 of it.
    measured = [
        {"eval/scores": s, "eval/scores_se": e, "eval/scores_std": 0.37} for s, e in ((0.484, 0.033), (0.254, 0.032))
    ]
    history = History(DEFAULTS)
    for step, line in zip((0, 25), measured, strict=True):
        history.add(step, line)
    found = {finding.rule: finding for finding in Doctor(history).examine()}
    assert (found["eval_falling"].severity, found["eval_falling"].title) == (
        "error",
        "eval/scores is worse than before training",
    )
    # 0.23 / sqrt(0.033**2 + 0.032**2) = 5.0
    assert found["eval_falling"].evidence == (
        "eval/scores was 0.484 before training and is 0.254 at step 25: lower by 0.62 standard deviations of a "
        "response's score, 5.0 standard errors of the difference"
    )
    assert "in another order" in found["eval_falling"].remedy
    # A fall by 0.6, with a standard error of 0.2 * 1.41 = 0.28 for the difference: 2.1 of them.
    assert examined(evaluations([0.4] * 4, 0.2), before=evaluated(1.0, 0.2)) == {}
    # Without standard errors the third evaluation is the first to count; the fall is 0.4.
    unsure = examined(evaluations([0.6] * 4, None), before=evaluated(1.0, None))["eval_falling"]
    assert (unsure.step, unsure.severity) == (20, "warning")
    assert unsure.evidence.endswith("0.40 standard deviations of a response's score")
    # It recovered, and another run was evaluated at step 10 for the first time.
    assert examined(evaluations([0.9] * 4, 0.01), before=evaluated(1.0, 0.01)) == {}
    assert "eval_falling" not in examined(evaluations([1.0, 0.0, 0.0, 0.0], 0.01))
    # Without any spread there is no scale to judge by.
    alone = History(DEFAULTS)
    alone.add(0, {"eval/scores": 1.0, "eval/scores_se": 0.01})
    alone.add(9, {"eval/scores": 0.0, "eval/scores_se": 0.01})
    assert Doctor(alone).examine() == []


def test_one_cause_is_one_finding():
    def constant(t):
        return FAULTS["constant_reward error"](t) | {
            "objective/uniform_groups": 1.0,
            **FAULTS["policy_does_not_move error"](t),
            "ppo/policy/grad_norm": 0.0,
        }

    assert list(examined(constant)) == ["constant_reward"]


def test_a_rate_a_thousand_times_too_small_is_an_error_though_the_kl_is_noisy():
    # As measured with 3e-7 instead of 3e-4: updates of 3e-9, and a KL of 2e-5 of either sign.
    slow = lambda t: {"ppo/policy/approx_kl_k3": 3e-9, "objective/kl_avg_seq": 2e-5 * (-1) ** t}  # noqa: E731
    assert examined(slow)["policy_does_not_move"].severity == "error"
    # Where one optimizer step leaves the KL alone to judge by, so much may be a policy that moves slowly.
    single = lambda t: slow(t) | {"ppo/policy/optimizer_steps": 1.0}  # noqa: E731
    assert examined(single)["policy_does_not_move"].severity == "warning"


@pytest.mark.parametrize(
    ("fault", "settings"),
    [
        ("reward_falling warning", {"dynamic_sampling": True}),
        ("constant_reward error", {"rollout_batch_size": 1}),
        ("kl_runaway error", {"reference": "none"}),
        ("negative_kl warning", {"kl_estimator": "k3"}),
        ("clip_fraction_zero info", {"policy_loss": "sapo"}),
        ("clip_fraction_high error", {"policy_loss": "gspo"}),
        ("sampler_mismatch warning", {"bf16": True}),
        ("first_ratio_off error", {"dtype": "bfloat16"}),
        ("source_drowned warning", {"adv_estimator": "gdpo"}),
        ("evaluation_dominates info", {"eval_steps": 0}),
    ],
)
def test_what_the_run_is_meant_to_be_is_no_finding(fault, settings):
    assert fault.split()[0] not in examined(FAULTS[fault], **settings)


def test_a_kl_that_nothing_holds_back_is_a_warning():
    for settings in ({"kl_coef": 0.0}, {"use_kl_in_reward": False}):
        assert examined(FAULTS["kl_runaway error"], **settings)["kl_runaway"].severity == "warning"
    held = examined(FAULTS["kl_runaway error"], use_kl_in_reward=False, use_kl_loss=True)
    assert held["kl_runaway"].severity == "error"


def test_a_mismatch_that_the_loss_corrects_is_a_warning():
    found = examined(FAULTS["sampler_mismatch error"], old_policy="correct")
    assert found["sampler_mismatch"].severity == "warning"


def test_truncated_responses_without_a_gradient_are_an_error():
    assert examined(FAULTS["all_truncated warning"], mask_truncated=True)["all_truncated"].severity == "error"


def test_episodes_that_are_cut_off_name_the_limits_of_episodes():
    fault = FAULTS["all_truncated warning"]
    assert "max_turn" not in str(examined(fault)["all_truncated"])
    found = examined(lambda t: fault(t) | {"objective/turns": 1.5})["all_truncated"]
    assert "raise max_turns, max_turn_tokens, max_policy_tokens or response_len" in found.remedy


def test_a_policy_that_one_step_moves_is_judged_by_its_reference():
    single = lambda t: {"ppo/policy/optimizer_steps": 1.0, "ppo/policy/approx_kl_k3": 0.0}  # noqa: E731
    assert examined(single) == {}
    still = lambda t: single(t) | {"objective/kl_avg_seq": 0.0}  # noqa: E731
    assert examined(still)["policy_does_not_move"].severity == "error"
    assert examined(still, reference="none") == {}


def test_a_policy_without_a_gradient_is_said_to_have_none():
    found = examined(lambda t: FAULTS["policy_does_not_move error"](t) | {"ppo/policy/grad_norm": 0.0})
    assert "the gradient is exactly 0" in found["policy_does_not_move"].cause
    slow = examined(FAULTS["policy_does_not_move error"])
    assert "learning_rate of 1e-05 is too small" in slow["policy_does_not_move"].cause


def test_neither_a_warm_up_nor_the_end_of_a_schedule_is_a_policy_that_does_not_move():
    still = FAULTS["policy_does_not_move error"](1)
    # Steps 1 to 9 are below half of the rate.
    assert examined(lambda t: still | {"objective/lr": 1e-6} if t < 10 else {}, warmup_steps=10) == {}
    assert examined(lambda t: {"ppo/policy/approx_kl_k3": 0.0, "objective/lr": 1e-8} if t > 20 else {}) == {}


def test_critic_pretraining_and_runs_without_a_critic_lack_metrics_and_nothing_is_found():
    assert examined(without=("ppo/val/",)) == {}
    assert examined(without=("ppo/policy/", "mismatch/")) == {}
    assert examined(without=("ppo/", "objective/kl", "time/", "mismatch/", "objective/entropies")) == {}
    for name in FAULTS:
        assert examined(lambda t: dict.fromkeys(healthy(t), None), steps=3) == {}, name


def test_values_of_a_tail_of_the_distribution_may_lie_off():
    tail = lambda t: {"ppo/val/mean": 3.0, "ppo/val/distribution_mean": 0.02 * t}  # noqa: E731
    assert examined(tail) == {}


def test_the_outermost_atoms_count_too():
    assert set(examined(lambda t: {"ppo/val/edge_mass": 0.8})) == {"returns_outside_support"}


def test_a_finding_comes_once_and_again_if_it_is_worse():
    doctor = Doctor(History(DEFAULTS))
    found = []
    for t in range(1, 41):
        doctor.history.add(t, healthy(t) | {"objective/kl_avg_seq": ramp(t, 0.0, 2.0)})
        found += [(f.rule, f.severity) for f in doctor.examine()]
    assert found == [("kl_runaway", "warning"), ("kl_runaway", "error")]


def test_what_is_known_is_not_found_again():
    known = examined(FAULTS["kl_runaway error"])["kl_runaway"]
    doctor = Doctor(History(DEFAULTS), [known])
    for t in range(1, 41):
        doctor.history.add(t, healthy(t) | {"objective/kl_avg_seq": ramp(t, 0.0, 2.0)})
        assert doctor.examine() == []


def test_stop_on_names_rules_or_severities():
    finding = examined(FAULTS["kl_runaway error"])["kl_runaway"]
    assert stops(finding, ["error"]) and stops(finding, ["padding", "kl_runaway"])
    assert not stops(finding, ["warning", "padding"]) and not stops(finding, [])


def test_a_step_that_is_added_twice_counts_once_and_numbers_that_are_not_finite_are_left_out():
    history = History({})
    history.add(1, {"a": 1.0, "b": math.nan})
    history.add(2, {"a": 2.0, "c": None})
    history.add(2, {"a": 3.0, "b": 5.0})
    assert history.series("a") == [(1, 1.0), (2, 3.0)] and history.series("b") == [(2, 5.0)]
    assert history.series("c") == [] and history.last("a", 3) == [] and history.step == 2


def test_the_best_mean_of_consecutive_values_is_kept():
    history = History({})
    for step, value in enumerate([0.0, 4.0, 2.0, 0.0], 1):
        history.add(step, {"a": value})
        if step >= 2:
            history.best_mean("a", 2)
    # (0 + 4) / 2 = 2, (4 + 2) / 2 = 3, (2 + 0) / 2 = 1
    assert history.best_mean("a", 2) == (3, 3.0)
    assert history.mean_until("a", 2, 2) == 2.0


def test_weights_are_given_to_sources_by_what_adds_up():
    history = History({"reward_weights": [2.0, 0.5, 0.0]})
    for step in (1, 2):
        history.add(
            step, {"objective/scores/a": 3.0, "objective/scores/b": 4.0 * step, "objective/scores/c": 1.0 * step}
        )
        # 0.5 * 3 + 0 * b + 2 * c
        history.add(step, {"objective/scores": 1.5 + 2.0 * step})
    assert history.source_weights == {"a": 0.5, "b": 0.0, "c": 2.0}
    history.add(1, {"objective/scores": 100.0})
    assert History({"reward_weights": None}).source_weights == {}
    unexplained = History({"reward_weights": [2.0, 0.0]})
    unexplained.add(1, {"objective/scores/a": 3.0, "objective/scores/b": 4.0, "objective/scores": 17.0})
    assert unexplained.source_weights == {}


def test_every_limit_has_a_reason():
    assert all(isinstance(entry, Limit) and len(entry.reason) > 10 for entry in LIMITS.values())


def test_the_page_lists_every_rule_and_every_limit():
    page = (Path(__file__).parents[2] / "docs/doctor.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \| (?:error|warning|info)", page, re.MULTILINE)) == set(RULES)
    table = [f"| `{name}` | {entry.value:g} | {entry.reason} |" for name, entry in LIMITS.items()]
    assert re.findall(r"^\| `\w+` \| [-\de.]+ \| .*$", page, re.MULTILINE) == table


@pytest.mark.parametrize("half", [False, True])
def test_a_mismatch_is_judged_by_the_bounds_of_the_run(half):
    bound = BOUNDS["mismatch/logprob_abs_mean"]
    assert LIMITS["mismatch_half" if half else "mismatch_float32"].value == (bound.warn_half if half else bound.warn)
    assert LIMITS["mismatch_error"].value == bound.stop


def test_identical_answers_to_a_task_that_was_learned_are_no_error():
    found = examined(lambda t: {"objective/identical_responses": float(t > 20), "objective/scores": 0.02 * t})
    assert found["identical_responses"].severity == "warning"
