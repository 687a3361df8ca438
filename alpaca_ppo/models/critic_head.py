"""What a critic head is: it computes values from hidden states, defines its own loss, and stores its settings in its
folder. A new kind of critic is one class with `register_critic_head`; the built-in ones are in `critic_heads`.

Heads compute in float32 at least, whatever the dtype of the backbone and of their own weights (DeepSpeed makes those
bfloat16 in a bfloat16 run).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self, TypeVar

import torch
from torch import Tensor, nn

from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.config.risk_level import RiskLevel
from alpaca_ppo.functional import Loss
from alpaca_ppo.registry import CRITIC_HEADS, CVaRTail

HeadClass = TypeVar("HeadClass", bound=type["CriticHead"])


class HeadOutputs(NamedTuple):
    """What a head reads from N hidden states."""

    values: Tensor
    """(N,), what GAE uses: what the head's `risk_level` names."""
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
        risk_level: what is read as the value, as in the configuration: `neutral`, the mean; `0.1`, the mean of that
            lower tail (CVaR); `upper:0.1`, of that upper tail. It is not stored with the weights, and may be changed
            between forward passes.
    """

    kind: str = ""

    def __init__(self, hidden_size: int, *, risk_level: str | float = "neutral") -> None:
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
        self.risk_level = args.risk_level

    @property
    def risk_level(self) -> str:
        """What `read` returns as the value. It may be set to a number too, and to nothing that is not a risk level."""
        return self._risk_level

    @risk_level.setter
    def risk_level(self, level: str | float) -> None:
        self._risk = RiskLevel.parse(str(level))
        self._risk_level = str(level)

    def value_of(self, means: Tensor, tail_mean: Callable[[float, CVaRTail], Tensor]) -> Tensor:
        """The value (N,) at the head's risk level, for `read` of a distributional head.

        Args:
            means: (N,), the mean of the distribution.
            tail_mean: the mean (N,) of the lower or upper tail of probability alpha, for (alpha, tail).
        """
        return means if self._risk.alpha is None else tail_mean(self._risk.alpha, self._risk.tail)

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

    def check_like(self, saved: "CriticHead") -> None:
        """Checks that this head can take the weights of the head `saved`.

        Raises:
            ValueError: when kinds, settings or hidden sizes differ.
        """
        of_saved, own = ({**head.spec(), "hidden_size": head.hidden_size} for head in (saved, self))
        if of_saved != own:
            raise ValueError(
                f"the value model's head is {of_saved}, but the critic asked for is {own}; set critic and its options "
                "to those of the value model"
            )

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
            return _checked(self.kind, self.read(states.to(dtype), taus), len(states))


def _checked(kind: str, returned: Any, rows: int) -> HeadOutputs:
    if not isinstance(returned, HeadOutputs):
        raise ValueError(f"read() of the critic {kind!r} returned a {type(returned).__name__}, not HeadOutputs")
    for field, value in returned._asdict().items():
        found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        if found != (rows,) and not (field == "predictions" and len(found) == 2 and found[0] == rows):
            raise ValueError(
                f"read() of the critic {kind!r} returned {field} of {found}; it must be a tensor ({rows},)"
                + (f" or ({rows}, M)" if field == "predictions" else "")
            )
    return returned


def register_critic_head(
    name: str, *, distributional: bool = False, fixed_support: bool = False
) -> Callable[[HeadClass], HeadClass]:
    """A class decorator that adds the critic `name`, a subclass of `CriticHead`.

    Args:
        name: the value of `critic` that selects it; also stored in the folders of its weights.
        distributional: it learns the distribution of the return and reads its `risk_level` (`value_of`).
        fixed_support: it gives probabilities to returns between the two ends of `PPOConfig.value_support`.

    Raises:
        TypeError: when the class is not a `CriticHead`.
        ValueError: when the name is taken, or holds a space, comma or colon.
    """

    def attach(head_class: HeadClass) -> HeadClass:
        if not (isinstance(head_class, type) and issubclass(head_class, CriticHead)):
            raise TypeError(f"the critic head {name!r} is {head_class!r}; register a subclass of CriticHead")
        CRITIC_HEADS.register(name, distributional=distributional, fixed_support=fixed_support)(head_class)
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


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
