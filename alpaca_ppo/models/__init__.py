"""Policy, critic and reference: wrappers that give log-probabilities and values of responses, and how they are
loaded.
"""

from alpaca_ppo.models.actor_critic import ActorCritic
from alpaca_ppo.models.critic_heads import Critic, ScalarHead
from alpaca_ppo.models.loading import (
    build_actor_critic,
    frozen_copy,
    load_causal_lm,
    load_sequence_classifier,
)
from alpaca_ppo.models.policy import Policy, disable_dropout

__all__ = [
    "ActorCritic",
    "Critic",
    "Policy",
    "ScalarHead",
    "build_actor_critic",
    "disable_dropout",
    "frozen_copy",
    "load_causal_lm",
    "load_sequence_classifier",
]
