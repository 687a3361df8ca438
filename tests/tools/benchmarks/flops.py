"""Floating-point operations of a PPO step: those it executes, and those that its real tokens need.

A multiplication with an addition counts as two. Only matrix products and attention are counted, as by
`torch.utils.flop_counter`, whose table lacks the in-place `addmm_` and the attention kernel of CPUs.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

aten = torch.ops.aten
SHARED = 16
"""Tokens of the shortest prompt that an update reads once for several samples."""


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


def count_stages(counter: FlopCounterMode, monkeypatch: Any) -> dict[str, int]:
    """What `counter` counts in each timed stage of this package's trainers from now on, until it is cleared."""
    # Programs of the benchmark import this module where the package is not installed.
    from alpaca_ppo.ppo.metrics import StepRecord

    by_stage: dict[str, int] = {}
    measure = StepRecord.measure

    @contextmanager
    def counted(record: StepRecord, phase: str, *total: int) -> Iterator[Any]:
        before = counter.get_total_flops()
        with measure(record, phase, *total) as count:
            yield count
        by_stage[phase] = by_stage.get(phase, 0) + counter.get_total_flops() - before

    monkeypatch.setattr(StepRecord, "measure", counted)
    return by_stage


@dataclass(frozen=True)
class Backbone:
    """What decides the FLOPs of a transformer's layers."""

    weights: int
    """Numbers in the matrices of all layers; every token is multiplied with each once."""
    gradients: int
    """The same numbers, each once for every gradient of its product: that of the weights where they are trained, and
    that of the input where something before them is trained. Below the first adapter of a frozen model nothing is."""
    attention: int
    """Layers times heads times the size of a head."""

    @classmethod
    def of(cls, model: nn.Module) -> "Backbone":
        """The backbone of a model of transformers, with the adapter that is active in it. Layers are alike, and the
        attention of each has a gradient if the model is trained. Autograd says which products have which gradients, in
        a pass over one token.
        """
        weights, gradients = [0], [0]

        def count(part: Any, inputs: Any, output: Any) -> None:
            weights[0] += part.weight.numel()
            gradients[0] += part.weight.numel() * (part.weight.requires_grad + inputs[0].requires_grad)

        backbone, config = model.base_model, model.config
        hooks = [part.register_forward_hook(count) for part in backbone.modules() if isinstance(part, nn.Linear)]
        token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
        # With a mask of four dimensions transformers does not look at numbers, which a model on `meta` does not have.
        mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=model.device)
        with torch.enable_grad():
            backbone(input_ids=token, attention_mask=mask, use_cache=False)
        for hook in hooks:
            hook.remove()
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(weights[0], gradients[0], config.num_hidden_layers * config.num_attention_heads * size)

    def forward(self, lengths: Iterable[int]) -> int:
        """Of rows of `lengths` tokens. Attention is counted as its kernels are: every query with every key of its row
        and scores and values are two products, so 4 n² of `attention`.
        """
        return sum(self.extend(0, n) for n in lengths)

    def extend(self, past: int, tokens: int) -> int:
        """Of `tokens` tokens of a row in one pass, after `past` tokens whose keys and values are there already."""
        return 2 * self.weights * tokens + 4 * self.attention * tokens * (past + tokens)

    def backward(self, lengths: Iterable[int]) -> int:
        """Of rows of `lengths` tokens: a product for each gradient, and attention, which computes its scores again."""
        return sum(2 * self.gradients * n + 10 * self.attention * n * n for n in lengths)

    def backward_of_extension(self, past: int, tokens: int) -> int:
        """Of `extend`."""
        return 2 * self.gradients * tokens + 10 * self.attention * tokens * (past + tokens)

    def decode(self, past: int, tokens: int) -> int:
        """Of `tokens` tokens of a row, one after the other, with `past` tokens in the cache before the first."""
        return sum(self.extend(past + t, 1) for t in range(tokens))


@dataclass(frozen=True)
class NeededFlops:
    """What the real tokens of a step need, by stage, in the passes that a configuration asks for."""

    rollout: int
    """Prefill of each prompt and decoding of each sample: a response's last token is never fed."""
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
    critic: nn.Module | None,
    reference: nn.Module | None,
    reward: nn.Module,
    *,
    prompts: Sequence[int],
    responses: Sequence[int],
    texts: Sequence[int],
    epochs: int,
    old_policy_pass: bool,
) -> NeededFlops:
    """The FLOPs that one step of PPO needs for its real tokens.

    A prompt is read once for all its samples, in an update if it has at least 16 tokens and all its samples are in the
    same micro-batch. An update keeps the logits for the backward pass.

    Args:
        policy: a causal language model, with the adapter that it trains, if any.
        critic: a sequence classifier with one label, likewise; `policy` itself for one more head on its hidden states;
            None without a critic.
        reference: a causal language model; None without one.
        reward: a sequence classifier with one label.
        prompts: tokens of each prompt.
        responses: tokens of each response, the eos included; those of the first prompt come first, and all prompts have
            equally many. The last token is predicted, but nothing follows it: `prompt + response - 1` make a row.
        texts: tokens of each row as the reward model reads it.
        epochs: passes over the rollouts.
        old_policy_pass: whether the policy's log-probs are computed again after sampling.
    """
    assert len(responses) % len(prompts) == 0
    samples, tokens = len(responses) // len(prompts), sum(responses)
    pairs = [(prompts[i // samples], r) for i, r in enumerate(responses)]
    rows = [p + r - 1 for p, r in pairs]

    def read(backbone: Backbone) -> int:
        if samples == 1:
            return backbone.forward(rows)
        return backbone.forward(prompts) + sum(backbone.extend(p, r - 1) for p, r in pairs)

    def train(backbone: Backbone) -> int:
        if samples == 1:
            return backbone.forward(rows) + backbone.backward(rows)
        shared = [number for number, prompt in enumerate(prompts) if prompt >= SHARED]
        alone = [row for number, row in enumerate(rows) if number // samples not in shared]
        whole = [*alone, *(prompts[number] for number in shared)]
        parts = [(p, r - 1) for number, (p, r) in enumerate(pairs) if number // samples in shared]
        return (
            backbone.forward(whole)
            + backbone.backward(whole)
            + sum(backbone.extend(*part) + backbone.backward_of_extension(*part) for part in parts)
        )

    of_policy, head = Backbone.of(policy), policy.get_output_embeddings().weight
    logits = 2 * head.numel() * tokens
    rollout = of_policy.forward(prompts) + sum(of_policy.decode(p, r - 1) for p, r in pairs)
    # The samples of a prompt are drawn from the same logits first.
    rollout += 2 * head.numel() * (tokens - len(responses) + len(prompts))
    logprobs = read(of_policy) + logits if old_policy_pass else 0
    update = train(of_policy) + (2 + head.requires_grad) * logits
    if reference is not None:
        logprobs += read(Backbone.of(reference)) + logits
    if critic is not None:
        values = 2 * critic.config.hidden_size * tokens
        logprobs, update = logprobs + values, update + 3 * values
        if critic is not policy:
            of_critic = Backbone.of(critic)
            logprobs, update = logprobs + read(of_critic), update + train(of_critic)
    score = Backbone.of(reward).forward(texts) + 2 * reward.config.hidden_size * sum(texts)
    return NeededFlops(rollout, score, logprobs, epochs * update)
