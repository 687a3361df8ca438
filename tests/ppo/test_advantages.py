"""The choice of the advantages; their mathematics is tested in tests/functional, their runs in test_algorithms."""

import pytest
import torch

from alpaca_ppo import PPOConfig
from alpaca_ppo.ppo.advantages import estimate_advantages, quantile_levels, rollout_parts
from alpaca_ppo.ppo.rollouts import RolloutParts

MASK = torch.tensor([[True, True], [True, False]])
REWARDS = torch.tensor([[0.0, 1.0], [3.0, 0.0]])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "adv_estimator is 'gae' but `values` is missing; rollout"),
        ({"adv_estimator": "remax"}, "adv_estimator is 'remax' but `baseline_scores` is missing; rollout"),
        ({"adv_estimator": "rloo", "num_return_sequences": 2}, "is 'rloo' but `prompt_ids` is missing; pass it"),
    ],
)
def test_what_an_estimator_lacks_is_named(settings, message):
    with pytest.raises(ValueError, match=message):
        estimate_advantages(REWARDS, None, MASK, prompt_ids=None, baseline_scores=None, args=PPOConfig(**settings))


def test_a_groups_score_is_the_sum_of_its_shaped_rewards():
    args = PPOConfig(adv_estimator="rloo", num_return_sequences=2)
    given = {"prompt_ids": torch.tensor([4, 4]), "baseline_scores": None, "args": args}
    outcome = estimate_advantages(REWARDS, None, MASK, **given)
    # Scores 0 + 1 = 1 and 3: each less the other.
    assert torch.equal(outcome["advantages"], torch.tensor([[-2.0, -2.0], [2.0, 0.0]]))
    assert torch.equal(outcome["returns"], torch.tensor([[1.0, 1.0], [3.0, 0.0]]))


def test_a_rollout_makes_the_passes_that_are_needed():
    assert rollout_parts(PPOConfig()) == RolloutParts(with_policy=True, with_critic=True, greedy_baseline=False)
    sparing = PPOConfig(adv_estimator="remax", old_policy="rollout")
    assert rollout_parts(sparing) == RolloutParts(with_policy=False, with_critic=False, greedy_baseline=True)


def test_quantile_levels_are_the_same_for_the_same_key_alone():
    args = PPOConfig(critic="iqn", num_quantiles=4)
    levels = quantile_levels(args, 1, 2, 3)
    assert levels.shape == (4,) and bool(((levels > 0) & (levels < 1)).all())
    assert torch.equal(levels, quantile_levels(args, 1, 2, 3)) and not torch.equal(
        levels, quantile_levels(args, 1, 3, 2)
    )
    assert quantile_levels(PPOConfig(), 1) is None
