"""Where a response ends, per-token rewards made of a score and a KL penalty, and the penalty for overlong responses."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from alpaca_ppo.functional.kl import kl_penalty
from alpaca_ppo.functional.masked import at_least_float32, zero_outside


class ShapedRewards(NamedTuple):
    """Per-token rewards, each (B, R) and 0 outside the response mask.

    Attributes:
        shaped_rewards: score and KL penalty together.
        non_score_rewards: only the KL penalty, -kl_coef * kl.
        kl: the KL estimate of each token, in nats.
    """

    shaped_rewards: Tensor
    non_score_rewards: Tensor
    kl: Tensor


def response_lengths(response_mask: Tensor) -> Tensor:
    """(B,) int64: the number of columns up to and including the last True of each row, 0 for an empty row."""
    columns = torch.arange(1, response_mask.size(1) + 1, device=response_mask.device)
    return torch.where(response_mask, columns, 0).amax(dim=1)


def last_token_index(response_mask: Tensor) -> Tensor:
    """(B,) int64: the column of the last True of each row, -1 for an empty row."""
    return response_lengths(response_mask) - 1


def per_token(rewards: Tensor, response_mask: Tensor) -> Tensor:
    """(B, R): rewards of tokens as they are; those of responses (B,) on their last chosen tokens, with 0 elsewhere."""
    if rewards.dim() == 2:
        return rewards
    is_last = torch.arange(response_mask.size(1), device=rewards.device) == last_token_index(response_mask).unsqueeze(1)
    return torch.where(is_last, rewards.unsqueeze(1), 0.0)


def shape_rewards(
    scores: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    response_mask: Tensor,
    *,
    kl_coef: float,
    kl_estimator: str = "k1",
) -> ShapedRewards:
    """`-kl_coef * kl` on every masked token, plus the score on the last one (the stop token, if the response has one).

    This is the reward of arXiv:1909.08593, equation 2, with the KL of the sequence distributed over its tokens.

    Args:
        scores: (B,), one for each response; or (B, R), one for each token.
        logprobs: (B, R), nats, under the policy that sampled the tokens.
        ref_logprobs: (B, R), nats, under the reference.
        response_mask: (B, R) bool, True = a token the policy chose; a row without any is an error.
        kl_coef: reward units per nat.
        kl_estimator: see `kl_penalty`.
    """
    last = last_token_index(response_mask)
    empty = (last < 0).nonzero().flatten().tolist()
    if empty:
        raise ValueError(f"response_mask has no token in rows {empty} of {len(last)}; a response has one at least")
    if scores.shape not in (last.shape, response_mask.shape):
        raise ValueError(
            f"scores has shape {tuple(scores.shape)}; it must be {tuple(last.shape)}, one score for each response, "
            f"or {tuple(response_mask.shape)}, one for each token"
        )
    token_scores = per_token(at_least_float32(scores), response_mask)
    kl = kl_penalty(zero_outside(logprobs, response_mask), zero_outside(ref_logprobs, response_mask), kl_estimator)
    # A registered estimator need not be 0 for equal log-probabilities.
    kl = zero_outside(kl, response_mask)
    non_score_rewards = -kl_coef * kl
    return ShapedRewards(non_score_rewards + zero_outside(token_scores, response_mask), non_score_rewards, kl)


def distill(rewards: Tensor, logprobs: Tensor, teacher_logprobs: Tensor, response_mask: Tensor, coef: float) -> Tensor:
    """(B, R): rewards (B,) or (B, R), plus `coef` times the log-ratio of teacher and policy on every masked token.

    The sum of the log-ratios of a response, averaged over responses of the policy, estimates minus the KL of the policy
    to the teacher (arXiv:2306.13649, the reverse KL of on-policy distillation). Log-probs are in nats.
    """
    return per_token(rewards, response_mask) + coef * zero_outside(teacher_logprobs - logprobs, response_mask)


def overlong_penalty(lengths: Tensor, *, max_len: int, buffer_len: int, factor: float = 1.0) -> Tensor:
    """(B,), to be added to scores: 0 up to `max_len - buffer_len` tokens, then linearly down to `-factor` at `max_len`
    and the same beyond it (soft overlong punishment of DAPO, arXiv:2503.14476).

    Args:
        lengths: (B,), tokens of each response.
        max_len: tokens at which the penalty is largest.
        buffer_len: tokens over which it grows, from 1 to max_len.
        factor: the largest penalty, in reward units, at least 0.
    """
    if not 0 < buffer_len <= max_len:
        raise ValueError(f"buffer_len is {buffer_len}; it must be at least 1 and at most max_len ({max_len})")
    if not 0.0 <= factor < math.inf:
        raise ValueError(f"factor is {factor}; it must be a number of at least 0, which is subtracted")
    excess = at_least_float32(lengths) - (max_len - buffer_len)
    return -factor * (excess / buffer_len).clamp(0.0, 1.0)


def sequence_scores(rewards: Tensor) -> Tensor:
    """(B,): the reward of each response, where `rewards` is (B,), or (B, R) with one for each token."""
    return rewards if rewards.dim() == 1 else rewards.sum(dim=1)
