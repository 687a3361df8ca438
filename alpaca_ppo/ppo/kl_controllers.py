"""Coefficients of the KL penalty in the reward that follow the KL that is seen: fixed, proportional and horizon
controllers.

A controller is plain Python: the caller reduces the observed KL over all processes, so that every process makes the
same update.
"""

import math
from abc import ABC, abstractmethod
from typing import Literal, get_args

KLControllerKind = Literal["fixed", "proportional", "horizon"]

ERROR_LIMIT = 0.2
"""Bound of the relative error kl / target - 1 in one update (arXiv:1909.08593, section 2.2)."""


class KLController(ABC):
    """A KL coefficient, `value`, that `update` moves once a step.

    Args:
        kl_coef: the first value, reward units per nat.

    Raises:
        ValueError: when kl_coef is negative or not finite.
    """

    def __init__(self, kl_coef: float) -> None:
        if not (math.isfinite(kl_coef) and kl_coef >= 0):
            raise ValueError(f"kl_coef is {kl_coef}; it must be finite and not negative")
        self.value = float(kl_coef)

    def update(self, kl: float, *, n_steps: int) -> None:
        """Sets the value for the next step.

        Args:
            kl: mean over the sequences of all processes of the summed per-token KL, in nats.
            n_steps: sequences that the mean is over.

        Raises:
            ValueError: when kl is not finite, and, from a horizon controller, when n_steps is too large for its
                horizon.
        """
        if not math.isfinite(kl):
            raise ValueError(
                f"the observed KL is {kl}; kl_coef stays {self.value}. "
                "Look for non-finite log-probabilities of the policy or the reference"
            )
        self.value *= self._factor(kl, n_steps)

    def state_dict(self) -> dict[str, float]:
        """What `load_state_dict` needs to go on from here."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Takes the value from a `state_dict`; targets and rates stay those of the constructor."""
        self.value = float(state["value"])

    @abstractmethod
    def _factor(self, kl: float, n_steps: int) -> float:
        """What multiplies the value."""


class FixedKLController(KLController):
    """Keeps the coefficient as it is."""

    def _factor(self, kl: float, n_steps: int) -> float:
        return 1.0


class ProportionalKLController(KLController):
    """AlpacaFarm's: value *= 1 + k_beta * clip(kl / target_kl - 1, -0.2, 0.2), whatever the number of sequences.

    Args:
        kl_coef: the first value.
        target_kl: nats a sequence.
        k_beta: gain, below 5 so that the value stays positive.

    Raises:
        ValueError: when target_kl is not positive, or k_beta not in (0, 5).
    """

    def __init__(self, kl_coef: float, *, target_kl: float, k_beta: float = 0.1) -> None:
        super().__init__(kl_coef)
        if not 0 < k_beta < 1 / ERROR_LIMIT:
            raise ValueError(
                f"k_beta is {k_beta}; it must be between 0 and {1 / ERROR_LIMIT:g}, or kl_coef may turn negative"
            )
        self.target_kl, self.k_beta = _positive("target_kl", target_kl), k_beta

    def _factor(self, kl: float, n_steps: int) -> float:
        return 1 + self.k_beta * _clipped_error(kl, self.target_kl)


class HorizonKLController(KLController):
    """Ziegler et al.'s (arXiv:1909.08593, section 2.2): value *= 1 + clip(kl / target_kl - 1, -0.2, 0.2) * n_steps /
    horizon.

    Args:
        kl_coef: the first value.
        target_kl: nats a sequence.
        horizon: sequences; the value changes by at most a fifth of n_steps / horizon.

    Raises:
        ValueError: when target_kl or horizon is not positive.
    """

    def __init__(self, kl_coef: float, *, target_kl: float, horizon: float = 10_000) -> None:
        super().__init__(kl_coef)
        self.target_kl, self.horizon = _positive("target_kl", target_kl), _positive("horizon", horizon)

    def _factor(self, kl: float, n_steps: int) -> float:
        if not 0 <= n_steps * ERROR_LIMIT < self.horizon:
            raise ValueError(
                f"n_steps ({n_steps}) must be 0 or more and less than 5 * horizon ({self.horizon}), "
                "or kl_coef may turn negative; raise the horizon"
            )
        return 1 + _clipped_error(kl, self.target_kl) * n_steps / self.horizon


def make_kl_controller(
    kind: str, *, kl_coef: float, target_kl: float | None = None, k_beta: float = 0.1, horizon: float = 10_000
) -> KLController:
    """The controller of a configuration; values that its kind does not use are not looked at.

    Args:
        kind: `fixed`, `proportional` or `horizon`.
        kl_coef: the first value.
        target_kl: nats a sequence, for `proportional` and `horizon`.
        k_beta: gain of `proportional`.
        horizon: sequences, for `horizon`.

    Raises:
        ValueError: for an unknown kind, and for values that the kind's class refuses.
    """
    if kind == "fixed":
        return FixedKLController(kl_coef)
    if kind not in get_args(KLControllerKind):
        raise ValueError(f"the KL controller is {kind!r}; it must be one of {', '.join(get_args(KLControllerKind))}")
    if target_kl is None:
        raise ValueError(
            f"target_kl is None, but a {kind} KL controller needs a target in nats a sequence; set it, or use 'fixed'"
        )
    if kind == "proportional":
        return ProportionalKLController(kl_coef, target_kl=target_kl, k_beta=k_beta)
    return HorizonKLController(kl_coef, target_kl=target_kl, horizon=horizon)


def _positive(name: str, value: float) -> float:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} is {value}; it must be positive and finite")
    return value


def _clipped_error(kl: float, target_kl: float) -> float:
    return min(max(kl / target_kl - 1, -ERROR_LIMIT), ERROR_LIMIT)
