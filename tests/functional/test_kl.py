import math

import pytest
import torch
from torch import tensor
from torch.autograd import gradcheck
from torch.testing import assert_close

from alpaca_ppo.functional import kl_penalty, register_kl_estimator
from alpaca_ppo.registry import KL_ESTIMATORS
from tests.registered import temporary_choices

SMOOTH = ("k1", "abs", "k2", "k3", "k1_clamped")


def test_estimators_by_hand():
    # d = -0.5 - (-1.0) = 0.5 and -2.0 - (-1.5) = -0.5
    logprobs, ref_logprobs = tensor([-0.5, -2.0]), tensor([-1.0, -1.5])
    expected = {
        "k1": [0.5, -0.5],
        "abs": [0.5, 0.5],
        "k2": [0.125, 0.125],
        "k3": [math.exp(-0.5) - 1 + 0.5, math.exp(0.5) - 1 - 0.5],
        "k1_clamped": [0.5, 0.0],
    }
    expected["k1+"], expected["k3+"] = expected["k1"], expected["k3"]
    assert set(expected) == set(KL_ESTIMATORS.names)
    for estimator, value in expected.items():
        assert_close(kl_penalty(logprobs, ref_logprobs, estimator), tensor(value))


@pytest.mark.parametrize("estimator", SMOOTH)
def test_gradients_match_finite_differences(estimator):
    logprobs = tensor([-0.5, -2.0, -1.1], dtype=torch.float64, requires_grad=True)
    ref_logprobs = tensor([-1.0, -1.5, -0.2], dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda p, q: kl_penalty(p, q, estimator), (logprobs, ref_logprobs))


@pytest.mark.parametrize("estimator", ["k1+", "k3+"])
def test_a_plus_keeps_the_value_and_takes_the_gradient_of_k2(estimator):
    # d/d logprobs of d^2 / 2 is d = 0.5 and -0.5
    logprobs, ref_logprobs = tensor([-0.5, -2.0], requires_grad=True), tensor([-1.0, -1.5])
    kl = kl_penalty(logprobs, ref_logprobs, estimator)
    assert_close(kl, kl_penalty(logprobs, ref_logprobs, estimator.removesuffix("+")), rtol=0, atol=0)
    (grad,) = torch.autograd.grad(kl.sum(), logprobs)
    assert_close(grad, tensor([0.5, -0.5]))


def test_k3_with_a_plus_keeps_its_gradient_where_the_value_is_cut():
    # d = -100: the value is cut to 10, where k3 alone has no gradient
    logprobs = tensor([-101.0], requires_grad=True)
    for estimator, slope in (("k3", 0.0), ("k3+", -100.0)):
        kl = kl_penalty(logprobs, tensor([-1.0]), estimator)
        assert kl.item() == 10 and torch.autograd.grad(kl, logprobs)[0].item() == slope


def test_k3_is_bounded_and_finite_however_far_the_policies_are():
    # d = -100: exp(20) - 1 - 20 is cut to 10; d = +100: -d is cut to -20, exp(-20) - 1 + 20
    k3 = kl_penalty(tensor([-101.0, -1.0]), tensor([-1.0, -101.0]), "k3")
    assert_close(k3, tensor([10.0, 10.0]))
    assert_close(kl_penalty(tensor([-1.0]), tensor([-9.0]), "k3"), tensor([math.exp(-8) - 1 + 8]))


def test_k3_of_nearly_equal_policies_keeps_its_digits_in_float32():
    # d^2 / 2 = 5e-9 to first order, which exp(-d) - 1 + d in float32 cannot resolve
    k3 = kl_penalty(tensor([0.0]), tensor([-1e-4]), "k3")
    assert_close(k3, tensor([5e-9]), rtol=0.5, atol=0)


def test_half_precision_is_computed_in_float32():
    logprobs, ref_logprobs = tensor([-1.5], dtype=torch.bfloat16), tensor([-1.25], dtype=torch.bfloat16)
    assert_close(kl_penalty(logprobs, ref_logprobs, "k3"), tensor([math.exp(0.25) - 1.25]))


def test_an_unknown_estimator_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"kl_estimator is 'k4'; choose one of k1, abs, k2, k3, k1_clamped, k1\+"):
        kl_penalty(torch.zeros(1), torch.zeros(1), "k4")
    with pytest.raises(ValueError, match="'abs\\+'"):
        kl_penalty(torch.zeros(1), torch.zeros(1), "abs+")


def test_a_registered_estimator_gets_the_difference_in_float32_and_gives_value_and_gradient():
    with temporary_choices():

        @register_kl_estimator("huber")
        def huber(difference):
            assert difference.dtype == torch.float32
            return torch.nn.functional.huber_loss(difference, torch.zeros_like(difference), reduction="none")

        # d = 0.5 and -3: 0.5 * 0.25 = 0.125 and 3 - 0.5 = 2.5, of slope 0.5 and -1.
        logprobs = tensor([-0.5, -4.0], dtype=torch.bfloat16, requires_grad=True)
        kl = kl_penalty(logprobs, tensor([-1.0, -1.0]), "huber")
        assert kl.tolist() == [0.125, 2.5]
        assert torch.autograd.grad(kl.sum(), logprobs)[0].tolist() == [0.5, -1.0]


@pytest.mark.parametrize(
    ("returned", "message"), [(lambda d: d.sum(), r"'mine' returned shape \(\)"), (lambda d: 1.0, "returned a float")]
)
def test_a_registered_estimator_that_returns_something_else_is_refused(returned, message):
    with temporary_choices():
        register_kl_estimator("mine")(returned)
        with pytest.raises(ValueError, match=rf"{message}; it must return a tensor of the shape of its input, \(2,\)"):
            kl_penalty(torch.zeros(2), torch.zeros(2), "mine")
