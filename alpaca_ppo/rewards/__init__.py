"""Reward sources: Python functions, sequence classifiers, HTTP servers, and weighted lists of both behind one callable.

`scoring.score_responses` applies them to sampled responses, with the penalty for a missing stop token. The KL penalty
is part of reward shaping, in `functional.shaping`.
"""

from alpaca_ppo.rewards.adapter_model import AdapterClassifier
from alpaca_ppo.rewards.batch import RewardBatch, RewardError
from alpaca_ppo.rewards.build import build_reward
from alpaca_ppo.rewards.remote import RemoteReward
from alpaca_ppo.rewards.reward_function import FailurePolicy, FunctionReward
from alpaca_ppo.rewards.reward_model import ModelReward
from alpaca_ppo.rewards.scorer import RewardScorer

__all__ = [
    "AdapterClassifier",
    "FailurePolicy",
    "FunctionReward",
    "ModelReward",
    "RemoteReward",
    "RewardBatch",
    "RewardError",
    "RewardScorer",
    "build_reward",
]
