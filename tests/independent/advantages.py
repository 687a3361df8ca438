"""Rewards and advantages of the independent PPO. Sequences are lists of tensors: entry i is (C_i,), the chosen tokens
of row i, and nothing else, so that no formula needs a mask.
"""

import math
from collections.abc import Callable, Mapping
from statistics import pvariance
from typing import Any

import torch
from torch import Tensor

Rows = list[Tensor]


def kl_values(difference: Tensor, estimator: str) -> Tensor:
    """Per-token KL of log-prob minus reference log-prob; http://joschu.net/blog/kl-approx.html. A `+` in the name
    changes the gradient only.
    """
    d = difference
    name = estimator.removesuffix("+")
    if name == "k1":
        return d
    if name == "abs":
        return d.abs()
    if name == "k2":
        return d * d / 2
    if name == "k1_clamped":
        return torch.where(d > 0, d, torch.zeros_like(d))
    assert name == "k3", f"no independent computation of KL estimator {estimator!r}"
    return (torch.exp(-d.clamp(-20, 20)) - 1 + d.clamp(-20, 20)).clamp(max=10)


def next_kl_coef(coef: float, kl: Rows, config: Mapping[str, Any], scores: list[list[float]]) -> float:
    """The controller's value after a step with per-token `kl`; `scores` are those of each step that counts so far."""
    if config["kl_controller"] == "scaled":
        # The trainer takes the standard deviations in float32.
        deviations = [float(torch.tensor(pvariance(of_step), dtype=torch.float32).sqrt()) for of_step in scores]
        squares = [std**2 for std in deviations if std > 0]
        return config["kl_coef"] * (math.sqrt(sum(squares) / len(squares)) if squares else 1)
    observed = sum(float(row.sum()) for row in kl) / len(kl)
    error = min(max(observed / config["target_kl"] - 1, -0.2), 0.2)
    if config["kl_controller"] == "proportional":
        return coef * (1 + 0.1 * error)
    if config["kl_controller"] == "horizon":
        return coef * (1 + error * len(kl) / config["kl_horizon"])
    assert config["kl_controller"] == "fixed", (
        f"no independent computation of kl_controller {config['kl_controller']!r}"
    )
    return coef


def whitened(rows: Rows, *, keep_mean: bool = False) -> Rows:
    """(x - mean) / sqrt(var + 1e-8) over all tokens of all rows, var unbiased."""
    flat = torch.cat(rows)
    mean = flat.sum() / len(flat)
    variance = ((flat - mean) ** 2).sum() / (len(flat) - 1)
    return [(row - mean) / (variance + 1e-8).sqrt() + (mean if keep_mean else 0) for row in rows]


def _gae(rewards: Rows, config: Mapping[str, Any], values: Rows, **_: Any) -> tuple[Rows, Rows]:
    lam_policy, lam_critic = (config["lam"] if config[k] is None else config[k] for k in ("lam_policy", "lam_critic"))
    advantages, returns = [], []
    for r, v in zip(rewards, values, strict=True):
        lam = max(0.0, 1 - 1 / (config["lam_alpha"] * len(r))) if lam_policy == "adaptive" else lam_policy
        advantages.append(_gae_of_row(r, v, config["gamma"], lam))
        returns.append(_gae_of_row(r, v, config["gamma"], lam_critic) + v)
    return (whitened(advantages) if config["whiten_advantages"] else advantages), returns


def _gae_of_row(r: Tensor, v: Tensor, gamma: float, lam: float) -> Tensor:
    row, following_value, following_advantage = torch.zeros_like(r), 0.0, 0.0
    for t in reversed(range(len(r))):
        delta = float(r[t]) + gamma * following_value - float(v[t])
        following_advantage = delta + gamma * lam * following_advantage
        following_value = float(v[t])
        row[t] = following_advantage
    return row


def returns_to_go(rewards: Rows, gamma: float) -> Rows:
    """The discounted sum of the rewards from each token on."""
    discounts = [gamma**k for k in range(max(len(row) for row in rewards))]
    return [
        torch.stack(
            [(row[t:] * torch.tensor(discounts[: len(row) - t], dtype=row.dtype)).sum() for t in range(len(row))]
        )
        for row in rewards
    ]


def _reinforce_plus_plus(rewards: Rows, config: Mapping[str, Any], **_: Any) -> tuple[Rows, Rows]:
    returns = returns_to_go(rewards, config["gamma"])
    return whitened(returns), returns


def _remax(rewards: Rows, config: Mapping[str, Any], baseline_scores: list[float], **_: Any) -> tuple[Rows, Rows]:
    returns = returns_to_go(rewards, 1.0)
    return [row - score for row, score in zip(returns, baseline_scores, strict=True)], returns


def _of_groups(of_sample: Callable[[Tensor, Tensor, int], Tensor]) -> Callable[..., tuple[Rows, Rows]]:
    """An estimator from the advantage `of_sample(scores, lengths, i)` of sample i of one prompt.

    The return is the score of the whole response. Only metrics read it.
    """

    def estimate(rewards: Rows, config: Mapping[str, Any], prompt_ids: list[int], **_: Any) -> tuple[Rows, Rows]:
        advantages, returns = [], []
        for row, prompt in zip(rewards, prompt_ids, strict=True):
            group = [other for other, its in zip(rewards, prompt_ids, strict=True) if its == prompt]
            place = next(i for i, other in enumerate(group) if other is row)
            scores = torch.stack([other.sum() for other in group])
            lengths = torch.tensor([float(len(other)) for other in group], dtype=torch.float64)
            advantages.append(of_sample(scores, lengths, place).expand(len(row)))
            returns.append(row.sum().expand(len(row)))
        return advantages, returns

    return estimate


def _group_deviation(scores: Tensor) -> Tensor:
    return (((scores - scores.mean()) ** 2).sum() / (len(scores) - 1)).sqrt()


def _reinforce_plus_plus_baseline(*args: Any, **inputs: Any) -> tuple[Rows, Rows]:
    centred, returns = ESTIMATORS["grpo_no_std"](*args, **inputs)
    return whitened(centred), returns


def _qae(rewards: Rows, config: Mapping[str, Any], **inputs: Any) -> tuple[Rows, Rows]:
    def of_sample(scores: Tensor, lengths: Tensor, i: int) -> Tensor:
        shares = [(float((scores <= score).sum()) / len(scores), score) for score in scores]
        baseline = min(score for share, score in shares if share >= 0.4)
        return (scores[i] - baseline) / (_group_deviation(scores) + 1e-6)

    return _of_groups(of_sample)(rewards, config, **inputs)


def _lead(scores: Tensor, lengths: Tensor, i: int) -> Tensor:
    """Of the best over the second best, for the best."""
    others = torch.cat([scores[:i], scores[i + 1 :]])
    return (scores[i] - others.max()).clamp(min=0) / (_group_deviation(scores) + 1e-6)


def _gdpo(
    rewards: Rows,
    config: Mapping[str, Any],
    prompt_ids: list[int],
    scores_by_source: list[list[float | list[float] | None]],
    **_: Any,
) -> tuple[Rows, Rows]:
    """Each source normalised among the responses to a prompt that it scored, and the rest of the reward centred."""
    weights = config["reward_weights"] or [1.0] * len(scores_by_source[0])
    totals = [[sum(score) if isinstance(score, list) else score for score in row] for row in scores_by_source]
    weighted = [sum(w * s for w, s in zip(weights, row, strict=True) if s is not None) for row in totals]
    rest = [float(reward.sum()) - score for reward, score in zip(rewards, weighted, strict=True)]
    advantages = []
    for i, prompt in enumerate(prompt_ids):
        group = [j for j, its in enumerate(prompt_ids) if its == prompt]
        total = torch.tensor(rest[i] - sum(rest[j] for j in group) / len(group), dtype=torch.float64)
        for source, weight in enumerate(weights):
            if totals[i][source] is None:
                continue
            scored = [j for j in group if totals[j][source] is not None]
            scores = torch.tensor([totals[j][source] for j in scored], dtype=torch.float64)
            if len(scored) > 1:
                total = total + weight * (scores[scored.index(i)] - scores.mean()) / (_group_deviation(scores) + 1e-6)
        advantages.append(total.expand(len(rewards[i])))
    return whitened(advantages), [reward.sum().expand(len(reward)) for reward in rewards]


ESTIMATORS: dict[str, Callable[..., tuple[Rows, Rows]]] = {
    "gae": _gae,
    "grpo": _of_groups(lambda s, lengths, i: (s[i] - s.mean()) / (_group_deviation(s) + 1e-6)),
    "grpo_no_std": _of_groups(lambda s, lengths, i: s[i] - s.mean()),
    "rloo": _of_groups(lambda s, lengths, i: s[i] - (s.sum() - s[i]) / (len(s) - 1)),
    "opo": _of_groups(lambda s, lengths, i: s[i] - (lengths * s).sum() / lengths.sum()),
    "reinforce_plus_plus_baseline": _reinforce_plus_plus_baseline,
    "qae": _qae,
    "grpo_passk": _of_groups(_lead),
    "gdpo": _gdpo,
    "reinforce_plus_plus": _reinforce_plus_plus,
    "remax": _remax,
}
"""Advantages, and the returns that a critic would learn, of shaped rewards."""
