"""Policy, critic and reference: wrappers that give log-probabilities and values of responses, and how they are
loaded.
"""

from alpaca_ppo.models.actor_critic import ActorCritic, ActorCriticOutputs
from alpaca_ppo.models.adapter_checks import put_adapter
from alpaca_ppo.models.adapter_folders import (
    check_fit,
    check_reward_adapter,
    check_whole_model,
    is_adapter,
    read_policy_adapter,
    read_reward_adapter,
)
from alpaca_ppo.models.adapters import (
    POLICY,
    REFERENCE,
    VALUE,
    AdapterSet,
    adapters_in,
    attach,
    load_adapters,
)
from alpaca_ppo.models.critic import Critic
from alpaca_ppo.models.critic_folders import is_critic_folder, load_critic, write_critic, write_critic_adapter
from alpaca_ppo.models.critic_heads import CriticHead, make_head
from alpaca_ppo.models.loading import (
    build_actor_critic,
    load_causal_lm,
    load_sequence_classifier,
)
from alpaca_ppo.models.merging import merged_weights
from alpaca_ppo.models.policy import Policy, disable_dropout
from alpaca_ppo.models.references import (
    AdapterReference,
    CopiedReference,
    Reference,
    frozen_copy,
    frozen_start,
)
from alpaca_ppo.models.reward_adapter import AdapterClassifier

__all__ = [
    "POLICY",
    "REFERENCE",
    "VALUE",
    "ActorCritic",
    "ActorCriticOutputs",
    "AdapterClassifier",
    "AdapterReference",
    "AdapterSet",
    "CopiedReference",
    "Critic",
    "CriticHead",
    "Policy",
    "Reference",
    "adapters_in",
    "attach",
    "build_actor_critic",
    "check_fit",
    "check_reward_adapter",
    "check_whole_model",
    "disable_dropout",
    "frozen_copy",
    "frozen_start",
    "is_adapter",
    "is_critic_folder",
    "load_adapters",
    "load_causal_lm",
    "load_critic",
    "load_sequence_classifier",
    "make_head",
    "merged_weights",
    "put_adapter",
    "read_policy_adapter",
    "read_reward_adapter",
    "write_critic",
    "write_critic_adapter",
]
