"""What policy, reference and critic say of one response, in plain torch: the independent PPO's forward passes.

Each row runs by itself, without padding, cache or micro-batches, and with the logits of all positions. Everything
returned is about the chosen tokens only: a row with C of them gives (C,) tensors, so that no formula behind it needs a
mask. Adapters are products added to the base's matrices.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

Weights = dict[str, Tensor]
"""Trained tensors by name: `policy.*` and `critic.*` with the names of the models, `head.*` of the critic's head.
Adapters are `policy.<layer>.lora_A`, `policy.<layer>.lora_B` and, of the critic, `critic.<layer>.lora_A`."""


class Row(NamedTuple):
    """One prompt and its response, without any padding."""

    prompt: list[int]
    response: list[int]
    """Up to the last chosen token; tokens that something else wrote are part of the context."""
    chosen: list[bool]
    """One for each of `response`: whether the policy chose the token."""


class PolicyRow(NamedTuple):
    """Of the C chosen tokens of a row."""

    logprobs: Tensor
    """(C,) in nats, at the temperature."""
    entropies: Tensor
    """(C,) in nats, of the whole next-token distribution."""
    states: Tensor
    """(C, H) last hidden states before each token, which a `shared` critic reads."""


@dataclass(frozen=True)
class Networks:
    """Architectures and frozen weights.

    Args:
        policy: a causal language model; its own weights are never used.
        backbone: of a critic in the layout `separate` or `cached`; its own weights are never used.
        reference: all weights of the reference policy by the names of `policy`. With adapters, the base's.
        layout: `separate`, `shared`, `adapter`, `cached`, or None without a critic.
        lora_scale: lora_alpha / r, or None without adapters.
        layers: the policy's layers that a `cached` critic reads, from 1.
        teacher: all weights of the teacher of a distillation, likewise.
    """

    policy: nn.Module
    backbone: nn.Module | None
    reference: Weights
    layout: str | None
    lora_scale: float | None
    layers: tuple[int, ...] = ()
    teacher: Weights | None = None

    def weights_of(self, owner: str, weights: Weights) -> Weights:
        """All weights of the policy's model as `owner` sees them: `policy`, or `critic` with an adapter of its own."""
        own = part(weights, owner)
        if self.lora_scale is None:
            return own
        merged = dict(self.reference)
        for name in own:
            if name.endswith(".lora_A"):
                layer = name.removesuffix(".lora_A")
                product = own[f"{layer}.lora_B"] @ own[name]
                merged[f"{layer}.weight"] = merged[f"{layer}.weight"] + self.lora_scale * product
        return merged

    def policy_row(self, weights: Weights, row: Row, *, temperature: float) -> PolicyRow:
        """The policy with `weights`."""
        return self.language_model(self.weights_of("policy", weights), row, temperature)

    def reference_row(self, row: Row, *, temperature: float) -> PolicyRow:
        """The reference policy."""
        return self.language_model(self.reference, row, temperature)

    def critic_states(self, weights: Weights, row: Row) -> Tensor:
        """(C, H): what the critic's head reads, the last hidden state before each chosen token."""
        if self.layout == "separate":
            assert self.backbone is not None
            out = functional_call(self.backbone, part(weights, "critic"), kwargs=_inputs(row))
            return _before_chosen(out.last_hidden_state, row)
        if self.layout == "cached":
            return self._cached_states(weights, row)
        owner = {"shared": "policy", "adapter": "critic"}[str(self.layout)]
        return self.language_model(self.weights_of(owner, weights), row, 1.0).states

    def _cached_states(self, weights: Weights, row: Row) -> Tensor:
        """What a small transformer makes of the policy's states before the chosen tokens, which it does not train."""
        assert self.backbone is not None
        policy = {name: weight.detach() for name, weight in self.weights_of("policy", weights).items()}
        out = functional_call(self.policy, policy, kwargs=_inputs(row) | {"output_hidden_states": True})
        layers = []
        for layer in self.layers:
            states = _before_chosen(out.hidden_states[layer], row)
            centered = states - states.mean(dim=-1, keepdim=True)
            layers.append(centered / (centered.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt())
        critic = part(weights, "critic")
        read = torch.cat(layers, dim=-1) @ critic["input.weight"].T + critic["input.bias"]
        kwargs = {"inputs_embeds": read.unsqueeze(0), "use_cache": False}
        return functional_call(self.backbone, part(critic, "blocks"), kwargs=kwargs).last_hidden_state[0]

    def language_model(self, weights: Weights, row: Row, temperature: float) -> PolicyRow:
        out = functional_call(self.policy, weights, kwargs=_inputs(row) | {"output_hidden_states": True})
        logits = _before_chosen(out.logits, row) / temperature
        log_probabilities = logits - logits.logsumexp(dim=-1, keepdim=True)
        tokens = torch.tensor([token for token, chosen in zip(row.response, row.chosen, strict=True) if chosen])
        return PolicyRow(
            log_probabilities[torch.arange(len(tokens)), tokens],
            -(log_probabilities.exp() * log_probabilities).sum(dim=-1),
            _before_chosen(out.hidden_states[-1], row),
        )


def part(weights: Mapping[str, Tensor], owner: str) -> Weights:
    """The weights of `owner`, by their own names."""
    return {name.removeprefix(f"{owner}."): w for name, w in weights.items() if name.startswith(f"{owner}.")}


def _inputs(row: Row) -> dict[str, Any]:
    tokens = torch.tensor([row.prompt + row.response])
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "use_cache": False}


def _before_chosen(outputs: Tensor, row: Row) -> Tensor:
    """`outputs` (1, T, ...) of the positions from which the chosen tokens are predicted."""
    positions = [len(row.prompt) - 1 + t for t, chosen in enumerate(row.chosen) if chosen]
    return outputs[0, positions]
