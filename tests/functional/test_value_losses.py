import pytest
import torch
from torch import nan, tensor
from torch.autograd import gradcheck
from torch.testing import assert_close

from alpaca_ppo.functional import LOSS_AGG_MODES, value_loss
from tests.golden_cases import golden_cases


def random_batch():
    torch.manual_seed(0)
    vpreds, old_values, returns = (torch.randn(5, 4, dtype=torch.float64) for _ in range(3))
    return vpreds, old_values, returns, torch.rand(5, 4) < 0.7


def test_without_a_clip_range_it_is_half_the_mean_squared_error():
    # errors 1 - 3 = -2 and 2 - 1 = 1: 0.5 * (4 + 1) / 2 = 1.25
    vpreds, returns, mask = tensor([[1.0, 2.0, nan]]), tensor([[3.0, 1.0, nan]]), tensor([[True, True, False]])
    loss, stats = value_loss(vpreds, torch.full((1, 3), nan), returns, mask)
    assert_close(loss, tensor(1.25))
    assert {name: value.item() for name, value in stats.items()} == {"clipfrac": 0.0, "error": 2.5, "vpred": 1.5}


def test_a_clipped_prediction_counts_where_its_error_is_the_larger():
    # return 0, old value 1, range 0.2: v = 0.5 counts as 0.8; v = 1.1 stays; v = 2 as 1.2, less than its own error
    # 0.5 * (0.64 + 1.21 + 4) / 3 = 0.975
    vpreds = tensor([[0.5, 1.1, 2.0]], requires_grad=True)
    mask = torch.ones(1, 3, dtype=torch.bool)
    loss, stats = value_loss(vpreds, torch.ones(1, 3), torch.zeros(1, 3), mask, cliprange_value=0.2)
    assert_close(loss, tensor(0.975))
    assert_close(stats["clipfrac"], tensor(1 / 3))
    # the clipped one gets no gradient; the others v / 3
    assert_close(torch.autograd.grad(loss, vpreds)[0], tensor([[0.0, 1.1 / 3, 2 / 3]]))


def test_a_wide_clip_range_changes_nothing():
    batch = random_batch()
    narrow, wide = value_loss(*batch), value_loss(*batch, cliprange_value=1e6)
    assert_close(wide, narrow, rtol=0, atol=0)


def test_predictions_inside_the_range_never_count_as_clipped():
    # in float32, old + (v - old) is not v, and its error may be the larger by a rounding
    torch.manual_seed(0)
    vpreds, old_values, returns = 0.1 * torch.rand(100, 100) - 0.05, 0.1 * torch.rand(100, 100), torch.randn(100, 100)
    stats = value_loss(vpreds, old_values, returns, torch.ones(100, 100).bool(), cliprange_value=0.2).stats
    assert stats["clipfrac"] == 0


@pytest.mark.parametrize("cliprange_value", [None, 0.2])
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_gradients_match_finite_differences(mode, cliprange_value):
    vpreds, old_values, returns, mask = random_batch()
    settings = {"cliprange_value": cliprange_value, "loss_agg_mode": mode}
    assert gradcheck(lambda x: value_loss(x, old_values, returns, mask, **settings).loss, vpreds.requires_grad_())


@pytest.mark.parametrize("cliprange_value", [None, 0.2])
def test_nan_outside_the_mask_reaches_neither_loss_stats_nor_gradient(cliprange_value):
    settings = {"cliprange_value": cliprange_value}
    *inputs, mask = random_batch()
    results = []
    for padding in (0.0, nan):
        vpreds, old_values, returns = (x.where(mask, padding) for x in inputs)
        loss, stats = value_loss(vpreds.requires_grad_(), old_values, returns, mask, **settings)
        loss.backward()
        results.append((loss.detach(), stats, vpreds.grad))
    assert_close(results[1], results[0], rtol=0, atol=0)
    assert results[1][2].isfinite().all()
    targets = returns.requires_grad_()
    value_loss(vpreds, old_values, targets, mask, **settings).loss.backward()
    assert targets.grad is None


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_parts_with_the_whole_batchs_denominator_add_up_to_the_whole(mode):
    batch, how = random_batch(), {"cliprange_value": 0.2, "loss_agg_mode": mode}
    mask = batch[-1]
    denominator = mask.sum() if mode == "token-mean" else mask.any(dim=1).sum()
    parts = [value_loss(*(x[p] for x in batch), **how, denominator=denominator).loss for p in torch.arange(5).split(2)]
    assert_close(sum(parts), value_loss(*batch, **how).loss, rtol=1e-13, atol=0)


@pytest.mark.parametrize("rows", [2, 0])
def test_a_batch_without_tokens_gives_zero_with_a_graph_and_finite_stats(rows):
    vpreds, padding = torch.full((rows, 3), nan, requires_grad=True), torch.full((rows, 3), nan)
    mask = torch.zeros(rows, 3, dtype=torch.bool)
    loss, stats = value_loss(vpreds, padding, padding, mask, cliprange_value=0.2, denominator=5)
    loss.backward()
    assert loss.item() == 0 and vpreds.grad.eq(0).all()
    assert all(value.isfinite() for value in stats.values())


def test_half_precision_is_computed_in_float32():
    ones = torch.ones(1, 2, dtype=torch.bfloat16)
    loss, stats = value_loss(ones, ones, ones, torch.ones(1, 2, dtype=torch.bool), cliprange_value=0.2)
    assert loss.dtype == torch.float32 and {value.dtype for value in stats.values()} == {torch.float32}


def test_a_clip_range_that_is_not_positive_is_refused():
    ones = torch.ones(1, 2)
    with pytest.raises(ValueError, match="cliprange_value is 0; it must be positive, or None"):
        value_loss(ones, ones, ones, ones.bool(), cliprange_value=0)


@pytest.mark.parametrize(("inputs", "expected"), golden_cases("value_loss"))
def test_value_loss_matches_golden(inputs, expected):
    inputs["vpreds"].requires_grad_()
    loss, stats = value_loss(**inputs)
    (grad,) = torch.autograd.grad(loss, inputs["vpreds"])
    assert loss.item() == pytest.approx(expected["loss"], abs=1e-6)
    assert stats["clipfrac"].item() == pytest.approx(expected["clipfrac"], abs=1e-6)
    assert_close(grad, expected["grad_wrt_vpreds"], rtol=0, atol=1e-6)
