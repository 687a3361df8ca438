"""When critic pretraining ends, and that its targets contain no value."""

import pytest
import torch
from torch import tensor

from alpaca_ppo import PPOConfig
from alpaca_ppo.functional import AdvantageInputs
from alpaca_ppo.ppo.advantages import estimate_advantages
from alpaca_ppo.ppo.critic_pretraining import CriticPretraining

NAN = float("nan")
MASK = tensor([[True, True, False], [True, False, True]])
RETURNS = tensor([[0.0, 2.0, NAN], [4.0, NAN, 6.0]])
"""Of variance 5."""


def rollouts(error, **more):
    """Values off by `error` at one of the four returns: a variance of 3/16 error^2, of 5."""
    values = RETURNS.clone()
    values[0, 0] += error
    return {"values": values, "returns": RETURNS, "response_mask": MASK, **more}


def pretraining(steps, bound):
    said, restarted = [], []
    args = PPOConfig(critic_pretraining_steps=steps, critic_pretraining_explained_variance=bound)
    return CriticPretraining(args, on_early_end=restarted.append, report=said.append), said, restarted


def test_it_ends_after_the_first_step_whose_values_explained_enough():
    made, said, restarted = pretraining(4, 0.5)
    # 1 - 3/16 * 16 / 5 = 0.4 and 1 - 3/16 * 4 / 5 = 0.85.
    made.end_step(0, rollouts(4.0))
    assert [made.includes(step) for step in range(5)] == [True] * 4 + [False] and not said
    made.end_step(1, rollouts(2.0))
    assert [made.includes(step) for step in range(5)] == [True] * 2 + [False] * 3
    assert restarted == [2] and len(said) == 1
    assert said[0].startswith("step 2: the critic explains 0.85 of the variance") and "2 of 4 steps" in said[0]
    again = pretraining(4, 0.5)[0]
    again.load_state_dict(made.state_dict())
    assert again.num_steps == 2
    # A step that is over does not count again.
    made.end_step(2, rollouts(0.0))
    assert restarted == [2] and len(said) == 1


@pytest.mark.parametrize(
    ("error", "text"),
    [(4.0, "critic_pretraining_steps are over, but the critic explains 0.4 of the variance"), (2.0, "after 2 of 2")],
)
def test_the_last_step_is_the_last_whatever_was_explained(error, text):
    made, said, restarted = pretraining(2, 0.5)
    made.end_step(1, rollouts(error))
    assert made.num_steps == 2 and not restarted
    assert len(said) == 1 and said[0].startswith("step 2: ") and text in said[0]


def test_a_distributional_critic_is_judged_by_its_means():
    made = pretraining(3, 0.5)[0]
    made.end_step(0, rollouts(4.0, value_means=RETURNS))
    assert made.num_steps == 1


def test_returns_that_give_no_gradient_are_not_to_be_explained():
    args = PPOConfig(critic_pretraining_steps=3, critic_pretraining_explained_variance=0.5, mask_truncated=True)
    made = CriticPretraining(args, on_early_end=[].append, report=[].append)
    # The error is in the first response. Of the second, which stopped, everything is explained.
    made.end_step(0, rollouts(100.0, stopped=tensor([False, True])))
    assert made.num_steps == 1


def test_without_a_bound_the_count_decides():
    made, said, restarted = pretraining(2, None)
    made.end_step(0, rollouts(0.0))
    made.end_step(1, rollouts(0.0))
    assert made.num_steps == 2 and not said and not restarted


def test_the_returns_are_sums_of_rewards_that_no_value_enters():
    rewards = tensor([[1.0, 2.0, NAN], [4.0, NAN, 8.0]], dtype=torch.float64)
    # 1 + 0.5 * 2 = 2 and 2; past the hole, 4 + 0.5 * 8 = 8 and 8.
    expected = [2.0, 2.0, 8.0, 8.0]
    for value in (0.0, 100.0):
        values = torch.where(MASK, value, NAN).double()
        inputs = AdvantageInputs(rewards, values, MASK)
        args = PPOConfig(gamma=0.5, lam=0.25, whiten_advantages=False)
        estimated = estimate_advantages(inputs, args, monte_carlo_returns=True)
        assert estimated.returns[MASK].tolist() == expected
        assert estimate_advantages(inputs, args).returns[MASK].tolist() != expected
    whitened = estimate_advantages(inputs, PPOConfig(whiten_rewards=True, gamma=1.0, lam=0.5), monte_carlo_returns=True)
    # Rewards of mean 3.75 and variance 9.583: (x - 3.75) / 3.0957 + 3.75 are 2.8617, 3.1847, 3.8308 and 5.1229.
    assert whitened.returns[MASK].tolist() == pytest.approx([6.0464, 3.1847, 8.9536, 5.1229], abs=1e-3)
