"""A reward model that is a LoRA adapter on the policy's base model, as `alpaca-ppo reward --use_peft` trains it."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import SequenceClassifierOutput

from alpaca_ppo.adapters.adapter_set import REWARD, AdapterSet
from alpaca_ppo.adapters.files import read_reward_adapter


class AdapterClassifier(nn.Module):
    """A sequence classifier with one label: the policy's base model, whose parameters it shares, a reward adapter on
    it, and a score head.

    Its logits equal those of transformers' classifier with the same adapter: the score is read at the last token that
    is not the pad id, or at the first if there is none, on whichever side a row is padded.

    Args:
        pad_token_id: the pad id of the tokenizer that the adapter was trained with; None uses the base's.
        padding_free: whether the base can read rows without padding (`models.trial`).

    Raises:
        ValueError: if the folder has no score head, or the adapter belongs to another base model.
    """

    def __init__(
        self, adapters: AdapterSet, folder: str, *, pad_token_id: int | None, padding_free: bool = False
    ) -> None:
        super().__init__()
        config = read_reward_adapter(folder)
        # Loads the adapter, and returns the weights of its score head.
        (score_weight,) = adapters.load(REWARD, "reward_adapter", folder, config, trainable=False).values()
        self.adapters, self.padding_free = adapters, padding_free
        self.score = nn.Parameter(score_weight.to(torch.float32), requires_grad=False)
        # A copy, because the policy keeps its own settings.
        self.config: Any = adapters.model.config.__class__(**{**adapters.model.config.to_dict(), "num_labels": 1})
        self.config.name_or_path = folder
        if pad_token_id is not None:
            self.config.get_text_config().pad_token_id = pad_token_id

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, *, columns: Tensor | None = None, **keywords: Any
    ) -> SequenceClassifierOutput:
        """Returns `logits` (B, 1) float32 for `input_ids` (B, T) with `attention_mask` (B, T), 1 = a real token.

        Rows may also lie end to end, as (1, N); then `columns` (B,) says at which column each row is scored.
        """
        with self.adapters.active(REWARD):
            hidden = self.adapters.model.base_model(
                input_ids=input_ids, attention_mask=attention_mask, use_cache=False, **keywords
            )
        rows: int | Tensor = 0
        if columns is None:
            pad = self.config.get_text_config().pad_token_id
            scored = attention_mask if pad is None else input_ids != pad
            columns = (torch.arange(input_ids.size(1), device=input_ids.device) * scored).argmax(dim=1)
            rows = torch.arange(len(columns), device=columns.device)
        states = hidden.last_hidden_state[rows, columns]
        return SequenceClassifierOutput(logits=nn.functional.linear(states.float(), self.score.to(states.device)))
