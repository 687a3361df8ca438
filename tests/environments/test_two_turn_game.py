"""A game of two turns whose every course can be listed: the exact gradient of its value, and its exact values.

The policy says one of three words, the environment answers with another, the policy says a second one. Each turn has a
reward; J is the expected sum. The environment's word is a function of the policy's first.
"""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from tests.enumerable import (
    PROMPT,
    Problem,
    add_advantages,
    enumerable_policy,
    enumerable_trainer,
    enumerated_rollouts,
    expected_loss_gradient,
    objective_gradient,
    probabilities,
    relative_error,
)

ANSWERS = {0: 2, 1: 0, 2: 1}
FIRST = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
SECOND = torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(8))
WORDS = "abc"


class Game:
    def reset(self, **row):
        self.first = None

    def reply(self, completion):
        # The word that ends a turn of text is not part of it.
        word = WORDS.index(completion.strip() or "a")
        if self.first is not None:
            return None, float(SECOND[self.first, word])
        self.first = word
        return WORDS[ANSWERS[word]], float(FIRST[word])


def courses():
    """The nine courses, with the rewards on the turns' tokens (N, 3), and their sums."""
    pairs = torch.cartesian_prod(torch.arange(3), torch.arange(3))
    answers = torch.tensor([ANSWERS[int(first)] for first in pairs[:, 0]])
    responses = torch.stack([pairs[:, 0], answers, pairs[:, 1]], dim=1)
    mask = torch.tensor([True, False, True]).repeat(9, 1)
    by_token = torch.zeros(9, 3, dtype=torch.float64)
    by_token[:, 0], by_token[:, 2] = FIRST[pairs[:, 0]], SECOND[pairs[:, 0], pairs[:, 1]]
    return Problem(responses, mask, by_token.sum(dim=1)), by_token


@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
def test_an_update_follows_the_gradient_of_the_games_value(tmp_path, kl_coef):
    problem, by_token = courses()
    trainer = enumerable_trainer(tmp_path, kl_coef=kl_coef)
    rollouts = enumerated_rollouts(trainer, problem)
    rollouts["rewards"] = by_token
    rollouts = add_advantages(trainer, rollouts)
    weights = probabilities(trainer.actor_critic.policy.model, problem)
    assert_close(weights.sum(), torch.ones((), dtype=torch.float64))
    climbed = -expected_loss_gradient(trainer, rollouts, weights)
    assert relative_error(climbed, objective_gradient(trainer, problem, kl_coef=kl_coef)) < 1e-5


@pytest.mark.parametrize(("turn_gamma", "turn_lam"), [(None, None), (0.5, None), (0.5, 0.25)])
def test_returns_discount_between_the_turns(tmp_path, turn_gamma, turn_lam):
    problem, by_token = courses()
    trainer = enumerable_trainer(tmp_path)
    # The trainer has no environment; the responses here have holes all the same.
    trainer.args = replace(trainer.args, turn_gamma=turn_gamma, turn_lam=turn_lam)
    rollouts = enumerated_rollouts(trainer, problem)
    rollouts["rewards"] = by_token
    values = rollouts["values"].double()
    rollouts = add_advantages(trainer, rollouts)
    discount, decay = turn_gamma or 1.0, 1.0 if turn_lam is None else turn_lam
    last = by_token[:, 2] - values[:, 2]
    first = by_token[:, 0] + discount * values[:, 2] - values[:, 0] + discount * decay * last
    assert_close(rollouts["advantages"][:, 2], last, rtol=0, atol=1e-6, check_dtype=False)
    assert_close(rollouts["advantages"][:, 0], first, rtol=0, atol=1e-6, check_dtype=False)
    assert not rollouts["advantages"][:, 1].any()


@pytest.mark.proof
def test_the_courses_of_a_trainer_are_these_as_often_as_they_are_likely(tmp_path):
    problem, by_token = courses()
    trainer = enumerable_trainer(
        tmp_path,
        max_turn_tokens=1,
        rollout_batch_size=10,
        num_return_sequences=200,
        rollout_per_device_batch_size=500,
        # One of the three words is the end of a turn.
        control_tokens_from="everything",
        trainer_arguments={"environment_factory": Game, "reward_funcs": None},
    )
    rollouts = trainer.rollout(trainer.prompt_batches(0))
    assert rollouts["queries"][0, -2:].tolist() == PROMPT.tolist()
    courses_of = {tuple(response.tolist()): number for number, response in enumerate(problem.responses)}
    numbers = torch.tensor([courses_of[tuple(response.tolist())] for response in rollouts["responses"]])
    assert torch.equal(rollouts["response_mask"], problem.mask[numbers])
    assert_close(rollouts["rewards"].double(), by_token[numbers], rtol=0, atol=1e-6)
    likely = probabilities(enumerable_policy(0), problem)
    found = numbers.bincount(minlength=9) / 2000
    # Five standard errors of a share of 2000.
    assert bool(((found - likely).abs() < 5 * (likely * (1 - likely) / 2000).sqrt() + 1e-9).all())
