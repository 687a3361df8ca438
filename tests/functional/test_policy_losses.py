"""PPO's clipped loss and GSPO's, worked out by hand. What holds for every loss is in `test_every_loss`."""

import math

import pytest
import torch
from torch import nan, tensor
from torch.testing import assert_close

from alpaca_ppo.functional import (
    cispo_policy_loss,
    dppo_policy_loss,
    gmpo_policy_loss,
    gspo_policy_loss,
    policy_loss,
    sapo_policy_loss,
)

SYMMETRIC = {"cliprange_low": 0.2, "cliprange_high": 0.2}
LOW_AND_HIGH = {"cliprange_low": 0.1, "cliprange_high": 0.28}


def one_row(loss_of, log_ratios, advantages, **settings):
    """Loss, stats and gradient of one response whose tokens have the given log-ratios."""
    old = tensor([[-3.0] * len(log_ratios)], dtype=torch.float64)
    logprobs = (old + tensor([log_ratios])).requires_grad_()
    mask = torch.ones(1, len(log_ratios), dtype=torch.bool)
    loss, stats = loss_of(logprobs, old, tensor([advantages]), mask, **(SYMMETRIC | settings))
    stats = {name: pytest.approx(value.item(), abs=1e-6) for name, value in stats.items()}
    return loss.item(), stats, torch.autograd.grad(loss, logprobs)[0][0].tolist()


def test_a_ratio_above_the_range_is_clipped_where_the_advantage_is_positive():
    # exp(-1.5 + 2.0) = 1.6487; max(-0.5 * 1.6487, -0.5 * 1.2) = max(-0.8244, -0.6) = -0.6
    loss, stats, grad = one_row(policy_loss, [0.5], [0.5])
    assert loss == pytest.approx(-0.6) and grad == [0.0]
    assert stats["ratio_mean"] == math.exp(0.5) and stats["clipfrac"] == 1 and stats["clipfrac_lower"] == 0


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "slope"),
    [
        (1.1, 2.0, -2.2, -2.2),  # inside the range: -A * ratio
        (1.5, 2.0, -2 * 1.28, 0.0),  # above it: -A * (1 + high)
        (0.5, 2.0, -1.0, -1.0),  # below it with A > 0: the raw term is the larger
        (0.5, -2.0, 2 * 0.9, 0.0),  # below it with A < 0: -A * (1 - low)
        (1.5, -2.0, 3.0, 3.0),  # above it with A < 0: the raw term
    ],
)
def test_clip_ranges_above_and_below_are_separate(ratio, advantage, expected, slope):
    loss, _, grad = one_row(policy_loss, [math.log(ratio)], [advantage], **LOW_AND_HIGH)
    assert loss == pytest.approx(expected) and grad == pytest.approx([slope])
    # The ratio of a sequence is the geometric mean: of these two tokens, the same.
    log_ratios = [math.log(ratio) - 1, math.log(ratio) + 1]
    loss, stats, grad = one_row(gspo_policy_loss, log_ratios, [advantage] * 2, **LOW_AND_HIGH)
    assert loss == pytest.approx(expected) and grad == pytest.approx([slope / 2] * 2)
    assert stats["clipfrac"] == (slope == 0)


def test_dual_clip_bounds_the_loss_where_the_advantage_is_negative_only():
    # A = -2, ratio 5: plain 10, bounded 2 * 3 = 6; A = +2: -2 * 1.2 either way
    for advantage, clip_ratio_c, expected, bounded in ((-2.0, None, 10, 0), (-2.0, 3.0, 6, 1), (2.0, 3.0, -2.4, 0)):
        loss, stats, _ = one_row(policy_loss, [math.log(5)], [advantage], clip_ratio_c=clip_ratio_c)
        assert loss == pytest.approx(expected) and stats["clipfrac_lower"] == bounded


def test_stats_by_hand():
    # ratios 2 and 0.5; k1 = mean(-log ratio) = 0; k3 = mean(ratio - 1 - log ratio) = ((1 - ln 2) + (-.5 + ln 2)) / 2
    _, stats, _ = one_row(policy_loss, [math.log(2), -math.log(2)], [1.0, 1.0])
    expected = {"clipfrac": 0.5, "clipfrac_lower": 0.0, "approx_kl_k1": 0.0, "approx_kl_k3": 0.25}
    assert {**expected, "ratio_mean": 1.25, "ratio_min": 0.5, "ratio_max": 2.0} == stats


def test_weights_scale_each_tokens_loss():
    # ratio 1, A = 1 and 3: (-1 * 0.5 - 3 * 2) / 2 = -3.25
    loss, _, grad = one_row(policy_loss, [0.0, 0.0], [1.0, 3.0], weights=tensor([[0.5, 2.0]]))
    assert loss == -3.25 and grad == [-0.25, -3.0]


def test_the_ratio_of_gspo_is_the_geometric_mean_of_the_tokens_ratios():
    # token ratios 2 and 0.5: sqrt(2 * 0.5) = 1, inside the range though neither token is;
    # loss (-1 * 1 - 3 * 1) / 2 = -2; straight-through: d loss / d logprob_t = -A_t * 1 / 2
    loss, stats, grad = one_row(gspo_policy_loss, [math.log(2), -math.log(2)], [1.0, 3.0])
    assert loss == pytest.approx(-2.0) and grad == pytest.approx([-0.5, -1.5])
    assert stats["ratio_min"] == stats["ratio_max"] == 1 and stats["clipfrac"] == 0


def test_gspo_gives_each_sequence_the_same_weight():
    # ratio 1: row means -(1 + 3) / 2 = -2 and -8, then (-2 - 8) / 2 = -5; over tokens it would be -4
    mask, zeros = tensor([[True, True], [True, False], [False, False]]), torch.zeros(3, 2)
    loss = gspo_policy_loss(zeros, zeros, tensor([[1.0, 3.0], [8.0, nan], [nan, nan]]), mask, **SYMMETRIC).loss
    assert_close(loss, tensor(-5.0))


def test_the_log_ratios_of_tokens_are_cut_apart_from_the_sequences():
    # The mean of 40 and 20 is cut to 20, and so is each of them, negated, in k1.
    _, stats, grad = one_row(gspo_policy_loss, [40.0, 20.0], [1.0, 1.0])
    assert stats["ratio_max"] == pytest.approx(math.exp(20)) and stats["approx_kl_k1"] == -20 and grad == [0, 0]


def test_stats_of_gspo_by_hand():
    # rows: token log-ratios (ln 4, 0), s = 2, and (-ln 2), s = 0.5; on tokens the ratios are 2, 2, 0.5
    # clipped: A = 1 at s = 2 (two of three tokens); k1 = -(ln 4 + 0 - ln 2) / 3 = -ln 2 / 3
    # k3 = ((4 - 1 - ln 4) + 0 + (0.5 - 1 + ln 2)) / 3 = (2.5 - ln 2) / 3
    old_logprobs = tensor([[-3.0, -3.0], [-3.0, nan]]).double()
    logprobs = old_logprobs + tensor([[math.log(4), 0.0], [-math.log(2), nan]], dtype=torch.float64)
    mask = tensor([[True, True], [True, False]])
    _, stats = gspo_policy_loss(logprobs, old_logprobs, torch.ones(2, 2), mask, **SYMMETRIC)
    expected = {"clipfrac": 2 / 3, "clipfrac_lower": 0.0, "ratio_mean": 1.5, "ratio_min": 0.5, "ratio_max": 2.0}
    expected |= {"approx_kl_k1": -math.log(2) / 3, "approx_kl_k3": (2.5 - math.log(2)) / 3}
    assert {name: value.item() for name, value in stats.items()} == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("loss_of", "settings", "message"),
    [
        (policy_loss, {"cliprange_low": -0.1}, "cliprange_low is -0.1"),
        (policy_loss, {"cliprange_low": 1.5}, "cliprange_low is 1.5"),
        (policy_loss, {"cliprange_high": -0.1}, "cliprange_high is -0.1"),
        (policy_loss, {"clip_ratio_c": 1.0}, "clip_ratio_c is 1.0; it must be above 1"),
        (policy_loss, {"loss_agg_mode": "mean"}, "loss_agg_mode is 'mean'; it must be one of token-mean"),
        (gspo_policy_loss, {"cliprange_low": 1.5}, "cliprange_low is 1.5"),
        (cispo_policy_loss, {"cliprange_low": 1.5}, "cliprange_low is 1.5"),
        (gmpo_policy_loss, {"cliprange_low": -0.1}, "cliprange_low is -0.1"),
        (dppo_policy_loss, {"cliprange_high": -0.2}, "cliprange_high is -0.2"),
        (dppo_policy_loss, {"divergence": "js"}, "divergence is 'js'; it must be one of tv, kl"),
        (dppo_policy_loss, {"clip_ratio_c": 1.0}, "clip_ratio_c is 1.0; it must be above 1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(loss_of, settings, message):
    with pytest.raises(ValueError, match=message):
        one_row(loss_of, [0.0], [1.0], **settings)


def test_a_gate_of_sapo_needs_a_temperature_above_zero():
    zeros = torch.zeros(1, 1)
    for settings in ({"tau_pos": 0.0, "tau_neg": 1.0}, {"tau_pos": 1.0, "tau_neg": nan}):
        with pytest.raises(ValueError, match=r"tau_(pos is 0.0|neg is nan); it must be positive"):
            sapo_policy_loss(zeros, zeros, zeros, torch.ones(1, 1, dtype=torch.bool), **settings)
