"""The controller of `kl_coef`, the weight of the KL in the reward: fixed, proportional, horizon or scaled.

Every process passes the statistics of all processes' sequences. The configuration checks the bounds of the settings.
"""

import math

# Bound of the relative error kl / target - 1 in one update (arXiv:1909.08593, section 2.2).
ERROR_LIMIT = 0.2


class KLController:
    """Holds the coefficient as `value`, in reward units per nat; `update` adapts it after each step.

    With e = clip(kl / target_kl - 1, -0.2, 0.2), an update multiplies it by 1 (`fixed`), by 1 + k_beta * e
    (`proportional`: AlpacaFarm's, for any number of sequences), or by 1 + e * num_sequences / horizon (`horizon`:
    Ziegler et al., arXiv:1909.08593, section 2.2). `scaled` sets it to kl_coef times the root mean square
    of scores_std over the steps so far whose scores differed. If all rewards are multiplied by c, so is the KL penalty.
    Until scores have differed it stays at kl_coef, so that a policy without a first success does not drift.

    Args:
        kind: `fixed`, `proportional`, `horizon` or `scaled`; settings that it does not use are ignored.
        kl_coef: the initial value; with `scaled`, the value for scores whose standard deviation is 1.
        target_kl: nats per sequence, positive.
        k_beta: gain, above 0 and below 5, so that the value stays positive.
        horizon: sequences, more than a fifth of those of an update.
    """

    def __init__(
        self, kind: str, kl_coef: float, *, target_kl: float, k_beta: float = 0.1, horizon: float = 10_000
    ) -> None:
        self.value = self._kl_coef = float(kl_coef)
        self._variance, self._num_variances = 0.0, 0
        self._kind, self._target_kl, self._k_beta, self._horizon = kind, target_kl, k_beta, horizon

    def update(self, kl: float, *, num_sequences: int, scores_std: float = math.nan) -> None:
        """Sets the value for the next step.

        Args:
            kl: mean over all sequences of the KL summed over a sequence's tokens, in nats.
            num_sequences: number of those sequences.
            scores_std: standard deviation of their scores (no Bessel's correction); `scaled` ignores the step if it
                is 0 or not finite.
        """
        error = min(max(kl / self._target_kl - 1, -ERROR_LIMIT), ERROR_LIMIT)
        if self._kind == "proportional":
            self.value *= 1 + self._k_beta * error
        elif self._kind == "horizon":
            self.value *= 1 + error * num_sequences / self._horizon
        elif self._kind == "scaled" and 0 < scores_std < math.inf:
            self._num_variances += 1
            self._variance += (scores_std * scores_std - self._variance) / self._num_variances
            self.value = self._kl_coef * math.sqrt(self._variance)

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value, "variance": self._variance, "num_variances": self._num_variances}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restores the state; target, gain and horizon stay those of the constructor."""
        self.value, self._variance = float(state["value"]), float(state["variance"])
        self._num_variances = int(state["num_variances"])
