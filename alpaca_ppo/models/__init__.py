"""Policy, critic and reference: wrappers that give log-probabilities and values of responses, and how they are
loaded.
"""

from alpaca_ppo.models.actor_critic import ActorCritic, ActorCriticOutputs
from alpaca_ppo.models.critic_folders import is_critic_folder, load_critic, write_critic
from alpaca_ppo.models.critic_heads import Critic, CriticHead, make_head
from alpaca_ppo.models.loading import (
    build_actor_critic,
    frozen_copy,
    load_causal_lm,
    load_sequence_classifier,
)
from alpaca_ppo.models.policy import Policy, disable_dropout

__all__ = [
    "ActorCritic",
    "ActorCriticOutputs",
    "Critic",
    "CriticHead",
    "Policy",
    "build_actor_critic",
    "disable_dropout",
    "frozen_copy",
    "is_critic_folder",
    "load_causal_lm",
    "load_critic",
    "load_sequence_classifier",
    "make_head",
    "write_critic",
]
