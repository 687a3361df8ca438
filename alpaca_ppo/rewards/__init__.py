"""Reward sources, and the `RewardScorer` that checks their scores and adds them up."""

from alpaca_ppo.rewards.adapter_model import AdapterClassifier
from alpaca_ppo.rewards.batch import RewardBatch, RewardError
from alpaca_ppo.rewards.build import build_reward
from alpaca_ppo.rewards.remote import RemoteReward
from alpaca_ppo.rewards.reward_function import FailureHandling, FunctionReward
from alpaca_ppo.rewards.reward_model import ModelReward
from alpaca_ppo.rewards.scorer import RewardScorer

__all__ = [
    "AdapterClassifier", "FailureHandling", "FunctionReward", "ModelReward", "RemoteReward", "RewardBatch",
    "RewardError", "RewardScorer", "build_reward",
]  # fmt: skip
