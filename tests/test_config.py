"""Parsing and validation: flags win over the file, and an error names field, value and remedy."""

import dataclasses

import pytest
from transformers import TrainingArguments

from alpaca_ppo import PPOConfig, ScriptArguments, parse_args
from alpaca_ppo.config import KL_ESTIMATORS, LOSS_AGG_MODES
from alpaca_ppo.functional import kl, masked

REQUIRED = ["--model_name_or_path", "m", "--dataset_name", "d", "--reward_funcs", "a:b"]


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("learning_rate: 1e-5\nkl_coef: 0.3\ncliprange_value: null\ntruncate_tokens: stop\nppo_epochs: 3\n")
    script, args = parse_args([ScriptArguments, PPOConfig], ["--config", str(path), "--kl_coef", "0.1", *REQUIRED])
    assert (args.learning_rate, args.kl_coef, args.ppo_epochs) == (1e-5, 0.1, 3)
    assert args.cliprange_value is None
    assert args.truncate_tokens == ["stop"]
    assert args.gamma == PPOConfig().gamma
    assert script.reward_funcs == ["a:b"]


def test_text_of_a_field_that_is_no_number_stays_text(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text('lr_scheduler_type: cosine\nsave_strategy: "no"\n')
    (arguments,) = parse_args([TrainingArguments], ["--config", str(path), "--output_dir", str(tmp_path)])
    assert (arguments.lr_scheduler_type, arguments.save_strategy) == ("cosine", "no")


def test_a_config_file_that_is_missing_malformed_or_unknown_is_refused(tmp_path):
    with pytest.raises(ValueError, match="there is no such file"):
        parse_args([PPOConfig], ["--config", str(tmp_path / "none.yaml")])
    with pytest.raises(ValueError, match="names no file"):
        parse_args([PPOConfig], ["--config"])
    path = tmp_path / "run.yaml"
    path.write_text("- a\n- b\n")
    with pytest.raises(ValueError, match="holds list"):
        parse_args([PPOConfig], ["--config", str(path)])
    path.write_text("learning_rat: 1\n")
    with pytest.raises(ValueError, match="unknown keys in the --config file: learning_rat"):
        parse_args([PPOConfig], ["--config", str(path)])
    path.write_text("learning_rate: fast\n")
    with pytest.raises(ValueError, match="learning_rate is 'fast' in the --config file; it must be float"):
        parse_args([PPOConfig], ["--config", str(path)])


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
        ({"total_epochs": 1, "total_episodes": 2}, r"total_epochs \(1\) and total_episodes \(2\) are both set"),
        ({"rollout_batch_size": 8, "step_batch_size": 16}, r"step_batch_size \(16\) is larger than"),
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


@pytest.mark.parametrize("missing", ["model_name_or_path", "dataset_name"])
def test_required_script_arguments_are_named(missing):
    given = {"model_name_or_path": "m", "dataset_name": "d", "reward_funcs": ["a:b"]}
    del given[missing]
    with pytest.raises(ValueError, match=f"{missing} is not set"):
        ScriptArguments(**given)


def test_a_run_without_any_reward_is_refused():
    with pytest.raises(ValueError, match="no reward"):
        ScriptArguments(model_name_or_path="m", dataset_name="d")


def test_the_configuration_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        PPOConfig().kl_coef = 1.0


def test_every_choice_of_the_configuration_is_one_the_functions_know():
    assert set(KL_ESTIMATORS) <= set(kl.KL_ESTIMATORS)
    assert set(LOSS_AGG_MODES) == set(masked.LOSS_AGG_MODES)
