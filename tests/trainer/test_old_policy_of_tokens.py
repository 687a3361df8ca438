"""As `test_old_policy`: what a token's ratio puts right, and the sequence's weights with further terms of the loss."""

import pytest
import torch

from tests.enumerable import (
    enumerable_policy,
    objective_gradient,
    policy_gradient,
    relative_error,
    token_logprobs,
    visited_states_gradient,
)
from tests.trainer.test_gradient_truth import BETA, TOLERANCE, either_problem
from tests.trainer.test_old_policy import SEQUENCE, expected_update, perturbed

pytestmark = pytest.mark.proof

TOKEN = {**SEQUENCE, "rollout_correction_level": "token"}


UNCLIPPED = {"old_policy": "rollout", "cliprange": 0.999, "cliprange_high": 1e9}


def one_token_gradient(trainer, problem, *, kl_coef):
    """Of the sum over places t and responses y of r(y) times mu(y), in which the policy takes the sampler's place for
    the token at t alone.
    """
    sampler = token_logprobs(perturbed(enumerable_policy(0)), problem).detach()
    policy = token_logprobs(trainer.actor_critic.policy.model, problem)
    reference = token_logprobs(trainer.collector.reference.policy.model, problem).detach()
    rewards = problem.rewards - kl_coef * (sampler - reference).sum(dim=1)
    swapped = (sampler.sum(dim=1, keepdim=True) - sampler + policy).exp()
    return policy_gradient((torch.where(problem.mask, swapped, 0.0) * rewards.unsqueeze(1)).sum(), trainer)


@either_problem
def test_a_tokens_ratio_puts_right_that_token_alone(problem, tmp_path):
    trainer, update = expected_update(tmp_path / "a", problem, **UNCLIPPED)
    assert relative_error(update, one_token_gradient(trainer, problem, kl_coef=BETA)) < TOLERANCE
    assert relative_error(update, objective_gradient(trainer, problem, kl_coef=BETA)) > 0.01
    trainer, update = expected_update(tmp_path / "b", problem, kl_coef=0.0, **TOKEN)
    assert relative_error(update, one_token_gradient(trainer, problem, kl_coef=0.0)) < TOLERANCE
    assert relative_error(update, objective_gradient(trainer, problem)) > 0.01


@either_problem
def test_sequence_weights_hold_for_kl_and_entropy_in_the_loss_too(problem, tmp_path):
    settings = {"kl_loss_coef": 0.7, "kl_loss_type": "k2", "entropy_coef": 0.7}
    trainer, update = expected_update(tmp_path, problem, **SEQUENCE, **settings)
    penalty = visited_states_gradient(trainer, problem, lambda pi, ref: (pi.exp() * (pi - ref)).sum(dim=-1))
    bonus = visited_states_gradient(trainer, problem, lambda pi, ref: -(pi.exp() * pi).sum(dim=-1))
    expected = objective_gradient(trainer, problem, kl_coef=BETA) - 0.7 * penalty + 0.7 * bonus
    assert relative_error(update, expected) < TOLERANCE
