"""The policy's losses of the independent PPO, of one optimizer step with all its rows at once.

Sequences are lists of tensors: entry i is (C_i,), the chosen tokens of row i.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tests.independent.advantages import Rows, kl_values


def averaged(losses: Rows, config: Mapping[str, Any]) -> Tensor:
    """The losses of all tokens as one number, by loss_agg_mode."""
    mode = config["loss_agg_mode"]
    if mode == "token-mean":
        return torch.cat(losses).sum() / sum(len(row) for row in losses)
    if mode == "seq-mean-token-mean":
        return torch.stack([row.sum() / len(row) for row in losses]).sum() / len(losses)
    sums = torch.stack([row.sum() for row in losses]).sum() / len(losses)
    if mode == "seq-mean-token-sum":
        return sums
    assert mode == "seq-mean-token-sum-norm", f"no independent computation of loss_agg_mode {mode!r}"
    return sums / config["response_len"]


def correction_weights(old: Rows, sampled: Rows, config: Mapping[str, Any], *, trained: list[bool]) -> Rows:
    """Truncated importance weights old / sampled of all rollouts of a step, one a token; 0 in rows that give no
    gradient.
    """
    log_ratios = [a - b for a, b in zip(old, sampled, strict=True)]
    of_sequences = config["rollout_correction_level"] == "sequence"
    if of_sequences:
        log_ratios = [row.sum().reshape(1) for row in log_ratios]
    weights = [torch.exp(row).clamp(max=config["rollout_correction_threshold"]) for row in log_ratios]
    return [row.expand(len(like)) * counts for row, like, counts in zip(weights, old, trained, strict=True)]


def policy_loss(new: Rows, old: Rows, advantages: Rows, config: Mapping[str, Any]) -> Rows:
    """Of each token, by the papers that docs/algorithms.md names."""
    low = config["cliprange"]
    high = low if config["cliprange_high"] is None else config["cliprange_high"]
    name = config["policy_loss"]
    assert name in ROWS, f"no independent computation of policy_loss {name!r}"
    return [ROWS[name](n, o, a, low, high, config) for n, o, a in zip(new, old, advantages, strict=True)]


def _clip(n: Tensor, o: Tensor, a: Tensor, low: float, high: float, config: Mapping[str, Any]) -> Tensor:
    ratio = torch.exp(n - o)
    if config["policy_loss"] == "gspo":
        ratio = torch.exp((n - o).detach().mean()) * torch.exp(n - n.detach())
    row = -torch.minimum(ratio * a, ratio.clamp(1 - low, 1 + high) * a)
    if (c := config["clip_ratio_c"]) is not None:
        row = torch.where(a < 0, torch.minimum(row, -c * a), row)
    return row


def _cispo(n: Tensor, o: Tensor, a: Tensor, low: float, high: float, config: Mapping[str, Any]) -> Tensor:
    weights = [min(max(float(torch.exp(x)), 1 - low), 1 + high) for x in (n - o).detach()]
    return -torch.tensor(weights, dtype=torch.float64) * a * n


def _sapo(n: Tensor, o: Tensor, a: Tensor, low: float, high: float, config: Mapping[str, Any]) -> Tensor:
    tokens = []
    for ratio, advantage in zip(torch.exp(n - o), a, strict=True):
        tau = 1.0 if advantage > 0 else 1.05
        tokens.append(-advantage * 4 / (tau * (1 + torch.exp(-tau * (ratio - 1)))))
    return torch.stack(tokens)


def _gmpo(n: Tensor, o: Tensor, a: Tensor, low: float, high: float, config: Mapping[str, Any]) -> Tensor:
    bounded = []
    for d, advantage in zip(n - o, a, strict=True):
        if advantage > 0:
            bounded.append(d.clamp(max=high))
        else:
            bounded.append(d.clamp(min=-low) if advantage < 0 else 0 * d)
    row = -a.mean() * torch.exp(torch.stack(bounded).sum() / len(n))
    return row.expand(len(n))


def _dppo(n: Tensor, o: Tensor, a: Tensor, low: float, high: float, config: Mapping[str, Any]) -> Tensor:
    bound, tokens = config["clip_ratio_c"] or 20.0, []
    for new, old, advantage in zip(n, o, a, strict=True):
        p, q = math.exp(new.item()), math.exp(old.item())
        moved = p - q if advantage > 0 else q - p
        limit = high if advantage > 0 else low
        if config["policy_loss"] == "dppo_kl":
            kl = q * math.log(q / p) + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))
            kept = moved <= 0 or kl <= limit
        else:
            kept = moved <= limit
        tokens.append(-advantage * min(p / q, bound) * new * kept)
    return torch.stack(tokens)


ROWS = {"clip": _clip, "gspo": _clip, "cispo": _cispo, "sapo": _sapo, "gmpo": _gmpo, "dppo": _dppo, "dppo_kl": _dppo}
"""The policy losses of one row's tokens by name."""


def success_loss(new: Rows, scores: list[float], config: Mapping[str, Any]) -> Tensor:
    """Minus the mean log-prob of the tokens of responses that score above the threshold (arXiv:2504.05118)."""
    chosen = [row for row, score in zip(new, scores, strict=True) if score > config["positive_nll_threshold"]]
    return -torch.cat(chosen).mean() if chosen else torch.zeros((), dtype=torch.float64)


def kl_loss(new: Rows, reference: Rows, config: Mapping[str, Any]) -> Rows:
    """The KL of each token to the reference; a `+` takes the value of its estimator and the gradient of k2."""
    kind, rows = config["kl_loss_type"], []
    for n, r in zip(new, reference, strict=True):
        value = kl_values(n - r, kind)
        if kind.endswith("+"):
            square = (n - r) ** 2 / 2
            value = value.detach() + square - square.detach()
        rows.append(value)
    return rows


def approximate_kl(new: Rows, old: Rows) -> float:
    """KL(old || new) per token by k3, which target_kl_stop bounds: r - 1 - log r with r = new / old."""
    d = torch.cat([n - o for n, o in zip(new, old, strict=True)]).detach()
    return float((torch.exp(d) - 1 - d).mean())
