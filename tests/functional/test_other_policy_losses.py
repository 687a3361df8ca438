"""CISPO, SAPO, GMPO and DPPO: single tokens worked out by hand, and what holds for all four."""

import math
from functools import partial

import pytest
import torch
from torch import nan, tensor
from torch.autograd import gradcheck
from torch.testing import assert_close

from alpaca_ppo.functional import (
    cispo_policy_loss,
    dppo_policy_loss,
    gmpo_policy_loss,
    policy_loss,
    sapo_policy_loss,
)
from tests.golden_cases import golden_cases

RANGES = {"cliprange_low": 0.2, "cliprange_high": 0.3}
LOSSES = {
    "cispo": partial(cispo_policy_loss, **RANGES),
    "sapo": partial(sapo_policy_loss, tau_pos=1.0, tau_neg=1.5, loss_agg_mode="token-mean"),
    "gmpo": partial(gmpo_policy_loss, **RANGES),
    "dppo, tv": partial(dppo_policy_loss, divergence="tv", clip_ratio_c=3.0, **RANGES),
    "dppo, kl": partial(dppo_policy_loss, divergence="kl", clip_ratio_c=3.0, **RANGES),
}
FUNCTIONS = {
    "cispo": cispo_policy_loss,
    "sapo": sapo_policy_loss,
    "gmpo": gmpo_policy_loss,
    "dppo": dppo_policy_loss,
}
GOLDEN = [(name, *case) for name in FUNCTIONS for case in golden_cases(f"{name}_policy_loss")]

every_loss = pytest.mark.parametrize("loss_of", LOSSES.values(), ids=LOSSES.keys())


def random_batch(rows=5, columns=4):
    torch.manual_seed(0)
    logprobs, old_logprobs = (-2 * torch.rand(rows, columns, dtype=torch.float64) - 0.1 for _ in range(2))
    advantages = torch.randn(rows, columns, dtype=torch.float64)
    mask = torch.rand(rows, columns) < 0.7
    mask[1] = False
    return logprobs, old_logprobs, advantages, mask


def tokens(loss_of, new, old, advantages):
    """Loss, stats and gradient of one response whose tokens have the probabilities `new` and had `old`."""
    logprobs = tensor([new], dtype=torch.float64).log().requires_grad_()
    old_logprobs = tensor([old], dtype=torch.float64).log()
    mask = torch.ones(1, len(new), dtype=torch.bool)
    loss, stats = loss_of(logprobs, old_logprobs, tensor([advantages], dtype=torch.float64), mask)
    return loss.item(), stats, torch.autograd.grad(loss, logprobs)[0][0].tolist()


@pytest.mark.parametrize(
    ("new", "advantage", "factor"),
    [
        (0.22, 2.0, 1.1),  # ratio 1.1, inside the range
        (0.40, 2.0, 1.3),  # ratio 2: clipped, but with a gradient
        (0.10, 2.0, 0.8),  # ratio 0.5
        (0.40, -2.0, 1.3),
    ],
)
def test_cispo_clips_the_weight_of_the_gradient(new, advantage, factor):
    loss, stats, grad = tokens(LOSSES["cispo"], [new], [0.2], [advantage])
    assert loss == pytest.approx(-factor * advantage * math.log(new))
    assert grad == pytest.approx([-factor * advantage])
    assert stats["clipfrac"].item() == (new != 0.22) and stats["clipfrac_lower"] == 0


@pytest.mark.parametrize(("advantage", "tau"), [(2.0, 1.0), (-2.0, 1.5)])
def test_sapo_gates_the_ratio_by_the_sign_of_the_advantage(advantage, tau):
    # Ratio 2: the gate is sigmoid(tau), its slope tau * s * (1 - s) * 4 / tau, and d ratio / d logprob = 2.
    s = 1 / (1 + math.exp(-tau))
    loss, stats, grad = tokens(LOSSES["sapo"], [0.4], [0.2], [advantage])
    assert loss == pytest.approx(-advantage * s * 4 / tau)
    assert grad == pytest.approx([-advantage * 4 * s * (1 - s) * 2])
    assert stats["clipfrac"] == 0 and stats["ratio_max"].item() == pytest.approx(2)


def test_gmpo_clips_each_log_ratio_and_takes_their_geometric_mean():
    # Log-ratios ln 2 -> 0.3 (A > 0), ln 0.5 (A > 0: free): mean (0.3 - ln 2) / 2; the mean advantage is 2. Only the
    # second has a gradient: half of the loss.
    loss, stats, grad = tokens(LOSSES["gmpo"], [0.4, 0.1], [0.2, 0.2], [1.0, 3.0])
    expected = -2 * math.exp((0.3 - math.log(2)) / 2)
    assert loss == pytest.approx(expected)
    assert grad == pytest.approx([0.0, expected / 2])
    assert stats["clipfrac"] == 0.5 and stats["ratio_max"].item() == pytest.approx(2)
    # With A < 0 the other side is bounded; with A = 0 a token counts as unchanged.
    loss, stats, grad = tokens(LOSSES["gmpo"], [0.4, 0.1, 0.4], [0.2, 0.2, 0.2], [-1.0, -2.0, 0.0])
    expected = math.exp((math.log(2) - 0.2 + 0) / 3)
    assert loss == pytest.approx(expected)
    assert grad == pytest.approx([expected / 3, 0.0, 0.0])
    assert stats["clipfrac"].item() == pytest.approx(1 / 3)


def test_gmpo_averages_over_rows_with_tokens_and_weighs_them_by_a_geometric_mean():
    zeros = torch.zeros(3, 2)
    mask = tensor([[True, True], [True, False], [False, False]])
    advantages = tensor([[1.0, 3.0], [8.0, nan], [nan, nan]])
    # Ratio 1: rows -(1 + 3) / 2 = -2 and -8; (-2 - 8) / 2 = -5.
    assert_close(LOSSES["gmpo"](zeros, zeros, advantages, mask).loss, tensor(-5.0))
    # Weights sqrt(2 * 0.5) = 1 and 3: (-2 - 24) / 2.
    weights = tensor([[2.0, 0.5], [3.0, nan], [nan, nan]])
    assert_close(LOSSES["gmpo"](zeros, zeros, advantages, mask, weights=weights).loss, tensor(-13.0))
    # A weight of 0 takes its row out of the sum.
    weights[0, 0] = 0
    assert_close(LOSSES["gmpo"](zeros, zeros, advantages, mask, weights=weights).loss, tensor(-12.0))


@pytest.mark.parametrize(
    ("old", "new", "advantage", "kept"),
    [
        (0.50, 0.75, 1.0, True),  # up by 0.25 of at most 0.3
        (0.50, 0.85, 1.0, False),
        (0.50, 0.85, -1.0, True),  # the side that corrects is free
        (0.50, 0.35, -1.0, True),  # down by 0.15 of at most 0.2
        (0.50, 0.25, -1.0, False),
        (0.50, 0.25, 1.0, True),
        (0.01, 0.02, 1.0, True),  # ratio 2, hardly any probability
    ],
)
def test_dppo_keeps_tokens_whose_probability_has_changed_little(old, new, advantage, kept):
    loss, stats, grad = tokens(LOSSES["dppo, tv"], [new], [old], [advantage])
    assert loss == pytest.approx(-advantage * new / old * math.log(new) * kept)
    assert grad == pytest.approx([-advantage * new / old * kept])
    assert stats["clipfrac"].item() == (not kept)


def test_dppo_bounds_the_ratio():
    # Ratio 5, probability up by 0.04: the weight is 3.
    loss, stats, grad = tokens(LOSSES["dppo, tv"], [0.05, 0.9], [0.01, 0.1], [2.0, 2.0])
    assert loss == pytest.approx(-2 * 3 * math.log(0.05) / 2) and grad == pytest.approx([-3.0, 0.0])
    assert stats["clipfrac"] == 0.5 and stats["clipfrac_lower"] == 0.5


@pytest.mark.parametrize(
    ("new", "advantage", "kept"),
    [
        # KL of coins with q = 0.5, ln 0.5 - 0.5 * ln(p (1 - p)): 0.16 at p = 0.24, 0.22 at 0.2 and 0.8, 0.43 at 0.12
        # and 0.88.
        (0.80, 1.0, True),
        (0.88, 1.0, False),
        (0.88, -1.0, True),
        (0.24, -1.0, True),
        (0.20, -1.0, False),
        (0.12, 1.0, True),
    ],
)
def test_dppo_can_bound_the_binary_kl(new, advantage, kept):
    kl = math.log(0.5) - 0.5 * math.log(new * (1 - new))
    wrong_side = (new > 0.5) == (advantage > 0)
    assert kept == (not wrong_side or kl <= (0.3 if advantage > 0 else 0.2))
    loss, stats, grad = tokens(LOSSES["dppo, kl"], [new], [0.5], [advantage])
    assert loss == pytest.approx(-advantage * new / 0.5 * math.log(new) * kept)
    assert grad == pytest.approx([-advantage * new / 0.5 * kept]) and stats["clipfrac"].item() == (not kept)


def test_dppo_with_kl_survives_a_token_that_has_become_certain():
    # 1 - p is 0: kl = 0.5 ln 0.5 + 0.5 ln(0.5 / 1e-8) = 8.5, out of range.
    loss, stats, grad = tokens(LOSSES["dppo, kl"], [1.0], [0.5], [1.0])
    assert loss == 0 and grad == [0.0] and stats["clipfrac"] == 1


@every_loss
def test_at_the_old_policy_the_gradient_is_that_of_the_advantage(loss_of):
    _, old_logprobs, advantages, mask = random_batch()
    logprobs = old_logprobs.clone().requires_grad_()
    loss, stats = loss_of(logprobs, old_logprobs, advantages, mask)
    loss.backward()
    if loss_of is LOSSES["gmpo"]:
        # Of the row's mean advantage, on each of its tokens; four rows have tokens.
        counts = mask.sum(dim=1, keepdim=True).clamp_min(1)
        advantages = torch.where(mask, advantages, 0).sum(dim=1, keepdim=True) / counts
        divisor = counts * mask.any(dim=1).sum()
    else:
        divisor = mask.sum()
    assert_close(logprobs.grad, torch.where(mask, -advantages / divisor, 0.0))
    assert stats["ratio_min"] == stats["ratio_max"] == 1 and stats["clipfrac"] == 0 and stats["approx_kl_k3"] == 0


@pytest.mark.parametrize("name", ["sapo", "gmpo"])
def test_gradients_match_finite_differences(name):
    logprobs, old_logprobs, advantages, mask = random_batch()
    assert gradcheck(lambda x: LOSSES[name](x, old_logprobs, advantages, mask).loss, logprobs.requires_grad_())


@every_loss
def test_nan_outside_the_mask_reaches_neither_loss_stats_nor_gradient(loss_of):
    *inputs, mask = random_batch()
    results = []
    for padding in (0.0, nan):
        logprobs, old_logprobs, advantages = (x.where(mask, padding) for x in inputs)
        logprobs.requires_grad_()
        weights = torch.full_like(advantages, 0.5).where(mask, padding).requires_grad_()
        loss, stats = loss_of(logprobs, old_logprobs, advantages, mask, weights=weights)
        loss.backward()
        assert weights.grad is None
        results.append((loss.detach(), stats, logprobs.grad))
    assert_close(results[1], results[0], rtol=0, atol=0)
    grad = results[1][2]
    assert grad.isfinite().all() and grad[~mask].eq(0).all() and grad.abs().sum() > 0
    # Equal weights scale the loss.
    unweighted = loss_of(*inputs, mask).loss
    assert_close(results[0][0], 0.5 * unweighted)


@every_loss
def test_parts_with_the_whole_batchs_denominator_give_the_whole_batchs_gradient(loss_of):
    logprobs, old_logprobs, advantages, mask = random_batch()
    denominator = mask.any(dim=1).sum() if loss_of is LOSSES["gmpo"] else mask.sum()
    grads = []
    for parts, shared in (([slice(0, 5)], None), ([slice(0, 2), slice(2, 3), slice(3, 5)], denominator)):
        leaf = logprobs.detach().requires_grad_()
        for part in parts:
            loss_of(leaf[part], old_logprobs[part], advantages[part], mask[part], denominator=shared).loss.backward()
        grads.append(leaf.grad)
    assert_close(grads[1], grads[0], rtol=1e-13, atol=0)


@every_loss
@pytest.mark.parametrize("rows", [2, 0])
def test_a_batch_without_tokens_gives_zero_with_a_graph_and_finite_stats(loss_of, rows):
    logprobs = torch.full((rows, 3), nan, requires_grad=True)
    padding, mask = torch.full((rows, 3), nan), torch.zeros(rows, 3, dtype=torch.bool)
    loss, stats = loss_of(logprobs, padding, padding, mask, weights=padding, denominator=7)
    loss.backward()
    assert loss.item() == 0 and logprobs.grad.eq(0).all()
    assert all(value.isfinite() for value in stats.values())
    assert stats["ratio_min"] == stats["ratio_max"] == 1


@every_loss
def test_stats_have_the_names_of_policy_loss_and_no_graph_and_half_precision_becomes_float32(loss_of):
    *inputs, mask = random_batch()
    inputs[0].requires_grad_()
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float32,) * 2, (torch.float64,) * 2):
        loss, stats = loss_of(*(x.to(dtype) for x in inputs), mask)
        assert loss.dtype == expected and {value.dtype for value in stats.values()} == {expected}
        assert all(value.dim() == 0 and not value.requires_grad for value in stats.values())
    assert list(stats) == list(policy_loss(*inputs, mask, **RANGES).stats)


@every_loss
def test_the_log_ratio_is_cut_at_twenty(loss_of):
    logprobs, old_logprobs = tensor([[-1.0, -101.0]]).double().requires_grad_(), tensor([[-101.0, -1.0]]).double()
    loss, stats = loss_of(logprobs, old_logprobs, torch.ones(1, 2), torch.ones(1, 2).bool())
    loss.backward()
    assert loss.isfinite() and logprobs.grad.isfinite().all()
    assert stats["ratio_max"].item() == pytest.approx(math.exp(20))
    assert stats["ratio_min"].item() == pytest.approx(math.exp(-20))


@pytest.mark.parametrize(
    ("loss_of", "settings", "message"),
    [
        (cispo_policy_loss, {"cliprange_low": 1.5, "cliprange_high": 0.2}, "cliprange_low is 1.5"),
        (cispo_policy_loss, {"cliprange_low": 0.2, "cliprange_high": -0.1}, "cliprange_high is -0.1"),
        (sapo_policy_loss, {"tau_pos": 0.0, "tau_neg": 1.0}, "tau_pos is 0.0; it must be positive"),
        (sapo_policy_loss, {"tau_pos": 1.0, "tau_neg": nan}, "tau_neg is nan; it must be positive"),
        (gmpo_policy_loss, {"cliprange_low": -0.1, "cliprange_high": 0.2}, "cliprange_low is -0.1"),
        (dppo_policy_loss, {"cliprange_low": 0.1, "cliprange_high": -0.2}, "cliprange_high is -0.2"),
        (dppo_policy_loss, {"divergence": "js", **RANGES}, "divergence is 'js'; it must be one of tv, kl"),
        (dppo_policy_loss, {"clip_ratio_c": 1.0, **RANGES}, "clip_ratio_c is 1.0; it must be above 1"),
        (dppo_policy_loss, {"loss_agg_mode": "mean", **RANGES}, "loss_agg_mode is 'mean'; it must be one of token"),
    ],
)
def test_settings_that_make_no_sense_are_refused(loss_of, settings, message):
    zeros = torch.zeros(1, 1)
    with pytest.raises(ValueError, match=message):
        loss_of(zeros, zeros, zeros, torch.ones(1, 1, dtype=torch.bool), **settings)


@every_loss
def test_shapes_that_differ_are_refused(loss_of):
    with pytest.raises(ValueError, match=r"mask has shape \(2, 3\) but values has \(2, 2\)"):
        loss_of(torch.zeros(2, 3), torch.zeros(2, 2), torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool))


@pytest.mark.parametrize(("name", "inputs", "expected"), GOLDEN)
def test_losses_match_golden(name, inputs, expected):
    inputs["logprobs"].requires_grad_()
    loss = FUNCTIONS[name](**inputs).loss
    (grad,) = torch.autograd.grad(loss, inputs["logprobs"])
    assert loss.item() == pytest.approx(expected["loss"], abs=1e-6)
    assert_close(grad, expected["grad_wrt_logprobs"], rtol=0, atol=1e-6)
