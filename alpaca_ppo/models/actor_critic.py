"""Policy and critic in one module, so that one wrapper (DDP, DeepSpeed) holds all that trains."""

from typing import NamedTuple

from torch import Tensor, nn

from alpaca_ppo.batching import pack_rows
from alpaca_ppo.models.critic_heads import Critic
from alpaca_ppo.models.policy import Policy, response_states, unpack


class ActorCriticOutputs(NamedTuple):
    """What one pass says of the response tokens; each (B, R), zero outside the response mask."""

    logprobs: Tensor
    """In nats."""
    entropies: Tensor
    """In nats."""
    values: Tensor
    """Value of the state before the token, in reward units."""


class ActorCritic(nn.Module):
    """The policy that is trained and its critic.

    Args:
        policy: the wrapped causal language model.
        critic: a head with a backbone of its own (layout `separate`) or without (layout `shared`: it reads the
            policy's states).
    """

    def __init__(self, policy: Policy, critic: Critic) -> None:
        super().__init__()
        self.policy = policy
        self.critic = critic

    def forward(
        self,
        queries: Tensor,
        query_attn_masks: Tensor,
        responses: Tensor,
        response_mask: Tensor,
        *,
        temperature: float,
        chunk_size: int,
    ) -> ActorCriticOutputs:
        """Log-probabilities, entropies and values (B, R) of `responses` (B, R) after `queries` (B, Q).

        Args:
            queries: (B, Q) int64, left-padded, with `query_attn_masks` (B, Q), 1 = real.
            responses: (B, R) int64, right-padded, with `response_mask` (B, R), True = chosen by the policy.
            temperature: the logits are divided by it.
            chunk_size: tokens whose logits are in memory at once.
        """
        packed = pack_rows(queries, query_attn_masks, responses, response_mask)
        states = self.policy.states(packed)
        outputs = self.policy.score(states, packed, responses, temperature=temperature, chunk_size=chunk_size)
        if self.critic.backbone is not None:
            states = response_states(self.critic.backbone, packed)
        return ActorCriticOutputs(*outputs, unpack(self.critic.head(states), packed, responses))
