"""Critics' heads: what reads from each hidden state a value, or the law of the return.

Heads compute in float32 at least, whatever the dtype of the backbone and of their own weights (in a bfloat16 run
DeepSpeed makes those bfloat16), and start at the value 0, so that the first advantages are the returns themselves.
Their losses are in `functional` (`value_loss`, `c51_loss`, `quantile_huber_loss`).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from alpaca_ppo.functional import c51_atoms, cvar_from_categorical, cvar_from_quantiles, quantile_midpoints

HEAD_KINDS = ("scalar", "c51", "quantile", "iqn")


class HeadOutputs(NamedTuple):
    """What a head says of N hidden states."""

    values: Tensor
    """(N,), what GAE reads: the mean, or the CVaR of the head's `risk_level`."""
    means: Tensor
    """(N,), the mean."""
    predictions: Tensor
    """What the head's loss takes: (N,) values, (N, atoms) logits, or (N, K) quantiles."""


class CriticHead(nn.Module, ABC):
    """A map from hidden states (N, H) to `HeadOutputs`.

    Attributes:
        kind: one of HEAD_KINDS.
        hidden_size: H.
        risk_level: None reads the mean; alpha in (0, 1] the mean of the lower alpha tail (CVaR). It may be changed
            between forward passes; it is no part of the weights.
    """

    kind: str

    def __init__(self, hidden_size: int, *, risk_level: float | None = None) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.risk_level = risk_level

    def settings(self) -> dict[str, Any]:
        """What `make_head` needs, besides the hidden size, to build a head that takes this one's weights."""
        return {"kind": self.kind}

    @abstractmethod
    def read(self, states: Tensor, taus: Tensor | None) -> HeadOutputs:
        """`HeadOutputs` of `states` (N, H), already in the dtype to compute in; `taus` as in `forward`."""

    def forward(self, states: Tensor, taus: Tensor | None = None) -> HeadOutputs:
        """What the head says of `states` (N, H), in any dtype.

        Args:
            states: hidden states.
            taus: (K,) in (0, 1), the quantile levels of `predictions`; for the iqn head in training only. Values never
                depend on them.
        """
        with torch.autocast(states.device.type, enabled=False):
            return self.read(states.to(_at_least_float32(next(self.parameters()).dtype)), taus)


class HeadLinear(nn.Linear):
    """A linear layer that computes in the dtype of its input, whatever that of its weights."""

    def forward(self, inputs: Tensor) -> Tensor:
        """(..., outputs) of `inputs` (..., inputs)."""
        return nn.functional.linear(inputs, self.weight.to(inputs.dtype), self.bias.to(inputs.dtype))


class ScalarHead(CriticHead):
    """A linear value head without bias, zero at the start: V(s) = w . h(s).

    Args:
        hidden_size: H of the backbone.
        weight: (1, H) to start from, as the `score` weight of a reward model; zeros by default.
        dtype: of the weight; half precision is raised to float32.
    """

    kind = "scalar"

    def __init__(self, hidden_size: int, *, weight: Tensor | None = None, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(hidden_size)
        start = torch.zeros(1, hidden_size) if weight is None else weight.detach().clone()
        self.weight = nn.Parameter(start.to(_at_least_float32(dtype)))

    def read(self, states: Tensor, taus: Tensor | None) -> HeadOutputs:
        """The linear map, three times."""
        values = nn.functional.linear(states, self.weight.to(states.dtype)).squeeze(-1)
        return HeadOutputs(values, values, values)


class C51Head(CriticHead):
    """Probabilities of `num_atoms` returns spread evenly over [v_min, v_max] (arXiv:1707.06887).

    At the start every state has the same distribution: uniform where the support is symmetric about 0, else tilted
    until its mean is 0, or as near 0 as the support allows. Each atom keeps a thousandth of the uniform probability:
    one that starts much lower would take too many updates to come back.

    Args:
        hidden_size: H of the backbone.
        num_atoms: atoms of the support.
        v_min: least return that can be told apart; smaller ones count as it.
        v_max: greatest one.
        risk_level: see `CriticHead`.
        dtype: of the weights; half precision is raised to float32.
    """

    kind = "c51"

    def __init__(
        self,
        hidden_size: int,
        *,
        num_atoms: int = 51,
        v_min: float = -10.0,
        v_max: float = 10.0,
        risk_level: float | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(hidden_size, risk_level=risk_level)
        self.num_atoms, self.v_min, self.v_max = num_atoms, v_min, v_max
        self.linear = _zero_linear(hidden_size, num_atoms, dtype)
        atoms = c51_atoms(num_atoms, v_min=v_min, v_max=v_max, dtype=torch.float64)
        self.linear.bias.data.copy_(_start(atoms))

    def settings(self) -> dict[str, Any]:
        """Kind and support."""
        return {"kind": self.kind, "num_atoms": self.num_atoms, "v_min": self.v_min, "v_max": self.v_max}

    def read(self, states: Tensor, taus: Tensor | None) -> HeadOutputs:
        """`predictions` are logits."""
        logits = self.linear(states)
        atoms = c51_atoms(self.num_atoms, v_min=self.v_min, v_max=self.v_max, dtype=logits.dtype, device=logits.device)
        probabilities = logits.softmax(dim=-1)
        means = probabilities @ atoms
        if self.risk_level is None:
            return HeadOutputs(means, means, logits)
        return HeadOutputs(cvar_from_categorical(probabilities, atoms, alpha=self.risk_level), means, logits)


class QuantileHead(CriticHead):
    """The quantiles of the return at the levels (i + 1/2) / K (arXiv:1710.10044), all 0 at the start.

    Args:
        hidden_size: H of the backbone.
        num_quantiles: K.
        risk_level: see `CriticHead`.
        dtype: of the weights; half precision is raised to float32.
    """

    kind = "quantile"

    def __init__(
        self,
        hidden_size: int,
        *,
        num_quantiles: int = 32,
        risk_level: float | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(hidden_size, risk_level=risk_level)
        self.num_quantiles = num_quantiles
        self.linear = _zero_linear(hidden_size, num_quantiles, dtype)

    def settings(self) -> dict[str, Any]:
        """Kind and number of quantiles."""
        return {"kind": self.kind, "num_quantiles": self.num_quantiles}

    def read(self, states: Tensor, taus: Tensor | None) -> HeadOutputs:
        """`predictions` are the quantiles."""
        quantiles = self.linear(states)
        means = quantiles.mean(dim=-1)
        if self.risk_level is None:
            return HeadOutputs(means, means, quantiles)
        return HeadOutputs(cvar_from_quantiles(quantiles, alpha=self.risk_level), means, quantiles)


class IQNHead(CriticHead):
    """The quantile function of the return, Z(s, tau) = w . (h(s) * phi(tau)) + b(tau) (arXiv:1806.06923, equation 4).

    phi(tau) = relu(W cos(pi i tau) + c), i = 0 .. embedding_dim - 1. w, b start at 0, and with them every quantile.
    The paper draws levels for each state; here the tokens of an optimizer step share them, so that phi is (K, H) and
    not (N, K, H). The gradient's expectation is the same.

    Args:
        hidden_size: H of the backbone.
        num_quantiles: K levels, where a value is read.
        embedding_dim: cosines.
        risk_level: see `CriticHead`.
        dtype: of the weights; half precision is raised to float32.
    """

    kind = "iqn"

    def __init__(
        self,
        hidden_size: int,
        *,
        num_quantiles: int = 32,
        embedding_dim: int = 64,
        risk_level: float | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(hidden_size, risk_level=risk_level)
        self.num_quantiles, self.embedding_dim = num_quantiles, embedding_dim
        dtype = _at_least_float32(dtype)
        self.embedding = HeadLinear(embedding_dim, hidden_size, dtype=dtype)
        self.bias = _zero_linear(embedding_dim, 1, dtype)
        self.weight = nn.Parameter(torch.zeros(hidden_size, dtype=dtype))

    def settings(self) -> dict[str, Any]:
        """Kind, number of levels and of cosines."""
        return {"kind": self.kind, "num_quantiles": self.num_quantiles, "embedding_dim": self.embedding_dim}

    def quantiles(self, states: Tensor, taus: Tensor) -> Tensor:
        """Quantiles (N, K) of the return at the levels `taus` (K,)."""
        order = torch.arange(self.embedding_dim, device=states.device, dtype=states.dtype)
        cosines = torch.cos(math.pi * order * taus.to(states.dtype).unsqueeze(1))
        phi = torch.relu(self.embedding(cosines))
        quantiles: Tensor = (states * self.weight.to(states.dtype)) @ phi.t() + self.bias(cosines).squeeze(-1)
        return quantiles

    def read(self, states: Tensor, taus: Tensor | None) -> HeadOutputs:
        """`predictions` are the quantiles at `taus`, or at the fixed midpoints without them."""
        midpoints = quantile_midpoints(self.num_quantiles, dtype=states.dtype, device=states.device)
        with torch.set_grad_enabled(torch.is_grad_enabled() and taus is None):
            fixed = self.quantiles(states, midpoints)
            # The mean of Z(s, tau) over tau in (0, alpha): levels of the tail itself, not those of the whole range.
            values = means = fixed.mean(dim=-1)
            if self.risk_level is not None:
                values = self.quantiles(states, self.risk_level * midpoints).mean(dim=-1)
        return HeadOutputs(values, means, fixed if taus is None else self.quantiles(states, taus))


def make_head(kind: str, hidden_size: int, *, dtype: torch.dtype = torch.float32, **settings: Any) -> CriticHead:
    """A new head.

    Args:
        kind: one of HEAD_KINDS.
        hidden_size: H of the backbone.
        dtype: of the weights; half precision is raised to float32.
        settings: further arguments of the head's class.

    Raises:
        ValueError: for an unknown kind.
    """
    classes: dict[str, Callable[..., CriticHead]] = {
        "scalar": ScalarHead,
        "c51": C51Head,
        "quantile": QuantileHead,
        "iqn": IQNHead,
    }
    if kind not in classes:
        raise ValueError(f"critic is {kind!r}; choose one of {', '.join(HEAD_KINDS)}")
    return classes[kind](hidden_size, dtype=dtype, **settings)


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _zero_linear(inputs: int, outputs: int, dtype: torch.dtype) -> nn.Linear:
    linear = HeadLinear(inputs, outputs, dtype=_at_least_float32(dtype))
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear


def _start(atoms: Tensor) -> Tensor:
    """Logits (num_atoms,) of 0.999 * softmax(t * atoms) + 0.001 * uniform, whose t brings the mean nearest to 0.

    t is found by bisection; odds between neighbouring atoms are at most 100.
    """
    if float(atoms[0] + atoms[-1]) == 0.0:
        return torch.zeros_like(atoms)
    high = math.log(100.0) / float(atoms[1] - atoms[0])
    low = -high
    for _ in range(80):
        middle = (low + high) / 2
        probabilities = 0.999 * torch.softmax(middle * atoms, dim=0) + 0.001 / atoms.numel()
        if float(probabilities @ atoms) < 0.0:
            low = middle
        else:
            high = middle
    return probabilities.log()
