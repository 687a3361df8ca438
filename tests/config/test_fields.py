"""One value of one field: its type, its choices, its bounds."""

import dataclasses
import math
import typing
from datetime import date
from typing import Literal

import numpy as np
import pytest

from alpaca_ppo import PPOConfig
from alpaca_ppo.config.fields import Bounds, argument, check_fields, options_of
from alpaca_ppo.registry import KL_ESTIMATORS, Registry


@dataclasses.dataclass
class Example:
    rate: float | None = argument(0.5, "A rate.", above=0, at_most=1, group="Numbers")
    count: int = argument(1, "A count.", at_least=1, below=10)
    limit: float = argument(2.0, "A limit.", above=0, allow_inf=True)
    weights: list[float] | None = argument([1.0], "Weights.", at_least=0)
    mode: Literal["fast", "exact"] | None = argument("fast", "A mode.", group="Words")
    name: str | None = argument(None, "A name.")
    on: bool = argument(False, "A switch.")
    plain: float = 0.0

    def __post_init__(self):
        check_fields(self)


@pytest.mark.parametrize(
    "settings",
    [
        {"rate": None},
        {"rate": 1},
        {"count": 9},
        {"limit": math.inf},
        {"weights": []},
        {"weights": [0, 2.5]},
        {"weights": None},
        {"mode": None},
        {"mode": "exact"},
        {"name": None},
        {"on": True},
        {"plain": -1e9},
    ],
)
def test_a_value_within_its_bounds_is_taken(settings):
    Example(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rate": 0.0}, "rate is 0.0; it must be above 0 and at most 1 or null"),
        ({"rate": math.nan}, "rate is nan; it must be finite and above 0 and at most 1 or null"),
        ({"rate": "0.1"}, r"rate is '0.1' \(str\); it must be float or null$"),
        ({"count": 10}, "count is 10; it must be at least 1 and below 10$"),
        ({"count": None}, r"^count is null; it must be int, or leave it out for 1$"),
        ({"count": 1.0}, r"count is 1.0 \(float\); it must be int$"),
        ({"count": True}, r"count is True \(bool\); it must be int$"),
        ({"limit": -math.inf}, "limit is -inf; it must be finite and above 0$"),
        ({"limit": math.nan}, "limit is nan; it must be finite and above 0$"),
        ({"plain": math.inf}, "plain is inf; it must be finite$"),
        ({"weights": [1.0, -1.0]}, r"weights is \[1.0, -1.0\]; it must be at least 0 or null"),
        ({"weights": [1.0, math.inf]}, r"weights is \[1.0, inf\]; it must be finite and at least 0"),
        ({"weights": 1.0}, r"weights is 1.0 \(float\); it must be list or null"),
        ({"weights": [True]}, r"an entry of weights is True \(bool\); it must be float$"),
        ({"mode": "slow"}, "mode is 'slow'; choose one of fast, exact$"),
        ({"mode": 3}, "mode is 3; choose one of fast, exact$"),
        ({"name": 3}, r"name is 3 \(int\); it must be str or null, in quotes"),
        ({"on": 1}, r"on is 1 \(int\); it must be bool"),
        ({"limit": 2**63}, "limit is 9223372036854775808; it must be within 64 bits and above 0"),
        ({"plain": 10**400}, r"plain is 1000*\.\.\.0*; it must be within 64 bits$"),
        ({"plain": 2**20000}, "plain is a number of 20001 bits; it must be within 64 bits$"),
        ({"mode": np.array([1, 2])}, r"mode is array\(\[1, 2\]\); choose one of fast, exact$"),
        ({"name": date(2020, 1, 2)}, r"name is datetime.date\(2020, 1, 2\) \(date\); .* or null, in quotes"),
        ({"name": "a\0b"}, r"name is 'a\\x00b', which is not text: it holds the character '\\x00'"),
        ({"name": "\udcff"}, r"name is '\\udcff', which is not text"),
    ],
)
def test_a_value_outside_is_named_with_what_it_may_be(settings, message):
    with pytest.raises(ValueError, match=message):
        Example(**settings)


def test_bounds_in_words():
    assert str(Bounds()) == ""
    assert str(Bounds(above=0)) == "above 0"
    assert str(Bounds(at_least=0.5, below=1)) == "at least 0.5 and below 1"


def test_fields_belong_to_the_group_that_was_started_last():
    groups = {name: option.group for name, option in options_of(Example).items()}
    assert groups["rate"] == groups["weights"] == "Numbers"
    assert groups["mode"] == groups["plain"] == "Words"


def test_a_default_list_is_copied_for_each_instance():
    Example().weights.append(2.0)
    assert Example().weights == [1.0]


def test_a_second_option_of_the_same_names_is_named_itself():
    @dataclasses.dataclass
    class Loss:
        kl_loss_type: str = argument("k3", "KL estimator.", registry=KL_ESTIMATORS)

    with pytest.raises(ValueError, match="kl_loss_type is 'k4'; choose one of k1, abs"):
        check_fields(Loss("k4"))


def test_a_registered_name_is_valid_at_once():
    registry = Registry("colour", {"red": {}})

    @dataclasses.dataclass
    class Paint:
        colour: str = argument("red", "Colour.", registry=registry)

    with pytest.raises(ValueError, match="colour is 'blue'; choose one of red, or register your own and add its file"):
        check_fields(Paint("blue"))
    registry.register("blue")(object)
    check_fields(Paint("blue"))


def test_every_option_of_a_run_has_a_help_text_and_a_valid_default():
    options = options_of(PPOConfig)
    assert all(option.help.endswith(".") for option in options.values())
    assert all(option.registry is None or str in option.kinds for option in options.values())
    literals = {name for name, option in options.items() if option.choices}
    assert literals == {
        "old_policy",
        "padding_free",
        "kl_controller",
        "critic_layout",
        "dtype",
        "overlong_prompts",
        "failed_rewards",
        "rollout_correction_level",
        "dppo_divergence",
        "loss_agg_mode",
        "mismatch_action",
    }
    hints = typing.get_type_hints(PPOConfig)
    assert typing.get_args(hints["dtype"]) == options["dtype"].choices == ("float32", "bfloat16")
