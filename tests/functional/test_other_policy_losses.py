"""CISPO, SAPO, GMPO and DPPO: single tokens worked out by hand. What holds for every loss is in `test_every_loss`."""

import math
from functools import partial

import pytest
import torch
from torch import nan, tensor
from torch.testing import assert_close

from alpaca_ppo.functional import cispo_policy_loss, dppo_policy_loss, gmpo_policy_loss, sapo_policy_loss

RANGES = {"cliprange_low": 0.2, "cliprange_high": 0.3}
LOSSES = {
    "cispo": partial(cispo_policy_loss, **RANGES),
    "sapo": partial(sapo_policy_loss, tau_pos=1.0, tau_neg=1.5, loss_agg_mode="token-mean"),
    "gmpo": partial(gmpo_policy_loss, **RANGES),
    "dppo, tv": partial(dppo_policy_loss, divergence="tv", clip_ratio_c=3.0, **RANGES),
    "dppo, kl": partial(dppo_policy_loss, divergence="kl", clip_ratio_c=3.0, **RANGES),
}


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
