import math

import pytest
import torch
from torch import nan, tensor
from torch.autograd import gradcheck
from torch.testing import assert_close

from alpaca_ppo.functional import LOSS_AGG_MODES, gspo_policy_loss, policy_loss
from tests.golden_cases import golden_cases

SYMMETRIC = {"cliprange_low": 0.2, "cliprange_high": 0.2}


def random_batch(rows=5, columns=4):
    torch.manual_seed(0)
    logprobs, old_logprobs, advantages = (torch.randn(rows, columns, dtype=torch.float64) for _ in range(3))
    return logprobs, old_logprobs, advantages, torch.rand(rows, columns) < 0.7


def one_row(log_ratios, advantages, **settings):
    """Loss, stats and gradient of one response whose tokens have the given log-ratios."""
    old = tensor([[-3.0] * len(log_ratios)], dtype=torch.float64)
    logprobs = (old + tensor([log_ratios])).requires_grad_()
    mask = torch.ones(1, len(log_ratios), dtype=torch.bool)
    loss, stats = gspo_policy_loss(logprobs, old, tensor([advantages]), mask, **(SYMMETRIC | settings))
    return loss.item(), stats, torch.autograd.grad(loss, logprobs)[0][0].tolist()


def test_the_ratio_is_the_geometric_mean_of_the_tokens_ratios():
    # token ratios 2 and 0.5: sqrt(2 * 0.5) = 1, inside the range though neither token is;
    # loss (-1 * 1 - 3 * 1) / 2 = -2; straight-through: d loss / d logprob_t = -A_t * 1 / 2
    loss, stats, grad = one_row([math.log(2), -math.log(2)], [1.0, 3.0])
    assert loss == pytest.approx(-2.0)
    assert grad == pytest.approx([-0.5, -1.5])
    assert stats["ratio_min"].item() == pytest.approx(1) and stats["ratio_max"].item() == pytest.approx(1)
    assert stats["clipfrac"] == 0


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "slope"),
    [
        (1.1, 2.0, -2.2, -2.2),  # inside the range: -A * s, and d s / d logprob = s
        (1.5, 2.0, -2 * 1.28, 0.0),  # above it: -A * (1 + high)
        (0.5, 2.0, -1.0, -1.0),  # below it with A > 0: the raw term is the larger
        (0.5, -2.0, 2 * 0.9, 0.0),  # below it with A < 0: -A * (1 - low)
        (1.5, -2.0, 3.0, 3.0),  # above it with A < 0: the raw term
    ],
)
def test_clip_ranges_above_and_below_are_separate(ratio, advantage, expected, slope):
    log_ratios = [math.log(ratio) - 1, math.log(ratio) + 1]
    loss, stats, grad = one_row(log_ratios, [advantage] * 2, cliprange_low=0.1, cliprange_high=0.28)
    assert loss == pytest.approx(expected)
    assert grad == pytest.approx([slope / 2] * 2)
    assert stats["clipfrac"].item() == (slope == 0)


def test_the_default_gives_each_sequence_the_same_weight():
    # ratio 1: row means -(1 + 3) / 2 = -2 and -8, then (-2 - 8) / 2 = -5; over tokens it would be -4
    mask, zeros = tensor([[True, True], [True, False], [False, False]]), torch.zeros(3, 2)
    loss = gspo_policy_loss(zeros, zeros, tensor([[1.0, 3.0], [8.0, nan], [nan, nan]]), mask, **SYMMETRIC).loss
    assert_close(loss, tensor(-5.0))


def test_equal_log_ratios_in_a_row_make_it_the_tokens_loss():
    _, old_logprobs, advantages, mask = random_batch()
    shift = 0.3 * torch.randn(5, 1, dtype=torch.float64)
    results = []
    for loss_of in (gspo_policy_loss, policy_loss):
        logprobs = (old_logprobs + shift).requires_grad_()
        loss, stats = loss_of(logprobs, old_logprobs, advantages, mask, loss_agg_mode="token-mean", **SYMMETRIC)
        results.append((loss.detach(), stats, torch.autograd.grad(loss, logprobs)))
    assert_close(results[0], results[1])
    assert 0 < results[0][1]["clipfrac"] < 1


def test_at_the_old_policy_the_gradient_is_that_of_the_advantage():
    # ratio 1: d loss / d logprob = -A / tokens of the row / rows, whatever the clip ranges
    _, old_logprobs, advantages, mask = random_batch()
    logprobs = old_logprobs.clone().requires_grad_()
    loss, stats = gspo_policy_loss(logprobs, old_logprobs, advantages, mask, cliprange_low=0.0, cliprange_high=0.0)
    loss.backward()
    divisor = mask.sum(dim=1, keepdim=True).clamp_min(1) * mask.any(dim=1).sum()
    assert_close(logprobs.grad, torch.where(mask, -advantages / divisor, 0.0))
    assert stats["ratio_min"] == stats["ratio_max"] == 1 and stats["clipfrac"] == 0


def test_the_sequences_log_ratio_is_cut_at_twenty():
    # means of +-30; the tokens' k1 is cut on its own
    _, stats, grad = one_row([40.0, 20.0], [1.0, 1.0])
    assert stats["ratio_max"].item() == pytest.approx(math.exp(20)) and stats["approx_kl_k1"].item() == -20
    assert grad == [0, 0]
    assert one_row([-40.0, -20.0], [1.0, 1.0])[1]["ratio_min"].item() == pytest.approx(math.exp(-20))


def test_stats_by_hand():
    # rows: token log-ratios (ln 4, 0), s = 2, and (-ln 2), s = 0.5; on tokens the ratios are 2, 2, 0.5
    # clipped: A = 1 at s = 2 (two of three tokens); k1 = -(ln 4 + 0 - ln 2) / 3 = -ln 2 / 3
    # k3 = ((4 - 1 - ln 4) + 0 + (0.5 - 1 + ln 2)) / 3 = (2.5 - ln 2) / 3
    old_logprobs = tensor([[-3.0, -3.0], [-3.0, nan]]).double()
    logprobs = old_logprobs + tensor([[math.log(4), 0.0], [-math.log(2), nan]], dtype=torch.float64)
    mask = tensor([[True, True], [True, False]])
    _, stats = gspo_policy_loss(logprobs, old_logprobs, torch.ones(2, 2), mask, **SYMMETRIC)
    expected = {
        "clipfrac": 2 / 3,
        "clipfrac_lower": 0.0,
        "approx_kl_k1": -math.log(2) / 3,
        "approx_kl_k3": (2.5 - math.log(2)) / 3,
        "ratio_mean": 1.5,
        "ratio_min": 0.5,
        "ratio_max": 2.0,
    }
    assert {name: value.item() for name, value in stats.items()} == pytest.approx(expected, abs=1e-12)


def test_stats_have_the_names_of_policy_loss_and_no_graph():
    *inputs, mask = random_batch()
    stats = gspo_policy_loss(inputs[0].requires_grad_(), *inputs[1:], mask, **SYMMETRIC).stats
    assert list(stats) == list(policy_loss(*inputs, mask, **SYMMETRIC).stats)
    assert all(value.dim() == 0 and not value.requires_grad for value in stats.values())


def test_weights_scale_each_tokens_loss_and_get_no_gradient():
    # ratio 1, A = 1 and 3: (-1 * 0.5 - 3 * 2) / 2 = -3.25
    zeros = torch.zeros(1, 2, requires_grad=True)
    weights = tensor([[0.5, 2.0]], requires_grad=True)
    mask = torch.ones(1, 2, dtype=torch.bool)
    loss = gspo_policy_loss(zeros, torch.zeros(1, 2), tensor([[1.0, 3.0]]), mask, weights=weights, **SYMMETRIC).loss
    assert_close(loss, tensor(-3.25))
    loss.backward()
    assert_close(zeros.grad, tensor([[-0.25, -3.0]]))
    assert weights.grad is None


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_gradients_match_finite_differences_where_a_rows_advantages_are_equal(mode):
    # Elsewhere straight-through is another gradient by design; the golden cases hold it.
    logprobs, old_logprobs, advantages, mask = random_batch()
    advantages = advantages[:, :1].expand(5, 4)
    settings = {"loss_agg_mode": mode, **SYMMETRIC}
    assert gradcheck(
        lambda x: gspo_policy_loss(x, old_logprobs, advantages, mask, **settings).loss, logprobs.requires_grad_()
    )


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_nan_outside_the_mask_reaches_neither_loss_stats_nor_gradient(mode):
    *inputs, mask = random_batch()
    mask[1] = False
    results = []
    for padding in (0.0, nan):
        logprobs, old_logprobs, advantages = (x.where(mask, padding) for x in inputs)
        logprobs.requires_grad_()
        weights = torch.full_like(advantages, 0.5).where(mask, padding)
        loss, stats = gspo_policy_loss(
            logprobs, old_logprobs, advantages, mask, weights=weights, loss_agg_mode=mode, **SYMMETRIC
        )
        loss.backward()
        results.append((loss.detach(), stats, logprobs.grad))
    assert_close(results[1], results[0], rtol=0, atol=0)
    assert results[1][2].isfinite().all() and results[1][2][~mask].eq(0).all()


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_parts_with_the_whole_batchs_denominator_give_the_whole_batchs_gradient(mode):
    logprobs, old_logprobs, advantages, mask = random_batch()
    mask[1] = False
    denominator = mask.sum() if mode == "token-mean" else mask.any(dim=1).sum()
    grads = []
    for parts, shared in (([slice(0, 5)], None), ([slice(0, 2), slice(2, 3), slice(3, 5)], denominator)):
        leaf = logprobs.detach().requires_grad_()
        for part in parts:
            gspo_policy_loss(
                leaf[part], old_logprobs[part], advantages[part], mask[part],
                loss_agg_mode=mode, denominator=shared, **SYMMETRIC,
            ).loss.backward()  # fmt: skip
        grads.append(leaf.grad)
    assert_close(grads[1], grads[0], rtol=1e-13, atol=0)


@pytest.mark.parametrize("rows", [2, 0])
def test_a_batch_without_tokens_gives_zero_with_a_graph_and_finite_stats(rows):
    logprobs = torch.full((rows, 3), nan, requires_grad=True)
    padding, mask = torch.full((rows, 3), nan), torch.zeros(rows, 3, dtype=torch.bool)
    loss, stats = gspo_policy_loss(logprobs, padding, padding, mask, denominator=7, **SYMMETRIC)
    loss.backward()
    assert loss.item() == 0 and logprobs.grad.eq(0).all()
    assert all(value.isfinite() for value in stats.values())
    assert stats["ratio_min"] == stats["ratio_max"] == 1


def test_half_precision_is_computed_in_float32_and_float64_stays():
    mask = torch.ones(1, 2, dtype=torch.bool)
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float32,) * 2, (torch.float64,) * 2):
        zeros = torch.zeros(1, 2, dtype=dtype)
        loss, stats = gspo_policy_loss(zeros, zeros, zeros + 1, mask, **SYMMETRIC)
        assert loss.dtype == expected and {value.dtype for value in stats.values()} == {expected}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cliprange_low": -0.1}, "cliprange_low is -0.1"),
        ({"cliprange_low": 1.5}, "cliprange_low is 1.5"),
        ({"cliprange_high": -0.1}, "cliprange_high is -0.1"),
        ({"loss_agg_mode": "mean"}, "loss_agg_mode is 'mean'; it must be one of token-mean"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        one_row([0.0], [1.0], **settings)


def test_shapes_that_differ_are_refused():
    with pytest.raises(ValueError, match=r"mask has shape \(2, 3\) but values has \(2, 2\)"):
        gspo_policy_loss(
            torch.zeros(2, 3), torch.zeros(2, 2), torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool), **SYMMETRIC
        )


@pytest.mark.parametrize(("inputs", "expected"), golden_cases("gspo_policy_loss"))
def test_gspo_policy_loss_matches_golden(inputs, expected):
    inputs["logprobs"].requires_grad_()
    loss = gspo_policy_loss(**inputs).loss
    (grad,) = torch.autograd.grad(loss, inputs["logprobs"])
    assert loss.item() == pytest.approx(expected["loss"], abs=1e-6)
    assert_close(grad, expected["grad_wrt_logprobs"], rtol=0, atol=1e-6)
