import math

import pytest
import torch
from torch import nan, tensor
from torch.autograd import gradcheck
from torch.testing import assert_close

from alpaca_ppo import functional as F

SUPPORT = {"v_min": -2.0, "v_max": 2.0}


def categorical(logits, returns, mask, **settings):
    return F.c51_loss(logits, returns, mask, **SUPPORT, **settings)


def fixed_quantiles(quantiles, returns, mask, **settings):
    return F.quantile_huber_loss(quantiles, returns, F.quantile_midpoints(quantiles.size(-1)), mask, **settings)


def random_batch():
    torch.manual_seed(0)
    predictions, returns = torch.randn(5, 4, 6, dtype=torch.float64), 2 * torch.randn(5, 4, dtype=torch.float64)
    return predictions, returns, torch.rand(5, 4) < 0.7


def test_atoms_span_the_support_evenly():
    assert_close(F.c51_atoms(5, v_min=-1, v_max=3), tensor([-1.0, 0.0, 1.0, 2.0, 3.0]))
    assert F.c51_atoms(2, v_min=0, v_max=1, dtype=torch.float64).dtype == torch.float64


def test_projection_splits_the_mass_by_distance():
    # atoms 1 apart: 0.25 is 3/4 of the way to 0 and 1/4 to 1;  -0.5 lies in the middle of -1 and 0
    expected = tensor([[0.0, 0.75, 0.25, 0.0], [0.5, 0.5, 0.0, 0.0]])
    assert_close(F.c51_project(tensor([0.25, -0.5]), F.c51_atoms(4, v_min=-1, v_max=2)), expected)


def test_projection_of_unevenly_spaced_atoms_keeps_the_mean():
    # 2 lies 1/3 of the way from 1 to 4: 2/3 * 1 + 1/3 * 4 = 2
    assert_close(F.c51_project(tensor(2.0), tensor([0.0, 1.0, 4.0])), tensor([0.0, 2 / 3, 1 / 3]))


def test_a_return_on_an_atom_keeps_its_mass_together():
    atoms = F.c51_atoms(51, v_min=-10, v_max=10)
    assert_close(F.c51_project(atoms, atoms), torch.eye(51), rtol=0, atol=0)


def test_returns_outside_the_support_count_as_its_ends():
    expected = tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.0, 0.0, 1.0]])
    assert_close(F.c51_project(tensor([-7.0, 1.5, math.inf]), tensor([-1.0, 0.0, 1.0])), expected)


def test_c51_loss_by_hand():
    # atoms -2, 0, 2.  Token 1: p = (1/4, 1/2, 1/4), return 1 -> target (0, 1/2, 1/2): (ln 2 + ln 4) / 2 = 1.5 ln 2,
    # mean 0, error 1.  Token 2: p = (1/2, 1/4, 1/4), return -5 -> (1, 0, 0): ln 2, mean -1 + 0.5 = -0.5,
    # error 4.5^2 = 20.25.  Edges: 1/2 and 3/4.
    logits = tensor([[[0.25, 0.5, 0.25], [0.5, 0.25, 0.25], [nan, nan, nan]]]).log()
    loss, stats = categorical(logits, tensor([[1.0, -5.0, nan]]), tensor([[True, True, False]]))
    assert_close(loss, tensor(1.25 * math.log(2)))
    assert {name: pytest.approx(value.item()) for name, value in stats.items()} == {
        "edge_mass": 0.625,
        "outside_support": 0.5,
        "error": 10.625,
        "vpred": -0.25,
    }


# The standard normal's distribution function: cdf(1) = 0.841345, cdf(2) = 0.977250, cdf(3) = 0.998650.
def test_a_normal_distribution_is_split_at_the_edges_of_the_bins_and_renormalised():
    # Edges -2, -1, 0, 1, 2 and sigma 1.  Return 0: masses cdf(2) - cdf(1) = 0.135905, cdf(1) - 1/2 = 0.341345 and the
    # same again, of 0.954500 in all: 0.142384, 0.357616.
    settings = {"v_min": -2.0, "v_max": 2.0, "num_bins": 4, "sigma": 1.0}
    outer, inner = 0.135905 / 0.954500, 0.341345 / 0.954500
    assert_close(F.hl_gauss_project(tensor(0.0), **settings), tensor([outer, inner, inner, outer]), rtol=0, atol=2e-6)
    # Return 1: cdf(-2) - cdf(-3) = 0.0214, cdf(-1) - cdf(-2) = 0.135905 and twice 0.341345; in all 0.839995.
    masses = [0.0214, 0.135905, 0.341345, 0.341345]
    expected = tensor([mass / 0.839995 for mass in masses])
    assert_close(F.hl_gauss_project(tensor([1.0]), **settings), expected.unsqueeze(0), rtol=0, atol=2e-6)


def test_smoothed_returns_outside_the_support_count_as_its_ends():
    settings = {"v_min": -2.0, "v_max": 2.0, "num_bins": 4, "sigma": 1.0}
    ends = F.hl_gauss_project(tensor([-2.0, 2.0]), **settings)
    assert_close(F.hl_gauss_project(tensor([-9.0, math.inf]), **settings), ends, rtol=0, atol=0)
    # Half a normal distribution of deviation 1, on bins at the distances 1/2, 3/2 (cdf(4) is 1 but for 3e-5):
    # 2 * (0.341345, 0.135905, 0.0214, 0.0013).
    assert_close(ends[0], tensor([0.68269, 0.27181, 0.0428, 0.0026]), rtol=0, atol=1e-4)


def test_a_narrow_smoothing_puts_all_mass_into_the_bin_of_the_return():
    settings = {"v_min": -2.0, "v_max": 2.0, "num_bins": 4, "sigma": 1e-6}
    # On an edge, half to each side.
    expected = tensor([[0.0, 0.0, 1.0, 0.0], [0.0, 0.5, 0.5, 0.0], [0.0, 0.0, 0.0, 1.0]])
    assert_close(F.hl_gauss_project(tensor([0.3, 0.0, 2.0]), **settings), expected)


def test_bins_have_their_value_at_their_centres():
    assert_close(F.hl_gauss_centres(4, v_min=-1, v_max=3), tensor([-0.5, 0.5, 1.5, 2.5]))
    assert F.hl_gauss_centres(2, v_min=0, v_max=1, dtype=torch.float64).dtype == torch.float64
    # 0.1 * -0.5 + 0.2 * 0.5 + 0.3 * 1.5 + 0.4 * 2.5 = 1.5
    logits = tensor([[0.1, 0.2, 0.3, 0.4]]).log() + 7.0
    assert_close(F.hl_gauss_value(logits, v_min=-1, v_max=3), tensor([1.5]))
    assert F.hl_gauss_value(logits.bfloat16(), v_min=-1, v_max=3).dtype == torch.float32


def test_hl_gauss_loss_by_hand():
    # Bins [-2, 0] and [0, 2], sigma 1.  Token 1: p = (1/4, 3/4), return 0 -> target (1/2, 1/2): (ln 4 + ln 4/3) / 2,
    # mean 1/2, error 1/4.  Token 2: p = (1/2, 1/2), return 5 -> clamped to 2: whatever the target, ln 2; mean 0,
    # error 25.  Both bins are edges.
    logits, mask = tensor([[[0.25, 0.75], [0.5, 0.5], [nan, nan]]]).log(), tensor([[True, True, False]])
    loss, stats = F.hl_gauss_loss(logits, tensor([[0.0, 5.0, nan]]), mask, **SUPPORT, sigma=1.0)
    assert_close(loss, tensor(0.5 * (math.log(4) - 0.5 * math.log(3) + math.log(2))))
    assert {name: pytest.approx(value.item()) for name, value in stats.items()} == {
        "edge_mass": 1.0,
        "outside_support": 0.5,
        "error": 12.625,
        "vpred": 0.25,
    }


@pytest.mark.parametrize("sigma", [0.0, -1.0, nan, math.inf])
def test_a_smoothing_that_is_not_positive_and_finite_is_refused(sigma):
    with pytest.raises(ValueError, match=f"sigma is {sigma}; it must be positive and finite, such as 0.75"):
        F.hl_gauss_loss(*random_batch(), **SUPPORT, sigma=sigma)


def test_quantile_huber_loss_by_hand():
    # kappa 1, return 2, taus (1/4, 3/4).  Quantile 1.5: d = 0.5, 0.5 * 0.25 * 1/4 = 0.03125.
    # Quantile 5: d = -3, (3 - 0.5) * |3/4 - 1| = 0.625.  Mean 0.328125; mean quantile 3.25, error 1.25^2 = 1.5625.
    quantiles, mask = tensor([[[1.5, 5.0], [nan, nan]]]), tensor([[True, False]])
    loss, stats = F.quantile_huber_loss(quantiles, tensor([[2.0, nan]]), tensor([0.25, 0.75]), mask)
    assert_close(loss, tensor(0.328125))
    assert {name: value.item() for name, value in stats.items()} == {"error": 1.5625, "vpred": 3.25}


def test_kappa_is_where_the_loss_turns_linear_and_no_divisor():
    # tau 1/2, d = 3.  kappa 2: 2 * (3 - 1) / 2 = 2;  kappa 4 and infinity: 9 / 2 / 2 = 2.25;
    # kappa 0.5: 0.5 * (3 - 0.25) / 2 = 0.6875
    for kappa, expected in ((2.0, 2.0), (4.0, 2.25), (0.5, 0.6875), (math.inf, 2.25)):
        inputs = torch.zeros(1, 1, 1), tensor([[3.0]]), tensor([0.5]), tensor([[True]])
        assert_close(F.quantile_huber_loss(*inputs, kappa=kappa).loss, tensor(expected))


def test_taus_may_differ_from_token_to_token():
    predictions, returns, mask = random_batch()
    taus = torch.rand_like(predictions).requires_grad_()
    whole = F.quantile_huber_loss(predictions, returns, taus, mask).loss
    assert not whole.requires_grad
    rows = [
        F.quantile_huber_loss(predictions[[i]][:, [t]], returns[[i]][:, [t]], taus[i, t], mask[[i]][:, [t]]).loss
        for i, t in mask.nonzero().tolist()
    ]
    assert_close(whole, torch.stack(rows).mean())


def test_midpoints_are_the_middles_of_equal_masses():
    assert_close(F.quantile_midpoints(4), tensor([0.125, 0.375, 0.625, 0.875]))
    assert_close(F.quantile_midpoints(1, dtype=torch.float64), tensor([0.5], dtype=torch.float64))


def test_cvar_of_quantiles_takes_a_part_of_the_boundary_quantile():
    # In any order, since learned quantiles may cross.
    quantiles = tensor([10.0, 1.0, 3.0, 2.0])
    # alpha 0.6: masses 0.25, 0.25, 0.1 -> (0.25 + 0.5 + 0.3) / 0.6 = 1.75;  alpha 0.25 and less: the lowest
    for alpha, expected in ((0.6, 1.75), (0.5, 1.5), (0.25, 1.0), (0.01, 1.0), (1.0, 4.0)):
        assert_close(F.cvar_from_quantiles(quantiles, alpha=alpha), tensor(expected))


def test_the_upper_tail_takes_the_highest_quantiles_and_atoms():
    quantiles = tensor([3.0, 1.0, 10.0, 2.0])
    # alpha 0.6: masses 0.25, 0.25, 0.1 of 10, 3, 2 -> (2.5 + 0.75 + 0.2) / 0.6 = 5.75
    for alpha, expected in ((0.6, 5.75), (0.5, 6.5), (0.25, 10.0), (0.01, 10.0), (1.0, 4.0)):
        assert_close(F.cvar_from_quantiles(quantiles, alpha=alpha, tail="upper"), tensor(expected))
    probs, atoms = tensor([[0.2, 0.5, 0.3], [1.0, 0.0, 0.0]]), tensor([-1.0, 2.0, 4.0])
    # alpha 0.4: 0.3 and 0.1 -> (1.2 + 0.2) / 0.4 = 3.5;  alpha 0.9: 0.3, 0.5, 0.1 -> (1.2 + 1 - 0.1) / 0.9 = 7 / 3
    for alpha, expected in ((0.4, 3.5), (0.9, 7 / 3), (0.3, 4.0), (0.05, 4.0), (1.0, 2.0)):
        assert_close(F.cvar_from_categorical(probs, atoms, alpha=alpha, tail="upper"), tensor([expected, -1.0]))


def test_cvar_of_a_categorical_distribution_takes_a_part_of_the_boundary_atom():
    probs, atoms = tensor([[0.2, 0.5, 0.3], [0.0, 0.0, 1.0]]), tensor([-1.0, 2.0, 4.0])
    # alpha 0.4: masses 0.2, 0.2 -> (-0.2 + 0.4) / 0.4 = 0.5;  alpha 0.8: 0.2, 0.5, 0.1 -> (-0.2 + 1 + 0.4) / 0.8 = 1.5
    for alpha, expected in ((0.4, 0.5), (0.8, 1.5), (0.2, -1.0), (0.05, -1.0), (1.0, 2.0)):
        assert_close(F.cvar_from_categorical(probs, atoms, alpha=alpha), tensor([expected, 4.0]))


@pytest.mark.parametrize("tail", ["lower", "upper"])
@pytest.mark.parametrize("alpha", [0.3, 1.0])
def test_gradients_of_values_match_finite_differences(alpha, tail):
    predictions = random_batch()[0].requires_grad_()
    atoms = F.c51_atoms(6, **SUPPORT, dtype=torch.float64)
    assert gradcheck(lambda x: F.cvar_from_quantiles(x, alpha=alpha, tail=tail), predictions)
    assert gradcheck(lambda x: F.cvar_from_categorical(x.softmax(-1), atoms, alpha=alpha, tail=tail), predictions)
    assert gradcheck(lambda x: F.hl_gauss_value(x, **SUPPORT), predictions)


def test_nan_taus_outside_the_mask_reach_nothing():
    predictions, returns, mask = random_batch()
    taus = torch.rand_like(predictions)
    losses = []
    for padding in (0.5, nan):
        inputs = predictions.clone().requires_grad_(), returns, taus.where(mask.unsqueeze(-1), padding), mask
        # Fails on a NaN anywhere in the backward pass, one that is dropped before it reaches the quantiles too.
        with torch.autograd.set_detect_anomaly(True):
            loss = F.quantile_huber_loss(*inputs).loss
            losses.append((loss.detach(), torch.autograd.grad(loss, inputs[0])[0]))
    assert_close(losses[1], losses[0], rtol=0, atol=0)


def test_values_and_projections_of_half_precision_are_float32_and_float64_is_kept():
    for dtype, wide in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        probs, atoms = torch.full((4,), 0.25, dtype=dtype), tensor([1.0, 2.0, 3.0, 4.0])
        values = F.cvar_from_quantiles(probs, alpha=0.3), F.cvar_from_categorical(probs, atoms, alpha=0.3)
        assert {x.dtype for x in (*values, F.c51_project(probs, atoms))} == {wide}


@pytest.mark.parametrize("alpha", [0.0, -0.1, 1.01, nan])
def test_a_tail_without_mass_or_beyond_the_distribution_is_refused(alpha):
    message = rf"alpha is {alpha}; the tail's probability must be in \(0, 1\], where 1 gives the mean"
    with pytest.raises(ValueError, match=message):
        F.cvar_from_quantiles(torch.ones(3), alpha=alpha)
    with pytest.raises(ValueError, match=message):
        F.cvar_from_categorical(torch.ones(1), torch.ones(1), alpha=alpha)


def test_a_third_tail_is_refused():
    with pytest.raises(ValueError, match="tail is 'middle'; choose one of lower, upper"):
        F.cvar_from_quantiles(torch.ones(3), alpha=0.5, tail="middle")


@pytest.mark.parametrize("kappa", [0, -1.0, nan])
def test_a_kappa_that_is_not_positive_is_refused(kappa):
    with pytest.raises(ValueError, match=f"kappa is {kappa}; it must be positive"):
        fixed_quantiles(*random_batch(), kappa=kappa)


def test_a_support_without_width_and_a_distribution_without_parts_are_refused():
    with pytest.raises(ValueError, match=r"v_min \(2.0\) must be below v_max \(2.0\)"):
        F.c51_loss(*random_batch(), v_min=2.0, v_max=2.0)
    with pytest.raises(ValueError, match=r"v_min \(3.0\) must be below v_max \(2.0\)"):
        F.hl_gauss_value(torch.ones(3), v_min=3.0, v_max=2.0)
    with pytest.raises(ValueError, match="num_bins is 1; it must be at least 2"):
        F.hl_gauss_project(torch.ones(3), v_min=0, v_max=1, num_bins=1, sigma=1.0)
    with pytest.raises(ValueError, match="num_atoms is 1; it must be at least 2"):
        F.c51_atoms(1, v_min=0, v_max=1)
    with pytest.raises(ValueError, match=r"atoms has shape \(1,\); pass a vector of at least two"):
        F.c51_project(torch.ones(3), torch.ones(1))
    with pytest.raises(ValueError, match="num_quantiles is 0; it must be at least 1"):
        F.quantile_midpoints(0)


def test_shapes_that_do_not_belong_together_are_refused():
    predictions, returns, mask = random_batch()
    with pytest.raises(ValueError, match=r"mask has shape \(5, 4\), logits \(5, 3, 6\)"):
        categorical(predictions[:, :3], returns, mask)
    with pytest.raises(ValueError, match=r"mask has shape \(5, 4\), quantiles \(5, 4\)"):
        fixed_quantiles(returns, returns, mask)
    with pytest.raises(ValueError, match=r"taus has shape \(5,\), quantiles \(5, 4, 6\)"):
        F.quantile_huber_loss(predictions, returns, torch.ones(5), mask)
    with pytest.raises(ValueError, match=r"atoms has shape \(5,\), probs \(5, 4, 6\)"):
        F.cvar_from_categorical(predictions, torch.ones(5), alpha=0.5)
