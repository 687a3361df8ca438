"""A reward model that is an adapter on the policy's base."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import SequenceClassifierOutput

from alpaca_ppo.models.adapters import REWARD, AdapterSet


class AdapterClassifier(nn.Module):
    """A sequence classifier with one label made of a policy's base, a reward adapter on it, and a score head.

    It shares the base's parameters and owns the head alone. Numbers are those of the classifier that the adapter was
    trained in: the score at a row's last real token.

    Args:
        adapters: of the policy.
        folder: of the adapter, or its hub id, as `examples/train_reward_model.py --use_peft` writes it.

    Raises:
        ValueError: when the folder has no score head, or an adapter of another base.
    """

    def __init__(self, adapters: AdapterSet, folder: str) -> None:
        super().__init__()
        weight = adapters.load_reward(REWARD, folder)
        self.adapters = adapters
        self.score = nn.Parameter(weight.to(torch.float32), requires_grad=False)
        self.config: Any = adapters.model.config.__class__(**{**adapters.model.config.to_dict(), "num_labels": 1})
        self.config.name_or_path = folder

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> SequenceClassifierOutput:
        """`logits` (B, 1) float32 of right-padded `input_ids` (B, T) with `attention_mask` (B, T), 1 = real."""
        with self.adapters.active(REWARD):
            hidden = self.adapters.model.base_model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
        last = attention_mask.sum(dim=1) - 1
        states = hidden.last_hidden_state[torch.arange(len(last), device=last.device), last]
        return SequenceClassifierOutput(logits=nn.functional.linear(states.float(), self.score.to(states.device)))
