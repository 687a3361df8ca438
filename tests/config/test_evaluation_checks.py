"""Combinations of options of evaluation that are refused."""

import pytest

from alpaca_ppo import PPOConfig

SAMPLED = {"eval_temperature": 1.0, "eval_num_samples": 4}
COMPARED = {"eval_opponent": "reference"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"eval_success_by": "gold"}, "eval_success_by is 'gold', but eval_success_above is null"),
        (
            {"eval_opponent": "reference", "reference": "none", "kl_coef": 0.0},
            "eval_opponent is 'reference', but reference is 'none'",
        ),
    ],
)
def test_a_contradiction_names_the_options_and_the_remedy(settings, message):
    with pytest.raises(ValueError, match=message):
        PPOConfig(**settings)
