"""Policy and critic in one module, so that one wrapper (DDP, DeepSpeed) holds all that trains."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from alpaca_ppo.adapters.adapter_set import VALUE
from alpaca_ppo.functional.packing import PackedRows, pack_rows
from alpaca_ppo.models.critic_heads import CriticHead
from alpaca_ppo.models.policy import Policy, response_states, unpack


class ActorCriticOutputs(NamedTuple):
    """What one pass says of the response tokens, zero outside the response mask; None for what was not asked of it."""

    logprobs: Tensor | None
    """(B, R) in nats."""
    entropies: Tensor | None
    """(B, R) in nats."""
    values: Tensor | None
    """(B, R) value of the state before the token, in reward units: what GAE reads."""
    value_means: Tensor | None
    """(B, R) mean of the law that a distributional critic learns; differs from `values` where it has a risk level."""
    predictions: Tensor | None
    """What the critic's loss takes: (B, R) values, (B, R, atoms) logits or (B, R, K) quantiles."""


class Critic(nn.Module):
    """A value head, with a backbone of its own, with an adapter of its own on the policy's base, or on the policy's
    hidden states.

    Args:
        head: the head.
        backbone: of the critic alone; None = the policy's.
        has_adapter: True reads the hidden states of the policy's base under the adapter `value`.
    """

    def __init__(self, head: CriticHead, backbone: nn.Module | None, *, has_adapter: bool = False) -> None:
        super().__init__()
        assert backbone is None or not has_adapter
        self.head = head
        self.backbone = backbone
        self.has_adapter = has_adapter

    @property
    def shares_states(self) -> bool:
        """Whether the head reads the very states from which the policy's logits come."""
        return self.backbone is None and not self.has_adapter


class ActorCritic(nn.Module):
    """The policy that is trained and its critic.

    Args:
        policy: the wrapped causal language model.
        critic: a head with a backbone of its own (layout `separate`), an adapter of its own on the policy's base
            (`adapter`), or neither (`shared`: it reads the policy's states); None for estimators without a critic.
    """

    def __init__(self, policy: Policy, critic: Critic | None) -> None:
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
        with_policy: bool = True,
        with_critic: bool = True,
        value_taus: Tensor | None = None,
    ) -> ActorCriticOutputs:
        """Log-probabilities, entropies and values (B, R) of `responses` (B, R) after `queries` (B, Q).

        Args:
            queries: (B, Q) int64, left-padded, with `query_attn_masks` (B, Q), 1 = real.
            responses: (B, R) int64, right-padded, with `response_mask` (B, R), True = chosen by the policy.
            temperature: the logits are divided by it.
            chunk_size: tokens whose logits are in memory at once.
            with_policy: False runs the critic alone; no gradient reaches the policy then.
            with_critic: False runs the policy alone, as where there is no critic.
            value_taus: (K,) quantile levels of `predictions`, for an iqn critic in training.
        """
        packed = pack_rows(queries, query_attn_masks, responses, response_mask)
        logprobs = entropies = states = None
        shared = self.critic is not None and self.critic.shares_states
        if with_policy or (with_critic and shared):
            with torch.set_grad_enabled(torch.is_grad_enabled() and with_policy):
                states = self.policy.states(packed)
        if with_policy:
            assert states is not None
            logprobs, entropies = self.policy.score(
                states, packed, responses, temperature=temperature, chunk_size=chunk_size
            )
        if self.critic is None or not with_critic:
            return ActorCriticOutputs(logprobs, entropies, None, None, None)
        if not shared:
            states = self._critic_states(packed)
        values, means, predictions = (unpack(part, packed, responses) for part in self.critic.head(states, value_taus))
        return ActorCriticOutputs(
            logprobs, entropies, values, means if self.critic.head.distributional else None, predictions
        )

    def critic_parameters(self) -> list[nn.Parameter]:
        """What trains for the critic alone: its head, its backbone or its adapter."""
        if self.critic is None:
            return []
        own = [p for p in self.critic.parameters() if p.requires_grad]
        return own + (
            self.policy.adapters.parameters_of(VALUE) if self.critic.has_adapter and self.policy.adapters else []
        )

    def policy_parameters(self) -> list[nn.Parameter]:
        """What trains for the policy, and for a critic that reads its hidden states."""
        critic = {id(p) for p in self.critic_parameters()}
        return [p for p in self.parameters() if p.requires_grad and id(p) not in critic]

    @contextmanager
    def critic_active(self) -> Iterator[None]:
        """Inside, the base is the critic's, where the critic is an adapter on it."""
        if self.critic is None or not self.critic.has_adapter:
            yield
            return
        assert self.policy.adapters is not None
        with self.policy.adapters.active(VALUE):
            yield

    def _critic_states(self, packed: PackedRows) -> Tensor:
        assert self.critic is not None
        if self.critic.backbone is not None:
            return response_states(self.critic.backbone, packed)
        adapters = self.policy.adapters
        assert adapters is not None
        if torch.is_grad_enabled() and adapters.peft.active_adapter != VALUE and self.policy.recomputes:
            raise ValueError(
                "gradient_checkpointing would compute the critic's activations again with the policy's adapter; run "
                "the critic's forward and backward pass inside critic_active(). A compute_loss of your own makes one "
                "backward pass for both: use critic_layout: shared or separate, or recompute nothing: "
                "gradient_checkpointing: false, and model.gradient_checkpointing_disable() where a model came with it"
            )
        with self.critic_active():
            return self.policy.states(packed)
