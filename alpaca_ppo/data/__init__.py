"""Prompts: from a dataset on the hub or on disk to left-padded batches of token ids.

Loading, templates and chat templates, tokenization, collation, and the order in which prompts are visited. Responses
are not here.
"""

from alpaca_ppo.data.loading import load_prompt_dataset
from alpaca_ppo.data.prompts import PromptDataset, collate_prompts, introduction, prepare_prompts
from alpaca_ppo.data.templates import PROMPT_TEMPLATES, PromptForm, PromptTemplate

__all__ = [
    "PROMPT_TEMPLATES", "PromptDataset", "PromptForm", "PromptTemplate", "collate_prompts", "introduction",
    "load_prompt_dataset", "prepare_prompts",
]  # fmt: skip
