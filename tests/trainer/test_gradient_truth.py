"""That an update follows the gradient of the objective, with every response enumerated instead of sampled.

The expectation, over the policy's responses, of the gradient of the trainer's own loss, after its own
`_shape_reward` and `_estimate_advantage`, is compared with the derivative of the explicit sum

    J = sum over y of pi(y) * (r(y) - beta * log(pi(y) / ref(y)))

Claimed: gae with lam = gamma = 1 whatever the critic says, rloo and remax give the gradient of J with KL k1 in the
reward; grpo_no_std gives (n - 1) / n of it. Whitening by given numbers only rescales. What a per-token term of the loss
differentiates is the token's distribution at the states that were visited, not how likely these states are: so KL in
the loss with k2, k1+ or k3+ has the gradient of the conditional KL(policy || reference) there, which is not that of the
sequence's KL, k3 that of KL(reference || policy), k1 none, and the entropy bonus that of the conditional entropies.
Claimed of no one: grpo (its std contains the response), opo (responses of other lengths weigh in the baseline), lam < 1
with a critic that errs, and whitening by statistics of the sample itself. `test_gradient_truth_of_terms` shows what is
said of whitening, of groups and of terms of the loss.
"""

import pytest
import torch

from tests.enumerable import (
    STOP,
    add_advantages,
    enumerable_policy,
    enumerable_trainer,
    enumerated_rollouts,
    every_response,
    expected_loss_gradient,
    next_token_logprobs,
    objective_gradient,
    pairs_of,
    policy_gradient,
    probabilities,
    relative_error,
)
from tests.tiny_runs import loss_of

TOLERANCE = 1e-5
PROBLEMS = {"three tokens": every_response(stops=False), "up to three": every_response(stops=True)}
BETA = 0.3

either_problem = pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS.keys())


def expected_update(folder, problem, *, denominator=1.0, extra=None, **overrides):
    """The trainer and the expected direction of descent of its loss."""
    trainer = enumerable_trainer(folder, **overrides)
    rollouts = add_advantages(trainer, enumerated_rollouts(trainer, problem), **(extra or {}))
    weights = probabilities(trainer.actor_critic.policy.model, problem)
    return trainer, -expected_loss_gradient(trainer, rollouts, weights, denominator=denominator)


def expected_pair_update(folder, problem, estimator, **overrides):
    """The same over all ordered pairs of responses, each pair the samples of one prompt."""
    trainer = enumerable_trainer(folder, adv_estimator=estimator, num_return_sequences=2, **overrides)
    rollouts, pairs = pairs_of(enumerated_rollouts(trainer, problem))
    rollouts = add_advantages(trainer, rollouts)
    weights = probabilities(trainer.actor_critic.policy.model, problem)[pairs].prod(dim=1).repeat_interleave(2)
    # A factor of each token's policy loss, which is the only term here; the mean is over the two of a pair.
    rollouts["loss_weights"] = weights.unsqueeze(1).expand(rollouts["responses"].shape)
    loss = loss_of(trainer, {**rollouts, "denominator": torch.tensor(2.0)})
    return trainer, rollouts, -policy_gradient(loss, trainer)


def greedy_score(trainer, problem):
    """The reward of the response that takes the most likely token at each place."""
    likeliest = next_token_logprobs(trainer.actor_critic.policy.model, problem).argmax(dim=-1)
    greedy = ((likeliest == problem.responses) | ~problem.mask).all(dim=1)
    assert greedy.sum() == 1
    return problem.rewards[greedy].item()


def test_the_problem_is_complete_and_far_from_trivial():
    for problem, count in zip(PROBLEMS.values(), (27, 15), strict=True):
        weights = probabilities(enumerable_policy(0), problem)
        assert len(problem.responses) == count
        assert weights.sum().item() == pytest.approx(1, abs=1e-12)
        assert weights.min() > 5e-4 and weights.max() < 0.5
        distance = (weights * (weights / probabilities(enumerable_policy(1), problem)).log()).sum()
        assert 0.1 < distance < 2, "nats between policy and reference"
    assert PROBLEMS["up to three"].mask.sum(dim=1).unique().tolist() == [1, 2, 3]


@either_problem
@pytest.mark.parametrize("layout", ["separate", "shared"])
def test_a_critic_that_errs_does_not_bias_the_gradient(problem, layout, tmp_path):
    trainer, update = expected_update(tmp_path, problem, kl_coef=BETA, critic_layout=layout)
    assert enumerated_rollouts(trainer, problem)["values"][problem.mask].std() > 0.1
    assert relative_error(update, objective_gradient(trainer, problem, kl_coef=BETA)) < TOLERANCE
    # The penalty is no small part of it, and its sign matters.
    assert relative_error(update, objective_gradient(trainer, problem)) > 0.01
    assert relative_error(update, objective_gradient(trainer, problem, kl_coef=-BETA)) > 0.01


@either_problem
def test_the_greedy_baseline_of_remax_does_not_bias_the_gradient(problem, tmp_path):
    score = greedy_score(enumerable_trainer(tmp_path / "a"), problem)
    assert abs(score) > 0.1
    baseline = torch.full_like(problem.rewards, score)
    settings = {"adv_estimator": "remax", "kl_coef": BETA, "extra": {"baseline_scores": baseline}}
    trainer, update = expected_update(tmp_path / "b", problem, **settings)
    assert relative_error(update, objective_gradient(trainer, problem, kl_coef=BETA)) < TOLERANCE


def test_the_greedy_baseline_of_a_rollout_is_the_reward_of_the_likeliest_tokens(tmp_path):
    problem = PROBLEMS["up to three"]
    table = {
        tuple(row[keep].tolist()): reward.item()
        for row, keep, reward in zip(problem.responses, problem.mask, problem.rewards, strict=True)
    }

    def look_up(prompts, completions, completion_ids, **columns):
        return [table[tuple(ids)] for ids in completion_ids]

    trainer = enumerable_trainer(tmp_path, adv_estimator="remax", trainer_arguments={"reward_funcs": look_up})
    rollouts = trainer.rollout(trainer.prompt_batches(0))
    assert STOP in rollouts["responses"][rollouts["response_mask"]]
    expected = [greedy_score(trainer, problem)] * 10
    assert rollouts["baseline_scores"].tolist() == pytest.approx(expected)


@either_problem
def test_leave_one_out_is_unbiased(problem, tmp_path):
    trainer, _, update = expected_pair_update(tmp_path, problem, "rloo", kl_coef=BETA)
    assert relative_error(update, objective_gradient(trainer, problem, kl_coef=BETA)) < TOLERANCE
