"""Critic heads: the base class, and those of this package (scalar, c51, hl_gauss, quantile and iqn).

Heads compute in float32 at least, whatever the dtype of the backbone and of their own weights (DeepSpeed makes those
bfloat16 in a bfloat16 run). Those of this package start at the value 0, so that the first advantages are the returns
themselves; their losses are functions of `functional`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple, Self, TypeVar

import torch
from torch import Tensor, nn
from transformers.modeling_utils import local_torch_dtype

from alpaca_ppo import functional
from alpaca_ppo.config.learning_options import RiskLevel
from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.registry import CRITIC_HEADS, CVaRTail
from alpaca_ppo.types import Rollouts

HeadClass = TypeVar("HeadClass", bound=type["CriticHead"])


class HeadOutputs(NamedTuple):
    """What a head reads from N hidden states.

    Attributes:
        values: (N,), what GAE uses: the mean of the return, or of the tail that the head's `risk_level` names.
        means: (N,), the mean of the return.
        predictions: (N,) or (N, M), the input of the head's loss: values, logits or quantiles.
    """

    values: Tensor
    means: Tensor
    predictions: Tensor


class CriticHead(nn.Module, ABC):
    """A map from hidden states (N, H) to `HeadOutputs`, and the loss of its predictions.

    A subclass is registered with `register_critic_head` and defines `read` and `loss`. One with options also defines
    `from_config` and `settings`, whose entries are the keywords of its `__init__`. Layers should be `HeadLinear`s, or
    cast their weights to the dtype of the states.

    Attributes:
        kind: the name it is registered under, the value of `critic` that selects it.
        hidden_size: H.
    """

    kind: str = ""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.risk_level = "neutral"

    @classmethod
    def from_config(cls, args: PPOConfig, hidden_size: int) -> Self:
        """A new head with the options given in `args`."""
        return cls(hidden_size)

    def settings(self) -> dict[str, Any]:
        """The options that rebuild the head, stored as JSON beside its weights."""
        return {}

    @property
    def risk_level(self) -> str:
        """What is read as the value, as in the configuration: `neutral`, the mean of the return; `0.1`, that of its
        lowest tenth (CVaR); `upper:0.1`, that of its highest. Not part of `settings`; may be set at any time.
        """
        return self._risk_level

    @risk_level.setter
    def risk_level(self, level: str | float) -> None:
        if level != "neutral" and not self.distributional:
            raise ValueError(f"risk_level is {level!r}, but the {self.kind!r} critic has no distribution; leave it out")
        self._risk = RiskLevel.parse(str(level))
        self._risk_level = str(level)

    def value_of(self, means: Tensor, tail_mean: Callable[[float, CVaRTail], Tensor]) -> Tensor:
        """The value (N,) at the head's risk level, for `read` of a distributional head: the `means` (N,), or
        `tail_mean(alpha, tail)` (N,), the mean of the lower or upper tail of probability alpha.
        """
        return means if self._risk.alpha is None else tail_mean(self._risk.alpha, self._risk.tail)

    @abstractmethod
    def read(self, states: Tensor, taus: Tensor | None) -> HeadOutputs:
        """The outputs for `states` (N, H), already in the dtype to compute in; `taus` as in `forward`."""

    @abstractmethod
    def loss(self, predictions: Tensor, batch: Rollouts, args: PPOConfig) -> functional.Loss:
        """The loss of a micro-batch, and statistics that are logged as `ppo/val/<name>`.

        It is computed outside of the model's forward pass, so it must not use parameters of the head.

        Args:
            predictions: (B, R) or (B, R, M), those of `read`.
            batch: `returns`, `values`, `response_mask`, `denominator` and what `sample_taus` returned as `value_taus`.
            args: the run's configuration.
        """

    def sample_taus(self, generator: torch.Generator) -> Tensor | None:
        """The quantile levels (K,) of the predictions in one optimizer step, on the CPU, if the head samples any."""
        return None

    def load_score_weight(self, weight: Tensor) -> None:
        """Starts from the `score` weight (1, H) of a reward model, if the head can."""

    @property
    def distributional(self) -> bool:
        """Whether the head learns the distribution of the return, and so has a `risk_level`."""
        return bool(CRITIC_HEADS.trait(self.kind, "distributional"))

    def spec(self) -> dict[str, Any]:
        """Kind, settings and hidden size; heads with the same spec can exchange weights."""
        return {"kind": self.kind, **self.settings(), "hidden_size": self.hidden_size}

    def check_like(self, saved: "CriticHead") -> None:
        """Raises a `ValueError` if this head cannot take the weights of the head `saved`."""
        if saved.spec() != self.spec():
            raise ValueError(f"value_model has the head {saved.spec()}, critic {self.spec()}; set the same options")

    def forward(self, states: Tensor, taus: Tensor | None = None) -> HeadOutputs:
        """The outputs for `states` (N, H) in any dtype.

        `taus` (K,) in (0, 1), from `sample_taus`, are the quantile levels of `predictions`, given in training only;
        values do not depend on them.

        Raises:
            ValueError: when `read` does not return `HeadOutputs` of N rows.
        """
        first = next(self.parameters(), None)
        dtype = torch.float32 if first is None else torch.promote_types(first.dtype, torch.float32)
        with torch.autocast(states.device.type, enabled=False):
            outputs: Any = self.read(states.to(dtype), taus)
        if not isinstance(outputs, HeadOutputs):
            raise ValueError(f"read() of the critic {self.kind!r} returned a {type(outputs).__name__}, not HeadOutputs")
        for field, value in outputs._asdict().items():
            dims = (1, 2) if field == "predictions" else (1,)
            if not (isinstance(value, Tensor) and value.dim() in dims and len(value) == len(states)):
                returned = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                rows = len(states)
                allowed = f"({rows},) or ({rows}, M)" if field == "predictions" else f"({rows},)"
                raise ValueError(f"read() of the critic {self.kind!r} returned {field} of {returned}, not {allowed}")
        return outputs


def register_critic_head(
    name: str, *, distributional: bool = False, fixed_support: bool = False
) -> Callable[[HeadClass], HeadClass]:
    """A class decorator that adds the critic `name`, a subclass of `CriticHead`.

    Args:
        name: without spaces, commas and colons; the value of `critic` that selects it, also stored with its weights.
        distributional: it learns the distribution of the return and reads its `risk_level` (`value_of`).
        fixed_support: its returns lie between the ends of `PPOConfig.value_support`.

    Raises:
        ValueError: if `name` is built in, is empty, or has a space, comma or colon. One of a user's is replaced.
    """

    def attach(head_class: HeadClass) -> HeadClass:
        CRITIC_HEADS.register(name, distributional=distributional, fixed_support=fixed_support)(head_class)
        head_class.kind = name
        return head_class

    return attach


def build_head(make: Callable[[int], CriticHead], hidden_size: int, dtype: torch.dtype) -> CriticHead:
    """`make(hidden_size)`, such as a head's class, with weights in float32, or float64 where `dtype` is."""
    with local_torch_dtype(torch.promote_types(dtype, torch.float32)):
        return make(hidden_size)


class HeadLinear(nn.Linear):
    """A linear layer that computes in the dtype of its input, whatever the dtype of its weights."""

    def forward(self, inputs: Tensor) -> Tensor:
        """(..., outputs) of `inputs` (..., inputs)."""
        return nn.functional.linear(inputs, self.weight.to(inputs.dtype), self.bias.to(inputs.dtype))


def _loss_arguments(batch: Rollouts, args: PPOConfig) -> dict[str, Any]:
    """What all losses take besides the predictions."""
    return {
        "returns": batch["returns"],
        "response_mask": batch["response_mask"],
        "loss_agg_mode": args.loss_agg_mode,
        "denominator": batch["denominator"],
    }


def _zero_linear(inputs: int, outputs: int) -> HeadLinear:
    linear = HeadLinear(inputs, outputs)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear


class ScalarHead(CriticHead):
    """A linear value head without bias, V(s) = w . h(s), zero at the start; trained by the squared error."""

    kind = "scalar"

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size)
        self.weight = nn.Parameter(torch.zeros(1, hidden_size))

    def read(self, states: Tensor, taus: Tensor | None) -> HeadOutputs:
        """The same numbers as values, means and predictions."""
        values = nn.functional.linear(states, self.weight.to(states.dtype)).squeeze(-1)
        return HeadOutputs(values, values, values)

    def loss(self, predictions: Tensor, batch: Rollouts, args: PPOConfig) -> functional.Loss:
        """The squared error, clipped with `cliprange_value`."""
        shared = _loss_arguments(batch, args)
        return functional.value_loss(predictions, batch["values"], cliprange_value=args.cliprange_value, **shared)

    def load_score_weight(self, weight: Tensor) -> None:
        """Copies `weight`."""
        self.weight.data.copy_(weight)


class _CategoricalCritic(CriticHead):
    """The base of the c51 and the hl_gauss head: probabilities of fixed returns (`support`) between two ends,
    to which returns outside are clamped.

    At the start every state has the same distribution: uniform where the support is symmetric about 0, otherwise tilted
    until its mean is 0, or as near to it as the support allows. Each return keeps a thousandth of the uniform
    probability; much less would take too many updates to recover from.
    """

    returns_of: Callable[..., Tensor]
    """Makes the support: the function of `functional` that a subclass names."""

    def __init__(self, hidden_size: int, *, num_atoms: int = 51, v_min: float = -10.0, v_max: float = 10.0) -> None:
        super().__init__(hidden_size)
        self.num_atoms, self.v_min, self.v_max = num_atoms, v_min, v_max
        self.linear = _zero_linear(hidden_size, num_atoms)
        # On the CPU: the memory estimate builds heads on the meta device.
        self.linear.bias.data.copy_(_initial_logits(self.support(torch.float64, torch.device("cpu"))))

    @classmethod
    def from_config(cls, args: PPOConfig, hidden_size: int) -> Self:
        """A head with the support that `args` gives."""
        v_min, v_max = map(float, args.value_support)
        return cls(hidden_size, num_atoms=args.num_atoms or 51, v_min=v_min, v_max=v_max)

    def settings(self) -> dict[str, Any]:
        """The support."""
        return {"num_atoms": self.num_atoms, "v_min": self.v_min, "v_max": self.v_max}

    def support(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """(num_atoms,): the returns that have the predicted probabilities, ascending."""
        return self.returns_of(self.num_atoms, v_min=self.v_min, v_max=self.v_max, dtype=dtype, device=device)

    def read(self, states: Tensor, taus: Tensor | None) -> HeadOutputs:
        """`predictions` (N, num_atoms) are logits."""
        logits = self.linear(states)
        support = self.support(logits.dtype, logits.device)
        probabilities = logits.softmax(dim=-1)
        means = probabilities @ support
        values = self.value_of(
            means, lambda alpha, tail: functional.cvar_from_categorical(probabilities, support, alpha=alpha, tail=tail)
        )
        return HeadOutputs(values, means, logits)


class C51Head(_CategoricalCritic):
    """Probabilities of `num_atoms` returns evenly spaced over [v_min, v_max] (arXiv:1707.06887)."""

    kind = "c51"
    returns_of = staticmethod(functional.c51_atoms)

    def loss(self, predictions: Tensor, batch: Rollouts, args: PPOConfig) -> functional.Loss:
        """The cross-entropy of the projected returns."""
        return functional.c51_loss(predictions, v_min=self.v_min, v_max=self.v_max, **_loss_arguments(batch, args))


class HLGaussHead(_CategoricalCritic):
    """Probabilities of `num_atoms` bins of equal width over [v_min, v_max], learned from returns that are smoothed by a
    normal distribution (HL-Gauss, arXiv:2403.03950). A risk level reads a tail of the smoothed distribution.
    """

    kind = "hl_gauss"
    returns_of = staticmethod(functional.hl_gauss_centres)
    sigma = 0.75  # the standard deviation of the smoothing, in widths of a bin

    def loss(self, predictions: Tensor, batch: Rollouts, args: PPOConfig) -> functional.Loss:
        """The cross-entropy of the smoothed returns."""
        sigma = self.sigma * (self.v_max - self.v_min) / self.num_atoms
        shared = _loss_arguments(batch, args)
        return functional.hl_gauss_loss(predictions, v_min=self.v_min, v_max=self.v_max, sigma=sigma, **shared)


class _QuantileCritic(CriticHead):
    """The base of the quantile and the iqn head: K = `num_quantiles`, and the loss."""

    def __init__(self, hidden_size: int, *, num_quantiles: int = 32) -> None:
        super().__init__(hidden_size)
        self.num_quantiles = num_quantiles

    @classmethod
    def from_config(cls, args: PPOConfig, hidden_size: int) -> Self:
        """A head with `num_atoms` quantiles."""
        return cls(hidden_size, num_quantiles=args.num_atoms or 32)

    def settings(self) -> dict[str, Any]:
        """The number of quantiles."""
        return {"num_quantiles": self.num_quantiles}

    def midpoints(self, like: Tensor) -> Tensor:
        """(K,): the levels at which values are read."""
        return functional.quantile_midpoints(self.num_quantiles, dtype=like.dtype, device=like.device)

    def loss(self, predictions: Tensor, batch: Rollouts, args: PPOConfig) -> functional.Loss:
        """The quantile Huber loss at the levels of `sample_taus`, or else at the midpoints."""
        sampled = batch.get("value_taus")
        taus = self.midpoints(predictions) if sampled is None else sampled.to(predictions.dtype)
        shared = _loss_arguments(batch, args)
        return functional.quantile_huber_loss(predictions, taus=taus, kappa=args.quantile_huber_kappa, **shared)


class QuantileHead(_QuantileCritic):
    """The quantiles of the return at the levels (i + 1/2) / K (arXiv:1710.10044), all 0 at the start."""

    kind = "quantile"

    def __init__(self, hidden_size: int, *, num_quantiles: int = 32) -> None:
        super().__init__(hidden_size, num_quantiles=num_quantiles)
        self.linear = _zero_linear(hidden_size, num_quantiles)

    def read(self, states: Tensor, taus: Tensor | None) -> HeadOutputs:
        """`predictions` (N, K) are the quantiles."""
        quantiles = self.linear(states)
        means = quantiles.mean(dim=-1)
        values = self.value_of(
            means, lambda alpha, tail: functional.cvar_from_quantiles(quantiles, alpha=alpha, tail=tail)
        )
        return HeadOutputs(values, means, quantiles)


class IQNHead(_QuantileCritic):
    """The quantile function of the return, Z(s, tau) = w . (h(s) * phi(tau)) + b(tau) (arXiv:1806.06923, equation 4).

    phi(tau) = relu(W cos(pi i tau) + c), i = 0 .. embedding_dim - 1. w and b start at 0, so every quantile starts at 0.
    The paper samples levels for each state. Here the tokens of an optimizer step share K of them, so that phi is (K, H)
    and not (N, K, H); the expected gradient is the same.
    """

    kind = "iqn"

    def __init__(self, hidden_size: int, *, num_quantiles: int = 32, embedding_dim: int = 64) -> None:
        super().__init__(hidden_size, num_quantiles=num_quantiles)
        self.embedding_dim = embedding_dim
        self.embedding = HeadLinear(embedding_dim, hidden_size)
        self.bias = _zero_linear(embedding_dim, 1)
        self.weight = nn.Parameter(torch.zeros(hidden_size))

    def settings(self) -> dict[str, Any]:
        """The number of levels and of cosines."""
        return {**super().settings(), "embedding_dim": self.embedding_dim}

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
        """`predictions` (N, K) are the quantiles at `taus`, or without them at the midpoints."""
        midpoints = self.midpoints(states)
        # With `taus`, the predictions, which are trained, are computed below.
        with torch.set_grad_enabled(torch.is_grad_enabled() and taus is None):
            at_midpoints = self.quantiles(states, midpoints)
            means = at_midpoints.mean(dim=-1)

            def tail_mean(alpha: float, tail: CVaRTail) -> Tensor:
                # The CVaR is the mean of Z(s, tau) over tau in (0, alpha), or (1 - alpha, 1): read K levels there.
                levels = alpha * midpoints if tail == "lower" else 1 - alpha * midpoints
                return self.quantiles(states, levels).mean(dim=-1)

            values = self.value_of(means, tail_mean)
        return HeadOutputs(values, means, at_midpoints if taus is None else self.quantiles(states, taus))


for _head in (ScalarHead, C51Head, HLGaussHead, QuantileHead, IQNHead):
    CRITIC_HEADS.implement(_head.kind)(_head)


def _initial_logits(atoms: Tensor) -> Tensor:
    """Logits (num_atoms,) of 0.999 * softmax(t * atoms) + 0.001 * uniform, with the t, found by bisection, that brings
    the mean nearest to 0. The odds between neighbouring atoms are at most 100.
    """
    if float(atoms[0] + atoms[-1]) == 0.0:
        # The mean is 0 at t = 0.
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
