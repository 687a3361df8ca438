"""A critic: a head, and where its hidden states come from."""

from torch import nn

from alpaca_ppo.models.critic_heads import CriticHead


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
