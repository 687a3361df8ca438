"""What every loss keeps: finite differences, precision, batches without tokens.

That nothing outside the mask counts, and that parts with the whole batch's denominator add up, is in
`tests/independent/test_properties_losses`.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import nan
from torch.autograd import gradcheck
from torch.testing import assert_close

from alpaca_ppo import functional as F

RANGES = {"cliprange_low": 0.2, "cliprange_high": 0.3}
SUPPORT = {"v_min": -2.0, "v_max": 2.0}


def fixed_quantiles(quantiles, returns, mask, **how):
    return F.quantile_huber_loss(quantiles, returns, F.quantile_midpoints(quantiles.size(-1)), mask, **how)


class Case(NamedTuple):
    loss_of: Callable[..., F.Loss]
    inputs: str
    modes: tuple[str | None, ...] = F.LOSS_AGG_MODES
    """None: the loss has no `loss_agg_mode`."""
    exact: bool = True
    """The gradient is the derivative of the number; of gspo, where a row's advantages are equal."""

    def batch(self):
        """The tensors of the loss, of which the first is what learns, and the mask, of which one row is empty."""
        torch.manual_seed(0)
        shape = (5, 4)
        if self.inputs == "logprobs":
            parts = [*(-2 * torch.rand(shape).double() - 0.1 for _ in range(2)), torch.randn(shape).double()]
        elif self.inputs == "values":
            parts = [torch.randn(shape).double() for _ in range(3)]
        else:
            parts = [torch.randn(*shape, 6).double(), 2 * torch.randn(shape).double()]
        mask = torch.rand(shape) < 0.7
        mask[1] = False
        return parts, mask


POLICY = {
    "ppo": Case(partial(F.policy_loss, **RANGES), "logprobs"),
    "ppo, dual clip": Case(partial(F.policy_loss, clip_ratio_c=1.5, **RANGES), "logprobs"),
    "gspo": Case(partial(F.gspo_policy_loss, **RANGES), "logprobs"),
    "cispo": Case(partial(F.cispo_policy_loss, **RANGES), "logprobs", exact=False),
    "sapo": Case(partial(F.sapo_policy_loss, tau_pos=1.0, tau_neg=1.5), "logprobs"),
    "gmpo": Case(partial(F.gmpo_policy_loss, **RANGES), "logprobs", modes=(None,)),
    "dppo, tv": Case(partial(F.dppo_policy_loss, clip_ratio_c=3.0, **RANGES), "logprobs", exact=False),
    "dppo, kl": Case(partial(F.dppo_policy_loss, divergence="kl", **RANGES), "logprobs", exact=False),
}
CASES = {
    **POLICY,
    "value": Case(F.value_loss, "values"),
    "value, clipped": Case(partial(F.value_loss, cliprange_value=0.2), "values"),
    "c51": Case(partial(F.c51_loss, **SUPPORT), "distributions"),
    "hl_gauss": Case(partial(F.hl_gauss_loss, sigma=0.5, **SUPPORT), "distributions"),
    "quantile": Case(fixed_quantiles, "distributions"),
}
every_loss = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
every_policy_loss = pytest.mark.parametrize("case", POLICY.values(), ids=POLICY)
MODES = [
    pytest.param(case, {} if mode is None else {"loss_agg_mode": mode}, id=f"{name}, {mode}")
    for name, case in CASES.items()
    for mode in (case.modes if case.exact else ())
]


@every_loss
def test_only_predictions_get_a_gradient_and_equal_weights_scale_the_loss(case):
    (predictions, *others), mask = case.batch()
    expected = case.loss_of(predictions, *others, mask).loss
    weights = {"weights": torch.full(mask.shape, 0.5).requires_grad_()} if case.inputs == "logprobs" else {}
    given = [x.requires_grad_() for x in (predictions, *others)]
    loss, stats = case.loss_of(*given, mask, **weights)
    loss.backward()
    assert given[0].grad.abs().sum() > 0 and all(x.grad is None for x in (*given[1:], *weights.values()))
    assert all(value.dim() == 0 and not value.requires_grad for value in stats.values())
    assert_close(loss.detach(), 0.5 * expected if weights else expected)


@pytest.mark.parametrize(("case", "how"), MODES)
def test_gradients_match_finite_differences(case, how):
    (predictions, *others), mask = case.batch()
    if case is POLICY["gspo"]:
        others[1] = others[1][:, :1].expand(5, 4)
    assert gradcheck(lambda x: case.loss_of(x, *others, mask, **how).loss, predictions.requires_grad_())


@every_loss
@pytest.mark.parametrize("rows", [2, 0])
def test_a_batch_without_tokens_gives_zero_with_a_graph_and_finite_stats(case, rows):
    inputs, _ = case.batch()
    predictions, *others = (torch.full_like(x[:rows], nan) for x in inputs)
    mask = torch.zeros(rows, 4, dtype=torch.bool)
    loss, stats = case.loss_of(predictions.requires_grad_(), *others, mask, denominator=7)
    loss.backward()
    assert loss.item() == 0 and predictions.grad.eq(0).all()
    assert all(value.isfinite() for value in stats.values())
    if case.inputs == "logprobs":
        assert stats["ratio_min"] == stats["ratio_max"] == 1


@every_loss
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_half_precision_is_computed_in_float32_and_inputs_stay_as_they_were(case, dtype):
    inputs, mask = case.batch()
    given = [x.to(dtype) for x in inputs]
    before = [x.clone() for x in given]
    loss, stats = case.loss_of(*given, mask)
    assert all(torch.equal(x, y) for x, y in zip(given, before, strict=True))
    assert {x.dtype for x in (loss, *stats.values())} == {torch.promote_types(dtype, torch.float32)}
    assert_close(loss, case.loss_of(*(x.double() for x in given), mask).loss.to(loss))


@every_loss
def test_shapes_that_differ_are_refused(case):
    (predictions, *others), mask = case.batch()
    with pytest.raises(ValueError, match=r"mask has shape \(5, 4\), but values \(5, 2\)"):
        case.loss_of(predictions, *(x[:, :2] for x in others), mask)


@every_policy_loss
def test_at_the_old_policy_the_gradient_is_that_of_the_advantage(case):
    # Ratio 1: d loss / d logprob = -A / tokens, or over the row's tokens and the rows.
    (_, old_logprobs, advantages), mask = case.batch()
    logprobs = old_logprobs.clone().requires_grad_()
    loss, stats = case.loss_of(logprobs, old_logprobs, advantages, mask)
    loss.backward()
    divisor = mask.sum()
    counts = mask.sum(dim=1, keepdim=True).clamp_min(1)
    if case is POLICY["gmpo"]:
        advantages = torch.where(mask, advantages, 0).sum(dim=1, keepdim=True) / counts
    if case in (POLICY["gmpo"], POLICY["gspo"], POLICY["sapo"]):
        divisor = counts * mask.any(dim=1).sum()
    assert_close(logprobs.grad, torch.where(mask, -advantages / divisor, 0.0))
    assert stats["ratio_min"] == stats["ratio_max"] == 1 and stats["clipfrac"] == 0 and stats["approx_kl_k3"] == 0
    assert list(stats) == list(POLICY["ppo"].loss_of(old_logprobs, old_logprobs, advantages.expand(5, 4), mask).stats)


@every_policy_loss
def test_the_log_ratio_is_cut_at_twenty(case):
    # Of gspo, the log-ratio of a sequence.
    logprobs, old_logprobs = torch.tensor([[-1.0], [-101.0]]).double(), torch.tensor([[-101.0], [-1.0]]).double()
    loss, stats = case.loss_of(logprobs.requires_grad_(), old_logprobs, torch.ones(2, 1), torch.ones(2, 1).bool())
    loss.backward()
    assert loss.isfinite() and logprobs.grad.isfinite().all()
    extremes = torch.stack([stats["ratio_min"], stats["ratio_max"]]).log()
    assert_close(extremes, torch.tensor([-20.0, 20.0]).double())
