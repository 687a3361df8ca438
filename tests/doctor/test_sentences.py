"""What findings say: whole sentences with unusual values, and no advice that names what the run lacks."""

import pytest

from alpaca_ppo.doctor import Doctor, History
from tests.doctor.test_rules import FAULTS, SETTINGS, examined, healthy, ramp

# What a finding must say, and must not say, where the run's options differ from the usual.
SENTENCES = {
    "one optimizer step": (
        "policy_does_not_move error", "evidence", {"ppo/policy/optimizer_steps": 1.0}, {},
        "in 10 steps, policy and reference differ by at most 1e-09 nats per token; ppo/policy/grad_norm is at most "
        "0.52, objective/lr 1e-05",
    ),
    "no reference": (
        "policy_does_not_move error", "evidence", {}, {"reference": "none"},
        "in 10 steps, old and new policy differ by at most 1e-12 nats per token; ppo/policy/grad_norm is at most 0.52, "
        "objective/lr 1e-05",
    ),
    "no penalty to lower": (
        "policy_does_not_move error", "cause", {}, {"kl_coef": 0.0},
        "a learning_rate of 1e-05 is too small for this model",
    ),
    "a KL in the loss alone": (
        "kl_runaway error", "remedy", {}, {"use_kl_in_reward": False, "use_kl_loss": True},
        "raise kl_loss_coef, lower learning_rate, or end the run at max_kl_to_ref; a policy this far away has usually "
        "left fluent text: read its responses",
    ),
    "no KL penalty": (
        "kl_runaway error", "cause", {}, {"kl_coef": 0.0},
        "nothing in this run holds the KL back: it has no KL penalty",
    ),
    "a penalty that outweighs the reward": (
        "length_collapse warning", "remedy", {}, {"use_kl_in_reward": False, "use_kl_loss": True},
        "score short answers by hand; lower kl_loss_coef if the penalty outweighs the reward",
    ),
    "a reward that falls without a critic": (
        "reward_falling warning", "remedy", {"ppo/val/explained_variance": None}, {"ppo_epochs": 1, "kl_coef": 0.0},
        "lower learning_rate, or set target_kl_stop: 0.02",
    ),
    "a reward that falls": (
        "reward_falling warning", "remedy", {}, {"reward_weights": [-1.0]},
        "lower learning_rate or ppo_epochs, or set target_kl_stop: 0.02; look at ppo/val/explained_variance; compare "
        "objective/non_score_rewards with objective/scores and lower kl_coef if the penalty is larger; check the signs "
        "in reward_weights",
    ),
    "a fall without a reference": (
        "entropy_collapse warning", "remedy", {}, {"reference": "none", "temperature": 0.7},
        "set entropy_coef (0.001 to 0.01) or cliprange_high (0.28); train with a reference (reference: auto) and "
        "kl_coef above 0; lower learning_rate; sample at temperature: 1",
    ),
    "an entropy bonus": (
        "entropy_explosion warning", "cause", {}, {"entropy_coef": 0.01},
        "an entropy_coef that outweighs the reward or updates that destroy the model",
    ),
    "one skipped step": (
        "skipped_updates warning", "evidence", {}, {},
        "1 optimizer step of this step had a loss or a gradient that is not finite",
    ),
    "no length and no response_len": (
        "all_truncated warning", "evidence", {"objective/response_length": None}, {"response_len": None},
        "objective/truncated_fraction is at least 1.00 in the last 5 steps (1.00 in the first)",
    ),
    "a support by default": (
        "returns_outside_support warning", "evidence", {"ppo/val/edge_mass": None, "ppo/returns/mean": None}, {},
        "10.0% of the returns lie outside of value_support ([-10, 10]), and 0.0% of the predicted probability "
        "lies on these ends",
    ),
    "padding that is asked for": (
        "padding warning", "remedy", {}, {"padding_free": "false"},
        "set padding_free: auto or a smaller max_tokens_per_micro_batch",
    ),
    "an evaluation after each step": (
        "evaluation_dominates info", "evidence", {}, {"eval_steps": 1},
        "an evaluation takes 50 s, and the training between two of them (1 step) 10 s",
    ),
    "a mismatch that is corrected": (
        "sampler_mismatch error", "remedy", {}, {"old_policy": "correct"},
        "try generation_backend: generate, or rollout_per_device_batch_size equal to num_return_sequences; "
        "docs/troubleshooting.md has the causes one by one",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SENTENCES)
def test_a_sentence_is_whole_and_names_nothing_that_the_run_lacks(case):
    named, part, changed, config, sentence = SENTENCES[case]
    rule = named.split()[0]
    found = examined(lambda t: FAULTS[named](t) | changed, **SETTINGS.get(rule, {}) | config)
    assert found[rule].row()[part] == sentence


def test_a_gradient_that_was_zero_before_has_no_factor():
    found = examined(lambda t: {"ppo/policy/grad_norm": 6.0 if t == 30 else 0.0})
    assert found["grad_norm_spike"].evidence == (
        "ppo/policy/grad_norm is 6; the median of the 20 steps before is 0. It is clipped to 1"
    )


def test_without_run_yaml_no_option_is_taken_for_switched_off():
    doctor, found = Doctor(History({})), {}
    for t in range(1, 41):
        doctor.history.add(t, healthy(t) | {"objective/kl_avg_seq": ramp(t, 0.0, 2.0)})
        found |= {finding.rule: finding for finding in doctor.examine()}
    assert found["kl_runaway"].cause.startswith("a KL penalty that is too weak")
    assert found["kl_runaway"].remedy.startswith("raise kl_coef, lower learning_rate")
