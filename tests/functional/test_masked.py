import pytest
import torch
from torch import nan, tensor
from torch.autograd import gradcheck
from torch.testing import assert_close

from alpaca_ppo.functional import LOSS_AGG_MODES, aggregate_loss, masked_mean, masked_var, masked_whiten, zero_outside
from tests.golden_cases import golden_cases

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
    with pytest.raises(ValueError, match=r"mask has shape \(2, 1\) but values has \(2, 3\)"):
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


def test_masked_whiten_of_equal_values_is_zero():
    assert masked_whiten(torch.full((2, 3), 4.0), MASK).eq(0).all()


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


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_no_mode_grows_with_the_number_of_sequences(mode):
    # every sequence twice: all sums and all counts double
    losses = with_padding([1.0, 2.0], [6.0])
    assert_close(aggregate_loss(losses.repeat(2, 1), MASK.repeat(2, 1), mode), aggregate_loss(losses, MASK, mode))


@pytest.mark.parametrize("as_tensor", [True, False])
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_parts_with_the_whole_batchs_denominator_add_up_to_the_whole(mode, as_tensor):
    torch.manual_seed(0)
    losses, mask = torch.randn(7, 5, dtype=torch.float64), torch.rand(7, 5) < 0.6
    mask[3] = False
    count = mask.sum() if mode == "token-mean" else mask.any(dim=1).sum()
    denominator = count if as_tensor else float(count)
    parts = [aggregate_loss(losses[p], mask[p], mode, denominator=denominator) for p in torch.arange(7).split(3)]
    assert_close(sum(parts), aggregate_loss(losses, mask, mode), rtol=1e-14, atol=0)


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


@pytest.mark.parametrize(("inputs", "expected"), golden_cases("masked_mean"))
def test_masked_mean_matches_golden(inputs, expected):
    assert masked_mean(**inputs).item() == pytest.approx(expected["mean"], abs=1e-6)


@pytest.mark.parametrize(("inputs", "expected"), golden_cases("masked_var"))
def test_masked_var_matches_golden(inputs, expected):
    assert masked_var(**inputs).item() == pytest.approx(expected["var"], abs=1e-6)


@pytest.mark.parametrize(("inputs", "expected"), golden_cases("masked_whiten"))
def test_masked_whiten_matches_golden(inputs, expected):
    assert_close(masked_whiten(**inputs), expected["whitened_inside_mask"], rtol=0, atol=1e-6)


@pytest.mark.parametrize(("inputs", "expected"), golden_cases("aggregate_loss"))
def test_aggregate_loss_matches_golden(inputs, expected):
    assert aggregate_loss(**inputs).item() == pytest.approx(expected["loss"], abs=1e-6)
