"""The advantages that need no critic: of groups, of the batch, and against the greedy response."""

import math

import pytest
import torch
from torch import nan, tensor
from torch.autograd import gradcheck
from torch.testing import assert_close

from alpaca_ppo.functional import (
    GROUP_ESTIMATORS,
    gdpo_advantages,
    group_advantages,
    informative_rows,
    reinforce_plus_plus,
    remax,
)

# One group of three, of lengths 1, 2 and 1.
SCORES, GROUP = tensor([1.0, 2.0, 6.0], dtype=torch.float64), tensor([0, 0, 0])
MASK = tensor([[True, False], [True, True], [False, True]])


def per_response(scores, group_ids, estimator, mask=None):
    """Advantages of one-token responses, (B,)."""
    mask = torch.ones(len(scores), 1, dtype=torch.bool) if mask is None else mask
    return group_advantages(scores, group_ids, mask, estimator=estimator)[:, 0]


def random_group_batch():
    torch.manual_seed(0)
    scores = torch.randn(7, dtype=torch.float64)
    mask = torch.rand(7, 4) < 0.7
    mask[3] = False
    return scores, tensor([5, -2, 5, 5, 9, -2, 5]), mask


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        # mean 3, unbiased variance (4 + 1 + 9) / 2 = 7
        ("grpo", [-2 / (math.sqrt(7) + 1e-6), -1 / (math.sqrt(7) + 1e-6), 3 / (math.sqrt(7) + 1e-6)]),
        ("grpo_no_std", [-2.0, -1.0, 3.0]),
        # 1 - (2 + 6) / 2;  2 - (1 + 6) / 2;  6 - (1 + 2) / 2
        ("rloo", [-3.0, -1.5, 4.5]),
        # baseline (1*1 + 2*2 + 1*6) / (1 + 2 + 1) = 11 / 4
        ("opo", [-1.75, -0.75, 3.25]),
        # tokens -2, -1, -1, 3: mean -1/4, unbiased variance (3.0625 + 2 * 0.5625 + 10.5625) / 3 = 59 / 12
        # shares 1/3, 2/3 and 1 reach 0.4 at the score 2
        ("qae", [-1 / (math.sqrt(7) + 1e-6), 0.0, 4 / (math.sqrt(7) + 1e-6)]),
        ("grpo_passk", [0.0, 0.0, (6 - 2) / (math.sqrt(7) + 1e-6)]),
        ("reinforce_plus_plus_baseline", [a / math.sqrt(59 / 12 + 1e-8) for a in (-1.75, -0.75, 3.25)]),
    ],
)
def test_group_advantages_by_hand(estimator, expected):
    low, middle, high = expected
    advantages = group_advantages(SCORES, GROUP, MASK, estimator=estimator)
    assert_close(advantages, tensor([[low, 0], [middle, middle], [0, high]], dtype=torch.float64))


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("grpo", 3 / (1 + 1e-6)),
        ("grpo_no_std", 3.0),
        ("rloo", 3.0),
        ("opo", 3.0),
        # It is its own quantile, and leads nobody.
        ("qae", 0.0),
        ("grpo_passk", 0.0),
    ],
)
def test_a_response_alone_in_its_group_has_its_score_as_advantage_or_none(estimator, expected):
    advantages = per_response(tensor([3.0, 1.0, 1.0]).double(), tensor([0, 1, 1]), estimator)
    assert_close(advantages, tensor([expected, 0.0, 0.0], dtype=torch.float64), rtol=0, atol=1e-12)


def test_two_responses_alone_in_their_groups_are_whitened_against_each_other():
    # 3 and 1, baseline 0: mean 2, unbiased variance 2
    advantages = per_response(tensor([3.0, 1.0]), tensor([0, 1]), "reinforce_plus_plus_baseline")
    assert_close(advantages, tensor([1.0, -1.0]) / math.sqrt(2))


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
@pytest.mark.parametrize("score", [7.3, -7.3, 1e4])
def test_equal_scores_give_exactly_zero_with_a_finite_gradient(estimator, score):
    # The float32 mean of three 7.3 is not 7.3; divided by a std of the same rounding error it would be an advantage.
    scores = torch.full((7,), score, requires_grad=True)
    mask = tensor([[True]] * 6 + [[False]])
    advantages = per_response(scores, tensor([0, 1, 0, 1, 0, 1, 0]), estimator, mask)
    assert advantages.eq(0).all()
    (grad,) = torch.autograd.grad(advantages.square().sum() + advantages[0], scores)
    assert grad.isfinite().all()


@pytest.mark.parametrize("scores", [[1000.0, 1000.125], [1e6, 1e6 + 1], [-1e30, 1e30], [0.0, 1e-3]])
def test_grpo_divides_any_scores_that_truly_differ_by_their_std(scores):
    # two scores, d apart: -d/2 and d/2 over d / sqrt(2) + 1e-6
    difference = scores[1] - scores[0]
    size = difference / 2 / (difference / math.sqrt(2) + 1e-6)
    assert_close(per_response(tensor(scores), tensor([0, 0]), "grpo"), tensor([-size, size]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
def test_group_gradients_match_finite_differences(estimator):
    scores, ids, mask = random_group_batch()
    assert gradcheck(lambda s: group_advantages(s, ids, mask, estimator=estimator), scores.requires_grad_())


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
@pytest.mark.parametrize("rows", [2, 0])
def test_a_group_batch_without_tokens_is_zero(estimator, rows):
    mask = torch.zeros(rows, 3, dtype=torch.bool)
    advantages = group_advantages(torch.full((rows,), nan), torch.zeros(rows).long(), mask, estimator=estimator)
    assert advantages.shape == (rows, 3) and advantages.eq(0).all()


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
def test_group_advantages_compute_half_precision_in_float32_and_keep_float64(estimator):
    # Their sum needs more than the 8 bits of bfloat16.
    half = tensor([100.5, 3.015625, 0.0078125], dtype=torch.bfloat16)
    whole = group_advantages(half, GROUP, MASK, estimator=estimator)
    assert whole.dtype == torch.float32
    wide = group_advantages(half.double(), GROUP, MASK, estimator=estimator)
    assert wide.dtype == torch.float64
    assert_close(whole, wide.float())


def test_an_unknown_group_estimator_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="group estimator is 'mean'; it must be one of grpo, grpo_no_std, rloo, opo, "):
        group_advantages(SCORES, GROUP, MASK, estimator="mean")


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((SCORES[:2], GROUP, MASK), r"scores has shape \(2,\), response_mask \(3, 2\)"),
        ((SCORES[:, None], GROUP, MASK), r"scores has shape \(3, 1\), response_mask \(3, 2\)"),
        ((SCORES, GROUP[:2], MASK), r"group_ids has shape \(2,\), response_mask \(3, 2\)"),
        ((SCORES, GROUP, MASK[:, 0]), r"scores has shape \(3,\), response_mask \(3,\)"),
    ],
)
def test_scores_and_ids_must_be_one_a_row(inputs, message):
    with pytest.raises(ValueError, match=message):
        group_advantages(*inputs, estimator="rloo")


@pytest.mark.parametrize(
    ("quantile", "baseline"),
    # Of ten scores 0 to 9; shares of 3, 6 and 7 of 10 are not exact in binary.
    [(0.01, 0), (0.1, 0), (0.11, 1), (0.3, 2), (0.6, 5), (0.7, 6), (0.95, 9), (1.0, 9)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_baseline_of_qae_is_the_smallest_score_that_the_share_does_not_exceed(quantile, baseline, dtype):
    scores = torch.arange(10).flip(0).to(dtype)
    advantages = group_advantages(
        scores, torch.zeros(10).long(), torch.ones(10, 1).bool(), estimator="qae", quantile=quantile
    )
    # squares of the deviations from 4.5 sum to 82.5
    assert_close(advantages[:, 0], (scores - baseline) / (math.sqrt(82.5 / 9) + 1e-6))


def test_passk_of_a_tie_at_the_top_is_zero_for_all():
    advantages = per_response(tensor([2.0, 1.0, 2.0, 0.0, 5.0]), tensor([0, 0, 0, 1, 1]), "grpo_passk")
    # the other group: (5 - 0) / (5 / sqrt(2))
    assert_close(advantages, tensor([0.0, 0.0, 0.0, 0.0, math.sqrt(2)]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("quantile", [0.0, 1.1, nan])
def test_a_quantile_outside_zero_to_one_is_refused(quantile):
    with pytest.raises(ValueError, match=rf"quantile is {quantile}; it must be above 0 and at most 1"):
        group_advantages(SCORES, GROUP, MASK, estimator="qae", quantile=quantile)


BY_SOURCE = tensor([[0.0, 3.0], [1.0, 0.0], [2.0, 0.0]], dtype=torch.float64)
"""Normalised: -1, 0, 1, and 2, -1, -1 over sqrt(3)."""


def test_gdpo_by_hand():
    # 1 * (-1, 0, 1) + 2 * (2, -1, -1) / sqrt(3), whitened over 1, 2 and 1 tokens.
    weights = tensor([1.0, 2.0], dtype=torch.float64)
    low, middle, high = -1 + 4 / math.sqrt(3), -2 / math.sqrt(3), 1 - 2 / math.sqrt(3)
    mean = (low + 2 * middle + high) / 4
    std = math.sqrt(((low - mean) ** 2 + 2 * (middle - mean) ** 2 + (high - mean) ** 2) / 3)
    low, middle, high = ((number - mean) / std for number in (low, middle, high))
    expected = tensor([[low, 0.0], [middle, middle], [0.0, high]], dtype=torch.float64)
    assert_close(gdpo_advantages(BY_SOURCE, weights, GROUP, MASK), expected, rtol=0, atol=1e-5)


def test_gdpo_adds_penalties_as_they_are_less_their_mean():
    # -1, 0, 1 and penalties 0.5, 0, -2 of mean -0.5: 0, 0.5, -0.5; mean 0, unbiased variance 0.25
    mask = torch.ones(3, 1, dtype=torch.bool)
    penalties = tensor([0.5, 0.0, -2.0], dtype=torch.float64)
    advantages = gdpo_advantages(BY_SOURCE[:, :1], torch.ones(1), GROUP, mask, penalties=penalties)
    assert_close(advantages[:, 0], tensor([0.0, 1.0, -1.0], dtype=torch.float64), rtol=0, atol=1e-5)


def test_gdpo_leaves_a_response_out_of_the_comparison_of_a_source_that_did_not_score_it():
    # The second source compares the first two: 3 and 0 give 1 and -1 over sqrt(2). Sums: a - 1, -a, 1.
    scores = BY_SOURCE.clone()
    scores[2, 1] = nan
    scores.requires_grad_()
    advantages = gdpo_advantages(scores, torch.ones(2), GROUP, torch.ones(3, 1, dtype=torch.bool))
    a = math.sqrt(0.5)
    std = math.sqrt(((a - 1) ** 2 + a**2 + 1) / 2)
    assert_close(advantages[:, 0], tensor([a - 1, -a, 1.0]).double() / std, rtol=0, atol=1e-5)
    (grad,) = torch.autograd.grad(advantages.square().mul(tensor([[1.0], [2], [3]])).sum(), scores)
    assert grad.isfinite().all() and grad[2, 1] == 0 and grad[:, 0].abs().sum() > 0


def test_gdpo_of_the_only_response_that_a_source_scored_has_nothing_to_compare_it_with():
    # The second source scores one response of the group: its bare score, 3, is no comparison. -1, 0, 1 are left.
    scores = BY_SOURCE.clone()
    scores[1:, 1] = nan
    mask = torch.ones(3, 1, dtype=torch.bool)
    expected = tensor([-1.0, 0.0, 1.0], dtype=torch.float64)
    assert_close(gdpo_advantages(scores, torch.ones(2), GROUP, mask)[:, 0], expected, rtol=0, atol=1e-5)
    # Without other responses, each is a group of one, of which `grpo` leaves the bare scores, here 0 and 2.
    mask[1] = False
    ids = tensor([0, 0, 1])
    alone = gdpo_advantages(scores[:, :1], torch.ones(1), ids, mask)
    assert_close(alone[:, 0], tensor([-1.0, 0.0, 1.0]).double() / 2**0.5, rtol=0, atol=1e-5)


def test_gradients_of_gdpo_match_finite_differences():
    torch.manual_seed(0)
    scores, penalties = torch.randn(7, 2, dtype=torch.float64), torch.randn(7, dtype=torch.float64)
    _, ids, mask = random_group_batch()
    weights = tensor([1.0, -0.5])
    leaves = scores.requires_grad_(), penalties.requires_grad_()
    assert gradcheck(lambda s, p: gdpo_advantages(s, weights, ids, mask, penalties=p), leaves)


def test_gdpo_refuses_shapes_that_do_not_fit():
    with pytest.raises(ValueError, match=r"scores_by_source has shape \(3, 2\) and weights \(3,\); pass"):
        gdpo_advantages(BY_SOURCE, torch.ones(3), GROUP, MASK)
    with pytest.raises(ValueError, match=r"scores_by_source has shape \(3,\) and weights \(2,\)"):
        gdpo_advantages(BY_SOURCE[:, 0], torch.ones(2), GROUP, MASK)
    with pytest.raises(ValueError, match=r"each column of scores_by_source has shape \(3,\), response_mask \(2, 2\)"):
        gdpo_advantages(BY_SOURCE, torch.ones(2), GROUP, MASK[:2])


def test_rows_are_informative_where_their_groups_scores_differ():
    scores = tensor([1.0, 0.0, 1000.7, 0.0, 1000.7, 7.0])
    # 1000.7 and the next float32 differ by rounding alone.
    scores[4] = scores[4].nextafter(tensor(2000.0))
    rows = informative_rows(scores, tensor([5, 5, -1, 0, -1, 9]))
    assert rows.tolist() == [True, True, False, False, False, False]


@pytest.mark.parametrize(("scores", "ids"), [(torch.ones(2), torch.ones(3)), (torch.ones(2, 2), torch.ones(2, 2))])
def test_informative_rows_need_one_score_and_id_a_row(scores, ids):
    with pytest.raises(ValueError, match=r"scores has shape .*, group_ids .*"):
        informative_rows(scores, ids)


def test_reinforce_plus_plus_by_hand():
    # G1 = 4, G0 = 1 + .5*4 = 3;  second row G0 = 2;  whitened: mean 3, unbiased variance (0 + 1 + 1) / 2 = 1
    advantages, returns = reinforce_plus_plus(
        tensor([[1.0, 4.0], [2.0, nan]]), tensor([[True, True], [True, False]]), gamma=0.5
    )
    assert_close(returns, tensor([[3.0, 4.0], [2.0, 0.0]]))
    assert_close(advantages, tensor([[0.0, 1.0], [-1.0, 0.0]]))


def test_remax_by_hand():
    # returns-to-go 1 + 4 = 5, 4 less a baseline of 3; 2 less -1
    advantages, returns = remax(
        tensor([[1.0, 4.0], [2.0, nan]]), tensor([3.0, -1.0]), tensor([[True, True], [True, False]])
    )
    assert_close(returns, tensor([[5.0, 4.0], [2.0, 0.0]]))
    assert_close(advantages, tensor([[2.0, 1.0], [3.0, 0.0]]))


def test_gradients_of_returns_match_finite_differences():
    torch.manual_seed(0)
    rewards = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    baseline = torch.randn(3, dtype=torch.float64, requires_grad=True)
    mask = tensor([[True, False, True, True], [True, True, False, False], [False] * 4])
    assert gradcheck(lambda r: reinforce_plus_plus(r, mask, gamma=0.9), rewards)
    assert gradcheck(lambda r, b: remax(r, b, mask), (rewards, baseline))


@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (2, 0)])
def test_returns_of_a_batch_without_tokens_are_zero(shape):
    mask = torch.zeros(shape, dtype=torch.bool)
    padding, baseline = torch.full(shape, nan), torch.full(shape[:1], nan)
    for result in (*reinforce_plus_plus(padding, mask, gamma=0.9), *remax(padding, baseline, mask)):
        assert result.shape == shape and result.eq(0).all()


def test_returns_compute_half_precision_in_float32_and_keep_float64():
    mask = torch.ones(1, 2, dtype=torch.bool)
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float64,) * 2):
        rewards, baseline = torch.ones(1, 2, dtype=dtype), torch.ones(1, dtype=dtype)
        for result in (*reinforce_plus_plus(rewards, mask, gamma=0.9), *remax(rewards, baseline, mask)):
            assert result.dtype == expected


def test_returns_refuse_shapes_that_differ_and_a_rate_outside_zero_to_one():
    rewards, mask = torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"mask has shape \(2, 2\), but values \(2, 3\)"):
        reinforce_plus_plus(rewards, mask[:, :2], gamma=0.9)
    with pytest.raises(ValueError, match=r"gamma is 1.5; it must be in \[0, 1\]"):
        reinforce_plus_plus(rewards, mask, gamma=1.5)
    with pytest.raises(ValueError, match=r"baseline_scores has shape \(3,\), response_mask \(2, 3\)"):
        remax(rewards, torch.ones(3), mask)
    with pytest.raises(ValueError, match=r"mask has shape \(2, 2\), but values \(2, 3\)"):
        remax(rewards, torch.ones(2), mask[:, :2])
