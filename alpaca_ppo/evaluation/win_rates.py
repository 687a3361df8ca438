"""Win-rates against another's answers, and the one that is left at equal length: pure functions of plain numbers.

Who wins is decided in `judges`. Leaves out ratings of more than two models (Elo, Bradley-Terry).
"""

import math
from collections.abc import Sequence

from alpaca_ppo.evaluation.statistics import Estimate

_RIDGE = 1e-3
"""Weight of half the squared coefficients, in units of one comparison: finite coefficients if one side always wins."""
_MOST_STEPS = 100


def both_orders(first: float | None, second: float | None) -> float | None:
    """Returns the win of an answer that a judge saw in both orders: the mean of the two; None if either is missing.

    A judge that always prefers the answer shown first gives 1 and 0, which makes a tie.

    Args:
        first: 1 if the answer won when it was shown first, 0.5 for a tie, 0 if it lost.
        second: the same when it was shown second.
    """
    return None if first is None or second is None else (first + second) / 2


def compare(own: float, other: float) -> float:
    """Returns 1, 0.5 or 0: whether `own` is above, equal to or below `other`.

    Numbers are equal up to the rounding of float32: a model gives one text scores that differ so much in other batches.
    """
    return 0.5 if math.isclose(own, other, rel_tol=1e-5, abs_tol=1e-6) else float(own > other)


def length_controlled(wins: Sequence[Sequence[float]], differences: Sequence[Sequence[float]]) -> Estimate:
    """Returns the win-rate that a logistic regression predicts at equal length, and its standard error.

    logit P(win) = theta + phi * tanh(d / s), where d is the difference in length and s its standard deviation over all
    comparisons (sqrt of the mean square around the mean; the term is absent if it is 0). The win-rate is
    sigmoid(theta): the prediction at d = 0.

    AlpacaEval 2 (arXiv:2404.04475, section 3) also has a term for how hard each instruction is, which it estimates
    from the answers of a whole leaderboard. There is none here, and phi is not regularized by cross-validation: both
    coefficients have a small ridge penalty. The standard error is the delta method on the sandwich covariance, summed
    over the comparisons of each prompt.

    Args:
        wins: of each prompt's comparisons, from 0 to 1; ties are 0.5.
        differences: own length less the other's, of each.
    """
    ys = [y for group in wins for y in group]
    ds = [d for group in differences for d in group]
    groups = [number for number, group in enumerate(wins) for _ in group]
    assert len(ys) == len(ds), (len(ys), len(ds))
    if not ys:
        return Estimate(math.nan, math.nan)
    mean = math.fsum(ds) / len(ds)
    spread = math.sqrt(math.fsum((d - mean) ** 2 for d in ds) / len(ds))
    xs = [math.tanh(d / spread) if spread else 0.0 for d in ds]
    theta, phi = _logistic_fit(xs, ys)
    rate = _sigmoid(theta)
    clusters = len(set(groups))
    if clusters < 2:
        return Estimate(rate, math.nan)
    scores: dict[int, list[float]] = {}
    for group, x, y in zip(groups, xs, ys, strict=True):
        score = scores.setdefault(group, [0.0, 0.0])
        residual = y - _sigmoid(theta + phi * x)
        score[0] += residual
        score[1] += residual * x
    # The first row of the inverse Hessian times the scores: how far each prompt moves theta.
    a, b, c = _hessian(xs, theta, phi)
    moves = [(c * first - b * second) / (a * c - b * b) for first, second in scores.values()]
    variance = clusters / (clusters - 1) * math.fsum(move**2 for move in moves)
    return Estimate(rate, rate * (1 - rate) * math.sqrt(variance))


def _logistic_fit(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """The theta and phi that minimize cross-entropy plus the ridge, by Newton's method with halved steps."""
    theta = phi = 0.0
    for _ in range(_MOST_STEPS):
        residuals = [y - _sigmoid(theta + phi * x) for x, y in zip(xs, ys, strict=True)]
        g0 = math.fsum(residuals) - _RIDGE * theta
        g1 = math.fsum(r * x for r, x in zip(residuals, xs, strict=True)) - _RIDGE * phi
        a, b, c = _hessian(xs, theta, phi)
        step = (c * g0 - b * g1) / (a * c - b * b), (a * g1 - b * g0) / (a * c - b * b)
        loss, size = _loss(xs, ys, theta, phi), 1.0
        while size > 1e-9 and _loss(xs, ys, theta + size * step[0], phi + size * step[1]) > loss:
            size /= 2
        theta, phi = theta + size * step[0], phi + size * step[1]
        if max(map(abs, step)) < 1e-12:
            break
    return theta, phi


def _hessian(xs: Sequence[float], theta: float, phi: float) -> tuple[float, float, float]:
    """The entries (theta theta), (theta phi) and (phi phi)."""
    ps = [_sigmoid(theta + phi * x) for x in xs]
    weights = [p * (1 - p) for p in ps]
    a = math.fsum(weights) + _RIDGE
    b = math.fsum(w * x for w, x in zip(weights, xs, strict=True))
    c = math.fsum(w * x * x for w, x in zip(weights, xs, strict=True)) + _RIDGE
    return a, b, c


def _loss(xs: Sequence[float], ys: Sequence[float], theta: float, phi: float) -> float:
    logits = [theta + phi * x for x in xs]
    entropy = math.fsum(_softplus(z) - y * z for z, y in zip(logits, ys, strict=True))
    return entropy + _RIDGE / 2 * (theta**2 + phi**2)


def _softplus(z: float) -> float:
    return max(z, 0.0) + math.log1p(math.exp(-abs(z)))


def _sigmoid(z: float) -> float:
    return 1 / (1 + math.exp(-z)) if z >= 0 else math.exp(z) / (1 + math.exp(z))
