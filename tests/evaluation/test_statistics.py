"""Standard errors and pass@k: by hand, and as expectations over every possible sample."""

import math
from itertools import product

import pytest

from alpaca_ppo.evaluation.summary import clustered_mean, pass_at_k


def test_with_one_number_a_prompt_the_standard_error_is_that_of_a_mean():
    estimate = clustered_mean([[1.0], [5.0], [6.0]])
    assert estimate.mean == pytest.approx(4.0)
    # Residuals -3, 1, 2: squares 9 + 1 + 4 = 14; 14 / 2 = 7; se = sqrt(7 / 3).
    assert estimate.se == pytest.approx(math.sqrt(7 / 3))


def test_responses_to_one_prompt_count_as_one_cluster():
    # Two prompts with equal responses: mean 1/2, cluster sums of residuals 4 * 1/2 and -2. C = 2, N = 8:
    # se = sqrt(2 / 1 * (4 + 4)) / 8 = 4 / 8.
    estimate = clustered_mean([[1.0] * 4, [0.0] * 4])
    assert estimate == pytest.approx((0.5, 0.5))
    # As if each prompt had one response: residuals 1/2 and -1/2, variance 1/2, se = sqrt(1/2 / 2).
    assert clustered_mean([[1.0], [0.0]]) == pytest.approx((0.5, 0.5))
    # Uneven clusters: numbers 3, 3, 0: mean 2; sums of residuals 2 and -2; sqrt(2 * 8) / 3.
    assert clustered_mean([[3.0, 3.0], [], [0.0]]) == pytest.approx((2.0, 4 / 3))


def test_what_has_no_number_or_no_second_prompt_is_nan():
    assert all(math.isnan(number) for number in clustered_mean([[], []]))
    mean, se = clustered_mean([[1.0, 2.0]])
    assert mean == 1.5
    assert math.isnan(se)


def test_pass_at_k_by_hand():
    assert pass_at_k(5, 2, 1) == pytest.approx(2 / 5)
    # C(3, 2) / C(5, 2) = 3 / 10.
    assert pass_at_k(5, 2, 2) == pytest.approx(0.7)
    assert pass_at_k(5, 2, 4) == 1.0
    assert pass_at_k(5, 0, 5) == 0.0


@pytest.mark.parametrize(("n", "k"), [(3, 1), (3, 2), (4, 2), (4, 3)])
def test_pass_at_k_is_unbiased_over_every_sample(n, k):
    """Three responses with known probabilities; the expectation over all 3^n samples is a finite sum."""
    chances, correct = (0.2, 0.5, 0.3), (0, 0, 1)

    def expected(estimate):
        return math.fsum(math.prod(chances[i] for i in s) * estimate(s) for s in product(range(3), repeat=n))

    # 1 - 0.7^k that none of k is the third response.
    assert expected(lambda s: pass_at_k(n, sum(correct[i] for i in s), k)) == pytest.approx(1 - 0.7**k)
