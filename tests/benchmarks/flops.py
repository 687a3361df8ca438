"""Floating-point operations of a PPO step: those it executes, and those that its real tokens need.

A multiplication with an addition counts as two. Only matrix products and attention are counted, as by
`torch.utils.flop_counter`, whose table lacks the in-place `addmm_` and the attention kernel of CPUs.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

aten = torch.ops.aten


def _addmm(self_shape: Any, a_shape: Any, b_shape: Any, **kwargs: Any) -> int:
    return 2 * a_shape[0] * a_shape[1] * b_shape[1]


def _baddbmm(self_shape: Any, a_shape: Any, b_shape: Any, **kwargs: Any) -> int:
    return 2 * a_shape[0] * a_shape[1] * a_shape[2] * b_shape[2]


def _attention(query_shape: Any, key_shape: Any, value_shape: Any, *args: Any, **kwargs: Any) -> int:
    return sdpa_flop_count(query_shape, key_shape, value_shape)


def _attention_backward(
    grad_shape: Any, query_shape: Any, key_shape: Any, value_shape: Any, *args: Any, **kwargs: Any
) -> int:
    return sdpa_backward_flop_count(grad_shape, query_shape, key_shape, value_shape)


def flop_counter() -> FlopCounterMode:
    """A context manager that counts; `get_total_flops()` and `get_flop_counts()["Global"]` are what it has counted."""
    return FlopCounterMode(
        display=False,
        custom_mapping={
            aten.addmm_: _addmm,
            aten.baddbmm_: _baddbmm,
            aten._scaled_dot_product_flash_attention_for_cpu: _attention,
            aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
        },
    )


@dataclass(frozen=True)
class Backbone:
    """What decides the FLOPs of a transformer's layers."""

    weights: int
    """Numbers in the weight matrices of all layers; every token is multiplied with each once."""
    attention: int
    """Layers times heads times the size of a head."""

    @classmethod
    def of(cls, model: nn.Module) -> "Backbone":
        """The backbone of a model of transformers whose layers are alike."""
        backbone, config = model.base_model, model.config
        weights = sum(part.weight.numel() for part in backbone.modules() if isinstance(part, nn.Linear))
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(weights, config.num_hidden_layers * config.num_attention_heads * size)

    def forward(self, lengths: Iterable[int]) -> int:
        """Of rows of `lengths` tokens. Attention is counted as its kernels are: every query with every key of its row
        and scores and values are two products, so 4 n² of `attention`.
        """
        return sum(2 * self.weights * n + 4 * self.attention * n * n for n in lengths)

    def backward(self, lengths: Iterable[int], *, frozen: bool = False) -> int:
        """Of rows of `lengths` tokens: each product has two gradients, or one where the weights are `frozen` under an
        adapter, and attention computes its scores again.
        """
        return sum((2 if frozen else 4) * self.weights * n + 10 * self.attention * n * n for n in lengths)

    def decode(self, past: int, tokens: int) -> int:
        """Of `tokens` tokens of a row, one after the other, with `past` tokens in the cache before the first."""
        return sum(2 * self.weights + 4 * self.attention * (past + t) for t in range(1, tokens + 1))


@dataclass(frozen=True)
class NeededFlops:
    """What the real tokens of a step need, by stage, in the passes that a configuration asks for."""

    rollout: int
    """Prefill and decoding: a response's last token is never fed. One row of logits for every response token."""
    score: int
    """The reward model on whole texts; its label is computed at every token, as transformers does."""
    logprobs: int
    """The passes without gradients: policy (where the configuration asks for it), reference and critic."""
    update: int
    """Forward and backward passes of policy and critic in every epoch."""

    @property
    def total(self) -> int:
        """Of the whole step."""
        return sum(getattr(self, field.name) for field in fields(self))


def needed_flops(
    policy: nn.Module,
    critic: nn.Module,
    reward: nn.Module,
    *,
    prompts: Sequence[int],
    responses: Sequence[int],
    texts: Sequence[int],
    epochs: int,
    old_policy_pass: bool,
    logits_made_twice: bool,
    lora: bool = False,
) -> NeededFlops:
    """The FLOPs that one step of PPO needs for its real tokens, with a separate critic, a reference and a reward model.

    Args:
        policy: a causal language model; the reference is of the same shape.
        critic: a sequence classifier with one label.
        reward: another.
        prompts: tokens of each prompt.
        responses: tokens of each response, the eos included. The last one is predicted, but nothing follows it: a pass
            over a row has `prompt + response - 1` tokens.
        texts: tokens of each row as the reward model reads it.
        epochs: passes over the rollouts.
        old_policy_pass: whether the policy's log-probs are computed again after sampling.
        logits_made_twice: whether the backward pass computes the logits again, instead of keeping them.
        lora: whether policy and critic train adapters on a frozen base. Their own few FLOPs are left out.
    """
    rows = [p + r - 1 for p, r in zip(prompts, responses, strict=True)]
    tokens = sum(responses)
    of_policy, of_critic, of_reward = (Backbone.of(model) for model in (policy, critic, reward))
    head, label = policy.get_output_embeddings().weight.numel(), critic.config.hidden_size
    pairs = list(zip(prompts, responses, strict=True))
    backward = (2 if lora else 4) + 2 * logits_made_twice
    return NeededFlops(
        rollout=of_policy.forward(prompts) + sum(of_policy.decode(p, r - 1) for p, r in pairs) + 2 * head * tokens,
        score=of_reward.forward(texts) + 2 * reward.config.hidden_size * sum(texts),
        logprobs=(1 + old_policy_pass) * (of_policy.forward(rows) + 2 * head * tokens)
        + of_critic.forward(rows)
        + 2 * label * tokens,
        update=epochs
        * (
            of_policy.forward(rows)
            + of_policy.backward(rows, frozen=lora)
            + (2 + backward) * head * tokens
            + of_critic.forward(rows)
            + of_critic.backward(rows, frozen=lora)
            + 6 * label * tokens
        ),
    )
