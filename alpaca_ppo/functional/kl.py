"""Per-token estimates of KL(policy || reference) from the log-probabilities of the sampled tokens.

The estimators are those of http://joschu.net/blog/kl-approx.html. The exact KL over the vocabulary is left out: it
would need the logits of both models at once.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from alpaca_ppo.functional.masked import at_least_float32
from alpaca_ppo.registry import KL_ESTIMATORS

# Nats: log-ratios are clamped to +- this before `exp`, which keeps float32 finite.
LOG_RATIO_LIMIT = 20.0
K3_LIMIT = 10.0

# From logprobs - ref_logprobs, any shape, in float32 or float64, to the estimate of each entry in nats.
KLEstimator = Callable[[Tensor], Tensor]


def register_kl_estimator(name: str, *, kink_at_zero: bool = False) -> Callable[[KLEstimator], KLEstimator]:
    """A decorator that adds a `KLEstimator`, for the penalty in the reward (`kl_estimator`) and, if it is
    differentiable, for the one in the loss (`kl_loss_type`).

    Args:
        name: without spaces, commas and colons. An estimator that a user has registered under it before is replaced.
        kink_at_zero: it has no derivative at a difference of 0, as the absolute value. The loss then refuses it: at the
            start of a run, when the policy is the reference, its gradient would follow the sign of rounding errors.

    Raises:
        ValueError: if `name` is built in, is empty, or has a space, comma or colon.
    """
    return KL_ESTIMATORS.register(name, kink_at_zero=kink_at_zero)


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """The KL estimate of each token, in nats. With d = logprobs - ref_logprobs:

    - `k1` = d: unbiased; positive where the policy gives the token a higher probability;
    - `abs` = |d|; `k2` = d^2 / 2, whose expected gradient is that of the KL;
    - `k3` = exp(-d) - 1 + d: unbiased and never negative; -d is clamped to +-20 and the result to at most 10;
    - `k1_clamped` = max(d, 0): AlpacaFarm's estimator, which is biased upward;
    - `k1+`, `k3+`: the value of k1 or k3 with the gradient of k2 (straight-through);
    - any name that `register_kl_estimator` added.

    Both arguments have any one shape, and there is no mask: where padding may hold NaN, pass them through
    `zero_outside` first.

    Raises:
        ValueError: for an unknown estimator, and for one that does not return a tensor of the shape of its input.
    """
    difference = at_least_float32(logprobs) - at_least_float32(ref_logprobs)
    value = KL_ESTIMATORS.get(estimator)(difference)
    if not isinstance(value, Tensor) or value.shape != difference.shape:
        returned = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        needed = f"a tensor of the shape of its input, {tuple(difference.shape)}"
        raise ValueError(f"the KL estimator {estimator!r} returned {returned}; it must return {needed}")
    return value


def _k3(difference: Tensor) -> Tensor:
    negated = (-difference).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    # expm1 keeps the digits that exp(x) - 1 loses where policy and reference nearly agree.
    return (torch.expm1(negated) - negated).clamp_max(K3_LIMIT)


def _with_gradient_of_k2(value: Tensor, difference: Tensor) -> Tensor:
    k2 = difference.square() / 2
    return k2 - k2.detach() + value.detach()


_BUILT_IN: dict[str, KLEstimator] = {
    "k1": lambda difference: difference,
    "abs": lambda difference: difference.abs(),
    "k2": lambda difference: difference.square() / 2,
    "k3": _k3,
    "k1_clamped": lambda difference: difference.clamp_min(0),
    "k1+": lambda difference: _with_gradient_of_k2(difference, difference),
    "k3+": lambda difference: _with_gradient_of_k2(_k3(difference), difference),
}
for _name, _estimator in _BUILT_IN.items():
    KL_ESTIMATORS.implement(_name)(_estimator)
