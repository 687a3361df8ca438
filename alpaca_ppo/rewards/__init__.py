"""Rewards: python functions, sequence classifiers and weighted lists of both, as one callable that scores responses.

Leaves out every penalty (`penalty_reward_value`, KL): those are the trainer's.
"""

from alpaca_ppo.rewards.batch import RewardBatch, RewardError
from alpaca_ppo.rewards.functions import FunctionReward, load_reward_function
from alpaca_ppo.rewards.models import ModelReward
from alpaca_ppo.rewards.scorer import RewardResult, RewardScorer, build_reward

__all__ = [
    "FunctionReward",
    "ModelReward",
    "RewardBatch",
    "RewardError",
    "RewardResult",
    "RewardScorer",
    "build_reward",
    "load_reward_function",
]
