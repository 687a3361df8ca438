"""Risk levels as text: every form, and what is refused."""

import math

import pytest

from alpaca_ppo.config.risk_level import parse_risk_level


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("neutral", [(1.0, None, "lower")]),
        ("0.1", [(1.0, 0.1, "lower")]),
        ("1", [(1.0, 1.0, "lower")]),
        ("1e-05", [(1.0, 1e-5, "lower")]),
        ("upper:0.1", [(1.0, 0.1, "upper")]),
        ("0.5*neutral+0.5*upper:0.2", [(0.5, None, "lower"), (0.5, 0.2, "upper")]),
        (" 0.25 * 0.1 + 0.75 * upper: 1.0 ", [(0.25, 0.1, "lower"), (0.75, 1.0, "upper")]),
        ("0.2*neutral+0.3*0.1+0.5*upper:0.1", [(0.2, None, "lower"), (0.3, 0.1, "lower"), (0.5, 0.1, "upper")]),
        ("0.333333*0.1+0.333333*0.2+0.333334*0.3", [(0.333333, 0.1, "lower"), (0.333333, 0.2, "lower"),
                                                     (0.333334, 0.3, "lower")]),
    ],
)  # fmt: skip
def test_a_risk_level_is_a_weighted_sum_of_the_mean_and_of_tails(text, expected):
    assert [tuple(part) for part in parse_risk_level(text)] == expected


@pytest.mark.parametrize(
    "text",
    ["", "bold", "0", "-0.1", "1.1", "nan", "upper", "upper:", "upper:0", "upper:2", "upper:upper:0.1", "lower:0.1",
     "neutral+", "+0.1", "0.5*", "*0.1", "0.5*0.5*0.1", "0*neutral+1*0.1", "-0.5*neutral+1.5*0.1", "nan*neutral",
     "x*neutral", "0.5neutral", "Neutral"],
)  # fmt: skip
def test_another_text_is_no_risk_level(text):
    with pytest.raises(ValueError, match="risk_level is .*; it must be neutral, a number above 0 .* upper:0.1"):
        parse_risk_level(text)


@pytest.mark.parametrize(
    ("text", "total"), [("0.1+0.2", "2"), ("0.5*neutral+0.4*0.1", "0.9"), ("0.5*0.1", "0.5"), ("inf*neutral", "inf")]
)
def test_weights_that_do_not_add_up_to_one_are_refused(text, total):
    with pytest.raises(ValueError, match=f"whose weights add up to {total}; give each part a weight"):
        parse_risk_level(text)


def test_weights_may_be_rounded():
    assert math.fsum(part.weight for part in parse_risk_level("0.333333*0.1+0.666666*neutral")) < 1
