"""Validation: an error names field, value and remedy."""

import dataclasses

import pytest

from alpaca_ppo import PPOConfig
from alpaca_ppo.functional import kl, masked
from alpaca_ppo.validation import KL_ESTIMATORS, LOSS_AGG_MODES


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rollout_batch_size": 0}, "rollout_batch_size is 0; it must be at least 1"),
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
    ],
)
def test_a_bad_value_is_named_with_its_remedy(settings, message):
    with pytest.raises(ValueError, match=message):
        PPOConfig(**settings)


def test_the_configuration_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        PPOConfig().kl_coef = 1.0


def test_every_choice_of_the_configuration_is_one_the_functions_know():
    assert set(KL_ESTIMATORS) <= set(kl.KL_ESTIMATORS)
    assert set(LOSS_AGG_MODES) == set(masked.LOSS_AGG_MODES)
