"""A reward model that is an adapter on the policy's base."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import SequenceClassifierOutput

from alpaca_ppo.adapters.adapter_set import REWARD, AdapterSet


class AdapterClassifier(nn.Module):
    """A sequence classifier with one label made of a policy's base, a reward adapter on it, and a score head.

    It shares the base's parameters and owns the head alone. Numbers are those of the classifier that the adapter was
    trained in, transformers' own: the score at a row's last token that is not the pad id, whichever side is padded.
    Where eos pads, that is before the eos that a text ends with; a row of nothing but pad ids is scored at its first.

    Args:
        adapters: of the policy.
        folder: of the adapter, or its hub id, as `examples/train_reward_model.py --use_peft` writes it.
        pad_token_id: of the tokenizer beside the adapter, which it was trained with; None = the base's.

    Raises:
        ValueError: when the folder has no score head, or an adapter of another base.
    """

    def __init__(self, adapters: AdapterSet, folder: str, *, pad_token_id: int | None) -> None:
        super().__init__()
        weight = adapters.load_reward(REWARD, folder)
        self.adapters = adapters
        self.score = nn.Parameter(weight.to(torch.float32), requires_grad=False)
        self.config: Any = adapters.model.config.__class__(**{**adapters.model.config.to_dict(), "num_labels": 1})
        self.config.name_or_path = folder
        if pad_token_id is not None:
            self.config.get_text_config().pad_token_id = pad_token_id

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> SequenceClassifierOutput:
        """`logits` (B, 1) float32 of `input_ids` (B, T) with `attention_mask` (B, T), 1 = real."""
        with self.adapters.active(REWARD):
            hidden = self.adapters.model.base_model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
        pad = self.config.get_text_config().pad_token_id
        scored = attention_mask if pad is None else input_ids != pad
        last = (torch.arange(input_ids.size(1), device=input_ids.device) * scored).argmax(dim=1)
        states = hidden.last_hidden_state[torch.arange(len(last), device=last.device), last]
        return SequenceClassifierOutput(logits=nn.functional.linear(states.float(), self.score.to(states.device)))
