"""The critic heads of this package: scalar, c51, hl_gauss, quantile and iqn.

They start at the value 0, so that the first advantages are the returns themselves. Their losses are functions of
`functional`.
"""

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.functional import (
    Loss,
    c51_atoms,
    c51_loss,
    cvar_from_categorical,
    cvar_from_quantiles,
    hl_gauss_centres,
    hl_gauss_loss,
    quantile_huber_loss,
    quantile_midpoints,
    value_loss,
)
from alpaca_ppo.models.critic_head import CriticHead, HeadLinear, HeadOutputs
from alpaca_ppo.registry import CRITIC_HEADS, CVaRTail


@CRITIC_HEADS.implement("scalar")
class ScalarHead(CriticHead):
    """A linear value head without bias, V(s) = w . h(s), zero at the start; trained by the squared error.

    Args:
        hidden_size: H of the backbone.
        cliprange_value: how far a prediction can move from the old value before the clipped error stops changing;
            None = no clipping.
    """

    kind = "scalar"

    def __init__(self, hidden_size: int, *, cliprange_value: float | None = None) -> None:
        super().__init__(hidden_size)
        self.cliprange_value = cliprange_value
        self.weight = nn.Parameter(torch.zeros(1, hidden_size))

    def configure(self, args: PPOConfig) -> None:
        """Takes `cliprange_value`."""
        super().configure(args)
        self.cliprange_value = args.cliprange_value

    def read(self, states: Tensor, taus: Tensor | None) -> HeadOutputs:
        """The same numbers as values, means and predictions."""
        values = nn.functional.linear(states, self.weight.to(states.dtype)).squeeze(-1)
        return HeadOutputs(values, values, values)

    def loss(
        self,
        predictions: Tensor,
        returns: Tensor,
        response_mask: Tensor,
        *,
        old_values: Tensor,
        taus: Tensor | None = None,
        **how: Any,
    ) -> Loss:
        """`functional.value_loss`."""
        clip = self.cliprange_value
        return value_loss(predictions, old_values, returns, response_mask, cliprange_value=clip, **how)

    def load_score_weight(self, weight: Tensor) -> None:
        """Copies it."""
        self.weight.data.copy_(weight)


class _CategoricalCritic(CriticHead):
    """What the c51 and the hl_gauss head share: the probabilities of fixed returns (`support`) between two ends.

    At the start every state has the same distribution: uniform where the support is symmetric about 0, otherwise tilted
    until its mean is 0, or as near to 0 as the support allows. Each return keeps a thousandth of the uniform
    probability, because one that starts much lower would take too many updates to recover.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        num_atoms: int = 51,
        v_min: float = -10.0,
        v_max: float = 10.0,
        risk_level: str | float = "neutral",
    ) -> None:
        super().__init__(hidden_size, risk_level=risk_level)
        self.num_atoms, self.v_min, self.v_max = num_atoms, v_min, v_max
        self.linear = _zero_linear(hidden_size, num_atoms)
        # On the CPU: the memory estimate builds heads on a device without numbers.
        self.linear.bias.data.copy_(_initial_logits(self.support(torch.float64, torch.device("cpu"))))

    @classmethod
    def from_config(cls, args: PPOConfig, hidden_size: int) -> Self:
        """With the support that `args` names."""
        v_min, v_max = map(float, args.value_support)
        return cls(hidden_size, num_atoms=args.num_atoms or 51, v_min=v_min, v_max=v_max)

    def settings(self) -> dict[str, Any]:
        """The support."""
        return {"num_atoms": self.num_atoms, "v_min": self.v_min, "v_max": self.v_max}

    _cross_entropy: Callable[..., Loss]

    @abstractmethod
    def support(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """(num_atoms,): the returns that have the predicted probabilities, ascending."""

    def read(self, states: Tensor, taus: Tensor | None) -> HeadOutputs:
        """`predictions` (N, num_atoms) are logits."""
        logits = self.linear(states)
        support = self.support(logits.dtype, logits.device)
        probabilities = logits.softmax(dim=-1)
        means = probabilities @ support
        values = self.value_of(
            means, lambda alpha, tail: cvar_from_categorical(probabilities, support, alpha=alpha, tail=tail)
        )
        return HeadOutputs(values, means, logits)

    def loss(
        self,
        predictions: Tensor,
        returns: Tensor,
        response_mask: Tensor,
        *,
        old_values: Tensor,
        taus: Tensor | None = None,
        **how: Any,
    ) -> Loss:
        """The cross-entropy: `functional.c51_loss` or `functional.hl_gauss_loss`."""
        return self._cross_entropy(predictions, returns, response_mask, v_min=self.v_min, v_max=self.v_max, **how)


@CRITIC_HEADS.implement("c51")
class C51Head(_CategoricalCritic):
    """Probabilities of `num_atoms` returns evenly spaced over [v_min, v_max] (arXiv:1707.06887).

    Args:
        hidden_size: H of the backbone.
        num_atoms: atoms of the support.
        v_min: the lowest atom; smaller returns are clamped to it.
        v_max: the highest atom; greater returns are clamped to it.
        risk_level: see `CriticHead`.
    """

    kind = "c51"
    _cross_entropy = staticmethod(c51_loss)

    def support(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The atoms."""
        return c51_atoms(self.num_atoms, v_min=self.v_min, v_max=self.v_max, dtype=dtype, device=device)


@CRITIC_HEADS.implement("hl_gauss")
class HLGaussHead(_CategoricalCritic):
    """Probabilities of `num_atoms` bins of equal width over [v_min, v_max], learned from returns that are smoothed by a
    normal distribution (HL-Gauss, arXiv:2403.03950). A bin stands for the return at its centre.

    Args:
        hidden_size: H of the backbone.
        num_atoms: the number of bins.
        v_min: the lower edge of the first bin; smaller returns are clamped to it.
        v_max: the upper edge of the last bin; greater returns are clamped to it.
        sigma: the standard deviation of the smoothing, in widths of a bin.
        risk_level: see `CriticHead`. A tail is one of the smoothed distribution.
    """

    kind = "hl_gauss"

    def __init__(self, hidden_size: int, *, sigma: float = 0.75, **others: Any) -> None:
        super().__init__(hidden_size, **others)
        self.sigma = sigma

    def support(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The centres of the bins."""
        return hl_gauss_centres(self.num_atoms, v_min=self.v_min, v_max=self.v_max, dtype=dtype, device=device)

    def _cross_entropy(self, *batch: Tensor, **how: Any) -> Loss:
        return hl_gauss_loss(*batch, sigma=self.sigma * (self.v_max - self.v_min) / self.num_atoms, **how)


class _QuantileCritic(CriticHead):
    """What the quantile and the iqn head share: the quantile Huber loss of `num_quantiles` predictions."""

    def __init__(
        self, hidden_size: int, *, num_quantiles: int = 32, kappa: float = 1.0, risk_level: str | float = "neutral"
    ) -> None:
        super().__init__(hidden_size, risk_level=risk_level)
        self.num_quantiles, self.kappa = num_quantiles, kappa

    @classmethod
    def from_config(cls, args: PPOConfig, hidden_size: int) -> Self:
        """With `num_atoms` quantiles."""
        return cls(hidden_size, num_quantiles=args.num_atoms or 32)

    def configure(self, args: PPOConfig) -> None:
        """Takes the risk level and `quantile_huber_kappa`."""
        super().configure(args)
        self.kappa = args.quantile_huber_kappa

    def loss(
        self,
        predictions: Tensor,
        returns: Tensor,
        response_mask: Tensor,
        *,
        old_values: Tensor,
        taus: Tensor | None = None,
        **how: Any,
    ) -> Loss:
        """`functional.quantile_huber_loss`, at the fixed midpoints without `taus`."""
        if taus is None:
            taus = quantile_midpoints(self.num_quantiles, dtype=predictions.dtype, device=predictions.device)
        return quantile_huber_loss(
            predictions, returns, taus.to(predictions.dtype), response_mask, kappa=self.kappa, **how
        )


@CRITIC_HEADS.implement("quantile")
class QuantileHead(_QuantileCritic):
    """The quantiles of the return at the levels (i + 1/2) / K (arXiv:1710.10044), all 0 at the start.

    Args:
        hidden_size: H of the backbone.
        num_quantiles: K.
        kappa: where the loss turns from quadratic to linear, in units of the return.
        risk_level: see `CriticHead`.
    """

    kind = "quantile"

    def __init__(self, hidden_size: int, **options: Any) -> None:
        super().__init__(hidden_size, **options)
        self.linear = _zero_linear(hidden_size, self.num_quantiles)

    def settings(self) -> dict[str, Any]:
        """The number of quantiles."""
        return {"num_quantiles": self.num_quantiles}

    def read(self, states: Tensor, taus: Tensor | None) -> HeadOutputs:
        """`predictions` (N, K) are the quantiles."""
        quantiles = self.linear(states)
        means = quantiles.mean(dim=-1)
        values = self.value_of(means, lambda alpha, tail: cvar_from_quantiles(quantiles, alpha=alpha, tail=tail))
        return HeadOutputs(values, means, quantiles)


@CRITIC_HEADS.implement("iqn")
class IQNHead(_QuantileCritic):
    """The quantile function of the return, Z(s, tau) = w . (h(s) * phi(tau)) + b(tau) (arXiv:1806.06923, equation 4).

    phi(tau) = relu(W cos(pi i tau) + c), i = 0 .. embedding_dim - 1. w and b start at 0, so every quantile starts at 0.
    The paper samples levels for each state. Here the tokens of an optimizer step share them, so that phi is (K, H)
    and not (N, K, H); the expected gradient is the same.

    Args:
        hidden_size: H of the backbone.
        num_quantiles: K, the number of levels of a value and of an optimizer step.
        embedding_dim: the number of cosines.
        kappa: where the loss turns from quadratic to linear, in units of the return.
        risk_level: see `CriticHead`.
    """

    kind = "iqn"

    def __init__(self, hidden_size: int, *, embedding_dim: int = 64, **options: Any) -> None:
        super().__init__(hidden_size, **options)
        self.embedding_dim = embedding_dim
        self.embedding = HeadLinear(embedding_dim, hidden_size)
        self.bias = _zero_linear(embedding_dim, 1)
        self.weight = nn.Parameter(torch.zeros(hidden_size))

    def settings(self) -> dict[str, Any]:
        """The number of levels and of cosines."""
        return {"num_quantiles": self.num_quantiles, "embedding_dim": self.embedding_dim}

    def sample_taus(self, generator: torch.Generator) -> Tensor:
        """K uniform levels, float64."""
        return torch.rand(self.num_quantiles, generator=generator, dtype=torch.float64)

    def quantiles(self, states: Tensor, taus: Tensor) -> Tensor:
        """The quantiles (N, K) of the return at the levels `taus` (K,)."""
        order = torch.arange(self.embedding_dim, device=states.device, dtype=states.dtype)
        cosines = torch.cos(math.pi * order * taus.to(states.dtype).unsqueeze(1))
        phi = torch.relu(self.embedding(cosines))
        quantiles: Tensor = (states * self.weight.to(states.dtype)) @ phi.t() + self.bias(cosines).squeeze(-1)
        return quantiles

    def read(self, states: Tensor, taus: Tensor | None) -> HeadOutputs:
        """`predictions` (N, K) are the quantiles at `taus`, or at the fixed midpoints without them."""
        midpoints = quantile_midpoints(self.num_quantiles, dtype=states.dtype, device=states.device)
        with torch.set_grad_enabled(torch.is_grad_enabled() and taus is None):
            fixed = self.quantiles(states, midpoints)
            means = fixed.mean(dim=-1)

            def tail_mean(alpha: float, tail: CVaRTail) -> Tensor:
                # The CVaR is the mean of Z(s, tau) over tau in (0, alpha), or (1 - alpha, 1), so K levels inside the
                # tail itself are read.
                levels = alpha * midpoints if tail == "lower" else 1 - alpha * midpoints
                return self.quantiles(states, levels).mean(dim=-1)

            values = self.value_of(means, tail_mean)
        return HeadOutputs(values, means, fixed if taus is None else self.quantiles(states, taus))


def _zero_linear(inputs: int, outputs: int) -> HeadLinear:
    linear = HeadLinear(inputs, outputs)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear


def _initial_logits(atoms: Tensor) -> Tensor:
    """Logits (num_atoms,) of 0.999 * softmax(t * atoms) + 0.001 * uniform, with the t that brings the mean nearest to
    0.

    t is found by bisection; the odds between neighbouring atoms are at most 100.
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
