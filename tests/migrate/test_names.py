"""Every field of TRL's configurations and every key of verl's ppo_trainer.yaml is in the table of names.

The names are listed in names.yaml.
"""

import re
from pathlib import Path

import pytest
import yaml

from alpaca_ppo.config.foreign_names import CONFIG_SECTIONS, find_foreign_name

NAMES = yaml.safe_load((Path(__file__).parent / "names.yaml").read_text())


def expanded(text: str) -> list[str]:
    """The words of `text`, with `a.{b,c}` written out."""
    names = []
    for word in text.split():
        head, brace, tail = word.partition("{")
        names += [head + part for part in tail.removesuffix("}").split(",")] if brace else [word]
    return names


@pytest.mark.parametrize("section", NAMES)
def test_every_name_is_in_the_table(section):
    # TRL's PPO has some of the names of its GRPO.
    sections = [section, "GRPOConfig"] if section == "PPOConfig" else [section]
    assert [name for name in expanded(NAMES[section]) if find_foreign_name(name, sections) is None] == []


def test_every_key_of_verl_is_found_by_its_whole_path():
    keys = expanded(NAMES["ppo_trainer.yaml"])
    assert len(keys) > 300
    # By its own path or a part of it, not by the last word of another key.
    found = {key: find_foreign_name(key, ["ppo_trainer.yaml"]).name for key in keys}
    assert [key for key, name in found.items() if key.split(".")[0] != name.split(".")[0]] == []


def test_a_name_that_nobody_has_is_not_found():
    assert find_foreign_name("num_generation", CONFIG_SECTIONS) is None
    assert find_foreign_name("data.nothing", CONFIG_SECTIONS) is None
    assert re.fullmatch(r"actor_rollout_ref.*", find_foreign_name("ppo_epochs", ["ppo_trainer.yaml"]).name)
