"""Per-token estimates of KL(policy || reference) from the log-probabilities of the sampled token alone.

The estimators are those of http://joschu.net/blog/kl-approx.html. The exact KL over the vocabulary is left out: it
would need both models' logits at once.
"""

import torch
from torch import Tensor

from alpaca_ppo.functional.masked import at_least_float32

KL_ESTIMATORS: tuple[str, ...] = ("k1", "abs", "k2", "k3", "k1_clamped", "k1+", "k3+")

LOG_RATIO_LIMIT = 20.0
"""Nats: log-ratios are clamped to +- this before `exp`, which keeps float32 finite."""

K3_LIMIT = 10.0


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """The estimate of each token's KL, in nats. With d = logprobs - ref_logprobs:

    - `k1` = d: unbiased, either sign; d > 0 means the policy likes the token more than the reference does;
    - `abs` = |d|; `k2` = d^2 / 2: its expected gradient is the KL's;
    - `k3` = exp(-d) - 1 + d: unbiased and never negative; -d is clamped to +-20 and the result to at most 10;
    - `k1_clamped` = max(d, 0): AlpacaFarm's, which is biased upward, for reproducing it;
    - `k1+`, `k3+`: the value of k1 or k3 with the gradient of k2 (straight-through).

    There is no mask here: where padding may hold NaN, pass both arguments through `zero_outside` first.

    Args:
        logprobs: any shape, log-probabilities of the sampled tokens under the policy, in nats.
        ref_logprobs: the same under the reference.
        estimator: one of the above.

    Raises:
        ValueError: for an unknown estimator.
    """
    if estimator not in KL_ESTIMATORS:
        raise ValueError(f"KL estimator is {estimator!r}; it must be one of {', '.join(KL_ESTIMATORS)}")
    difference = at_least_float32(logprobs) - at_least_float32(ref_logprobs)
    value = _estimate(difference, estimator.removesuffix("+"))
    if estimator.endswith("+"):
        with_gradient = _estimate(difference, "k2")
        return with_gradient - with_gradient.detach() + value.detach()
    return value


def _estimate(difference: Tensor, estimator: str) -> Tensor:
    if estimator == "k1":
        return difference
    if estimator == "abs":
        return difference.abs()
    if estimator == "k2":
        return difference.square() / 2
    if estimator == "k1_clamped":
        return difference.clamp_min(0)
    negated = (-difference).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    # expm1 keeps the digits that exp(x) - 1 loses where policy and reference nearly agree.
    return (torch.expm1(negated) - negated).clamp_max(K3_LIMIT)
