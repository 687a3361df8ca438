"""The critic's squared error by hand. What holds for every loss is in `test_every_loss`."""

import pytest
import torch
from torch import nan, tensor
from torch.testing import assert_close

from alpaca_ppo.functional import value_loss


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


def test_predictions_inside_the_range_never_count_as_clipped():
    # in float32, old + (v - old) is not v, and its error may be the larger by a rounding
    torch.manual_seed(0)
    vpreds, old_values, returns = 0.1 * torch.rand(100, 100) - 0.05, 0.1 * torch.rand(100, 100), torch.randn(100, 100)
    stats = value_loss(vpreds, old_values, returns, torch.ones(100, 100).bool(), cliprange_value=0.2).stats
    assert stats["clipfrac"] == 0


def test_a_clip_range_that_is_not_positive_is_refused():
    ones = torch.ones(1, 2)
    with pytest.raises(ValueError, match="cliprange_value is 0; it must be positive, or None"):
        value_loss(ones, ones, ones, ones.bool(), cliprange_value=0)
