"""What `risk_level` may be: of which part of the distribution of returns a critic's value is the mean."""

from typing import NamedTuple, Self

from alpaca_ppo.registry import CVaRTail


class RiskLevel(NamedTuple):
    """The mean of the distribution, or of one of its tails."""

    alpha: float | None
    """The probability of the tail, in (0, 1]; None for the mean."""
    tail: CVaRTail

    @classmethod
    def parse(cls, text: str) -> Self:
        """The risk level `text`, such as `0.1` or `upper:0.2`.

        Raises:
            ValueError: for anything else.
        """
        if text == "neutral":
            return cls(None, "lower")
        tail: CVaRTail = "upper" if text.startswith("upper:") else "lower"
        try:
            alpha = float(text.removeprefix("upper:"))
        except ValueError:
            alpha = 0.0
        if not 0 < alpha <= 1:
            raise ValueError(
                f"risk_level is {text!r}; it must be neutral, a number above 0 and at most 1 such as 0.1 (a lower "
                "tail), or upper:0.1 (an upper tail)"
            )
        return cls(alpha, tail)
