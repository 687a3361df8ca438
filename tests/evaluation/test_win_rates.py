"""Win-rates, and their length-controlled kind, by hand and in limiting cases."""

import math

import pytest

from alpaca_ppo.evaluation.win_rates import both_orders, compare, length_controlled


def test_a_judge_that_prefers_the_first_place_makes_a_tie():
    assert both_orders(1.0, 0.0) == 0.5
    assert both_orders(1.0, 0.5) == 0.75
    assert both_orders(1.0, None) is None
    assert both_orders(None, 1.0) is None


def test_equal_scores_are_half_a_win():
    assert [compare(2.0, 1.0), compare(1.0, 1.0), compare(0.0, 1.0)] == [1.0, 0.5, 0.0]
    # The rounding of float32 is a tie.
    assert [compare(1.0, 1.0 + 1e-7), compare(1.001, 1.0), compare(0.0, 1e-7), compare(0.0, 1e-3)] == [0.5, 1, 0.5, 0]


def test_without_differences_in_length_it_is_the_win_rate_with_its_standard_error():
    wins = [[1.0], [1.0], [0.0], [1.0]]
    rate, se = length_controlled(wins, [[5.0]] * 4)
    assert rate == pytest.approx(0.75, abs=1e-3)
    # Residuals 1/4 three times and -3/4: 12/16; times 4/3 over 16: 1/16.
    assert se == pytest.approx(0.25, abs=1e-3)


def test_what_length_alone_explains_is_taken_out():
    """Longer answers win by sigmoid(2 tanh(d / s)), shorter ones lose as much: at equal length the rate is 1/2."""
    # s = 10 for differences of +10 and -10 in equal number; here 3 of 4 are longer: mean 5, s = sqrt(75).
    differences, s = [10.0, 10.0, 10.0, -10.0], math.sqrt(75)
    wins = [1 / (1 + math.exp(-2 * math.tanh(d / s))) for d in differences]
    assert math.fsum(wins) / 4 > 0.6
    rate, _ = length_controlled([[w] for w in wins], [[d] for d in differences])
    assert rate == pytest.approx(0.5, abs=1e-3)
    # With an advantage of its own of log 3, sigmoid(log 3) = 3/4 is left.
    wins = [1 / (1 + math.exp(-math.log(3) - 2 * math.tanh(d / s))) for d in differences]
    assert length_controlled([wins], [differences]).mean == pytest.approx(0.75, abs=1e-3)


def test_two_comparisons_of_a_prompt_are_one_cluster():
    wins = [[1.0] * 3, [0.0] * 3, [1.0] * 3]
    _, se = length_controlled(wins, [[0.0] * 3] * 3)
    # As three prompts: residuals 1/3, -2/3, 1/3: 6/9 * 3/2 / 9.
    assert se == pytest.approx(1 / 3, abs=1e-3)


def test_it_stays_finite_if_one_side_always_wins_and_is_nan_without_a_comparison():
    rate, se = length_controlled([[1.0], [1.0], [1.0]], [[3.0], [1.0], [-2.0]])
    assert 0.99 < rate < 1.0
    assert 0.0 <= se < 0.01
    assert all(math.isnan(number) for number in length_controlled([], []))
    assert math.isnan(length_controlled([[1.0, 0.0]], [[1.0, 2.0]]).se)
