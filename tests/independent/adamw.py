"""The optimizer of the independent PPO: clipping, learning-rate schedules and AdamW (arXiv:1711.05101), written out."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tests.independent.networks import Weights


def rate_factor(update: int, total: int, config: Mapping[str, Any], *, critic: bool) -> float:
    """What the learning rate of optimizer step `update` (from 0) of `total` is multiplied by; all are the policy's, or
    the critic's.
    """
    warmup, name = config["warmup_steps"], config["lr_scheduler_type"]
    if critic:
        warmup = of_critic(config, "warmup_steps", "critic_lr_warmup_steps")
    # As in transformers, the plain constant schedule has no warm-up.
    if name != "constant" and update < warmup:
        return update / warmup
    done = (update - warmup) / max(1, total - warmup)
    if name == "linear":
        return max(0.0, 1 - done)
    if name == "cosine":
        return max(0.0, (1 + math.cos(math.pi * done)) / 2)
    assert name in ("constant", "constant_with_warmup")
    return 1.0


def of_critic(config: Mapping[str, Any], policys: str, critics: str) -> Any:
    """An option of the critic's own, or the policy's where that is None."""
    own = config[critics]
    return config[policys] if own is None else own


def separate_critic_steps(config: Mapping[str, Any]) -> bool:
    """Whether the critic takes optimizer steps of its own, which a shared one never does."""
    asked = config["critic_epochs"] is not None or config["critic_step_batch_size"] is not None
    return config["critic_layout"] == "cached" or (asked and config["critic_layout"] != "shared")


class AdamW:
    """Moments and number of updates of each tensor: one that has no gradient keeps all three.

    Args:
        config: the run's configuration.
        critic: names of the critic's tensors: `critic.*` and `head.*`. All others are the policy's.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.first: Weights = {}
        self.second: Weights = {}
        self.count: dict[str, int] = {}

    def step(self, weights: Weights, gradients: Mapping[str, Tensor], factor: float, critic_factor: float) -> Weights:
        """The new weights; those without a gradient are returned as they are. The factors are those of the learning
        rates of policy and critic.
        """
        new = dict(weights)
        for is_critic in (False, True):
            own = {n: g for n, g in gradients.items() if n.startswith(("critic.", "head.")) == is_critic}
            if own:
                new |= self._step_group(weights, own, critic_factor if is_critic else factor, is_critic=is_critic)
        return new

    def _step_group(
        self, weights: Weights, gradients: Mapping[str, Tensor], factor: float, *, is_critic: bool
    ) -> Weights:
        def option(name: str, critics: str) -> Any:
            return of_critic(self.config, name, critics) if is_critic else self.config[name]

        rate = factor * option("learning_rate", "critic_learning_rate")
        if is_critic and self.config["critic_learning_rate"] is None and separate_critic_steps(self.config):
            rate = factor * 3e-4 if self.config["critic_layout"] == "cached" else 3 * rate
        beta1, beta2, decay = (self.config[name] for name in ("adam_beta1", "adam_beta2", "weight_decay"))
        epsilon = self.config["adam_epsilon"]
        limit = option("max_grad_norm", "critic_max_grad_norm")
        norm = math.sqrt(sum(float((g**2).sum()) for g in gradients.values()))
        scale = min(1.0, limit / (norm + 1e-6))
        new = {}
        for name, gradient in gradients.items():
            w, g = weights[name], gradient * scale
            t = self.count[name] = self.count.get(name, 0) + 1
            m = self.first[name] = beta1 * self.first.get(name, torch.zeros_like(w)) + (1 - beta1) * g
            v = self.second[name] = beta2 * self.second.get(name, torch.zeros_like(w)) + (1 - beta2) * g**2
            step = (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + epsilon)
            new[name] = w - rate * step - (rate * decay * w if w.dim() >= 2 else 0)
        return new
