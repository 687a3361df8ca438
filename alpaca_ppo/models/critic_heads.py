"""Critics: a backbone (its own, or the policy's) and a head that reads a value from each hidden state.

Only the scalar head is here. Heads compute in float32 at least, whatever the backbone's dtype.
"""

import torch
from torch import Tensor, nn


class ScalarHead(nn.Module):
    """A linear value head without bias, zero at the start: V(s) = w . h(s), so the first advantages are the returns
    themselves.

    Args:
        hidden_size: H of the backbone.
        weight: (1, H) to start from, as the `score` weight of a reward model; zeros by default.
        dtype: of the weight; half precision is raised to float32.
    """

    def __init__(self, hidden_size: int, *, weight: Tensor | None = None, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        start = torch.zeros(1, hidden_size) if weight is None else weight.detach().clone()
        self.weight = nn.Parameter(start.to(torch.promote_types(dtype, torch.float32)))

    def forward(self, states: Tensor) -> Tensor:
        """Values (N,) of hidden states (N, H)."""
        with torch.autocast(states.device.type, enabled=False):
            return nn.functional.linear(states.to(self.weight.dtype), self.weight).squeeze(-1)


class Critic(nn.Module):
    """A value head, with a backbone of its own or (None) on the policy's hidden states."""

    def __init__(self, head: ScalarHead, backbone: nn.Module | None) -> None:
        super().__init__()
        self.head = head
        self.backbone = backbone
