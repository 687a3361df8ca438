import math

import pytest
import torch
from torch import nan, tensor
from torch.autograd import gradcheck
from torch.testing import assert_close

from alpaca_ppo.functional import decoupled_gae, gae, length_adaptive_lam


def test_gae_by_hand():
    # A1 = 4 - 2 = 2;  A0 = (0 + .5*2 - 1) + .5*.5*A1 = 0.5;  returns = A + V
    rewards, values, mask = tensor([[0.0, 4.0, 0.0]]), tensor([[1.0, 2.0, 0.0]]), tensor([[True, True, False]])
    advantages, returns = gae(rewards, values, mask, gamma=0.5, lam=0.5)
    assert_close(advantages, tensor([[0.5, 2.0, 0.0]]))
    assert_close(returns, tensor([[1.5, 4.0, 0.0]]))


def test_gae_gradients_match_finite_differences():
    torch.manual_seed(0)
    rewards, values = (torch.randn(2, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    mask = tensor([[True, False, True, True], [True, True, False, False]])
    assert gradcheck(lambda r, v: gae(r, v, mask, gamma=0.9, lam=0.7), (rewards, values))


def test_gae_of_a_row_or_batch_without_tokens_is_zero():
    nothing = gae(torch.ones(1, 3), torch.ones(1, 3), torch.zeros(1, 3, dtype=torch.bool), gamma=0.9, lam=0.9)
    assert nothing.advantages.eq(0).all() and nothing.returns.eq(0).all()
    empty = gae(torch.ones(2, 0), torch.ones(2, 0), torch.zeros(2, 0, dtype=torch.bool), gamma=0.9, lam=0.9)
    assert empty.advantages.shape == (2, 0)


def test_gae_computes_half_precision_in_float32():
    ones = torch.ones(1, 3, dtype=torch.bfloat16)
    # A lam for each row does not widen the results.
    for lam in (0.95, tensor([0.95], dtype=torch.float64)):
        result = gae(ones, ones, torch.ones(1, 3, dtype=torch.bool), gamma=0.99, lam=lam)
        assert all(tensor.dtype == torch.float32 for tensor in result)


@pytest.mark.parametrize("name", ["gamma", "lam", "turn_gamma", "turn_lam"])
def test_gae_refuses_a_rate_outside_zero_to_one(name):
    rates = {"gamma": 0.9, "lam": 0.9} | {name: 1.5}
    with pytest.raises(ValueError, match=rf"{name} is 1.5; it must be in \[0, 1\]"):
        gae(torch.ones(1, 2), torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool), **rates)


@pytest.mark.parametrize(
    ("lam", "message"),
    [
        (tensor([0.5, 1.5]), r"lam is 1.5 in row 1; it must be in \[0, 1\]"),
        (tensor([nan, 0.5]), "lam is nan in row 0"),
        (tensor([0.5]), r"lam has shape \(1,\); pass a float"),
        (tensor(0.5), r"lam has shape \(\)"),
    ],
)
def test_gae_refuses_a_lam_for_each_row_of_another_size_or_range(lam, message):
    with pytest.raises(ValueError, match=message):
        gae(torch.ones(2, 2), torch.ones(2, 2), torch.ones(2, 2, dtype=torch.bool), gamma=0.9, lam=lam)


def test_gae_across_a_hole_takes_the_rates_of_turns():
    # Tokens 0, 1 and, two columns on, 4: A4 = 4 - 2 = 2
    # A1 = (0 + .5*2 - 1) + .5*.25*2 = .25, across the hole;  A0 = (0 + .8*1 - 3) + .8*.5*.25 = -2.1
    rewards = tensor([[0.0, 0.0, nan, nan, 4.0, nan]])
    values, mask = tensor([[3.0, 1.0, nan, nan, 2.0, nan]]), tensor([[True, True, False, False, True, False]])
    advantages, returns = gae(rewards, values, mask, gamma=0.8, lam=0.5, turn_gamma=0.5, turn_lam=0.25)
    assert_close(advantages, tensor([[-2.1, 0.25, 0.0, 0.0, 2.0, 0.0]]))
    assert_close(returns, tensor([[0.9, 1.25, 0.0, 0.0, 4.0, 0.0]]))


def test_gae_without_rates_of_turns_crosses_a_hole_as_any_step():
    torch.manual_seed(0)
    rewards, values = torch.randn(3, 5), torch.randn(3, 5)
    mask = tensor([[True, False, True, True, False], [False, True, False, False, True], [True] * 5])
    for lam in (0.7, tensor([0.7, 0.2, 1.0])):
        plain = gae(rewards, values, mask, gamma=0.9, lam=lam)
        stated = gae(rewards, values, mask, gamma=0.9, lam=lam, turn_gamma=0.9)
        assert all(torch.equal(a, b) for a, b in zip(plain, stated, strict=True))
    # One rate of turns alone: the other is that of tokens, also where it is one a row.
    lam = tensor([0.7, 0.7, 0.7])
    assert_close(
        gae(rewards, values, mask, gamma=0.9, lam=lam, turn_gamma=0.5),
        gae(rewards, values, mask, gamma=0.9, lam=0.7, turn_gamma=0.5, turn_lam=0.7),
    )


def test_gae_of_turns_ignores_nan_in_holes_and_its_gradients_match_finite_differences():
    torch.manual_seed(0)
    mask = tensor([[True, False, True, True], [True, True, False, True]])
    rewards, values = (torch.randn(2, 4, dtype=torch.float64).where(mask, nan).requires_grad_() for _ in range(2))
    rates = {"gamma": 0.9, "turn_gamma": 0.8, "turn_lam": 1.0}
    lam = tensor([0.5, 0.9], dtype=torch.float64)
    result = decoupled_gae(rewards, values, mask, lam_policy=lam, lam_critic=0.7, **rates)
    for grad in torch.autograd.grad(sum(x.square().sum() for x in result), (rewards, values)):
        assert grad.isfinite().all() and grad[~mask].eq(0).all()
    clean = [x.detach().where(mask, 0.0).requires_grad_() for x in (rewards, values)]
    assert gradcheck(lambda r, v: decoupled_gae(r, v, mask, lam_policy=lam, lam_critic=0.7, **rates), clean)


def test_decoupled_gae_takes_advantages_and_returns_from_two_lambdas():
    # lam 0: 0 + 2 - 1 = 1, 4 - 2 = 2. Returns of lam 1 without a discount: 4, 4, whatever the values.
    rewards, values, mask = tensor([[0.0, 4.0, nan]]), tensor([[1.0, 2.0, nan]]), tensor([[True, True, False]])
    advantages, returns = decoupled_gae(rewards, values, mask, gamma=1.0, lam_policy=0.0, lam_critic=1.0)
    assert_close(advantages, tensor([[1.0, 2.0, 0.0]]))
    assert_close(returns, tensor([[4.0, 4.0, 0.0]]))
    same = decoupled_gae(rewards, values, mask, gamma=0.9, lam_policy=0.5, lam_critic=0.5)
    assert all(torch.equal(a, b) for a, b in zip(same, gae(rewards, values, mask, gamma=0.9, lam=0.5), strict=True))


def test_length_adaptive_lam_by_hand():
    # Lengths 3, 2, 1 and 0 of chosen tokens: 1 - 1 / 1.5, 1 - 1 / 1 and below 0.
    mask = tensor([[True, False, True, True], [True, True, False, False], [False, True, False, False], [False] * 4])
    assert_close(length_adaptive_lam(mask, alpha=0.5), tensor([1 / 3, 0.0, 0.0, 0.0], dtype=torch.float64))
    # 1 - 1 / 4 of one token; none has no lambda above that.
    assert length_adaptive_lam(mask[2:], alpha=4.0).tolist() == [0.75, 0.0]
    # 1 - 1 / (0.05 * 1000)
    assert_close(length_adaptive_lam(torch.ones(1, 1000).bool(), alpha=0.05), tensor([0.98], dtype=torch.float64))


@pytest.mark.parametrize("alpha", [0.0, -1.0, nan, math.inf])
def test_length_adaptive_lam_refuses_an_alpha_that_is_not_above_zero(alpha):
    with pytest.raises(ValueError, match=f"alpha is {alpha}; it must be a number above 0"):
        length_adaptive_lam(torch.ones(1, 1).bool(), alpha=alpha)
