import math

import pytest
import torch
from torch import nan, tensor
from torch.autograd import gradcheck
from torch.testing import assert_close

from alpaca_ppo.functional import LOSS_AGG_MODES, policy_loss
from tests.golden_cases import golden_cases

SYMMETRIC = {"cliprange_low": 0.2, "cliprange_high": 0.2}


def one_token(ratio, advantage, **settings):
    """Loss and stats of a single token with the given ratio."""
    old = tensor([[-3.0]], dtype=torch.float64)
    mask = torch.ones(1, 1, dtype=torch.bool)
    return policy_loss(old + math.log(ratio), old, tensor([[advantage]]), mask, **(SYMMETRIC | settings))


def random_batch(rows=5, columns=4):
    torch.manual_seed(0)
    logprobs, old_logprobs, advantages = (torch.randn(rows, columns, dtype=torch.float64) for _ in range(3))
    return logprobs, old_logprobs, advantages, torch.rand(rows, columns) < 0.7


def test_a_ratio_above_the_range_is_clipped_where_the_advantage_is_positive():
    # exp(-1.5 + 2.0) = 1.6487; max(-0.5 * 1.6487, -0.5 * 1.2) = max(-0.8244, -0.6) = -0.6
    logprobs = tensor([[-1.5]], requires_grad=True)
    loss, stats = policy_loss(logprobs, tensor([[-2.0]]), tensor([[0.5]]), tensor([[True]]), **SYMMETRIC)
    assert_close(loss, tensor(-0.6))
    assert_close(stats["ratio_mean"], tensor(1.6487), rtol=0, atol=1e-4)
    assert stats["clipfrac"] == 1 and stats["clipfrac_lower"] == 0
    assert torch.autograd.grad(loss, logprobs)[0].item() == 0


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.1, 2.0, -2.2),  # inside the range: -A * ratio
        (1.5, 2.0, -2 * 1.28),  # above it: -A * (1 + high)
        (0.5, 2.0, -1.0),  # below it with A > 0: the raw term is the larger
        (0.5, -2.0, 2 * 0.9),  # below it with A < 0: -A * (1 - low)
        (1.5, -2.0, 3.0),  # above it with A < 0: the raw term
    ],
)
def test_clip_ranges_above_and_below_are_separate(ratio, advantage, expected):
    assert one_token(ratio, advantage, cliprange_low=0.1, cliprange_high=0.28).loss.item() == pytest.approx(expected)


def test_dual_clip_bounds_the_loss_where_the_advantage_is_negative_only():
    # A = -2, ratio 5: plain 10, bounded 2 * 3 = 6; A = +2: -2 * 1.2 either way
    assert one_token(5.0, -2.0).loss.item() == pytest.approx(10.0)
    bounded = one_token(5.0, -2.0, clip_ratio_c=3.0)
    assert bounded.loss.item() == pytest.approx(6.0) and bounded.stats["clipfrac_lower"] == 1
    positive = one_token(5.0, 2.0, clip_ratio_c=3.0)
    assert positive.loss.item() == pytest.approx(-2.4) and positive.stats["clipfrac_lower"] == 0


def test_the_log_ratio_is_cut_at_twenty():
    logprobs, old_logprobs = tensor([[-1.0, -101.0]]).double(), tensor([[-101.0, -1.0]]).double()
    _, stats = policy_loss(logprobs, old_logprobs, torch.ones(1, 2), torch.ones(1, 2).bool(), **SYMMETRIC)
    assert stats["ratio_max"].item() == pytest.approx(math.exp(20))
    assert stats["ratio_min"].item() == pytest.approx(math.exp(-20))


def test_stats_by_hand():
    # ratios 2 and 0.5; k1 = mean(-log ratio) = 0; k3 = mean(ratio - 1 - log ratio) = ((1 - ln 2) + (-.5 + ln 2)) / 2
    old_logprobs = tensor([[-2.0, -2.0, nan]]).double()
    logprobs = old_logprobs + tensor([[math.log(2), -math.log(2), 0.0]], dtype=torch.float64)
    mask = tensor([[True, True, False]])
    _, stats = policy_loss(logprobs, old_logprobs, tensor([[1.0, 1.0, nan]]), mask, **SYMMETRIC)
    expected = {
        "clipfrac": 0.5,
        "clipfrac_lower": 0.0,
        "approx_kl_k1": 0.0,
        "approx_kl_k3": 0.25,
        "ratio_mean": 1.25,
        "ratio_min": 0.5,
        "ratio_max": 2.0,
    }
    assert {name: value.item() for name, value in stats.items()} == pytest.approx(expected, abs=1e-12)
    assert not any(value.requires_grad for value in stats.values())


def test_weights_scale_each_tokens_loss_and_get_no_gradient():
    # ratio 1, A = 1 and 3: (-1 * 0.5 - 3 * 2) / 2 = -3.25
    zeros = torch.zeros(1, 2, requires_grad=True)
    weights = tensor([[0.5, 2.0]], requires_grad=True)
    mask = torch.ones(1, 2, dtype=torch.bool)
    loss = policy_loss(zeros, torch.zeros(1, 2), tensor([[1.0, 3.0]]), mask, weights=weights, **SYMMETRIC).loss
    assert_close(loss, tensor(-3.25))
    loss.backward()
    assert_close(zeros.grad, tensor([[-0.25, -3.0]]))
    assert weights.grad is None


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_gradients_match_finite_differences(mode):
    logprobs, old_logprobs, advantages, mask = random_batch()
    for clip_ratio_c in (None, 1.5):
        settings = {"clip_ratio_c": clip_ratio_c, "loss_agg_mode": mode, **SYMMETRIC}
        assert gradcheck(
            lambda x, s=settings: policy_loss(x, old_logprobs, advantages, mask, **s).loss, logprobs.requires_grad_()
        )


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_nan_outside_the_mask_reaches_neither_loss_stats_nor_gradient(mode):
    *inputs, mask = random_batch()
    settings = {"clip_ratio_c": 2.0, "loss_agg_mode": mode, **SYMMETRIC}
    results = []
    for padding in (0.0, nan):
        logprobs, old_logprobs, advantages = (x.where(mask, padding) for x in inputs)
        logprobs.requires_grad_()
        weights = torch.full_like(advantages, 0.5).where(mask, padding)
        loss, stats = policy_loss(logprobs, old_logprobs, advantages, mask, weights=weights, **settings)
        loss.backward()
        results.append((loss.detach(), stats, logprobs.grad))
    assert_close(results[1], results[0], rtol=0, atol=0)
    assert results[1][2].isfinite().all()


def test_at_the_old_policy_the_gradient_is_that_of_the_advantage():
    # ratio 1: d loss / d logprob = -A / tokens, whatever the clip ranges
    _, old_logprobs, advantages, mask = random_batch()
    logprobs = old_logprobs.clone().requires_grad_()
    loss, stats = policy_loss(logprobs, old_logprobs, advantages, mask, cliprange_low=0.0, cliprange_high=0.0)
    loss.backward()
    assert_close(logprobs.grad, torch.where(mask, -advantages / mask.sum(), 0.0))
    assert stats["ratio_min"] == stats["ratio_max"] == 1 and stats["clipfrac"] == 0


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_parts_with_the_whole_batchs_denominator_give_the_whole_batchs_gradient(mode):
    logprobs, old_logprobs, advantages, mask = random_batch()
    mask[1] = False
    denominator = mask.sum() if mode == "token-mean" else mask.any(dim=1).sum()
    grads = []
    for parts, shared in (([slice(0, 5)], None), ([slice(0, 2), slice(2, 3), slice(3, 5)], denominator)):
        leaf = logprobs.detach().requires_grad_()
        for part in parts:
            policy_loss(
                leaf[part], old_logprobs[part], advantages[part], mask[part],
                loss_agg_mode=mode, denominator=shared, **SYMMETRIC,
            ).loss.backward()  # fmt: skip
        grads.append(leaf.grad)
    assert_close(grads[1], grads[0], rtol=1e-13, atol=0)


@pytest.mark.parametrize("rows", [2, 0])
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_a_batch_without_tokens_gives_zero_with_a_graph_and_finite_stats(mode, rows):
    logprobs = torch.full((rows, 3), nan, requires_grad=True)
    padding, mask = torch.full((rows, 3), nan), torch.zeros(rows, 3, dtype=torch.bool)
    loss, stats = policy_loss(
        logprobs, padding, padding, mask, clip_ratio_c=3.0, loss_agg_mode=mode, denominator=7, **SYMMETRIC
    )
    loss.backward()
    assert loss.item() == 0 and logprobs.grad.eq(0).all()
    assert all(value.isfinite() for value in stats.values())
    assert stats["ratio_min"] == stats["ratio_max"] == 1


def test_half_precision_is_computed_in_float32_and_float64_stays():
    mask = torch.ones(1, 2, dtype=torch.bool)
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float32,) * 2, (torch.float64,) * 2):
        zeros = torch.zeros(1, 2, dtype=dtype)
        loss, stats = policy_loss(zeros, zeros, zeros + 1, mask, **SYMMETRIC)
        assert loss.dtype == expected and {value.dtype for value in stats.values()} == {expected}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cliprange_low": -0.1}, "cliprange_low is -0.1"),
        ({"cliprange_low": 1.5}, "cliprange_low is 1.5"),
        ({"cliprange_high": -0.1}, "cliprange_high is -0.1"),
        ({"clip_ratio_c": 1.0}, "clip_ratio_c is 1.0; it must be above 1"),
    ],
)
def test_clip_ranges_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        one_token(1.0, 1.0, **settings)


@pytest.mark.parametrize(("inputs", "expected"), golden_cases("policy_loss"))
def test_policy_loss_matches_golden(inputs, expected):
    inputs["logprobs"].requires_grad_()
    loss, stats = policy_loss(**inputs)
    (grad,) = torch.autograd.grad(loss, inputs["logprobs"])
    assert loss.item() == pytest.approx(expected["loss"], abs=1e-6)
    for name in ("clipfrac", "clipfrac_lower", "approx_kl_k1"):
        assert stats[name].item() == pytest.approx(expected[name], abs=1e-6)
    assert_close(grad, expected["grad_wrt_logprobs"], rtol=0, atol=1e-6)
