"""Advantages of responses that are compared with others to the same prompt, their group, and so need no critic.

Everywhere, `group_ids` (B,) are integers, equal within a group and in any order, and `response_mask` (B, R) is True for
tokens that the policy chose. A row with an empty mask does not count in its group. Scores that are equal up to rounding
(`rounding_error`) count as equal. Shapes that do not fit raise a `ValueError`. Two estimators whiten over all tokens
and must see the whole rollout batch: `reinforce_plus_plus_baseline` and `gdpo_advantages`.
"""

from typing import Literal

import torch
from torch import Tensor

from alpaca_ppo.functional.masked import at_least_float32, check_row_values, masked_whiten, rounding_error, zero_outside
from alpaca_ppo.registry import ADV_ESTIMATORS

# The estimators of `group_advantages`.
GROUP_ESTIMATORS = ADV_ESTIMATORS.names_with(needs_group=True, needs_scores_by_source=False)

STD_EPSILON = 1e-6


def group_advantages(
    scores: Tensor, group_ids: Tensor, response_mask: Tensor, *, estimator: str, quantile: float = 0.4
) -> Tensor:
    """Advantages (B, R), equal on all masked tokens of a response and 0 elsewhere, from its score s and the scores of
    the n responses in its group:

    - `grpo`: (s - mean) / (std + 1e-6), std unbiased (arXiv:2402.03300);
    - `grpo_no_std`: s - mean (Dr. GRPO, arXiv:2503.20783);
    - `rloo`: s - mean of the others = n / (n - 1) * (s - mean) (arXiv:2402.14740);
    - `opo`: s - the group's mean weighted by response length (arXiv:2505.23585);
    - `reinforce_plus_plus_baseline`: s - mean, then whitened over all tokens of the batch (arXiv:2501.03262);
    - `qae`: (s - q) / (std + 1e-6), where q is the smallest score of the group such that at least a share `quantile`
      of its scores is <= q (arXiv:2509.22611);
    - `grpo_passk`: (best - second best) / (std + 1e-6) for the best response, 0 for all others; 0 for all if the two
      best are equal (arXiv:2503.19595).

    A response that is alone in its group has baseline 0 and, for `grpo`, std 1; for `qae` and `grpo_passk` its
    advantage is 0. `scores` are (B,), and `quantile` is above 0 and at most 1.
    """
    if estimator not in GROUP_ESTIMATORS:
        raise ValueError(f"the group estimator is {estimator!r}; it must be one of {', '.join(GROUP_ESTIMATORS)}")
    if not 0.0 < quantile <= 1.0:
        raise ValueError(f"quantile is {quantile}; it must be above 0 and at most 1")
    check_row_values("scores", scores, response_mask)
    check_row_values("group_ids", group_ids, response_mask)
    lengths = response_mask.sum(dim=1)
    member = lengths > 0
    scores = at_least_float32(scores)
    _, group = torch.unique(group_ids, return_inverse=True)
    size = _group_sum(member.to(scores.dtype), group)
    alone = size < 2
    # Relative to the group's lowest score, equal scores are exactly 0. Otherwise the rounding error of their mean would
    # become an advantage, divided by their std.
    lowest, equal = _lowest_and_equal(scores, member, group)
    relative = zero_outside(torch.where(alone, scores, torch.where(equal, 0.0, scores - lowest)), member)
    weights = (lengths if estimator == "opo" else member).to(scores.dtype)
    mean = _group_sum(weights * relative, group) / _group_sum(weights, group).clamp_min(1)
    deviations = advantages = zero_outside(relative - torch.where(alone, 0.0, mean), member)
    if estimator == "rloo":
        advantages = deviations * size / (size - 1).clamp_min(1)
    elif estimator == "qae":
        advantages = zero_outside(relative - _group_quantile(relative, member, size, group, quantile), member)
    elif estimator == "grpo_passk":
        advantages = _lead_of_the_best(relative, member, size, group)
    if estimator in ("grpo", "qae", "grpo_passk"):
        std = torch.where(alone, 1.0, _group_std(deviations, size, group))
        advantages = advantages / (std + STD_EPSILON)
    per_token = advantages.unsqueeze(1).expand(response_mask.shape)
    if estimator == "reinforce_plus_plus_baseline":
        return masked_whiten(per_token, response_mask)
    return zero_outside(per_token, response_mask)


def gdpo_advantages(
    scores_by_source: Tensor,
    weights: Tensor,
    group_ids: Tensor,
    response_mask: Tensor,
    *,
    penalties: Tensor | None = None,
) -> Tensor:
    """Advantages (B, R) of several reward sources: the weighted sum of the `grpo` advantages of each source on its own,
    whitened over all masked tokens of the batch (GDPO, arXiv:2601.05242).

    Args:
        scores_by_source: (B, S). A response that a source did not score (NaN) has no part in that source's comparison.
            Nor has the only response that it did score in a group of several: its advantage would be its bare score.
        weights: (S,), one for each source.
        penalties: (B,), other terms of the reward, such as a KL penalty (not in the paper). Minus their group's mean,
            they are added to the weighted sum. Division by their std would undo their coefficient.
    """
    if scores_by_source.dim() != 2 or weights.shape != scores_by_source.shape[1:]:
        problem = f"scores_by_source has shape {tuple(scores_by_source.shape)} and weights {tuple(weights.shape)}"
        raise ValueError(f"{problem}; pass scores (B, S) of S sources and one weight for each of these")
    check_row_values("each column of scores_by_source", scores_by_source.sum(dim=1), response_mask)
    check_row_values("group_ids", group_ids, response_mask)
    _, group = torch.unique(group_ids, return_inverse=True)
    has_tokens = response_mask.any(dim=1)
    size = _group_sum(has_tokens.long(), group)
    total = at_least_float32(scores_by_source).new_zeros(response_mask.shape)
    for scores, weight in zip(scores_by_source.unbind(dim=1), weights.to(total), strict=True):
        scored = has_tokens & ~scores.isnan()
        compared = scored & ((_group_sum(scored.long(), group) > 1) | (size < 2))
        mask = response_mask & compared.unsqueeze(1)
        total = total + weight * group_advantages(scores, group_ids, mask, estimator="grpo")
    if penalties is not None:
        total = total + group_advantages(penalties, group_ids, response_mask, estimator="grpo_no_std")
    return masked_whiten(total, response_mask)


def informative_rows(scores: Tensor, group_ids: Tensor) -> Tensor:
    """(B,) bool: whether the scores of the row's group differ. Groups whose scores are equal teach a critic-free run
    nothing (dynamic sampling of DAPO, arXiv:2503.14476).

    Pass `scores` (B,) before any shaping: a KL penalty makes responses differ that have all failed.
    """
    if scores.dim() != 1 or group_ids.shape != scores.shape:
        raise ValueError(f"scores has shape {tuple(scores.shape)}, group_ids {tuple(group_ids.shape)}; pass (B,)")
    _, group = torch.unique(group_ids, return_inverse=True)
    _, equal = _lowest_and_equal(at_least_float32(scores), torch.ones_like(scores, dtype=torch.bool), group)
    return ~equal


def _lowest_and_equal(scores: Tensor, member: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
    """(B,) each: the lowest score of the row's group, without a gradient, and whether all its scores are equal."""
    lowest, highest = (_group_extreme(scores.detach(), member, group, kind) for kind in ("amin", "amax"))
    return lowest, highest - lowest <= rounding_error(torch.maximum(lowest.abs(), highest.abs()))


def _group_std(deviations: Tensor, size: Tensor, group: Tensor) -> Tensor:
    """(B,): the unbiased std of the row's group, from the deviations from its mean."""
    # Divided by the group's largest deviation, since the squares of scores above 1e19 overflow float32.
    every_row = torch.ones_like(group, dtype=torch.bool)
    unit = _group_extreme(deviations.detach().abs(), every_row, group, "amax").clamp_min(1)
    variance = _group_sum((deviations / unit).square(), group) / (size - 1).clamp_min(1)
    # The gradient of the square root at 0 is infinite.
    return unit * variance.clamp_min(torch.finfo(variance.dtype).tiny).sqrt()


def _group_quantile(scores: Tensor, member: Tensor, size: Tensor, group: Tensor, quantile: float) -> Tensor:
    """(B,): the smallest score q of the row's group such that at least a share `quantile` of its scores is <= q."""
    ranks = _ranks(scores, member, group)

    def reaches_quantile(rank: Tensor) -> Tensor:
        share = rank / size.clamp_min(1)
        # So that 3 of 10 reach 0.3 in any precision.
        return share + rounding_error(share) >= quantile

    is_quantile = member & reaches_quantile(ranks) & ~reaches_quantile(ranks - 1)
    return _group_sum(torch.where(is_quantile, scores, 0.0), group)


def _lead_of_the_best(scores: Tensor, member: Tensor, size: Tensor, group: Tensor) -> Tensor:
    """(B,): best - second best of the group for its best row, 0 for all other rows and without a second."""
    ranks = _ranks(scores, member, group)
    best, second = member & (ranks == size), member & (ranks == size - 1)
    lead = _group_sum(torch.where(best, scores, torch.where(second, -scores, 0.0)), group)
    return torch.where(best & (size > 1), lead, 0.0)


def _ranks(scores: Tensor, member: Tensor, group: Tensor) -> Tensor:
    """(B,) in the dtype of `scores`: the rank of each member in its group, from 1 for the lowest score; equal scores
    are in the order of rows. 0 for other rows.
    """
    rows = member.nonzero().flatten()
    rows = rows[scores.detach()[rows].argsort(stable=True)]
    rows = rows[group[rows].argsort(stable=True)]
    groups = group[rows]
    # Minus the position of the group's first row.
    ranks = torch.arange(1, len(rows) + 1, device=rows.device) - torch.searchsorted(groups, groups)
    return torch.zeros_like(scores.detach()).index_copy(0, rows, ranks.to(scores.dtype))


def _group_sum(values: Tensor, group: Tensor) -> Tensor:
    """(B,): for each row, the sum of `values` over its group."""
    return torch.zeros_like(values).index_add(0, group, values)[group]


def _group_extreme(values: Tensor, member: Tensor, group: Tensor, kind: Literal["amin", "amax"]) -> Tensor:
    """(B,): for each row, the smallest or largest of `values` over the members of its group, or an infinity."""
    initial = torch.full_like(values, torch.inf if kind == "amin" else -torch.inf)
    return initial.scatter_reduce(0, group, torch.where(member, values, initial), kind)[group]
