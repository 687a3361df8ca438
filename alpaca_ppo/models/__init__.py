"""Policy, critic and reference: wrappers that compute log-probabilities and values of responses, and their loading."""

from alpaca_ppo.models.actor_critic import ActorCritic, ActorCriticOutputs, Critic
from alpaca_ppo.models.critic_heads import (
    C51Head,
    CriticHead,
    HeadLinear,
    HeadOutputs,
    HLGaussHead,
    IQNHead,
    QuantileHead,
    ScalarHead,
    register_critic_head,
)
from alpaca_ppo.models.factory import build_actor_critic
from alpaca_ppo.models.loading import load_causal_lm, load_sequence_classifier
from alpaca_ppo.models.policy import Policy, disable_dropout
from alpaca_ppo.models.reference import AdapterReference, CopiedReference, Reference
from alpaca_ppo.models.saved_critic import is_critic_folder, load_critic, write_critic

__all__ = [
    "ActorCritic", "ActorCriticOutputs", "AdapterReference", "C51Head", "CopiedReference", "Critic", "CriticHead",
    "HLGaussHead", "HeadLinear", "HeadOutputs", "IQNHead", "Policy", "QuantileHead", "Reference", "ScalarHead",
    "build_actor_critic", "disable_dropout", "is_critic_folder", "load_causal_lm", "load_critic",
    "load_sequence_classifier", "register_critic_head", "write_critic",
]  # fmt: skip
