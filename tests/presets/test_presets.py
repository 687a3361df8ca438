"""The presets are what their publishers use, are found by name, and are part of an installed package."""

from pathlib import Path

import pytest
from setuptools import Distribution

from alpaca_ppo import LoraArguments, PPOConfig, ScriptArguments, parse_args
from alpaca_ppo.config.parser import read_yaml
from alpaca_ppo.presets import preset_names, preset_path

ROOT = Path(__file__).parents[2]
REQUIRED = ["--model_name_or_path", "m", "--dataset_name", "d", "--reward_funcs", "a:b"]

# What the presets' comments claim, typed from the publishers' own files: AlpacaFarm's rlhf_ppo.sh and its
# TrainingArguments, TRL's PPOConfig, verl's ppo_trainer.yaml with its actor, critic and algorithm parts.
PUBLISHED = {
    "alpaca_farm": {
        "query_len": 192,
        "response_len": 300,
        "rollout_batch_size": 512,
        "step_batch_size": 256,
        "ppo_epochs": 2,
        "total_epochs": 10,
        "learning_rate": 3e-6,
        "lr_scheduler_type": "linear",
        "warmup_steps": 5,
        "adam_epsilon": 1e-5,
        "max_grad_norm": 1.0,
        "temperature": 1.0,
        "gamma": 1.0,
        "lam": 1.0,
        "whiten_rewards": True,
        "whiten_advantages": True,
        "cliprange": 0.2,
        "cliprange_value": 0.2,
        "vf_coef": 0.1,
        "kl_coef": 0.02,
        "kl_estimator": "k1_clamped",
        "old_policy": "recompute",
        "kl_controller": "fixed",
        "init_value_with_reward": True,
    },
    "trl": {
        "response_len": 53,
        "temperature": 0.7,
        "ppo_epochs": 4,
        "learning_rate": 3e-6,
        "lr_scheduler_type": "linear",
        "max_grad_norm": 1.0,
        "gamma": 1.0,
        "lam": 0.95,
        "whiten_rewards": False,
        "whiten_advantages": True,
        "cliprange": 0.2,
        "cliprange_value": 0.2,
        "vf_coef": 0.1,
        "kl_coef": 0.05,
        "kl_estimator": "k1",
        "old_policy": "rollout",
        "kl_controller": "fixed",
        "adam_epsilon": 1e-8,
    },
    "verl": {
        "query_len": 512,
        "response_len": 512,
        "rollout_batch_size": 1024,
        "step_batch_size": 256,
        "ppo_epochs": 1,
        "learning_rate": 1e-6,
        "critic_learning_rate": 1e-5,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1.0,
        "temperature": 1.0,
        "gamma": 1.0,
        "lam": 1.0,
        "whiten_advantages": True,
        "cliprange": 0.2,
        "clip_ratio_c": 3.0,
        "old_policy": "recompute",
        "cliprange_value": 0.5,
        "loss_agg_mode": "token-mean",
        "kl_coef": 0.0,
        "weight_decay": 0.01,
        "adam_epsilon": 1e-8,
        "total_epochs": 30,
    },
}


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_a_preset_has_the_defaults_that_were_published(name):
    _, args = parse_args([ScriptArguments, PPOConfig], ["--config", name, *REQUIRED])
    assert {field: getattr(args, field) for field in PUBLISHED[name]} == PUBLISHED[name]


def test_every_preset_is_checked_here_and_names_no_model_reward_or_folder():
    assert set(preset_names()) == set(PUBLISHED)
    for name in preset_names():
        given = read_yaml(name)
        assert not {"model_name_or_path", "reward_funcs", "reward_model_name_or_path", "output_dir"} & set(given)


def test_a_preset_is_a_file_that_is_found_by_name():
    assert preset_path("trl").read_text().startswith("# The defaults of TRL")
    with pytest.raises(ValueError, match="there is no preset 'grpo'; choose one of alpaca_farm, trl, verl"):
        preset_path("grpo")


def test_a_file_of_the_name_wins_over_the_preset(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "verl").mkdir()
    (tmp_path / "trl").write_text("seed: 7\n")
    assert read_yaml("trl") == {"seed": 7}
    assert read_yaml("verl")["clip_ratio_c"] == 3.0


def test_a_config_that_is_neither_file_nor_preset_lists_the_presets(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message = f"--config is 'tlr', but there is no such file .*{tmp_path}.* the presets are alpaca_farm, trl, verl"
    with pytest.raises(ValueError, match=message):
        parse_args([ScriptArguments, LoraArguments, PPOConfig], ["--config", "tlr", *REQUIRED])


def test_a_build_of_the_package_contains_the_presets(monkeypatch):
    monkeypatch.chdir(ROOT)
    distribution = Distribution()
    distribution.parse_config_files(["setup.cfg"])
    build = distribution.get_command_obj("build_py")
    build.ensure_finalized()
    files = {package: set(names) for package, _, _, names in build.data_files}
    assert files["alpaca_ppo.presets"] == {f"{name}.yaml" for name in preset_names()}
    assert files["alpaca_ppo"] == {"py.typed"}
