"""How the configuration selects an estimator; the mathematics is tested in tests/functional."""

from dataclasses import replace

import pytest
import torch
from torch import nan, tensor

from alpaca_ppo import PPOConfig
from alpaca_ppo.functional import AdvantageInputs, Advantages, register_adv_estimator
from alpaca_ppo.ppo.advantages import estimate_advantages
from tests.registered import temporary_choices

MASK = tensor([[True, True], [True, False]])
REWARDS = tensor([[0.0, 1.0], [3.0, 0.0]])
INPUTS = AdvantageInputs(REWARDS, None, MASK)
GROUPED = AdvantageInputs(REWARDS, None, MASK, prompt_ids=tensor([4, 4]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "adv_estimator is 'gae' but `values` is missing; rollout"),
        ({"adv_estimator": "remax"}, "adv_estimator is 'remax' but `baseline_scores` is missing; rollout"),
        ({"adv_estimator": "rloo", "num_return_sequences": 2}, "is 'rloo' but `prompt_ids` is missing"),
    ],
)
def test_what_an_estimator_lacks_is_named(settings, message):
    with pytest.raises(ValueError, match=message):
        estimate_advantages(INPUTS, PPOConfig(**settings))


def test_the_sources_that_gdpo_compares_are_named_when_they_are_missing():
    with pytest.raises(ValueError, match="adv_estimator is 'gdpo' but `scores_by_source` is missing; rollout"):
        estimate_advantages(GROUPED, PPOConfig(adv_estimator="gdpo", num_return_sequences=2))


def test_gae_takes_the_lambdas_of_policy_and_critic():
    inputs = AdvantageInputs(REWARDS, tensor([[1.0, 2.0], [0.5, 0.0]]), MASK)

    def estimate(**options):
        return [x.tolist() for x in estimate_advantages(inputs, PPOConfig(whiten_advantages=False, **options))]

    # The first row's deltas are 0 + 2 - 1 and 1 - 2, so A0 = 1 - lam and its return 2 - lam.
    assert estimate(lam=0.5) == [[[0.5, -1.0], [2.5, 0.0]], [[1.5, 1.0], [3.0, 0.0]]]
    assert estimate(lam=0.5, lam_policy=0.0) == [[[1.0, -1.0], [2.5, 0.0]], [[1.5, 1.0], [3.0, 0.0]]]
    assert estimate(lam=0.5, lam_critic=1) == [[[0.5, -1.0], [2.5, 0.0]], [[1.0, 1.0], [3.0, 0.0]]]
    # 1 - 1 / (2 * 2) = 0.75 for the row of two tokens.
    adaptive = {"lam_policy": "adaptive", "lam_alpha": 2.0, "lam_critic": 0.0}
    assert estimate(**adaptive) == [[[0.25, -1.0], [2.5, 0.0]], [[2.0, 1.0], [3.0, 0.0]]]


def test_qae_takes_its_quantile():
    inputs = replace(GROUPED, rewards=tensor([[0.0, 1.0], [4.0, 0.0]]))
    settings = {"adv_estimator": "qae", "num_return_sequences": 2}
    # 1 and 4 are 3 / sqrt(2) of std: the baseline is the lower one, which at least 0.4 of the group do not exceed.
    outcome = estimate_advantages(inputs, PPOConfig(**settings))
    assert outcome.advantages[:, 0].tolist() == pytest.approx([0.0, 2**0.5], abs=1e-5)


def gdpo(rewards, by_source, **options):
    mask = torch.ones(len(rewards), 1, dtype=torch.bool)
    inputs = AdvantageInputs(
        tensor(rewards).unsqueeze(1), None, mask, prompt_ids=torch.zeros(len(rewards)), scores_by_source=by_source
    )
    return estimate_advantages(inputs, PPOConfig(adv_estimator="gdpo", num_return_sequences=3, **options))


def test_gdpo_weighs_the_sources_and_adds_what_else_is_in_the_rewards():
    by_source = tensor([[0.0, 30.0], [1.0, 0.0], [2.0, 0.0]])
    # Weighted scores 60, 1 and 2; the rewards have 0.4, 0.1 and -0.5 more. Normalised sources: -1, 0, 1 and
    # 2, -1, -1 over sqrt(3).
    outcome = gdpo([60.4, 1.1, 1.5], by_source, reward_weights=[1.0, 2.0])
    sums = [-1 + 4 / 3**0.5 + 0.4, -2 / 3**0.5 + 0.1, 1 - 2 / 3**0.5 - 0.5]
    std = (sum(x * x for x in sums) / 2) ** 0.5
    assert outcome.advantages[:, 0].tolist() == pytest.approx([x / std for x in sums], abs=1e-4)
    assert outcome.returns[:, 0].tolist() == pytest.approx([60.4, 1.1, 1.5])


def test_gdpo_of_responses_that_no_source_tells_apart_is_zero_whatever_the_rounding():
    # In float32, 0.1 + 0.7 and its neighbours; NaN = no opinion.
    rewards = tensor([0.8, 0.8, 0.8])
    rewards[1] = rewards[1].nextafter(tensor(1.0))
    by_source = tensor([[0.1, 0.7, nan]] * 3)
    assert gdpo(rewards.tolist(), by_source).advantages.eq(0).all()
    # A KL penalty is more than rounding, and the only difference.
    assert gdpo([0.8, 0.79, 0.81], by_source).advantages[:, 0].tolist() == pytest.approx([0.0, -1.0, 1.0], abs=1e-3)


def test_gae_whitens_rewards_and_advantages_where_it_is_asked_to_and_never_the_returns():
    inputs = AdvantageInputs(REWARDS, tensor([[1.0, 2.0], [0.5, 0.0]]), MASK)
    # gamma = lam = 1: returns to go 1, 1 and 3, less the values 1, 2 and 0.5.
    plain = estimate_advantages(inputs, PPOConfig(lam=1.0, whiten_advantages=False))
    assert plain.advantages.tolist() == [[0.0, -1.0], [2.5, 0.0]] and plain.returns.tolist() == [[1.0, 1.0], [3.0, 0.0]]
    whitened = estimate_advantages(inputs, PPOConfig(lam=1.0))
    # Mean 0.5; variance (0.25 + 2.25 + 4) / 2 = 3.25.
    expected = [(0.0 - 0.5) / 3.25**0.5, (-1.0 - 0.5) / 3.25**0.5, (2.5 - 0.5) / 3.25**0.5]
    assert whitened.advantages[MASK].tolist() == pytest.approx(expected)
    assert torch.equal(whitened.returns, plain.returns)
    # Rewards 0, 1, 3 of mean 4/3 and variance (16 + 1 + 25) / 9 / 2 = 7/3 are scaled about their mean.
    scaled = estimate_advantages(inputs, PPOConfig(lam=1.0, whiten_rewards=True)).returns
    rewards = [(reward - 4 / 3) / (7 / 3) ** 0.5 + 4 / 3 for reward in (0.0, 1.0, 3.0)]
    assert scaled[MASK].tolist() == pytest.approx([rewards[0] + rewards[1], rewards[1], rewards[2]])


def test_a_groups_score_is_the_sum_of_its_shaped_rewards():
    outcome = estimate_advantages(GROUPED, PPOConfig(adv_estimator="rloo", num_return_sequences=2))
    # Scores 0 + 1 = 1 and 3: each less the other.
    assert torch.equal(outcome.advantages, tensor([[-2.0, -2.0], [2.0, 0.0]]))
    assert torch.equal(outcome.returns, tensor([[1.0, 1.0], [3.0, 0.0]]))


def test_a_registered_estimator_gets_the_inputs_and_what_it_needs_by_its_traits():
    with temporary_choices():

        @register_adv_estimator("halved", needs_critic=True, needs_greedy_baseline=True)
        def halved(inputs, args):
            return Advantages(inputs.rewards * args.lam, inputs.scores[:, None] * inputs.response_mask)

        args = PPOConfig(adv_estimator="halved", lam=0.5)
        assert args.uses_critic
        given = {"scores": tensor([1.0, 3.0]), "baseline_scores": tensor([0.0, 0.0])}
        outcome = estimate_advantages(AdvantageInputs(REWARDS, torch.zeros(2, 2), MASK, **given), args)
        assert outcome.advantages.tolist() == [[0.0, 0.5], [1.5, 0.0]]
        assert outcome.returns.tolist() == [[1.0, 1.0], [3.0, 0.0]]
        with pytest.raises(ValueError, match="adv_estimator is 'halved' but `values` is missing"):
            estimate_advantages(AdvantageInputs(REWARDS, None, MASK, **given), args)
        with pytest.raises(ValueError, match="adv_estimator is 'halved' but `baseline_scores` is missing"):
            estimate_advantages(AdvantageInputs(REWARDS, torch.zeros(2, 2), MASK), args)


def test_a_registered_estimator_that_discounts_says_so():
    with temporary_choices():
        register_adv_estimator("discounted", uses_gamma=True)(object)
        register_adv_estimator("undiscounted")(object)
        assert PPOConfig(adv_estimator="discounted", gamma=0.9).gamma == 0.9
        with pytest.raises(ValueError, match="gamma is 0.9"):
            PPOConfig(adv_estimator="undiscounted", gamma=0.9)


def test_what_a_registered_estimator_returns_is_checked():
    with temporary_choices():
        register_adv_estimator("mine")(lambda inputs, args: inputs.rewards)
        with pytest.raises(ValueError, match="the adv_estimator 'mine' returned tensor"):
            estimate_advantages(INPUTS, PPOConfig(adv_estimator="mine"))
