import pytest
import torch
from torch import nan, tensor
from torch.autograd import gradcheck
from torch.testing import assert_close

from alpaca_ppo.functional import LOSS_AGG_MODES, aggregate_loss, masked_mean, masked_var, masked_whiten, zero_outside

MASK = tensor([[True, True, False], [True, False, False]])


def with_padding(*rows):
    """Rows of real values, NaN elsewhere, as a float64 leaf that wants a gradient."""
    values = torch.full((len(rows), 3), nan, dtype=torch.float64)
    for row, kept in enumerate(rows):
        values[row, : len(kept)] = tensor(kept, dtype=torch.float64)
    return values.requires_grad_()


def test_zero_outside_keeps_masked_values_and_clears_the_rest():
    assert_close(zero_outside(with_padding([1.0, 2.0], [4.0]), MASK), tensor([[1.0, 2, 0], [4, 0, 0]]).double())


def test_zero_outside_widens_half_precision_and_integers_to_float32_and_keeps_float64():
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.int64, torch.float32), (torch.float64,) * 2):
        assert zero_outside(torch.ones(2, 3, dtype=dtype), MASK).dtype == expected


def test_zero_outside_refuses_a_mask_that_would_broadcast():
    with pytest.raises(ValueError, match=r"mask has shape \(2, 1\), but values \(2, 3\)"):
        zero_outside(torch.ones(2, 3), MASK[:, :1])


def test_masked_mean_counts_masked_entries_only():
    # (1 + 2 + 6) / 3 = 3; by row (1 + 2) / 2 = 1.5 and 6; by column (1 + 6) / 2 = 3.5, 2 and nothing = 0
    values = with_padding([1.0, 2.0], [6.0])
    assert_close(masked_mean(values, MASK), tensor(3.0).double())
    assert_close(masked_mean(values, MASK, dim=1), tensor([1.5, 6.0]).double())
    assert_close(masked_mean(values, MASK, 0), tensor([3.5, 2.0, 0.0]).double())


def test_masked_mean_of_nothing_is_zero_and_keeps_its_graph():
    values = with_padding([1.0], [2.0])
    mean = masked_mean(values, torch.zeros_like(MASK))
    mean.backward()
    assert mean.item() == 0 and values.grad.eq(0).all()


def test_masked_var_divides_by_count_less_one_or_by_count():
    # mean of 1, 2, 6 is 3; squares 4 + 1 + 9 = 14; 14 / 2 = 7, 14 / 3
    values = with_padding([1.0, 2.0], [6.0])
    assert_close(masked_var(values, MASK), tensor(7.0).double())
    assert_close(masked_var(values, MASK, unbiased=False), tensor(14 / 3).double())


def test_masked_var_of_one_entry_is_zero():
    values = with_padding([5.0], [])
    assert masked_var(values, ~values.isnan()).item() == 0


def test_masked_whiten_gives_mean_zero_and_variance_one():
    # deviations -2, -1, 3 over sqrt(7)
    whitened = masked_whiten(with_padding([1.0, 2.0], [6.0]), MASK)
    assert_close(whitened, tensor([[-2.0, -1, 0], [3, 0, 0]]).double() / 7**0.5, rtol=0, atol=1e-8)


def test_masked_whiten_keep_mean_adds_the_mean_back_inside_the_mask():
    whitened = masked_whiten(with_padding([1.0, 2.0], [6.0]), MASK, keep_mean=True)
    root = 7**0.5
    expected = tensor([[3 - 2 / root, 3 - 1 / root, 0], [3 + 3 / root, 0, 0]], dtype=torch.float64)
    assert_close(whitened, expected, rtol=0, atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("count", "value"), [(1, 1000.7), (3, 0.1), (4096, 1000.7), (100_000, 12345.6), (64, -1e30), (7, 0.0)]
)
def test_equal_values_have_no_variance_and_are_whitened_to_zero(count, value, dtype):
    # In float32 the sum of 4096 times 1000.7, divided by 4096, is not 1000.7.
    values = torch.full((1, count), value, dtype=dtype)
    mask = torch.ones(1, count, dtype=torch.bool)
    assert masked_var(values, mask).item() == 0
    assert masked_whiten(values, mask).eq(0).all()
    kept = masked_whiten(values, mask, keep_mean=True)
    assert_close(kept, values.to(kept.dtype), rtol=1e-6, atol=0)


def test_values_that_differ_by_rounding_alone_count_as_equal():
    # 1000.7 and its neighbours: the same number, computed in three ways. Their std is 0.8 units in the last place.
    value = torch.full((1, 3000), 1000.7)
    value[0, ::3] = value[0, ::3].nextafter(tensor(2000.0))
    value[0, 1::3] = value[0, 1::3].nextafter(tensor(0.0))
    mask = torch.ones(1, 3000, dtype=torch.bool)
    assert value.unique().numel() == 3
    assert masked_var(value, mask).item() == 0
    assert masked_whiten(value, mask).eq(0).all()
    # In float64 the same numbers differ by far more than its rounding: 2/3 of the squared distance of 6.1e-5.
    assert masked_var(value.double(), mask).item() == pytest.approx(2 / 3 * (2.0**-14) ** 2, rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("low", "step"), [(1000.0, 0.125), (1e6, 1.0), (0.0, 2.0**-10), (-1000.0, 0.125), (0.0, 1e30)])
def test_close_and_huge_values_that_truly_differ_are_whitened_to_unit_variance(low, step, dtype):
    # As many of low as of low + step: deviations of half a step, and for n entries a variance of n / (n - 1) of its
    # square. 1e-8 is added to the variance, which matters for a step of 1/1024 only.
    values = low + step * torch.arange(4000, dtype=dtype).remainder(2).unsqueeze(0)
    mask = torch.ones(1, 4000, dtype=torch.bool)
    half = step / 2
    size = (4000 / 3999 + 1e-8 / half / half) ** -0.5
    expected = torch.where(values > low, size, -size).to(dtype)
    assert_close(masked_whiten(values, mask), expected, rtol=1e-6, atol=0)
    if step < 1e30:
        assert masked_var(values, mask).item() == pytest.approx(half**2 * 4000 / 3999, rel=1e-6)


def test_one_value_apart_from_100_000_equal_ones_is_no_rounding_error():
    # 1000.125 among 1000.0: with n = 100000 the deviations are 0.125 * (1 - 1/n) and -0.125/n, the unbiased variance
    # is 0.125**2 / n, and so the one is whitened to about sqrt(n) * (1 - 1/n) and the others to -1/sqrt(n).
    values = torch.full((1, 100_000), 1000.0)
    values[0, 7] = 1000.125
    whitened = masked_whiten(values, torch.ones(1, 100_000, dtype=torch.bool))
    root = (1.5625e-2 / 1e5 + 1e-8) ** 0.5
    assert whitened[0, 7].item() == pytest.approx(0.125 * (1 - 1e-5) / root, rel=1e-5)
    assert whitened[0, 0].item() == pytest.approx(-0.125e-5 / root, rel=1e-3)


def test_a_number_that_is_not_finite_does_not_pass_as_equal_values():
    for bad in (nan, torch.inf, -torch.inf):
        assert masked_whiten(tensor([[bad, 1.0, 1.0], [1.0, 1.0, 1.0]]), MASK)[MASK].isnan().all()


@pytest.mark.parametrize(
    "function",
    [
        masked_mean,
        lambda x, m: masked_mean(x, m, dim=1),
        masked_var,
        masked_whiten,
        lambda x, m: masked_whiten(x, m, keep_mean=True),
        *(lambda x, m, mode=mode: aggregate_loss(x, m, mode) for mode in LOSS_AGG_MODES),
    ],
)
def test_gradients_match_finite_differences_and_padding_gets_none_even_where_it_is_nan(function):
    # a finite difference cannot stand on a NaN, so padding is finite in the first check and NaN in the second
    finite = tensor([[0.3, -1.2, 9.0], [0.7, 9.0, 9.0]], dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda x: function(x, MASK), finite)
    scale = tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]).double()
    grads = []
    for values in (finite, finite.detach().where(MASK, nan).requires_grad_()):
        result = function(values, MASK)
        weight = scale if result.dim() == 2 else 1
        (grad,) = torch.autograd.grad((result * weight).sum(), values)
        grads.append(grad)
    assert grads[1].isfinite().all()
    assert_close(grads[1], grads[0] * MASK)


def test_aggregate_loss_modes_by_hand():
    # row 0 holds 1 and 2, row 1 holds 6, row 2 nothing; tokens 3, sequences 2, padded length 3
    mask = torch.cat([MASK, torch.zeros(1, 3, dtype=torch.bool)])
    losses = with_padding([1.0, 2.0], [6.0], [])
    expected = {
        "token-mean": 9 / 3,
        "seq-mean-token-sum": (3 + 6) / 2,
        "seq-mean-token-mean": (1.5 + 6) / 2,
        "seq-mean-token-sum-norm": (3 + 6) / 3 / 2,
    }
    assert {mode: aggregate_loss(losses, mask, mode).item() for mode in LOSS_AGG_MODES} == expected


@pytest.mark.parametrize("rows", [2, 0])
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_aggregate_loss_of_an_empty_mask_is_zero_with_a_graph(mode, rows):
    losses = torch.full((rows, 3), nan, requires_grad=True)
    for denominator in (None, 12.0):
        loss = aggregate_loss(losses, torch.zeros(rows, 3, dtype=torch.bool), mode, denominator=denominator)
        (grad,) = torch.autograd.grad(loss, losses)
        assert loss.item() == 0 and grad.eq(0).all()


def test_aggregate_loss_keeps_float32_under_a_float64_denominator():
    assert aggregate_loss(torch.ones(2, 3), MASK, "token-mean", denominator=tensor(3.0).double()).dtype == torch.float32


def test_aggregate_loss_names_the_modes_it_knows():
    with pytest.raises(ValueError, match="loss_agg_mode is 'mean'; it must be one of token-mean, seq-mean-token-sum"):
        aggregate_loss(torch.ones(2, 3), MASK, "mean")
