import pytest
import torch
from torch import nan, tensor
from torch.testing import assert_close

from alpaca_ppo.functional import positive_nll_loss

MASK = tensor([[True, True, False], [True, False, True], [False, False, False], [True, True, True]])
POSITIVE = tensor([True, False, True, True])


def logprobs():
    torch.manual_seed(0)
    return -torch.rand(4, 3, dtype=torch.float64)


def test_the_loss_is_the_mean_over_the_tokens_of_positive_rows():
    # -(-1 - 2 - 4) / 3; the second row is not positive.
    values = tensor([[-1.0, -2.0], [-8.0, -8.0], [-4.0, nan]], requires_grad=True)
    mask = tensor([[True, True], [True, True], [True, False]])
    loss, stats = positive_nll_loss(values, tensor([True, False, True]), mask)
    loss.backward()
    assert_close(loss, tensor(7 / 3))
    assert_close(values.grad, tensor([[-1 / 3, -1 / 3], [0.0, 0.0], [-1 / 3, 0.0]]))
    assert {name: value.item() for name, value in stats.items()} == {"positive_fraction": pytest.approx(3 / 5)}
    assert not stats["positive_fraction"].requires_grad


@pytest.mark.parametrize("denominator", [None, 0, tensor(0), tensor(7)])
def test_without_a_positive_token_the_loss_is_zero_and_keeps_its_graph(denominator):
    nobody = torch.zeros(4, dtype=torch.bool)
    for positive, mask in ((nobody, MASK), (~nobody, torch.zeros_like(MASK))):
        values = logprobs().where(mask, nan).requires_grad_()
        loss, stats = positive_nll_loss(values, positive, mask, denominator=denominator)
        loss.backward()
        assert loss.item() == 0 and values.grad.eq(0).all() and stats["positive_fraction"] == 0


def test_half_precision_is_computed_in_float32_and_float64_stays():
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float32,) * 2, (torch.float64,) * 2):
        loss, stats = positive_nll_loss(logprobs().to(dtype), POSITIVE, MASK, denominator=tensor(5))
        assert loss.dtype == stats["positive_fraction"].dtype == expected


def test_one_entry_for_each_row_is_needed():
    with pytest.raises(ValueError, match=r"positive has shape \(3,\), response_mask \(4, 3\)"):
        positive_nll_loss(logprobs(), POSITIVE[:3], MASK)
