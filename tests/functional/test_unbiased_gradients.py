"""Which advantages give the policy gradient itself, checked without sampling: every response is enumerated.

A softmax policy over 3 tokens with logits of its own for each of the 13 prefixes writes 3 tokens; token 0 stops, and
what follows it is masked. The expectation of an estimate is then a finite sum over the 27 responses, or over the 27^2
pairs of them for the estimators that compare the responses of a group, and the gradient of the expected return comes
from differentiating the probabilities.

Claimed to be unbiased: `rloo`, `remax` with the greedy response's score, and returns-to-go without whitening.
`grpo_no_std` is (n - 1) / n of the gradient, because a response is part of its own baseline. Biased, and claimed
nowhere: `grpo` (divides by a std that the response itself moved), `opo` (weighs its own response into the baseline),
whitening (`reinforce_plus_plus`, `reinforce_plus_plus_baseline`: mean and std contain the response).
"""

import pytest
import torch
from torch.testing import assert_close

from alpaca_ppo.functional import group_advantages, policy_loss, reinforce_plus_plus, remax

VOCABULARY, LENGTH, STOP = 3, 3, 0
RESPONSES = torch.cartesian_prod(*[torch.arange(VOCABULARY)] * LENGTH)
N = len(RESPONSES)
STOPS = (RESPONSES == STOP).long()
MASK = STOPS.cumsum(dim=1) - STOPS == 0
# Number of each prefix: 0 for the empty one, 1 to 3 after one token, 4 to 12 after two, 13 to 39 after three.
FIRST, SECOND, THIRD = RESPONSES.unbind(dim=1)
NODES = torch.stack([torch.zeros(N).long(), 1 + FIRST, 4 + 3 * FIRST + SECOND, 13 + 9 * FIRST + 3 * SECOND + THIRD], 1)

GENERATOR = torch.Generator().manual_seed(0)
LOGITS = torch.randn(13, VOCABULARY, dtype=torch.float64, generator=GENERATOR)
# A reward for each token, which depends on the whole prefix that it ends.
REWARDS = torch.where(MASK, torch.randn(40, dtype=torch.float64, generator=GENERATOR)[NODES[:, 1:]], 0.0)
SCORES = REWARDS.sum(dim=1)


def response_logprobs(logits):
    """(27, 3): of each token of each response, those after the stop token included."""
    return logits.log_softmax(dim=1)[NODES[:, :-1], RESPONSES]


PROBABILITIES = response_logprobs(LOGITS).sum(dim=1).exp()


def policy_gradient():
    """Of the expected score, by differentiating the probabilities of the responses."""
    logits = LOGITS.clone().requires_grad_()
    expected_score = (response_logprobs(logits).sum(dim=1).exp() * SCORES).sum()
    return torch.autograd.grad(expected_score, logits)[0]


def expected_estimate(advantages, rows, probabilities, rows_per_sample):
    """Expectation of the ascent direction of `policy_loss` at the old policy. `rows` are the responses of all samples,
    each of `rows_per_sample` rows; `probabilities` is each row's sample's.
    """
    logits = LOGITS.clone().requires_grad_()
    logprobs = response_logprobs(logits)[rows]
    loss = policy_loss(
        logprobs, logprobs.detach(), advantages, MASK[rows],
        cliprange_low=0.2, cliprange_high=0.2, loss_agg_mode="seq-mean-token-sum",
        weights=probabilities.unsqueeze(1).expand(-1, LENGTH), denominator=rows_per_sample,
    ).loss  # fmt: skip
    return -torch.autograd.grad(loss, logits)[0]


def expected_group_estimate(estimator):
    """Over all pairs of responses, each pair one group."""
    pairs = torch.cartesian_prod(torch.arange(N), torch.arange(N))
    rows, ids = pairs.flatten(), torch.arange(len(pairs)).repeat_interleave(2)
    advantages = group_advantages(SCORES[rows], ids, MASK[rows], estimator=estimator)
    return expected_estimate(advantages, rows, PROBABILITIES[pairs].prod(dim=1)[ids], rows_per_sample=2)


def expected_single_estimate(advantages):
    """Over all responses, each a sample of its own."""
    return expected_estimate(advantages, torch.arange(N), PROBABILITIES, rows_per_sample=1)


def greedy_score():
    node, score = 0, 0.0
    for _ in range(LENGTH):
        token = LOGITS[node].argmax().item()
        row = ((NODES[:, :-1] == node) & (RESPONSES == token)).nonzero()[0]
        score += REWARDS[row[0], row[1]].item()
        node = NODES[row[0], row[1] + 1].item()
        if token == STOP:
            break
    return score


def test_the_enumeration_is_complete_and_the_gradient_is_not_zero():
    assert N == 27 and PROBABILITIES.sum().item() == pytest.approx(1)
    assert MASK.sum(dim=1).unique().tolist() == [1, 2, 3]
    assert policy_gradient().abs().max() > 0.1


def test_leave_one_out_is_unbiased():
    assert_close(expected_group_estimate("rloo"), policy_gradient(), rtol=0, atol=1e-5)


def test_the_group_mean_as_baseline_gives_half_the_gradient_in_groups_of_two():
    assert_close(expected_group_estimate("grpo_no_std"), policy_gradient() / 2, rtol=0, atol=1e-5)


def test_remax_is_unbiased():
    baseline = torch.full((N,), greedy_score(), dtype=torch.float64)
    assert baseline[0].abs() > 0.1
    advantages = remax(REWARDS, baseline, MASK).advantages
    assert_close(expected_single_estimate(advantages), policy_gradient(), rtol=0, atol=1e-5)


def test_returns_to_go_are_unbiased():
    returns = reinforce_plus_plus(REWARDS, MASK, gamma=1.0).returns
    assert_close(expected_single_estimate(returns), policy_gradient(), rtol=0, atol=1e-5)


def test_the_std_of_the_group_changes_the_direction():
    # What separates the claims above from a check that accepts anything. Of a pair, (s - mean) / std is +-1 / sqrt(2).
    estimate, gradient = expected_group_estimate("grpo").flatten(), policy_gradient().flatten()
    assert torch.cosine_similarity(estimate, gradient, dim=0) < 0.999
