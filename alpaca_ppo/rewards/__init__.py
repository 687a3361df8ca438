"""Reward sources: Python functions, HTTP servers, sequence classifiers and reward adapters on the policy's base. One
`RewardScorer` checks their scores and adds them up.

`scorer.score_responses` applies it to sampled responses, with the penalties for a missing stop and for length. The KL
penalty is part of reward shaping, in `functional.shaping`.
"""

from alpaca_ppo.rewards.adapter_model import AdapterClassifier
from alpaca_ppo.rewards.batch import RewardBatch, RewardError
from alpaca_ppo.rewards.build import build_reward
from alpaca_ppo.rewards.remote import RemoteReward
from alpaca_ppo.rewards.reward_function import FailureHandling, FunctionReward
from alpaca_ppo.rewards.reward_model import ModelReward
from alpaca_ppo.rewards.scorer import RewardScorer

__all__ = [
    "AdapterClassifier",
    "FailureHandling",
    "FunctionReward",
    "ModelReward",
    "RemoteReward",
    "RewardBatch",
    "RewardError",
    "RewardScorer",
    "build_reward",
]
