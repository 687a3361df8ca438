"""One value of one field: its type, its choices, its bounds, and whether it can act."""

import dataclasses
import math
from datetime import date
from typing import Annotated, Literal

import numpy as np
import pytest
from pydantic import Field

from alpaca_ppo import LoraArguments, PPOConfig, ScriptArguments
from alpaca_ppo.config.fields import argument, check_fields, check_needs, options_of, unless, when, when_trait
from alpaca_ppo.registry import Registry

COLOURS: Registry = Registry("colour", {"red": {"warm": True}, "blue": {}}, {"warm": False})


@dataclasses.dataclass
class Example:
    rate: float | None = argument(0.5, "A rate.", gt=0, le=1, group="Numbers")
    count: int = argument(1, "A count.", ge=1, lt=10)
    limit: float = argument(2.0, "A limit.", gt=0, allow_inf_nan=True)
    weights: list[float] | None = argument([1.0], "Weights.", min_length=1)
    mode: Literal["fast", "exact", True] | None = argument("fast", "A mode.", group="Words")
    name: str | None = argument(None, "A name.")
    on: bool = argument(False, "A switch.")
    plain: float = 0.0
    share: Annotated[float, Field(le=1)] | str = 1.0
    """A share or
    a word."""
    colour: str = argument("red", "Colour.", registry=COLOURS)

    def __post_init__(self):
        check_fields(self)


VALID = {
    "rate": [None, 1],
    "count": [9],
    "limit": [math.inf],
    "weights": [[0, 2.5], None],
    "mode": [None, "exact", True],
    "name": [None, "é🦙"],
    "on": [True],
    "plain": [-1e9, np.float64(3)],
    "share": ["adaptive", -1.0],
    "colour": ["blue"],
}
INVALID = {
    "rate": [0.0, math.nan, math.inf, "0.1", 1.5],
    "count": [10, 0, None, 1.0, True, 2**20000, np.int64(3)],
    "limit": [-math.inf, math.nan, 0],
    "weights": [[], [1.0, math.inf], [math.nan], 1.0, [True], (1.0,)],
    "mode": ["slow", 3, np.array([1, 2])],
    "name": [3, date(2020, 1, 2), "a\0b", "\udcff"],
    "on": [1, "true"],
    "plain": [math.inf, 10**400, None],
    "share": [2.0, [1]],
    "colour": ["green", None],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in VALID.items() for value in values])
def test_a_value_within_its_bounds_is_kept(name, value):
    assert getattr(Example(**{name: value}), name) is value


@pytest.mark.parametrize("name", INVALID)
def test_a_value_outside_is_named(name):
    for value in INVALID[name]:
        with pytest.raises(ValueError, match=f"^{name} is ") as refused:
            Example(**{name: value})
        assert len(str(refused.value)) < 600
        if isinstance(value, float | str):
            assert repr(value) in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ({"count": 10}, "less than 10"),
        ({"rate": 0.0}, "greater than 0"),
        ({"count": None}, "count is null; it should be a valid integer"),
        ({"mode": "slow"}, "'fast', 'exact' or True"),
        ({"name": 3}, "a valid string, in quotes"),
        ({"share": 2.0}, "less than or equal to 1 or be a valid string"),
        ({"colour": "green"}, "choose one of red, blue, or register your own"),
    ],
)
def test_the_error_says_what_may_stand_there(settings, remedy):
    with pytest.raises(ValueError, match=remedy):
        Example(**settings)


def test_a_default_list_is_copied_and_fields_belong_to_the_group_that_was_started_last():
    Example().weights.append(2.0)
    assert Example().weights == [1.0]
    groups = {name: option.group for name, option in options_of(Example).items()}
    assert groups["rate"] == groups["weights"] == "Numbers" and groups["mode"] == groups["plain"] == "Words"
    assert options_of(Example)["rate"].range == "above 0 and at most 1"


def test_the_help_is_given_or_stands_beneath_the_field_of_the_class_or_its_base():
    @dataclasses.dataclass
    class Longer(Example):
        more: int = 0
        """More."""

    helps = {name: option.help for name, option in options_of(Longer).items()}
    assert (helps["rate"], helps["share"], helps["plain"], helps["more"]) == (
        "A rate.",
        "A share or a word.",
        "",
        "More.",
    )


@dataclasses.dataclass
class Needy:
    kind: str = argument("plain", "A kind.")
    colour: str = argument("red", "A colour.", registry=COLOURS)
    size: int | None = None
    weight: float = argument(1.0, "A weight.", needs=when("kind", "heavy", "huge"))
    gap: float = argument(0.0, "A gap.", needs=unless("kind", "plain"))
    heat: float = argument(0.0, "Heat.", needs=when_trait(COLOURS, "warm"))
    depth: int = argument(0, "A depth.", needs=(when("size"), when("water near")))
    width: int = argument(0, "A width.", needs=when("size") | when("heat"))
    dry: bool = argument(False, "Dry.", needs=unless("size"))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"kind": "huge", "weight": 2.0, "gap": 1.0},
        {"heat": 1.0},
        {"weight": 1, "gap": 0},
        {"size": 3, "depth": 1},
        {"size": 0, "depth": 1},
        {"heat": 1.0, "width": 1},
        {"dry": True},
    ],
)
def test_an_option_that_can_act_or_has_its_default_is_taken(settings):
    check_needs(Needy(**settings), water_near=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weight": 2.0}, "^weight is 2.0, without effect: needs kind: heavy or huge"),
        ({"gap": 1.0}, "gap is 1.0, without effect: needs kind: not plain"),
        ({"heat": 1.0, "colour": "blue"}, "heat is 1.0, without effect: needs colour: red"),
        ({"depth": 1}, "depth is 1, without effect: needs size"),
        ({"width": 1}, "width is 1, without effect: needs size or heat"),
        ({"depth": 1, "size": 3}, "depth is 1, without effect: needs water near"),
        ({"dry": True, "size": 3}, "dry is True, without effect: needs no size"),
        ({"weight": 2.0, "gap": 1.0}, "weight is 2.0, .* heavy or huge; gap is 1.0, without"),
    ],
)
def test_an_option_that_cannot_act_is_refused_with_what_it_needs(settings, message):
    with pytest.raises(ValueError, match=message):
        check_needs(Needy(**settings), water_near=False)


def test_a_fact_that_is_not_known_yet_may_hold():
    check_needs(Needy(size=3, depth=1))


FACTS = {"environments or tools", "prompts that are messages", "reward functions", "eval set"}


def test_every_option_has_a_help_text_a_valid_default_and_needs_that_exist():
    for cls in (PPOConfig, ScriptArguments, LoraArguments):
        options = options_of(cls)
        for name, option in options.items():
            assert option.help.endswith("."), name
            assert {need.option for need in option.needs} <= {*options, *FACTS}, name
            option.check(option.default)
    check_needs(PPOConfig(), **{fact.replace(" ", "_"): False for fact in FACTS})
