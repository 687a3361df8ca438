"""docs/configuration.md lists every option as it is."""

import dataclasses
from pathlib import Path

from alpaca_ppo import LoraArguments, PPOConfig, ScriptArguments
from alpaca_ppo.registry import KL_ESTIMATORS
from tests.tools.configuration_page import configuration_page

PAGE = Path(__file__).parents[2] / "docs/configuration.md"


def test_the_page_is_current():
    assert PAGE.read_text() == configuration_page(), "python -m tests.tools.configuration_page > docs/configuration.md"


def test_the_page_names_every_option_with_type_bounds_default_and_meaning():
    page = configuration_page()
    for cls in (PPOConfig, ScriptArguments, LoraArguments):
        for field in dataclasses.fields(cls):
            assert page.count(f"- **`{field.name}`** (") == 1
    assert "- **`gamma`** (float): Discount per token. Needs adv_estimator: gae or " in page
    assert "- **`dtype`** (float32 | bfloat16): Data type" in page and "at least 0 and at most 1)" in page
    assert "- **`truncate_tokens`** (list of str or int):" in page
    assert all(len(line) <= 110 for line in page.splitlines())


def test_names_that_a_user_registered_are_not_on_the_page(monkeypatch):
    monkeypatch.setattr(KL_ESTIMATORS, "traits", {**KL_ESTIMATORS.traits, "mine": {}})
    assert "`mine`" not in configuration_page()
