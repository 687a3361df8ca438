"""A run's own run.yaml repeats it: of every preset, and of every option that it can set."""

import dataclasses

import pytest

from alpaca_ppo import LoraArguments, PPOConfig, ScriptArguments
from alpaca_ppo.config.parser import as_yaml, parse_args
from alpaca_ppo.presets import preset_names

TYPES = [ScriptArguments, LoraArguments, PPOConfig]
REQUIRED = ["--model_name_or_path", "m", "--dataset_name", "d", "--reward_funcs", "a:b"]


@pytest.mark.parametrize("preset", [None, *preset_names()])
def test_the_options_of_a_run_load_again_as_they_were(preset, tmp_path):
    given = parse_args(TYPES, [*REQUIRED, *(["--preset", preset] if preset else [])])
    written = {name: value for part in given for name, value in dataclasses.asdict(part).items()}
    (tmp_path / "run.yaml").write_text(as_yaml(written))
    assert parse_args(TYPES, ["--config", str(tmp_path / "run.yaml")]) == given


@pytest.mark.parametrize("text", ["1e3", "1.5", "null", "yes", "0x1F", "1:30", "2020-01-01", "'", "", "é🦙\n"])
def test_text_that_looks_like_something_else_loads_again(text, tmp_path):
    (tmp_path / "run.yaml").write_text(as_yaml({"truncate_tokens": [text, 7], "run_name": text}))
    (args,) = parse_args([PPOConfig], ["--config", str(tmp_path / "run.yaml")])
    assert (args.truncate_tokens, args.run_name) == ([text, 7], text)
