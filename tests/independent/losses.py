"""The policy's losses of the independent PPO, of one optimizer step with all its rows at once.

Sequences are lists of tensors: entry i is (C_i,), the chosen tokens of row i.
"""

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


def correction_weights(old: Rows, sampled: Rows, config: Mapping[str, Any]) -> Rows:
    """Truncated importance weights old / sampled of all rollouts of a step, one a token."""
    log_ratios = [a - b for a, b in zip(old, sampled, strict=True)]
    of_sequences = config["rollout_correction_level"] == "sequence"
    if of_sequences:
        log_ratios = [row.sum().reshape(1) for row in log_ratios]
    weights = [torch.exp(row).clamp(max=config["rollout_correction_threshold"]) for row in log_ratios]
    if config["rollout_correction_normalize"]:
        mean = torch.cat(weights).mean()
        weights = [row / mean for row in weights]
    return [row.expand(len(like)) for row, like in zip(weights, old, strict=True)]


def policy_loss(new: Rows, old: Rows, advantages: Rows, config: Mapping[str, Any]) -> Rows:
    """Of each token: PPO's clipped loss (arXiv:1707.06347) or GSPO's (arXiv:2507.18071)."""
    low = config["cliprange"]
    high = low if config["cliprange_high"] is None else config["cliprange_high"]
    rows = []
    for n, o, a in zip(new, old, advantages, strict=True):
        if config["policy_loss"] == "gspo":
            ratio = torch.exp((n - o).detach().mean()) * torch.exp(n - n.detach())
        else:
            assert config["policy_loss"] == "clip", (
                f"no independent computation of policy_loss {config['policy_loss']!r}"
            )
            ratio = torch.exp(n - o)
        row = -torch.minimum(ratio * a, ratio.clamp(1 - low, 1 + high) * a)
        if (c := config["clip_ratio_c"]) is not None:
            row = torch.where(a < 0, torch.minimum(row, -c * a), row)
        rows.append(row)
    return rows


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
