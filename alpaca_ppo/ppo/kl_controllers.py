"""Controllers of `kl_coef`, the weight of the KL in the reward: fixed, proportional and horizon.

A controller is plain Python. Its caller averages the observed KL over all processes, so that every process makes the
same update. The configuration checks the bounds of the settings.
"""

import math
from abc import ABC, abstractmethod

ERROR_LIMIT = 0.2
"""Bound of the relative error kl / target - 1 in one update (arXiv:1909.08593, section 2.2)."""


class KLController(ABC):
    """Holds the coefficient as `value`, in reward units per nat; `update` adapts it after each step."""

    def __init__(self, kl_coef: float) -> None:
        self.value = float(kl_coef)

    def update(self, kl: float, *, num_sequences: int) -> None:
        """Sets the value for the next step.

        Args:
            kl: mean over all sequences of the KL summed over a sequence's tokens, in nats.
            num_sequences: number of those sequences.

        Raises:
            ValueError: when kl is not finite; in a horizon controller also when num_sequences is too large.
        """
        if not math.isfinite(kl):
            raise ValueError(
                f"the observed KL is {kl}, so kl_coef stays {self.value}; look for non-finite log-probabilities of the "
                "policy or the reference"
            )
        self.value *= self._factor(kl, num_sequences)

    def state_dict(self) -> dict[str, float]:
        """The value, for `load_state_dict`."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restores the value; targets and rates remain those of the constructor."""
        self.value = float(state["value"])

    @abstractmethod
    def _factor(self, kl: float, num_sequences: int) -> float:
        """The factor by which an update changes the value."""


class FixedKLController(KLController):
    """Leaves the coefficient as it is."""

    def _factor(self, kl: float, num_sequences: int) -> float:
        return 1.0


class ProportionalKLController(KLController):
    """AlpacaFarm's controller: value *= 1 + k_beta * clip(kl / target_kl - 1, -0.2, 0.2), for any number of sequences.

    Args:
        kl_coef: the initial value.
        target_kl: nats per sequence, positive.
        k_beta: gain, above 0 and below 5, so that the value stays positive.

    Raises:
        ValueError: when target_kl is not positive.
    """

    def __init__(self, kl_coef: float, *, target_kl: float, k_beta: float) -> None:
        super().__init__(kl_coef)
        self.target_kl, self.k_beta = _positive("target_kl", target_kl), k_beta

    def _factor(self, kl: float, num_sequences: int) -> float:
        return 1 + self.k_beta * _clipped_error(kl, self.target_kl)


class HorizonKLController(KLController):
    """Ziegler et al.'s controller: value *= 1 + clip(kl / target_kl - 1, -0.2, 0.2) * num_sequences / horizon.

    arXiv:1909.08593, section 2.2.

    Args:
        kl_coef: the initial value.
        target_kl: nats per sequence, positive.
        horizon: sequences, positive; one update changes the value by at most a fifth of num_sequences / horizon.

    Raises:
        ValueError: when target_kl or horizon is not positive.
    """

    def __init__(self, kl_coef: float, *, target_kl: float, horizon: float) -> None:
        super().__init__(kl_coef)
        self.target_kl, self.horizon = _positive("target_kl", target_kl), _positive("horizon", horizon)

    def _factor(self, kl: float, num_sequences: int) -> float:
        if not 0 <= num_sequences * ERROR_LIMIT < self.horizon:
            raise ValueError(
                f"num_sequences ({num_sequences}) must be 0 or more and less than 5 * horizon ({self.horizon}), "
                "because kl_coef could become negative; raise kl_horizon"
            )
        return 1 + _clipped_error(kl, self.target_kl) * num_sequences / self.horizon


def make_kl_controller(
    kind: str, *, kl_coef: float, target_kl: float, k_beta: float = 0.1, horizon: float = 10_000
) -> KLController:
    """The controller `kind` (`fixed`, `proportional` or `horizon`); settings that it does not use are ignored.

    Raises:
        ValueError: when a setting that the controller uses is out of range.
    """
    if kind == "fixed":
        return FixedKLController(kl_coef)
    if kind == "proportional":
        return ProportionalKLController(kl_coef, target_kl=target_kl, k_beta=k_beta)
    assert kind == "horizon", kind
    return HorizonKLController(kl_coef, target_kl=target_kl, horizon=horizon)


def _positive(name: str, value: float) -> float:
    if not value > 0:
        raise ValueError(f"{name} is {value}; it must be above 0")
    return value


def _clipped_error(kl: float, target_kl: float) -> float:
    return min(max(kl / target_kl - 1, -ERROR_LIMIT), ERROR_LIMIT)
