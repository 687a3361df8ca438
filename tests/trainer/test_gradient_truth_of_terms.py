"""As `test_gradient_truth`, of whose claims these are the further ones: whitening, groups, KL and entropy in the loss,
other normalisations and policy losses.
"""

import pytest

from tests.enumerable import (
    add_advantages,
    enumerable_trainer,
    enumerated_rollouts,
    objective_gradient,
    relative_error,
    visited_states_gradient,
)
from tests.trainer.test_gradient_truth import (
    BETA,
    PROBLEMS,
    TOLERANCE,
    either_problem,
    expected_pair_update,
    expected_update,
)

pytestmark = pytest.mark.proof

COEF = 0.7


def kl_of_tokens(policy, reference):
    return (policy.exp() * (policy - reference)).sum(dim=-1)


def reversed_kl_of_tokens(policy, reference):
    return (reference.exp() * (reference - policy)).sum(dim=-1)


def entropy_of_tokens(policy, reference):
    return -(policy.exp() * policy).sum(dim=-1)


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


@either_problem
def test_k3_in_the_loss_has_the_gradient_of_the_reversed_kl(problem, tmp_path):
    settings = {"kl_loss_coef": COEF, "kl_loss_type": "k3"}
    trainer, update = expected_update(tmp_path, problem, **settings)
    penalty = visited_states_gradient(trainer, problem, reversed_kl_of_tokens)
    assert relative_error(update, objective_gradient(trainer, problem) - COEF * penalty) < TOLERANCE
    assert relative_error(penalty, visited_states_gradient(trainer, problem, kl_of_tokens)) > 0.01


@either_problem
def test_k1_in_the_loss_has_no_gradient_on_average(problem, tmp_path):
    settings = {"kl_loss_coef": COEF, "kl_loss_type": "k1"}
    trainer, update = expected_update(tmp_path, problem, **settings)
    assert relative_error(update, objective_gradient(trainer, problem)) < TOLERANCE


@either_problem
def test_the_entropy_bonus_is_that_of_the_next_token_at_the_visited_states(problem, tmp_path):
    trainer, update = expected_update(tmp_path, problem, entropy_coef=COEF)
    bonus = visited_states_gradient(trainer, problem, entropy_of_tokens)
    assert relative_error(update, objective_gradient(trainer, problem) + COEF * bonus) < TOLERANCE
    assert COEF * bonus.norm() > 0.01 * update.norm()


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


@pytest.mark.parametrize("name", ["gspo", "cispo", "sapo", "dppo"])
def test_at_ratio_one_the_other_policy_losses_have_the_gradient_per_token(name, tmp_path):
    problem = PROBLEMS["three tokens"]
    settings = {"policy_loss": name, "loss_agg_mode": "seq-mean-token-mean", "kl_coef": BETA}
    trainer, update = expected_update(tmp_path, problem, **settings)
    assert relative_error(3 * update, objective_gradient(trainer, problem, kl_coef=BETA)) < TOLERANCE
