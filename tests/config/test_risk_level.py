"""Risk levels as text: every form, and what is refused."""

import pytest

from alpaca_ppo.config.learning_options import RiskLevel


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("neutral", (None, "lower")),
        ("0.1", (0.1, "lower")),
        ("1", (1.0, "lower")),
        ("1e-05", (1e-5, "lower")),
        ("upper:0.1", (0.1, "upper")),
    ],
)
def test_a_risk_level_is_the_mean_or_a_tail(text, expected):
    assert RiskLevel.parse(text) == expected


@pytest.mark.parametrize(
    "text", ["", "bold", "0", "-0.1", "1.1", "nan", "upper:", "upper:0", "upper:2", "upper:upper:0.1", "lower:0.1",
             "Neutral", "0.5*neutral+0.5*0.1"]
)  # fmt: skip
def test_another_text_is_no_risk_level(text):
    with pytest.raises(ValueError, match="risk_level is .*write neutral, 0.1"):
        RiskLevel.parse(text)
