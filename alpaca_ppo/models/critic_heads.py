"""The heads of critics: a head computes values from hidden states, defines its own loss, and stores its settings in its
folder. A new kind of critic is one class with `register_critic_head`.

Heads compute in float32 at least, whatever the dtype of the backbone and of their own weights (DeepSpeed makes those
bfloat16 in a bfloat16 run). The built-in heads start at the value 0, so that the first advantages are the returns
themselves. Their losses are functions of `functional`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self, TypeVar

import torch
from torch import Tensor, nn

from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.functional import (
    Loss,
    c51_atoms,
    c51_loss,
    cvar_from_categorical,
    cvar_from_quantiles,
    quantile_huber_loss,
    quantile_midpoints,
    value_loss,
)
from alpaca_ppo.registry import CRITIC_HEADS

HeadClass = TypeVar("HeadClass", bound=type["CriticHead"])


class HeadOutputs(NamedTuple):
    """What a head reads from N hidden states."""

    values: Tensor
    """(N,), what GAE uses: the mean, or the CVaR at the head's `risk_level`."""
    means: Tensor
    """(N,), the mean of the return."""
    predictions: Tensor
    """(N,) or (N, M), what the head's loss takes: values, logits or quantiles."""


class CriticHead(nn.Module, ABC):
    """A map from hidden states (N, H) to `HeadOutputs`, and the loss of its predictions.

    A subclass defines `read` and `loss`. One with options also defines `from_config` and `settings`, whose entries are
    the keywords of its `__init__`. Layers should be `HeadLinear`s, or cast their weights to the dtype of the states.
    The subclass is registered (`register_critic_head`) before an instance is made.

    Attributes:
        kind: the name it is registered under, the value of `critic` that selects it.
        hidden_size: H.
        risk_level: None reads the mean as the value; alpha in (0, 1] the mean of the lower alpha tail (CVaR). It is
            not stored with the weights and may be changed between forward passes.
    """

    kind: str = ""

    def __init__(self, hidden_size: int, *, risk_level: float | None = None) -> None:
        super().__init__()
        if not self.kind:
            raise TypeError(f"{type(self).__name__} has no name yet; register the class with register_critic_head")
        self.hidden_size = hidden_size
        self.risk_level = risk_level

    @classmethod
    def from_config(cls, args: PPOConfig, hidden_size: int) -> Self:
        """A new head with the options given in `args`. `configure` sets what is not stored in the head's folder."""
        return cls(hidden_size)

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any], hidden_size: int) -> Self:
        """A head that takes the weights of one with these `settings`."""
        return cls(hidden_size, **settings)

    def settings(self) -> dict[str, Any]:
        """The options needed to rebuild the head for its saved weights; JSON values, stored in the head's folder."""
        return {}

    def configure(self, args: PPOConfig) -> None:
        """Takes from `args` what is not among the settings: how values are read, and options of the loss. Called for a
        new head, a loaded one, and one in an `ActorCritic` that the user built.
        """
        self.risk_level = args.risk_alpha

    @abstractmethod
    def read(self, states: Tensor, taus: Tensor | None) -> HeadOutputs:
        """`HeadOutputs` of `states` (N, H), already in the dtype to compute in; `taus` as in `forward`."""

    @abstractmethod
    def loss(
        self,
        predictions: Tensor,
        returns: Tensor,
        response_mask: Tensor,
        *,
        old_values: Tensor,
        taus: Tensor | None = None,
        loss_agg_mode: str = "token-mean",
        denominator: Tensor | float | None = None,
    ) -> Loss:
        """The loss of a micro-batch, and statistics that are logged as `ppo/val/<name>`.

        It is computed outside of the model's forward pass, so it must not use parameters of the head.

        Args:
            predictions: (B, R) or (B, R, M), those of `read`, in the columns of the response.
            returns: (B, R), targets, not whitened.
            response_mask: (B, R) bool, True = a token the policy chose.
            old_values: (B, R), the values at the time of the rollout.
            taus: what `sample_taus` drew for this optimizer step.
            loss_agg_mode: see `functional.aggregate_loss`, as for `denominator`.
            denominator: tokens or sequences of the whole optimizer step.
        """

    def sample_taus(self, generator: torch.Generator) -> Tensor | None:
        """The quantile levels (K,) of the predictions in one optimizer step, on the CPU; None for a head that needs
        none.
        """
        return None

    def score_weight(self) -> Tensor | None:
        """(1, H): the weight of a sequence classifier's linear layer `score` whose logits are this head's values; None
        if the values are not such a linear function. A critic that has it is saved as a sequence classifier.
        """
        return None

    def load_score_weight(self, weight: Tensor) -> None:
        """Starts from the `score` weight (1, H) of a reward model, if the head can; otherwise changes nothing."""

    @property
    def distributional(self) -> bool:
        """Whether the head learns the distribution of the return, so that a risk level has a meaning."""
        known: bool = CRITIC_HEADS.trait(self.kind, "distributional")
        return known

    def spec(self) -> dict[str, Any]:
        """Kind and settings: heads with the same spec and hidden size can exchange their weights."""
        return {"kind": self.kind, **self.settings()}

    def forward(self, states: Tensor, taus: Tensor | None = None) -> HeadOutputs:
        """What the head reads from `states` (N, H), in any dtype.

        Args:
            states: hidden states.
            taus: (K,) in (0, 1), the quantile levels of `predictions`, from `sample_taus`; given in training only.
                Values do not depend on them.

        Raises:
            ValueError: when `read` returns something other than `HeadOutputs` of these shapes.
        """
        first = next(self.parameters(), None)
        dtype = torch.float32 if first is None else _at_least_float32(first.dtype)
        with torch.autocast(states.device.type, enabled=False):
            return _checked(self.kind, self.read(states.to(dtype), taus), states.shape[:-1])


def _checked(kind: str, returned: Any, rows: torch.Size) -> HeadOutputs:
    if not isinstance(returned, HeadOutputs):
        raise ValueError(
            f"read() of the critic {kind!r} returned a {type(returned).__name__}; it must return HeadOutputs"
        )
    for field, value in returned._asdict().items():
        if not isinstance(value, Tensor):
            raise ValueError(
                f"read() of the critic {kind!r} returned {field} of type {type(value).__name__}; it must be a tensor"
            )
        shape = value.shape[: len(rows)] if field == "predictions" and value.dim() == len(rows) + 1 else value.shape
        if shape != rows:
            sizes = ", ".join(map(str, rows))
            wanted = f"({sizes},) or ({sizes}, M)" if field == "predictions" else f"({sizes},)"
            raise ValueError(
                f"read() of the critic {kind!r} returned {field} of shape {tuple(value.shape)}; it must be {wanted}: "
                "one entry per hidden state"
            )
    return returned


def register_critic_head(name: str, *, distributional: bool = False) -> Callable[[HeadClass], HeadClass]:
    """A class decorator that adds the critic `name`, a subclass of `CriticHead`.

    Args:
        name: the value of `critic` that selects it; also stored in the folders of its weights.
        distributional: it learns the distribution of the return and reads its `risk_level`.

    Raises:
        TypeError: when the class is not a `CriticHead`.
        ValueError: when the name is taken, or holds a space, comma or colon.
    """

    def attach(head_class: HeadClass) -> HeadClass:
        if not (isinstance(head_class, type) and issubclass(head_class, CriticHead)):
            raise TypeError(f"the critic head {name!r} is {head_class!r}; register a subclass of CriticHead")
        CRITIC_HEADS.register(name, distributional=distributional)(head_class)
        head_class.kind = name
        return head_class

    return attach


def build_head(make: Callable[[int], CriticHead], hidden_size: int, dtype: torch.dtype) -> CriticHead:
    """`make(hidden_size)`, a head's class for instance, with weights in float32, or in float64 where `dtype` is."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(_at_least_float32(dtype))
    try:
        return make(hidden_size)
    finally:
        torch.set_default_dtype(before)


class HeadLinear(nn.Linear):
    """A linear layer that computes in the dtype of its input, whatever the dtype of its weights."""

    def forward(self, inputs: Tensor) -> Tensor:
        """(..., outputs) of `inputs` (..., inputs)."""
        return nn.functional.linear(inputs, self.weight.to(inputs.dtype), self.bias.to(inputs.dtype))


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
        loss_agg_mode: str = "token-mean",
        denominator: Tensor | float | None = None,
    ) -> Loss:
        """`functional.value_loss`."""
        return value_loss(
            predictions,
            old_values,
            returns,
            response_mask,
            cliprange_value=self.cliprange_value,
            loss_agg_mode=loss_agg_mode,
            denominator=denominator,
        )

    def score_weight(self) -> Tensor:
        """The head's own weight."""
        return self.weight

    def load_score_weight(self, weight: Tensor) -> None:
        """Copies it."""
        self.weight.data.copy_(weight)


@CRITIC_HEADS.implement("c51")
class C51Head(CriticHead):
    """Probabilities of `num_atoms` returns evenly spaced over [v_min, v_max] (arXiv:1707.06887).

    At the start every state has the same distribution: uniform where the support is symmetric about 0, otherwise tilted
    until its mean is 0, or as near to 0 as the support allows. Each atom keeps a thousandth of the uniform probability,
    because an atom that starts much lower would take too many updates to recover.

    Args:
        hidden_size: H of the backbone.
        num_atoms: atoms of the support.
        v_min: the lowest atom; smaller returns are clamped to it.
        v_max: the highest atom; greater returns are clamped to it.
        risk_level: see `CriticHead`.
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
    ) -> None:
        super().__init__(hidden_size, risk_level=risk_level)
        self.num_atoms, self.v_min, self.v_max = num_atoms, v_min, v_max
        self.linear = _zero_linear(hidden_size, num_atoms)
        atoms = c51_atoms(num_atoms, v_min=v_min, v_max=v_max, dtype=torch.float64)
        self.linear.bias.data.copy_(_initial_logits(atoms))

    @classmethod
    def from_config(cls, args: PPOConfig, hidden_size: int) -> Self:
        """With the support that `args` names."""
        return cls(hidden_size, num_atoms=args.num_atoms, v_min=float(args.c51_v_min), v_max=float(args.c51_v_max))

    def settings(self) -> dict[str, Any]:
        """The support."""
        return {"num_atoms": self.num_atoms, "v_min": self.v_min, "v_max": self.v_max}

    def read(self, states: Tensor, taus: Tensor | None) -> HeadOutputs:
        """`predictions` (N, num_atoms) are logits."""
        logits = self.linear(states)
        atoms = c51_atoms(self.num_atoms, v_min=self.v_min, v_max=self.v_max, dtype=logits.dtype, device=logits.device)
        probabilities = logits.softmax(dim=-1)
        means = probabilities @ atoms
        if self.risk_level is None:
            return HeadOutputs(means, means, logits)
        return HeadOutputs(cvar_from_categorical(probabilities, atoms, alpha=self.risk_level), means, logits)

    def loss(
        self,
        predictions: Tensor,
        returns: Tensor,
        response_mask: Tensor,
        *,
        old_values: Tensor,
        taus: Tensor | None = None,
        loss_agg_mode: str = "token-mean",
        denominator: Tensor | float | None = None,
    ) -> Loss:
        """`functional.c51_loss`."""
        return c51_loss(
            predictions,
            returns,
            response_mask,
            v_min=self.v_min,
            v_max=self.v_max,
            loss_agg_mode=loss_agg_mode,
            denominator=denominator,
        )


class _QuantileCritic(CriticHead):
    """What the quantile and the iqn head share: the quantile Huber loss of `num_quantiles` predictions."""

    def __init__(self, hidden_size: int, *, num_quantiles: int, kappa: float, risk_level: float | None) -> None:
        super().__init__(hidden_size, risk_level=risk_level)
        self.num_quantiles, self.kappa = num_quantiles, kappa

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
        loss_agg_mode: str = "token-mean",
        denominator: Tensor | float | None = None,
    ) -> Loss:
        """`functional.quantile_huber_loss`, at the fixed midpoints without `taus`."""
        if taus is None:
            taus = quantile_midpoints(self.num_quantiles, dtype=predictions.dtype, device=predictions.device)
        return quantile_huber_loss(
            predictions,
            returns,
            taus.to(predictions.dtype),
            response_mask,
            kappa=self.kappa,
            loss_agg_mode=loss_agg_mode,
            denominator=denominator,
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

    def __init__(
        self, hidden_size: int, *, num_quantiles: int = 32, kappa: float = 1.0, risk_level: float | None = None
    ) -> None:
        super().__init__(hidden_size, num_quantiles=num_quantiles, kappa=kappa, risk_level=risk_level)
        self.linear = _zero_linear(hidden_size, num_quantiles)

    @classmethod
    def from_config(cls, args: PPOConfig, hidden_size: int) -> Self:
        """With `num_quantiles`."""
        return cls(hidden_size, num_quantiles=args.num_quantiles)

    def settings(self) -> dict[str, Any]:
        """The number of quantiles."""
        return {"num_quantiles": self.num_quantiles}

    def read(self, states: Tensor, taus: Tensor | None) -> HeadOutputs:
        """`predictions` (N, K) are the quantiles."""
        quantiles = self.linear(states)
        means = quantiles.mean(dim=-1)
        if self.risk_level is None:
            return HeadOutputs(means, means, quantiles)
        return HeadOutputs(cvar_from_quantiles(quantiles, alpha=self.risk_level), means, quantiles)


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

    def __init__(
        self,
        hidden_size: int,
        *,
        num_quantiles: int = 32,
        embedding_dim: int = 64,
        kappa: float = 1.0,
        risk_level: float | None = None,
    ) -> None:
        super().__init__(hidden_size, num_quantiles=num_quantiles, kappa=kappa, risk_level=risk_level)
        self.embedding_dim = embedding_dim
        self.embedding = HeadLinear(embedding_dim, hidden_size)
        self.bias = _zero_linear(embedding_dim, 1)
        self.weight = nn.Parameter(torch.zeros(hidden_size))

    @classmethod
    def from_config(cls, args: PPOConfig, hidden_size: int) -> Self:
        """With `num_quantiles` and `iqn_embedding_dim`."""
        return cls(hidden_size, num_quantiles=args.num_quantiles, embedding_dim=args.iqn_embedding_dim)

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
            # The CVaR is the mean of Z(s, tau) over tau in (0, alpha), so K levels inside the tail itself are read.
            values = means = fixed.mean(dim=-1)
            if self.risk_level is not None:
                values = self.quantiles(states, self.risk_level * midpoints).mean(dim=-1)
        return HeadOutputs(values, means, fixed if taus is None else self.quantiles(states, taus))


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


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
