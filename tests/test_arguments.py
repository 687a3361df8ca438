"""The command line: flags win over the file, and an error names what is wrong in either."""

import pytest
from transformers import TrainingArguments

from alpaca_ppo import PPOConfig, ScriptArguments, parse_args

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


@pytest.mark.parametrize("missing", ["model_name_or_path", "dataset_name"])
def test_required_script_arguments_are_named(missing):
    given = {"model_name_or_path": "m", "dataset_name": "d", "reward_funcs": ["a:b"]}
    del given[missing]
    with pytest.raises(ValueError, match=f"{missing} is not set"):
        ScriptArguments(**given)


def test_a_run_without_any_reward_is_refused():
    with pytest.raises(ValueError, match="no reward"):
        ScriptArguments(model_name_or_path="m", dataset_name="d")
