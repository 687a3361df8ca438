"""Validation: an error names field, value and remedy."""

import dataclasses

import pytest

from alpaca_ppo import PPOConfig, functional
from alpaca_ppo.config.checks import ADV_ESTIMATORS, GROUP_ESTIMATORS, KL_ESTIMATORS, LOSS_AGG_MODES
from alpaca_ppo.functional import kl, masked


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rollout_batch_size": 0}, "rollout_batch_size is 0; it must be at least 1"),
        ({"max_skipped_updates": -1}, "max_skipped_updates is -1; it must be 0 or more"),
        (
            {"metric_for_best_model": "objective/scores"},
            "metric_for_best_model is 'objective/scores' but save_steps is 0",
        ),
        (
            {"metric_for_best_model": "eval/scores", "save_steps": 4},
            r"save_steps \(4\) is no multiple of eval_steps \(0\), .* set eval_steps to 4",
        ),
        (
            {"metric_for_best_model": "eval/scores", "save_steps": 4, "eval_steps": 3},
            r"save_steps \(4\) is no multiple of eval_steps \(3\)",
        ),
        ({"save_steps": -1}, "save_steps is -1; it must be 0 or more"),
        ({"temperature": 0.0}, "temperature is 0.0; it must be a positive number"),
        ({"kl_coef": float("nan")}, "kl_coef is nan; it must be 0 or more"),
        ({"gamma": 1.5}, "gamma is 1.5; it must be between 0 and 1"),
        ({"cliprange": 1.0}, "cliprange is 1.0; it must be below 1"),
        ({"clip_ratio_c": 1.0}, "clip_ratio_c is 1.0; it must be above 1"),
        ({"adam_beta2": 1.0}, "adam_beta2 is 1.0"),
        ({"reward_weights": []}, "reward_weights is"),
        ({"penalty_reward_value": float("inf")}, "penalty_reward_value is inf"),
        ({"kl_estimator": "k9"}, "kl_estimator is 'k9'; choose one of k1, abs"),
        ({"critic_layout": "twin"}, "critic_layout is 'twin'; choose one of separate, shared"),
        ({"ppo_epochs": "two"}, "ppo_epochs is 'two', a str; it must be int"),
        ({"ppo_epochs": True}, "ppo_epochs is True, a bool; it must be int"),
        ({"report_to": "none"}, "report_to is 'none', a str; it must be list"),
        ({"reward_weights": ["1e-1"]}, "an entry of reward_weights is '1e-1', a str; it must be float or int"),
        ({"reward_weights": [True]}, "an entry of reward_weights is True, a bool"),
        ({"report_to": [1]}, "an entry of report_to is 1, a int; it must be str, in quotes"),
        ({"truncate_tokens": [1.5]}, "an entry of truncate_tokens is 1.5, a float; it must be str or int"),
        ({"run_name": 7}, "run_name is 7, a int; it must be str, in quotes"),
        ({"total_epochs": 1, "total_episodes": 2}, r"total_epochs \(1\) and total_episodes \(2\) are both set"),
        ({"rollout_batch_size": 8, "step_batch_size": 16}, r"step_batch_size \(16\) is larger than"),
        ({"num_return_sequences": 33}, r"num_return_sequences \(33\) is larger than rollout_per_device_batch"),
        (
            {"kl_controller": "horizon", "kl_horizon": 10, "rollout_batch_size": 64},
            "kl_horizon is 10: .* use 13 or more",
        ),
        ({"k_beta": 5.0}, "k_beta is 5.0; it must be below 5"),
        ({"push_to_hub": True}, "hub_model_id is not set"),
        ({"eval_top_p": 0.9}, "act on sampled responses only"),
        ({"truncate_after": 3}, "truncate_tokens is not set"),
        ({"critic": "c52"}, "critic is 'c52'; choose one of scalar, c51, quantile, iqn"),
        ({"num_atoms": 1}, "num_atoms is 1; it must be at least 2"),
        ({"num_quantiles": 0}, "num_quantiles is 0; it must be at least 1"),
        ({"c51_v_min": 2.0, "c51_v_max": 2.0}, r"c51_v_min \(2.0\) is not below c51_v_max \(2.0\)"),
        ({"c51_v_max": float("inf")}, "c51_v_max is inf; it must be a finite number"),
        ({"quantile_huber_kappa": 0.0}, "quantile_huber_kappa is 0.0; it must be a positive number"),
        ({"critic": "iqn", "risk_level": 1.5}, "risk_level is '1.5'; it must be neutral, or a number above 0"),
        ({"critic": "iqn", "risk_level": "bold"}, "risk_level is 'bold'; it must be neutral"),
        ({"risk_level": 0.1}, "risk_level is '0.1' but critic is 'scalar', which knows the mean alone"),
        ({"adv_estimator": "a2c"}, "adv_estimator is 'a2c'; choose one of gae, grpo"),
        ({"adv_estimator": "rloo"}, "num_return_sequences is 1; set it to 2 or more"),
        ({"adv_estimator": "remax", "critic": "iqn"}, "critic is 'iqn', but adv_estimator 'remax' has no critic"),
        ({"policy_loss": "gspo"}, "loss_agg_mode is 'token-mean'; .*set loss_agg_mode: seq-mean-token-mean"),
        (
            {"policy_loss": "gspo", "loss_agg_mode": "seq-mean-token-mean", "clip_ratio_c": 3.0},
            "clip_ratio_c is 3.0, but policy_loss 'gspo' has no dual clip",
        ),
        (
            {"use_kl_in_reward": False, "kl_controller": "proportional"},
            "kl_controller is 'proportional' but use_kl_in_reward is False",
        ),
        ({"kl_controller": "proportional", "kl_coef": 0.0}, "kl_controller is 'proportional' but kl_coef is 0"),
        (
            {"init_value_with_reward": True, "critic_layout": "shared"},
            "init_value_with_reward is True but critic_layout",
        ),
        ({"adv_estimator": "remax", "gamma": 0.9}, "gamma is 0.9, but adv_estimator 'remax' weighs whole responses"),
        (
            {"reference": "none", "use_kl_in_reward": False, "max_kl_to_ref": 5.0},
            "max_kl_to_ref is 5.0 but reference is 'none'",
        ),
        ({"load_in_4bit": True, "merge_on_save": True}, "merge_on_save is True, but load_in_4bit too"),
        ({"kl_loss_type": "k4"}, "kl_loss_type is 'k4'; choose one of k1"),
        ({"old_policy": "new"}, "old_policy is 'new'; choose one of recompute, rollout, correct"),
        ({"rollout_correction_threshold": 0.0}, "rollout_correction_threshold is 0.0; it must be a positive"),
        ({"target_kl_stop": -1.0}, "target_kl_stop is -1.0; it must be a positive number"),
        ({"critic_learning_rate": -1.0}, "critic_learning_rate is -1.0; it must be 0 or more"),
    ],
)
def test_a_bad_value_is_named_with_its_remedy(settings, message):
    with pytest.raises(ValueError, match=message):
        PPOConfig(**settings)


def test_the_configuration_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        PPOConfig().kl_coef = 1.0


def test_every_choice_of_the_configuration_is_one_the_functions_know():
    assert KL_ESTIMATORS == kl.KL_ESTIMATORS
    assert GROUP_ESTIMATORS == functional.GROUP_ESTIMATORS
    assert set(ADV_ESTIMATORS) - set(GROUP_ESTIMATORS) == {"gae", "reinforce_plus_plus", "remax"}


def test_a_risk_level_may_be_a_number():
    assert PPOConfig(critic="c51", risk_level=0.25).risk_alpha == 0.25
    assert PPOConfig(critic="c51").risk_alpha is None


def test_loss_modes_are_those_of_the_functions():
    assert set(LOSS_AGG_MODES) == set(masked.LOSS_AGG_MODES)
