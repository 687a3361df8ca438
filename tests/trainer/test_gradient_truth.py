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
with a critic that errs, and whitening by statistics of the sample itself.
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
    visited_states_gradient,
)
from tests.tiny_runs import loss_of

TOLERANCE = 1e-5
PROBLEMS = {"three tokens": every_response(stops=False), "up to three": every_response(stops=True)}
BETA, COEF = 0.3, 0.7

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


def kl_of_tokens(policy, reference):
    return (policy.exp() * (policy - reference)).sum(dim=-1)


def reversed_kl_of_tokens(policy, reference):
    return (reference.exp() * (reference - policy)).sum(dim=-1)


def entropy_of_tokens(policy, reference):
    return -(policy.exp() * policy).sum(dim=-1)


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


@pytest.mark.proof
@either_problem
def test_whitening_by_given_numbers_rescales_the_gradient(problem, tmp_path):
    # Mean and std are those of the enumeration here, the same for each response: (A - m) / s is 1 / s of the gradient,
    # since a constant is a baseline like any other.
    plain = enumerable_trainer(tmp_path / "plain", kl_coef=BETA)
    advantages = add_advantages(plain, enumerated_rollouts(plain, problem))["advantages"][problem.mask]
    trainer, update = expected_update(tmp_path / "whitened", problem, kl_coef=BETA, whiten_advantages=True)
    gradient = objective_gradient(trainer, problem, kl_coef=BETA)
    assert relative_error(update * advantages.std(), gradient) < TOLERANCE
    assert relative_error(update, gradient) > 0.01
    returns = add_advantages(plain, enumerated_rollouts(plain, problem))["returns"][problem.mask]
    _, update = expected_update(tmp_path / "r++", problem, kl_coef=BETA, adv_estimator="reinforce_plus_plus")
    assert relative_error(update * returns.std(), gradient) < TOLERANCE


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


@pytest.mark.proof
@either_problem
def test_the_group_mean_as_baseline_gives_half_the_gradient_in_groups_of_two(problem, tmp_path):
    trainer, _, update = expected_pair_update(tmp_path, problem, "grpo_no_std", kl_coef=BETA)
    assert relative_error(2 * update, objective_gradient(trainer, problem, kl_coef=BETA)) < TOLERANCE


@either_problem
@pytest.mark.parametrize("kind", ["k2", "k1+", "k3+"])
def test_kl_in_the_loss_is_that_of_the_next_token_at_the_visited_states(problem, kind, tmp_path):
    settings = {"kl_loss_coef": COEF, "kl_loss_type": kind}
    trainer, update = expected_update(tmp_path, problem, **settings)
    gradient, penalty = objective_gradient(trainer, problem), visited_states_gradient(trainer, problem, kl_of_tokens)
    assert relative_error(update, gradient - COEF * penalty) < TOLERANCE
    # The sequence's KL also counts where a token leads; only the penalty in the reward has that part.
    whole = (gradient - objective_gradient(trainer, problem, kl_coef=COEF)) / COEF
    assert relative_error(penalty, whole) > 0.01


@pytest.mark.proof
@either_problem
def test_k3_in_the_loss_has_the_gradient_of_the_reversed_kl(problem, tmp_path):
    settings = {"kl_loss_coef": COEF, "kl_loss_type": "k3"}
    trainer, update = expected_update(tmp_path, problem, **settings)
    penalty = visited_states_gradient(trainer, problem, reversed_kl_of_tokens)
    assert relative_error(update, objective_gradient(trainer, problem) - COEF * penalty) < TOLERANCE
    assert relative_error(penalty, visited_states_gradient(trainer, problem, kl_of_tokens)) > 0.01


@pytest.mark.proof
@either_problem
def test_k1_in_the_loss_has_no_gradient_on_average(problem, tmp_path):
    settings = {"kl_loss_coef": COEF, "kl_loss_type": "k1"}
    trainer, update = expected_update(tmp_path, problem, **settings)
    assert relative_error(update, objective_gradient(trainer, problem)) < TOLERANCE


@pytest.mark.proof
@either_problem
def test_the_entropy_bonus_is_that_of_the_next_token_at_the_visited_states(problem, tmp_path):
    trainer, update = expected_update(tmp_path, problem, entropy_coef=COEF)
    bonus = visited_states_gradient(trainer, problem, entropy_of_tokens)
    assert relative_error(update, objective_gradient(trainer, problem) + COEF * bonus) < TOLERANCE
    assert COEF * bonus.norm() > 0.01 * update.norm()


@pytest.mark.proof
@pytest.mark.parametrize(
    ("name", "mode", "denominator"),
    [
        ("three tokens", "token-mean", 3.0),
        ("three tokens", "seq-mean-token-mean", 1.0),
        ("three tokens", "seq-mean-token-sum-norm", 1.0),
        # A response of less than three tokens has a third of its sum too: the padded length and the batch's count of
        # tokens do not depend on it. That count is random in training, which this does not show.
        ("up to three", "token-mean", 3.0),
        ("up to three", "seq-mean-token-sum-norm", 1.0),
    ],
)
def test_a_normalisation_that_is_the_same_for_all_responses_rescales_the_gradient(name, mode, denominator, tmp_path):
    problem = PROBLEMS[name]
    settings = {"loss_agg_mode": mode, "denominator": denominator, "kl_coef": BETA}
    trainer, update = expected_update(tmp_path, problem, **settings)
    assert relative_error(3 * update, objective_gradient(trainer, problem, kl_coef=BETA)) < TOLERANCE


@pytest.mark.proof
@pytest.mark.parametrize("name", ["gspo", "cispo", "sapo", "dppo"])
def test_at_ratio_one_the_other_policy_losses_have_the_gradient_per_token(name, tmp_path):
    problem = PROBLEMS["three tokens"]
    settings = {"policy_loss": name, "loss_agg_mode": "seq-mean-token-mean", "kl_coef": BETA}
    trainer, update = expected_update(tmp_path, problem, **settings)
    assert relative_error(3 * update, objective_gradient(trainer, problem, kl_coef=BETA)) < TOLERANCE
