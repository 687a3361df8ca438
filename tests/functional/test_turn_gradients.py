"""How far the average update of an estimator is from the policy gradient, over one, two and three turns of decisions.

A softmax policy with logits of its own for each history decides up to three times among three tokens, of which token 0
ends the response. Between turns an environment writes one of two tokens at random, which the policy sees: after the
first decision in two turns, after the first and the second in three. All responses are enumerated, or all groups of
three of them, so that an average is a finite sum (of the 27 sequences of three decisions, 15 are left where token 0
ends them; replies make 29 and 53 of them); the gradient of the expected score comes from differentiating the
probabilities. The score stands on the last token: from one source 1 or 0, a right or wrong answer, and from another a
tenth for each decision.
"""

from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch.testing import assert_close

from alpaca_ppo.functional import decoupled_gae, gae, gdpo_advantages, group_advantages, length_adaptive_lam

pytestmark = pytest.mark.proof

DOCS = Path(__file__).parents[2] / "docs" / "appendix.md"
STOP, DECISIONS, REPLY = 0, range(3), 0.3
COLUMNS = {1: "ddd", 2: "dedd", 3: "deded"}
"""What is in each column of a response of so many turns: a decision or a token of the environment."""
GROUP = 3


class Problem(NamedTuple):
    """All N responses of R columns, over K histories at which the policy decides."""

    mask: torch.Tensor
    """(N, R) bool, True = a decision."""
    states: torch.Tensor
    """(N, R) int: the number of the history before each decision."""
    actions: torch.Tensor
    """(N, R) int."""
    replies: torch.Tensor
    """(N,): the probability of what the environment wrote."""
    by_source: torch.Tensor
    """(N, 2): the scores of the two sources."""
    logits: torch.Tensor
    """(K, 3), of the policy."""

    @property
    def scores(self):
        return self.by_source.sum(dim=1)

    @property
    def rewards(self):
        last = torch.where(self.mask, torch.arange(self.mask.size(1)), -1).amax(dim=1, keepdim=True)
        return torch.zeros(self.mask.shape, dtype=torch.float64).scatter(1, last, self.scores.unsqueeze(1))

    def logprobs(self, logits):
        """(N, R): of each decision."""
        return torch.where(self.mask, logits.log_softmax(dim=1)[self.states, self.actions], 0.0)

    def probabilities(self, logits):
        """(N,): of each response."""
        return self.logprobs(logits).sum(dim=1).exp() * self.replies

    def values(self):
        """(K,): the expected score after each history."""
        weights = self.probabilities(self.logits).unsqueeze(1).expand(self.mask.shape)[self.mask]
        scores = self.scores.unsqueeze(1).expand(self.mask.shape)[self.mask]
        return self.over_visits(weights * scores) / self.over_visits(weights)

    def over_visits(self, of_decisions):
        """(K,): for each history, the sum over decisions of numbers in the order of the mask."""
        return torch.zeros(len(self.logits), dtype=torch.float64).index_add(0, self.states[self.mask], of_decisions)


def problem_of(turns):
    histories, rows = {}, []

    def extend(history, row, reply):
        if len(row) == len(COLUMNS[turns]):
            rows.append((row, reply))
        elif COLUMNS[turns][len(row)] == "e":
            for token, chance in enumerate((REPLY, 1 - REPLY)):
                extend((*history, token), [*row, None], reply * chance)
        else:
            state = histories.setdefault(history, len(histories))
            for action in DECISIONS:
                longer = [*row, (state, action)]
                if action == STOP:
                    longer += [None] * (len(COLUMNS[turns]) - len(longer))
                extend((*history, action), longer, reply)

    extend((), [], 1.0)
    replies = [reply for _, reply in rows]
    cells = [[cell or (0, 0) for cell in row] for row, _ in rows]
    states, actions = torch.tensor(cells).unbind(dim=2)
    mask = torch.tensor([[cell is not None for cell in row] for row, _ in rows])
    generator = torch.Generator().manual_seed(turns)
    right = (torch.rand(len(rows), dtype=torch.float64, generator=generator) < 0.5).double()
    by_source = torch.stack([right, 0.1 * mask.sum(dim=1)], dim=1)
    logits = torch.randn(len(histories), 3, dtype=torch.float64, generator=generator)
    return Problem(mask, states, actions, torch.tensor(replies, dtype=torch.float64), by_source, logits)


PROBLEMS = {turns: problem_of(turns) for turns in COLUMNS}


def gradient(problem, objective):
    logits = problem.logits.clone().requires_grad_()
    return torch.autograd.grad(objective(logits), logits)[0]


def policy_gradient(problem):
    """Of the expected score."""
    return gradient(problem, lambda logits: problem.probabilities(logits) @ problem.scores)


def average_update(problem, advantages, rows, weights):
    """The sum over `rows` of weight times the sum over tokens of advantage times the gradient of the log-prob."""
    return gradient(problem, lambda logits: (weights.unsqueeze(1) * advantages * problem.logprobs(logits)[rows]).sum())


def relative_error(actual, expected):
    """The norm of the difference over the norm of `expected`."""
    return ((actual - expected).norm() / expected.norm()).item()


def misalignment(actual, expected):
    """The part of `expected` that no multiple of `actual` has, over its norm: the sine of the angle between them."""
    return relative_error(((actual * expected).sum() / actual.square().sum()) * actual, expected)


def critic(problem, *, errs):
    """(K,): the values of a critic that is exact, or off by half a point or so."""
    noise = torch.randn(len(problem.logits), dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    return problem.values() + (0.5 * noise if errs else 0.0)


def estimated(problem, rates, *, errs):
    """Advantages and returns (N, R) by GAE with one of the settings in `LAMBDAS`."""
    rates = dict(rates)
    if "alpha" in rates:
        rates["lam"] = length_adaptive_lam(problem.mask, alpha=rates.pop("alpha"))
    values = torch.where(problem.mask, critic(problem, errs=errs)[problem.states], 0.0)
    estimate = decoupled_gae if "lam_critic" in rates else gae
    return estimate(problem.rewards, values, problem.mask, gamma=1.0, **rates)


def bias_of_the_update(problem, rates, *, errs):
    weights = problem.probabilities(problem.logits)
    advantages = estimated(problem, rates, errs=errs).advantages
    update = average_update(problem, advantages, torch.arange(len(weights)), weights)
    return relative_error(update, policy_gradient(problem))


def bias_of_the_returns(problem, rates):
    """What the average return misses the true value by, over what the critic misses it by: root mean squares over the
    visited states.
    """
    visits = problem.probabilities(problem.logits).unsqueeze(1).expand(problem.mask.shape)[problem.mask]
    returns = problem.over_visits(visits * estimated(problem, rates, errs=True).returns[problem.mask])
    weights = problem.over_visits(visits)
    errors = (returns / weights - problem.values(), critic(problem, errs=True) - problem.values())
    missed, of_critic = ((weights * error.square()).sum().sqrt() for error in errors)
    return (missed / of_critic).item()


@cache
def groups_of(turns):
    """All unordered groups: the responses (G, 3) of each in ascending order, and in how many orders (G,) they come."""
    groups = torch.combinations(torch.arange(len(PROBLEMS[turns].mask)), GROUP, with_replacement=True)
    return groups, torch.tensor([6, 3, 1])[(groups[:, 1:] == groups[:, :-1]).sum(dim=1)]


def probabilities_of_groups(problem, groups, orders, logits):
    return orders * problem.probabilities(logits)[groups].prod(dim=1)


def update_of_groups(turns, estimator):
    """The average over groups of the mean over their responses."""
    problem, (groups, orders) = PROBLEMS[turns], groups_of(turns)
    rows, ids = groups.flatten(), torch.arange(len(groups)).repeat_interleave(GROUP)
    mask = problem.mask[rows]
    if estimator == "gdpo":
        advantages = gdpo_advantages(problem.by_source[rows], torch.ones(2), ids, mask)
    else:
        name, _, quantile = estimator.partition(" ")
        rates = {"quantile": float(quantile)} if quantile else {}
        advantages = group_advantages(problem.scores[rows], ids, mask, estimator=name, **rates)
    weights = probabilities_of_groups(problem, groups, orders, problem.logits)[ids] / GROUP
    return average_update(problem, advantages, rows, weights)


@cache
def gradient_of_the_best(turns):
    """Of the expected best score of a group."""
    problem, (groups, orders) = PROBLEMS[turns], groups_of(turns)
    best = problem.scores[groups].amax(dim=1)
    return gradient(problem, lambda logits: probabilities_of_groups(problem, groups, orders, logits) @ best)


def percent(numbers):
    return ", ".join(f"{100 * number:.1f}" for number in numbers)


LAMBDAS = {
    "`lam: 1`": ({"lam": 1.0}, "0.0, 0.0, 0.0", "0.0, 0.0, 0.0", "0.0, 0.0, 0.0"),
    "`lam: 0.95`": ({"lam": 0.95}, "0.0, 0.0, 0.0", "8.3, 4.1, 2.1", "4.3, 1.8, 2.6"),
    "`lam: 0.5`": ({"lam": 0.5}, "0.0, 0.0, 0.0", "84.8, 40.7, 34.4", "42.3, 18.0, 25.3"),
    "`lam_policy: 0.5`, `lam_critic: 1`": (
        {"lam_policy": 0.5, "lam_critic": 1.0},
        "0.0, 0.0, 0.0",
        "84.8, 40.7, 34.4",
        "0.0, 0.0, 0.0",
    ),
    "`lam_policy: adaptive`, `lam_alpha: 1`": ({"alpha": 1.0}, "3.1, 2.8, 0.8", "62.8, 31.3, 22.5", None),
    "`gae(lam=0.5, turn_lam=1)`": ({"lam": 0.5, "turn_lam": 1.0}, "0.0, 0.0, 0.0", "84.8, 5.3, 0.0", "42.3, 15.9, 0.0"),
}
"""Each setting of GAE, and in percent for one, two and three turns the bias of its update with an exact critic and with
one that errs, and that of the returns which the latter learns. `None`: not `lam_policy`'s.
"""

GROUPS = {
    "rloo": ("0.0, 0.0, 0.0", "68.9, 6.7, 5.7"),
    "grpo": ("61.0, 28.8, 13.1", "10.9, 35.1, 14.8"),
    "qae 0.2": ("64.7, 32.7, 4.6", "11.6, 38.9, 9.5"),
    "qae 0.4": ("49.1, 27.4, 19.6", "24.6, 33.7, 20.8"),
    "grpo_passk": ("81.7, 25.5, 3.9", "22.5, 31.9, 8.7"),
    "gdpo": ("93.4, 23.7, 51.2", "45.1, 30.1, 52.8"),
}
"""Of each estimator, in percent for one, two and three turns, the misalignment with the gradient of the expected score
and with that of the expected best score of three.
"""


def test_the_enumeration_is_complete():
    # One turn: 1 + 2 + 4 * 3. A reply doubles what is behind it: 1 + 4 + 8 * 3, and 1 + 4 + 16 * 3.
    for problem, count in zip(PROBLEMS.values(), (15, 29, 53), strict=True):
        weights = problem.probabilities(problem.logits)
        assert len(weights) == count and weights.sum().item() == pytest.approx(1, abs=1e-12)
        assert problem.mask.sum(dim=1).unique().tolist() == [1, 2, 3]
        assert policy_gradient(problem).norm() > 0.1
        assert problem.values()[0].item() == pytest.approx((weights @ problem.scores).item())


@pytest.mark.parametrize("setting", LAMBDAS)
def test_the_bias_of_gae_is_as_stated(setting):
    rates, exact, errs, of_returns = LAMBDAS[setting]
    problems = PROBLEMS.values()
    assert percent(bias_of_the_update(problem, rates, errs=False) for problem in problems) == exact
    assert percent(bias_of_the_update(problem, rates, errs=True) for problem in problems) == errs
    if of_returns is not None:
        assert percent(bias_of_the_returns(problem, rates) for problem in problems) == of_returns


@pytest.mark.parametrize("errs", [False, True])
@pytest.mark.parametrize("rates", [{"lam": 1.0}, {"lam": 0.3, "turn_lam": 1.0}], ids=str)
def test_lambda_one_between_any_two_decisions_is_unbiased(rates, errs):
    # In three turns every step from one decision to the next crosses a hole.
    problem = PROBLEMS[3]
    assert bias_of_the_update(problem, rates, errs=errs) < 1e-12
    assert bias_of_the_returns(problem, rates) < 1e-12


@pytest.mark.parametrize("turns", COLUMNS)
def test_any_lambda_is_unbiased_with_an_exact_critic_unless_it_depends_on_what_follows(turns):
    problem = PROBLEMS[turns]
    for rates in ({"lam": 0.0}, {"lam": 0.7, "turn_lam": 0.2}, {"lam_policy": 0.4, "lam_critic": 1.0}):
        assert bias_of_the_update(problem, rates, errs=False) < 1e-12
    # The length of a response is decided by later tokens, and with it the lambda of earlier ones.
    assert bias_of_the_update(problem, {"alpha": 1.0}, errs=False) > 0.005


@pytest.mark.parametrize("turns", COLUMNS)
def test_the_critics_lambda_does_not_change_the_update(turns):
    problem = PROBLEMS[turns]
    plain, decoupled = {"lam": 0.5}, {"lam_policy": 0.5, "lam_critic": 1.0}
    assert_close(estimated(problem, decoupled, errs=True).advantages, estimated(problem, plain, errs=True).advantages)
    assert bias_of_the_returns(problem, decoupled) < 1e-12


@pytest.mark.parametrize("estimator", GROUPS)
def test_the_misalignment_of_group_estimators_is_as_stated(estimator):
    score, best = GROUPS[estimator]
    updates = {turns: update_of_groups(turns, estimator) for turns in COLUMNS}
    assert percent(misalignment(updates[turns], policy_gradient(PROBLEMS[turns])) for turns in COLUMNS) == score
    assert percent(misalignment(updates[turns], gradient_of_the_best(turns)) for turns in COLUMNS) == best


def test_the_lead_of_the_best_without_the_std_is_the_gradient_of_the_expected_best():
    # best - best of the others is 0 for all rows but the best one. Here the lead is written out, and the estimator's
    # division by the std is what its misalignment comes from.
    groups, orders = groups_of(3)
    problem = PROBLEMS[3]
    scores = problem.scores[groups]
    lead = scores - scores.sort(dim=1).values[:, -2:-1]
    rows, weights = groups.flatten(), probabilities_of_groups(problem, groups, orders, problem.logits)
    advantages = lead.clamp_min(0.0).flatten().unsqueeze(1) * problem.mask[rows]
    update = average_update(problem, advantages, rows, weights.repeat_interleave(GROUP))
    assert relative_error(update, gradient_of_the_best(3)) < 1e-12


def test_the_documented_biases_are_those_of_the_tests():
    text = DOCS.read_text(encoding="utf-8")
    for setting, (_, *numbers) in LAMBDAS.items():
        assert " | ".join([f"| {setting}", *("" if n is None else n for n in numbers)]).strip() in text, setting
    for estimator, numbers in GROUPS.items():
        name, _, quantile = estimator.partition(" ")
        shown = f"`{name}`" + (f", quantile {quantile}" if quantile else "")
        assert " | ".join([f"| {shown}", *numbers]) in text, estimator
