"""The critic heads of the independent PPO: predictions, the value that GAE reads, and the loss of each token.

From arXiv:1707.06887 (c51), arXiv:2403.03950 (hl_gauss), arXiv:1710.10044 (quantile) and arXiv:1806.06923 (iqn). All
of one row's C chosen tokens.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tests.independent.networks import Weights


def midpoints(count: int) -> Tensor:
    """(K,): the middles of K equal parts of [0, 1]."""
    return torch.tensor([(i + 0.5) / count for i in range(count)], dtype=torch.float64)


def atoms(config: Mapping[str, Any]) -> Tensor:
    """(atoms,): evenly spaced over the support; for c51 with both ends, for hl_gauss the middles of equal parts."""
    (low, high), count = config["value_support"], config["num_atoms"] or 51
    if config["critic"] == "hl_gauss":
        places = [(i + 0.5) / count for i in range(count)]
    else:
        places = [i / (count - 1) for i in range(count)]
    return torch.tensor([low + (high - low) * place for place in places], dtype=torch.float64)


def lower_tail_mean(outcomes: Tensor, masses: Tensor, alpha: float) -> Tensor:
    """(C,): CVaR, the mean of the lowest `alpha` of the mass; `outcomes` and `masses` are (C, N)."""
    order = outcomes.argsort(dim=-1)
    outcomes, masses = outcomes.gather(-1, order), masses.gather(-1, order)
    below = masses.cumsum(dim=-1) - masses
    taken = torch.minimum((alpha - below).clamp(min=0), masses)
    return (taken * outcomes).sum(dim=-1) / alpha


def at_risk(level: str, mean: Tensor, lower: Callable[[float], Tensor], upper: Callable[[float], Tensor]) -> Tensor:
    """(C,): what `level` names: the mean, or the mean of a lower or upper tail."""
    if level == "neutral":
        return mean
    return upper(float(level[len("upper:") :])) if level.startswith("upper:") else lower(float(level))


def _iqn(head: Weights, states: Tensor, taus: Tensor) -> Tensor:
    """(C, K): Z(s, tau) = w . (h(s) * relu(W cos(pi i tau) + c)) + b(cos(pi i tau)), i from 0."""
    numbers = torch.arange(head["embedding.weight"].size(1), dtype=torch.float64)
    cosines = torch.cos(torch.pi * taus.double()[:, None] * numbers[None, :])
    features = torch.relu(cosines @ head["embedding.weight"].T + head["embedding.bias"])
    products = states[:, None, :] * features[None, :, :]
    return products @ head["weight"] + (cosines @ head["bias.weight"].T + head["bias.bias"])[None, :, 0]


def predictions(
    head: Weights, states: Tensor, config: Mapping[str, Any], training_taus: Tensor | None
) -> tuple[Tensor, Tensor]:
    """What the loss reads, (C,) or (C, N), and the value (C,) that GAE reads."""
    kind, risk = config["critic"], config["risk_level"]
    if kind == "scalar":
        values = (states * head["weight"]).sum(dim=-1)
        return values, values
    if kind == "iqn":
        levels = midpoints(config["num_atoms"] or 32)
        values = at_risk(
            risk,
            _iqn(head, states, levels).mean(dim=-1),
            lambda alpha: _iqn(head, states, alpha * levels).mean(dim=-1),
            lambda alpha: _iqn(head, states, 1 - alpha + alpha * levels).mean(dim=-1),
        )
        return _iqn(head, states, levels if training_taus is None else training_taus), values
    outputs = states @ head["linear.weight"].T + head["linear.bias"]
    if kind == "quantile":
        outcomes, masses = outputs, torch.full_like(outputs, 1 / outputs.size(1))
    else:
        assert kind in ("c51", "hl_gauss"), f"no independent computation of critic {kind!r}"
        outcomes, masses = atoms(config).expand_as(outputs), outputs.softmax(dim=-1)
    values = at_risk(
        risk,
        (outcomes * masses).sum(dim=-1),
        lambda alpha: lower_tail_mean(outcomes, masses, alpha),
        # The best outcomes are the worst of the opposite ones.
        lambda alpha: -lower_tail_mean(-outcomes, masses, alpha),
    )
    return outputs, values


def token_losses(
    predicted: Tensor, returns: Tensor, old_values: Tensor, config: Mapping[str, Any], training_taus: Tensor | None
) -> Tensor:
    """(C,): the critic's loss of each token, before it is averaged and weighted by vf_coef."""
    kind = config["critic"]
    if kind == "scalar":
        errors = (predicted - returns) ** 2 / 2
        if (width := config["cliprange_value"]) is not None:
            clipped = torch.minimum(torch.maximum(predicted, old_values - width), old_values + width)
            errors = torch.maximum(errors, (clipped - returns) ** 2 / 2)
        return errors
    if kind == "hl_gauss":
        return -(_smoothed(returns, config) * predicted.log_softmax(dim=-1)).sum(dim=-1)
    if kind == "c51":
        return -(_projected(returns, atoms(config)) * predicted.log_softmax(dim=-1)).sum(dim=-1)
    taus = midpoints(config["num_atoms"] or 32) if training_taus is None else training_taus.double()
    return _quantile_huber(predicted, returns, taus, config["quantile_huber_kappa"])


def _smoothed(returns: Tensor, config: Mapping[str, Any]) -> Tensor:
    """(C, bins): the share of a normal distribution around each return that falls into each bin of the support."""
    (low, high), count = config["value_support"], config["num_atoms"] or 51
    width = (high - low) / count
    rows = []
    for value in returns.clamp(min=low, max=high).tolist():
        scaled = [(low + width * i - value) / (0.75 * width) for i in range(count + 1)]
        cdf = [0.5 * math.erfc(-place / math.sqrt(2)) for place in scaled]
        rows.append([(right - left) / (cdf[-1] - cdf[0]) for left, right in zip(cdf, cdf[1:], strict=False)])
    return torch.tensor(rows, dtype=torch.float64).view(len(returns), count)


def _projected(returns: Tensor, support: Tensor) -> Tensor:
    """(C, atoms): each return's mass of 1, split between its two neighbours in the support by distance."""
    step = support[1] - support[0]
    rows = []
    for value in returns.clamp(min=support[0], max=support[-1]):
        rows.append((1 - (support - value).abs() / step).clamp(min=0))
    return torch.stack(rows)


def _quantile_huber(quantiles: Tensor, returns: Tensor, taus: Tensor, kappa: float) -> Tensor:
    errors = returns[:, None] - quantiles
    sizes = errors.abs()
    huber = torch.where(sizes <= kappa, errors**2 / 2, kappa * (sizes - kappa / 2))
    weights = torch.where(errors < 0, 1 - taus, taus)
    return (weights * huber).mean(dim=-1)
