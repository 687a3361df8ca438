"""What `risk_level` may be: of which part of the distribution of returns a critic's value is the mean."""

import math
from typing import NamedTuple

from alpaca_ppo.registry import CVaRTail


class RiskPart(NamedTuple):
    """One term of a risk level: the mean, or the mean of a tail, and its weight in the sum."""

    weight: float
    alpha: float | None
    """The probability of the tail, in (0, 1]; None for the mean."""
    tail: CVaRTail


def parse_risk_level(text: str) -> tuple[RiskPart, ...]:
    """The terms of the risk level `text`, such as `0.5*neutral+0.5*upper:0.2`, whose weights add up to 1.

    Raises:
        ValueError: for anything else.
    """
    parts = tuple(_part(text, term) for term in text.split("+"))
    total = math.fsum(part.weight for part in parts)
    # Three weights of 0.333333 are meant to be thirds.
    if not math.isclose(total, 1.0, abs_tol=1e-5):
        raise ValueError(
            f"risk_level is {text!r}, whose weights add up to {total:g}; give each part a weight, so that they add up "
            "to 1, as in 0.5*neutral+0.5*upper:0.2"
        )
    return parts


def _part(text: str, term: str) -> RiskPart:
    weight, star, level = (piece.strip() for piece in term.rpartition("*"))
    share, alpha = _number(weight) if star else 1.0, None
    tail: CVaRTail = "upper" if level.startswith("upper:") else "lower"
    if level != "neutral":
        alpha = _number(level.removeprefix("upper:"))
    if not share > 0 or not (alpha is None or 0 < alpha <= 1):
        raise ValueError(
            f"risk_level is {text!r}; it must be neutral, a number above 0 and at most 1 such as 0.1 (a lower tail), "
            "upper:0.1 (an upper tail), or a sum of these with positive weights such as 0.5*neutral+0.5*upper:0.2"
        )
    return RiskPart(share, alpha, tail)


def _number(text: str) -> float:
    """The number `text`, or NaN."""
    try:
        return float(text)
    except ValueError:
        return math.nan
