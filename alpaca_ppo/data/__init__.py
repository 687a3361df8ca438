"""Prompts: from a dataset on the hub or on disk to the left-padded batch of each step."""

from alpaca_ppo.data.loading import load_prompt_dataset
from alpaca_ppo.data.prompts import PromptDataset, collate_prompts, introduction, prepare_prompts
from alpaca_ppo.data.templates import PROMPT_TEMPLATES, PromptForm, PromptTemplate

__all__ = [
    "PROMPT_TEMPLATES", "PromptDataset", "PromptForm", "PromptTemplate", "collate_prompts", "introduction",
    "load_prompt_dataset", "prepare_prompts",
]  # fmt: skip
