import math

import pytest
import torch
from torch import nan, tensor
from torch.autograd import gradcheck
from torch.testing import assert_close

from alpaca_ppo.functional import (
    LOSS_AGG_MODES,
    c51_atoms,
    c51_loss,
    c51_project,
    cvar_from_categorical,
    cvar_from_quantiles,
    hl_gauss_centres,
    hl_gauss_loss,
    hl_gauss_project,
    hl_gauss_value,
    quantile_huber_loss,
    quantile_midpoints,
)
from tests.golden_cases import golden_cases

SUPPORT = {"v_min": -2.0, "v_max": 2.0}


def categorical(logits, returns, mask, **settings):
    return c51_loss(logits, returns, mask, **SUPPORT, **settings)


def fixed_quantiles(quantiles, returns, mask, **settings):
    return quantile_huber_loss(quantiles, returns, quantile_midpoints(quantiles.size(-1)), mask, **settings)


def smoothed(logits, returns, mask, **settings):
    return hl_gauss_loss(logits, returns, mask, **SUPPORT, sigma=0.5, **settings)


LOSSES = pytest.mark.parametrize("loss_of", [categorical, fixed_quantiles, smoothed])


def random_batch():
    torch.manual_seed(0)
    predictions, returns = torch.randn(5, 4, 6, dtype=torch.float64), 2 * torch.randn(5, 4, dtype=torch.float64)
    return predictions, returns, torch.rand(5, 4) < 0.7


def test_atoms_span_the_support_evenly():
    assert_close(c51_atoms(5, v_min=-1, v_max=3), tensor([-1.0, 0.0, 1.0, 2.0, 3.0]))
    assert c51_atoms(2, v_min=0, v_max=1, dtype=torch.float64).dtype == torch.float64


def test_projection_splits_the_mass_by_distance():
    # atoms 1 apart: 0.25 is 3/4 of the way to 0 and 1/4 to 1;  -0.5 lies in the middle of -1 and 0
    expected = tensor([[0.0, 0.75, 0.25, 0.0], [0.5, 0.5, 0.0, 0.0]])
    assert_close(c51_project(tensor([0.25, -0.5]), c51_atoms(4, v_min=-1, v_max=2)), expected)


def test_projection_of_unevenly_spaced_atoms_keeps_the_mean():
    # 2 lies 1/3 of the way from 1 to 4: 2/3 * 1 + 1/3 * 4 = 2
    assert_close(c51_project(tensor(2.0), tensor([0.0, 1.0, 4.0])), tensor([0.0, 2 / 3, 1 / 3]))


def test_a_return_on_an_atom_keeps_its_mass_together():
    atoms = c51_atoms(51, v_min=-10, v_max=10)
    assert_close(c51_project(atoms, atoms), torch.eye(51), rtol=0, atol=0)


def test_returns_outside_the_support_count_as_its_ends():
    expected = tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.0, 0.0, 1.0]])
    assert_close(c51_project(tensor([-7.0, 1.5, math.inf]), tensor([-1.0, 0.0, 1.0])), expected)


def test_projections_of_any_shape_sum_to_one_and_have_the_return_as_mean():
    torch.manual_seed(0)
    returns, atoms = 4 * torch.rand(3, 2, 5, dtype=torch.float64) - 2, c51_atoms(7, **SUPPORT, dtype=torch.float64)
    probs = c51_project(returns.transpose(0, 2), atoms)
    assert probs.shape == (5, 2, 3, 7) and (probs >= 0).all() and ((probs > 0).sum(-1) <= 2).all()
    assert_close(probs.sum(-1), torch.ones(5, 2, 3, dtype=torch.float64))
    assert_close((probs * atoms).sum(-1), returns.transpose(0, 2))
    assert c51_project(tensor(0.5), atoms).shape == (7,)


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


def test_the_gradient_of_the_c51_loss_is_prediction_less_target():
    logits = torch.zeros(1, 1, 4, requires_grad=True)
    loss = c51_loss(logits, tensor([[0.25]]), tensor([[True]]), v_min=-1, v_max=2).loss
    # softmax (1/4, 1/4, 1/4, 1/4) less target (0, 3/4, 1/4, 0)
    assert_close(torch.autograd.grad(loss, logits)[0], tensor([[[0.25, -0.5, 0.0, 0.25]]]))


# The standard normal's distribution function: cdf(1) = 0.841345, cdf(2) = 0.977250, cdf(3) = 0.998650.
def test_a_normal_distribution_is_split_at_the_edges_of_the_bins_and_renormalised():
    # Edges -2, -1, 0, 1, 2 and sigma 1.  Return 0: masses cdf(2) - cdf(1) = 0.135905, cdf(1) - 1/2 = 0.341345 and the
    # same again, of 0.954500 in all: 0.142384, 0.357616.
    settings = {"v_min": -2.0, "v_max": 2.0, "num_bins": 4, "sigma": 1.0}
    outer, inner = 0.135905 / 0.954500, 0.341345 / 0.954500
    assert_close(hl_gauss_project(tensor(0.0), **settings), tensor([outer, inner, inner, outer]), rtol=0, atol=2e-6)
    # Return 1: cdf(-2) - cdf(-3) = 0.0214, cdf(-1) - cdf(-2) = 0.135905 and twice 0.341345; in all 0.839995.
    masses = [0.0214, 0.135905, 0.341345, 0.341345]
    expected = tensor([mass / 0.839995 for mass in masses])
    assert_close(hl_gauss_project(tensor([1.0]), **settings), expected.unsqueeze(0), rtol=0, atol=2e-6)


def test_smoothed_returns_outside_the_support_count_as_its_ends():
    settings = {"v_min": -2.0, "v_max": 2.0, "num_bins": 4, "sigma": 1.0}
    ends = hl_gauss_project(tensor([-2.0, 2.0]), **settings)
    assert_close(hl_gauss_project(tensor([-9.0, math.inf]), **settings), ends, rtol=0, atol=0)
    # Half a normal distribution of deviation 1, on bins at the distances 1/2, 3/2 (cdf(4) is 1 but for 3e-5):
    # 2 * (0.341345, 0.135905, 0.0214, 0.0013).
    assert_close(ends[0], tensor([0.68269, 0.27181, 0.0428, 0.0026]), rtol=0, atol=1e-4)


def test_a_narrow_smoothing_puts_all_mass_into_the_bin_of_the_return():
    settings = {"v_min": -2.0, "v_max": 2.0, "num_bins": 4, "sigma": 1e-6}
    # On an edge, half to each side.
    expected = tensor([[0.0, 0.0, 1.0, 0.0], [0.0, 0.5, 0.5, 0.0], [0.0, 0.0, 0.0, 1.0]])
    assert_close(hl_gauss_project(tensor([0.3, 0.0, 2.0]), **settings), expected)


def test_smoothed_projections_of_any_shape_sum_to_one_and_keep_a_mean_away_from_the_edges():
    torch.manual_seed(0)
    returns = 2 * torch.rand(3, 2, 5, dtype=torch.float64) - 1
    settings = {"v_min": -6.0, "v_max": 6.0}
    probs = hl_gauss_project(returns.transpose(0, 2), num_bins=120, sigma=0.2, **settings)
    assert probs.shape == (5, 2, 3, 120) and (probs >= 0).all()
    assert_close(probs.sum(-1), torch.ones(5, 2, 3, dtype=torch.float64))
    # Bins of half a sigma: the sum over their centres is the mean up to exp(-2 (pi sigma / width)^2) = 1e-34.
    assert_close((probs * hl_gauss_centres(120, **settings, dtype=torch.float64)).sum(-1), returns.transpose(0, 2))
    # At the edge, the mean is that of half a normal distribution: sigma * sqrt(2 / pi) inside, to the width's square.
    edge = hl_gauss_project(tensor(6.0).double(), num_bins=1200, sigma=0.2, **settings)
    mean = (edge * hl_gauss_centres(1200, **settings, dtype=torch.float64)).sum()
    assert mean.item() == pytest.approx(6.0 - 0.2 * math.sqrt(2 / math.pi), abs=1e-4)


def test_bins_have_their_value_at_their_centres():
    assert_close(hl_gauss_centres(4, v_min=-1, v_max=3), tensor([-0.5, 0.5, 1.5, 2.5]))
    assert hl_gauss_centres(2, v_min=0, v_max=1, dtype=torch.float64).dtype == torch.float64
    # 0.1 * -0.5 + 0.2 * 0.5 + 0.3 * 1.5 + 0.4 * 2.5 = 1.5
    logits = tensor([[0.1, 0.2, 0.3, 0.4]]).log() + 7.0
    assert_close(hl_gauss_value(logits, v_min=-1, v_max=3), tensor([1.5]))
    assert hl_gauss_value(logits.bfloat16(), v_min=-1, v_max=3).dtype == torch.float32


def test_hl_gauss_loss_by_hand():
    # Bins [-2, 0] and [0, 2], sigma 1.  Token 1: p = (1/4, 3/4), return 0 -> target (1/2, 1/2): (ln 4 + ln 4/3) / 2,
    # mean 1/2, error 1/4.  Token 2: p = (1/2, 1/2), return 5 -> clamped to 2: whatever the target, ln 2; mean 0,
    # error 25.  Both bins are edges.
    logits, mask = tensor([[[0.25, 0.75], [0.5, 0.5], [nan, nan]]]).log(), tensor([[True, True, False]])
    loss, stats = hl_gauss_loss(logits, tensor([[0.0, 5.0, nan]]), mask, **SUPPORT, sigma=1.0)
    assert_close(loss, tensor(0.5 * (math.log(4) - 0.5 * math.log(3) + math.log(2))))
    assert {name: pytest.approx(value.item()) for name, value in stats.items()} == {
        "edge_mass": 1.0,
        "outside_support": 0.5,
        "error": 12.625,
        "vpred": 0.25,
    }


def test_the_gradient_of_the_hl_gauss_loss_is_prediction_less_target():
    logits = torch.zeros(1, 1, 2, requires_grad=True)
    loss = hl_gauss_loss(logits, tensor([[1.0]]), tensor([[True]]), **SUPPORT, sigma=1.0).loss
    # target: (cdf(-1) - cdf(-3), cdf(1) - cdf(-1)) = (0.157305, 0.682690) of 0.839995
    target = 0.157305 / 0.839995
    assert_close(torch.autograd.grad(loss, logits)[0], tensor([[[0.5 - target, target - 0.5]]]), rtol=0, atol=2e-6)


@pytest.mark.parametrize("sigma", [0.0, -1.0, nan, math.inf])
def test_a_smoothing_that_is_not_positive_and_finite_is_refused(sigma):
    with pytest.raises(ValueError, match=f"sigma is {sigma}; it must be positive and finite, such as 0.75"):
        hl_gauss_loss(*random_batch(), **SUPPORT, sigma=sigma)


def test_quantile_huber_loss_by_hand():
    # kappa 1, return 2, taus (1/4, 3/4).  Quantile 1.5: d = 0.5, 0.5 * 0.25 * 1/4 = 0.03125.
    # Quantile 5: d = -3, (3 - 0.5) * |3/4 - 1| = 0.625.  Mean 0.328125; mean quantile 3.25, error 1.25^2 = 1.5625.
    quantiles, mask = tensor([[[1.5, 5.0], [nan, nan]]]), tensor([[True, False]])
    loss, stats = quantile_huber_loss(quantiles, tensor([[2.0, nan]]), tensor([0.25, 0.75]), mask)
    assert_close(loss, tensor(0.328125))
    assert {name: value.item() for name, value in stats.items()} == {"error": 1.5625, "vpred": 3.25}


def test_kappa_is_where_the_loss_turns_linear_and_no_divisor():
    # tau 1/2, d = 3.  kappa 2: 2 * (3 - 1) / 2 = 2;  kappa 4 and infinity: 9 / 2 / 2 = 2.25;
    # kappa 0.5: 0.5 * (3 - 0.25) / 2 = 0.6875
    for kappa, expected in ((2.0, 2.0), (4.0, 2.25), (0.5, 0.6875), (math.inf, 2.25)):
        inputs = torch.zeros(1, 1, 1), tensor([[3.0]]), tensor([0.5]), tensor([[True]])
        assert_close(quantile_huber_loss(*inputs, kappa=kappa).loss, tensor(expected))


def test_one_quantile_and_a_wide_zone_make_a_quarter_of_the_squared_error():
    predictions, returns, mask = random_batch()
    loss = fixed_quantiles(predictions[..., :1], returns, mask, kappa=1e6).loss
    assert_close(loss, 0.25 * (predictions[..., 0] - returns)[mask].square().mean())


def test_taus_may_differ_from_token_to_token():
    predictions, returns, mask = random_batch()
    taus = torch.rand_like(predictions).requires_grad_()
    whole = quantile_huber_loss(predictions, returns, taus, mask).loss
    assert not whole.requires_grad
    rows = [
        quantile_huber_loss(predictions[[i]][:, [t]], returns[[i]][:, [t]], taus[i, t], mask[[i]][:, [t]]).loss
        for i, t in mask.nonzero().tolist()
    ]
    assert_close(whole, torch.stack(rows).mean())


def test_midpoints_are_the_middles_of_equal_masses():
    assert_close(quantile_midpoints(4), tensor([0.125, 0.375, 0.625, 0.875]))
    assert_close(quantile_midpoints(1, dtype=torch.float64), tensor([0.5], dtype=torch.float64))


def test_cvar_of_quantiles_takes_a_part_of_the_boundary_quantile():
    quantiles = tensor([1.0, 2.0, 3.0, 10.0])
    # alpha 0.6: masses 0.25, 0.25, 0.1 -> (0.25 + 0.5 + 0.3) / 0.6 = 1.75;  alpha 0.25 and less: the lowest
    for alpha, expected in ((0.6, 1.75), (0.5, 1.5), (0.25, 1.0), (0.01, 1.0), (1.0, 4.0)):
        assert_close(cvar_from_quantiles(quantiles, alpha=alpha), tensor(expected))


def test_the_upper_tail_takes_the_highest_quantiles_and_atoms():
    quantiles = tensor([3.0, 1.0, 10.0, 2.0])
    # alpha 0.6: masses 0.25, 0.25, 0.1 of 10, 3, 2 -> (2.5 + 0.75 + 0.2) / 0.6 = 5.75
    for alpha, expected in ((0.6, 5.75), (0.5, 6.5), (0.25, 10.0), (0.01, 10.0), (1.0, 4.0)):
        assert_close(cvar_from_quantiles(quantiles, alpha=alpha, tail="upper"), tensor(expected))
    probs, atoms = tensor([[0.2, 0.5, 0.3], [1.0, 0.0, 0.0]]), tensor([-1.0, 2.0, 4.0])
    # alpha 0.4: 0.3 and 0.1 -> (1.2 + 0.2) / 0.4 = 3.5;  alpha 0.9: 0.3, 0.5, 0.1 -> (1.2 + 1 - 0.1) / 0.9 = 7 / 3
    for alpha, expected in ((0.4, 3.5), (0.9, 7 / 3), (0.3, 4.0), (0.05, 4.0), (1.0, 2.0)):
        assert_close(cvar_from_categorical(probs, atoms, alpha=alpha, tail="upper"), tensor([expected, -1.0]))


def test_both_tails_of_a_distribution_have_its_mean_between_them():
    predictions, _, _ = random_batch()
    probs, atoms = predictions.softmax(-1), c51_atoms(6, **SUPPORT, dtype=torch.float64)
    for alpha in (0.1, 0.37, 0.5):
        # The mean is alpha of the upper tail and 1 - alpha of the rest, the lower tail of that probability.
        for mean, tail_mean in (
            (predictions.mean(-1), lambda a, t: cvar_from_quantiles(predictions, alpha=a, tail=t)),
            ((probs * atoms).sum(-1), lambda a, t: cvar_from_categorical(probs, atoms, alpha=a, tail=t)),
        ):
            parts = alpha * tail_mean(alpha, "upper") + (1 - alpha) * tail_mean(1 - alpha, "lower")
            assert_close(parts, mean)


def test_cvar_of_crossing_quantiles_takes_the_lowest():
    # sorted 1, 2, 3, 10; the first two as they stand would give (10 + 1) / 2
    assert_close(cvar_from_quantiles(tensor([[10.0, 1.0, 3.0, 2.0]]), alpha=0.5), tensor([1.5]))


def test_cvar_of_a_categorical_distribution_takes_a_part_of_the_boundary_atom():
    probs, atoms = tensor([[0.2, 0.5, 0.3], [0.0, 0.0, 1.0]]), tensor([-1.0, 2.0, 4.0])
    # alpha 0.4: masses 0.2, 0.2 -> (-0.2 + 0.4) / 0.4 = 0.5;  alpha 0.8: 0.2, 0.5, 0.1 -> (-0.2 + 1 + 0.4) / 0.8 = 1.5
    for alpha, expected in ((0.4, 0.5), (0.8, 1.5), (0.2, -1.0), (0.05, -1.0), (1.0, 2.0)):
        assert_close(cvar_from_categorical(probs, atoms, alpha=alpha), tensor([expected, 4.0]))


@pytest.mark.parametrize("alpha", [0.01, 0.1, 0.337, 1.0])
def test_cvar_of_the_uniform_distribution_is_half_of_alpha(alpha):
    # E[u | u < alpha] = alpha / 2 on [0, 1]; the alpha * K lowest midpoints, (i + 1/2) / K, have exactly that mean
    quantiles = quantile_midpoints(1000, dtype=torch.float64)
    assert cvar_from_quantiles(quantiles.flip(0), alpha=alpha).item() == pytest.approx(alpha / 2, abs=1e-6)
    probs = torch.full((1000,), 1e-3, dtype=torch.float64)
    assert cvar_from_categorical(probs, quantiles, alpha=alpha).item() == pytest.approx(alpha / 2, abs=1e-6)


def test_cvar_at_one_is_the_mean_and_grows_with_alpha():
    predictions, _, _ = random_batch()
    probs, atoms = predictions.softmax(-1), c51_atoms(6, **SUPPORT, dtype=torch.float64)
    assert_close(cvar_from_quantiles(predictions, alpha=1), predictions.mean(-1))
    assert_close(cvar_from_categorical(probs, atoms, alpha=1.0), (probs * atoms).sum(-1))
    levels = torch.linspace(0.05, 1, 20).tolist()
    for values in (
        [cvar_from_quantiles(predictions, alpha=a) for a in levels],
        [cvar_from_categorical(probs, atoms, alpha=a) for a in levels],
    ):
        assert (torch.stack(values).diff(dim=0) >= -1e-12).all()


@pytest.mark.parametrize("tail", ["lower", "upper"])
@pytest.mark.parametrize("alpha", [0.3, 1.0])
def test_gradients_of_cvar_match_finite_differences(alpha, tail):
    predictions = random_batch()[0].requires_grad_()
    atoms = c51_atoms(6, **SUPPORT, dtype=torch.float64)
    assert gradcheck(lambda x: cvar_from_quantiles(x, alpha=alpha, tail=tail), predictions)
    assert gradcheck(lambda x: cvar_from_categorical(x.softmax(-1), atoms, alpha=alpha, tail=tail), predictions)


def test_the_gradient_of_an_hl_gauss_value_matches_finite_differences():
    assert gradcheck(lambda x: hl_gauss_value(x, **SUPPORT), random_batch()[0].requires_grad_())


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@LOSSES
def test_gradients_match_finite_differences(loss_of, mode):
    predictions, returns, mask = random_batch()
    assert gradcheck(lambda x: loss_of(x, returns, mask, loss_agg_mode=mode).loss, predictions.requires_grad_())


@LOSSES
def test_nan_outside_the_mask_reaches_neither_loss_stats_nor_gradient(loss_of):
    *inputs, mask = random_batch()
    results = []
    for padding in (0.0, nan):
        predictions, returns = (x.where(mask if x.dim() == 2 else mask.unsqueeze(-1), padding) for x in inputs)
        loss, stats = loss_of(predictions.requires_grad_(), returns, mask)
        loss.backward()
        results.append((loss.detach(), stats, predictions.grad))
    assert_close(results[1], results[0], rtol=0, atol=0)
    assert results[1][2].isfinite().all()


def test_nan_taus_outside_the_mask_reach_nothing():
    predictions, returns, mask = random_batch()
    taus = torch.rand_like(predictions)
    losses = []
    for padding in (0.5, nan):
        inputs = predictions.clone().requires_grad_(), returns, taus.where(mask.unsqueeze(-1), padding), mask
        # Fails on a NaN anywhere in the backward pass, one that is dropped before it reaches the quantiles too.
        with torch.autograd.set_detect_anomaly(True):
            loss = quantile_huber_loss(*inputs).loss
            losses.append((loss.detach(), torch.autograd.grad(loss, inputs[0])[0]))
    assert_close(losses[1], losses[0], rtol=0, atol=0)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@LOSSES
def test_parts_with_the_whole_batchs_denominator_add_up_to_the_whole(loss_of, mode):
    batch = random_batch()
    mask = batch[-1]
    denominator = mask.sum() if mode == "token-mean" else mask.any(dim=1).sum()
    parts = [
        loss_of(*(x[p] for x in batch), loss_agg_mode=mode, denominator=denominator).loss
        for p in torch.arange(5).split(2)
    ]
    assert_close(sum(parts), loss_of(*batch, loss_agg_mode=mode).loss, rtol=1e-13, atol=0)


@pytest.mark.parametrize("rows", [2, 0])
@LOSSES
def test_a_batch_without_tokens_gives_zero_with_a_graph_and_finite_stats(loss_of, rows):
    predictions, mask = torch.full((rows, 3, 4), nan, requires_grad=True), torch.zeros(rows, 3, dtype=torch.bool)
    loss, stats = loss_of(predictions, torch.full((rows, 3), nan), mask, denominator=5)
    loss.backward()
    assert loss.item() == 0 and predictions.grad.eq(0).all()
    assert all(value.isfinite() for value in stats.values())


@LOSSES
def test_targets_get_no_gradient_and_stats_have_none(loss_of):
    predictions, returns, mask = random_batch()
    loss, stats = loss_of(predictions.requires_grad_(), returns.requires_grad_(), mask)
    loss.backward()
    assert returns.grad is None and not any(value.requires_grad for value in stats.values())


@LOSSES
def test_inputs_stay_as_they_were(loss_of):
    batch = random_batch()
    loss_of(*batch)
    cvar_from_quantiles(batch[0], alpha=0.5)
    assert_close(batch, random_batch(), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@LOSSES
def test_half_precision_is_computed_in_float32(loss_of, dtype):
    predictions, returns, mask = (x if x.dtype == torch.bool else x.to(dtype) for x in random_batch())
    loss, stats = loss_of(predictions, returns, mask)
    assert {x.dtype for x in (loss, *stats.values())} == {torch.float32}
    assert_close(loss, loss_of(predictions.double(), returns.double(), mask).loss.float())


def test_values_and_projections_of_half_precision_are_float32_and_float64_is_kept():
    for dtype, wide in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        probs, atoms = torch.full((4,), 0.25, dtype=dtype), tensor([1.0, 2.0, 3.0, 4.0])
        values = cvar_from_quantiles(probs, alpha=0.3), cvar_from_categorical(probs, atoms, alpha=0.3)
        assert {x.dtype for x in (*values, c51_project(probs, atoms))} == {wide}
    assert categorical(*random_batch()).loss.dtype == fixed_quantiles(*random_batch()).loss.dtype == torch.float64


@pytest.mark.parametrize("alpha", [0.0, -0.1, 1.01, nan])
def test_a_tail_without_mass_or_beyond_the_distribution_is_refused(alpha):
    message = rf"alpha is {alpha}; the tail's probability must be in \(0, 1\], where 1 gives the mean"
    with pytest.raises(ValueError, match=message):
        cvar_from_quantiles(torch.ones(3), alpha=alpha)
    with pytest.raises(ValueError, match=message):
        cvar_from_categorical(torch.ones(1), torch.ones(1), alpha=alpha)


def test_a_third_tail_is_refused():
    with pytest.raises(ValueError, match="tail is 'middle'; choose one of lower, upper"):
        cvar_from_quantiles(torch.ones(3), alpha=0.5, tail="middle")


@pytest.mark.parametrize("kappa", [0, -1.0, nan])
def test_a_kappa_that_is_not_positive_is_refused(kappa):
    with pytest.raises(ValueError, match=f"kappa is {kappa}; it must be positive"):
        fixed_quantiles(*random_batch(), kappa=kappa)


def test_a_support_without_width_and_a_distribution_without_parts_are_refused():
    with pytest.raises(ValueError, match=r"v_min \(2.0\) must be below v_max \(2.0\)"):
        c51_loss(*random_batch(), v_min=2.0, v_max=2.0)
    with pytest.raises(ValueError, match=r"v_min \(3.0\) must be below v_max \(2.0\)"):
        hl_gauss_value(torch.ones(3), v_min=3.0, v_max=2.0)
    with pytest.raises(ValueError, match="num_bins is 1; it must be at least 2"):
        hl_gauss_project(torch.ones(3), v_min=0, v_max=1, num_bins=1, sigma=1.0)
    with pytest.raises(ValueError, match="num_atoms is 1; it must be at least 2"):
        c51_atoms(1, v_min=0, v_max=1)
    with pytest.raises(ValueError, match=r"atoms has shape \(1,\); pass a vector of at least two"):
        c51_project(torch.ones(3), torch.ones(1))
    with pytest.raises(ValueError, match="num_quantiles is 0; it must be at least 1"):
        quantile_midpoints(0)


def test_shapes_that_do_not_belong_together_are_refused():
    predictions, returns, mask = random_batch()
    with pytest.raises(ValueError, match=r"mask has shape \(5, 4\) but logits has \(5, 3, 6\)"):
        categorical(predictions[:, :3], returns, mask)
    with pytest.raises(ValueError, match=r"mask has shape \(5, 4\) but quantiles has \(5, 4\)"):
        fixed_quantiles(returns, returns, mask)
    with pytest.raises(ValueError, match=r"taus has shape \(5,\) but quantiles has \(5, 4, 6\)"):
        quantile_huber_loss(predictions, returns, torch.ones(5), mask)
    with pytest.raises(ValueError, match=r"atoms has shape \(5,\) but probs has \(5, 4, 6\)"):
        cvar_from_categorical(predictions, torch.ones(5), alpha=0.5)


@pytest.mark.parametrize(("inputs", "expected"), golden_cases("c51"))
def test_c51_matches_golden(inputs, expected):
    support = {"v_min": inputs["v_min"], "v_max": inputs["v_max"]}
    atoms = c51_atoms(inputs["logits"].size(-1), **support, dtype=torch.float64)
    assert_close(c51_project(inputs["returns"], atoms), expected["target_probs"], rtol=0, atol=1e-6)
    values = cvar_from_categorical(inputs["logits"].softmax(-1), atoms, alpha=1.0)
    assert_close(values, expected["expected_values"], rtol=0, atol=1e-6)
    assert c51_loss(**inputs).loss.item() == pytest.approx(expected["loss_token_mean"], abs=1e-6)


@pytest.mark.parametrize(("inputs", "expected"), golden_cases("hl_gauss"))
def test_hl_gauss_matches_golden(inputs, expected):
    support = {"v_min": inputs["v_min"], "v_max": inputs["v_max"]}
    bins = {"num_bins": inputs["logits"].size(-1), "sigma": inputs["sigma"]}
    assert_close(hl_gauss_project(inputs["returns"], **support, **bins), expected["target_probs"], rtol=0, atol=1e-6)
    assert_close(hl_gauss_value(inputs["logits"], **support), expected["values"], rtol=0, atol=1e-6)
    assert hl_gauss_loss(**inputs).loss.item() == pytest.approx(expected["loss_token_mean"], abs=1e-6)


@pytest.mark.parametrize("name", ["quantiles", "categorical"])
def test_upper_tails_match_golden(name):
    tail_mean = {"quantiles": cvar_from_quantiles, "categorical": cvar_from_categorical}[name]
    for inputs, expected in golden_cases(f"cvar_upper_{name}"):
        assert_close(tail_mean(**inputs, tail="upper"), expected["cvar"], rtol=0, atol=1e-6)


@pytest.mark.parametrize(("inputs", "expected"), golden_cases("quantile_huber"))
def test_quantile_huber_loss_matches_golden(inputs, expected):
    values = cvar_from_quantiles(inputs["quantiles"], alpha=1.0)
    assert_close(values, expected["expected_values"], rtol=0, atol=1e-6)
    assert_close(quantile_midpoints(5, dtype=torch.float64), inputs["taus"])
    assert quantile_huber_loss(**inputs).loss.item() == pytest.approx(expected["loss_token_mean"], abs=1e-6)


# 40 % N(1, 0.2) and 60 % N(4, 0.4): mean 0.4 * 1 + 0.6 * 4 = 2.8.  With z(p) the standard normal's quantile:
# 25 % quantile: z(0.25 / 0.4 = 0.625) = 0.3186 -> 1 + 0.2 * 0.3186 = 1.064
# 50 %: z((0.5 - 0.4) / 0.6 = 0.1667) = -0.9674 -> 4 - 0.4 * 0.9674 = 3.613
# 75 %: z((0.75 - 0.4) / 0.6 = 0.5833) = 0.2104 -> 4 + 0.4 * 0.2104 = 4.084
# lower 10 %: the lower quarter of N(1, 0.2), 1 - 0.2 * density(z(0.25)) / 0.25 = 1 - 0.2 * 0.3178 / 0.25 = 0.746
MEAN, CVAR, QUARTILES = 2.8, 0.746, tensor([1.064, 3.613, 4.084])


def learn(table, loss_of, *, lr):
    """The `table` that 300 steps leave. A step moves a logit by at most `lr`: at a small one the bins that no return
    falls into, in the tails, keep some of the mass that they start with.
    """
    torch.manual_seed(0)
    shape = (8, 128)
    mask = torch.ones(shape, dtype=torch.bool)
    optimizer = torch.optim.Adam([table], lr=lr)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, 300)
    for _ in range(300):
        low, high = 1 + 0.2 * torch.randn(shape), 4 + 0.4 * torch.randn(shape)
        returns = torch.where(torch.rand(shape) < 0.4, low, high)
        optimizer.zero_grad()
        loss_of(table.expand(*shape, -1), returns, mask).loss.backward()
        optimizer.step()
        schedule.step()
    return table.detach()


def test_learned_quantiles_recover_a_bimodal_distribution():
    start = torch.zeros(40, requires_grad=True)
    quantiles = learn(start, lambda *batch: fixed_quantiles(*batch, kappa=0.05), lr=0.1)
    assert cvar_from_quantiles(quantiles, alpha=1.0).item() == pytest.approx(MEAN, rel=0.02)
    assert cvar_from_quantiles(quantiles, alpha=0.1).item() == pytest.approx(CVAR, rel=0.1)
    # the quantile at 1/4 lies between those at 9.5/40 and 10.5/40
    assert_close(quantiles[[9, 19, 29]] / 2 + quantiles[[10, 20, 30]] / 2, QUARTILES, rtol=0.05, atol=0)


def test_learned_categorical_distribution_recovers_a_bimodal_one():
    support = {"v_min": -1.0, "v_max": 6.0}
    atoms = c51_atoms(71, **support)
    start = torch.zeros(71, requires_grad=True)
    probs = learn(start, lambda *batch: c51_loss(*batch, **support), lr=0.4).softmax(-1)
    assert cvar_from_categorical(probs, atoms, alpha=1.0).item() == pytest.approx(MEAN, rel=0.02)
    assert cvar_from_categorical(probs, atoms, alpha=0.1).item() == pytest.approx(CVAR, rel=0.05)
    # the first atom with a quarter, a half, three quarters of the mass at or below it; atoms are 0.1 apart
    assert_close(atoms[torch.searchsorted(probs.cumsum(0), tensor([0.25, 0.5, 0.75]))], QUARTILES, rtol=0, atol=0.1)


def test_learned_hl_gauss_distribution_recovers_a_bimodal_one():
    # Smoothed by 0.075, a fraction of the deviations 0.2 and 0.4.
    support = {"v_min": -1.0, "v_max": 6.0}
    start = torch.zeros(70, requires_grad=True)
    logits = learn(start, lambda *batch: hl_gauss_loss(*batch, **support, sigma=0.075), lr=0.4)
    assert hl_gauss_value(logits, **support).item() == pytest.approx(MEAN, rel=0.02)
    centres = hl_gauss_centres(70, **support)
    assert cvar_from_categorical(logits.softmax(-1), centres, alpha=0.1).item() == pytest.approx(CVAR, rel=0.05)
    # The upper 10 %: the upper sixth of N(4, 0.4), 4 + 0.4 * density(0.9674) / (1/6) = 4 + 0.4 * 0.24987 * 6 = 4.600
    upper = cvar_from_categorical(logits.softmax(-1), centres, alpha=0.1, tail="upper")
    assert upper.item() == pytest.approx(4.6, rel=0.02)
