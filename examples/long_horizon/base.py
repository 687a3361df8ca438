"""The untrained model: a tokenizer with a token for each word, and a small GPT-2.

GPT-2 has learned positions. All prompts have the same length, so that the model finds a noun of the prompt by its
position, which takes few demonstrations to learn.
"""

from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from examples.long_horizon.task import QUERY_LEN, RESPONSE_LEN, WORDS
from examples.mini_farm.base import word_tokenizer


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer that splits at spaces and has a token for each word of the task."""
    return word_tokenizer(WORDS)


def write_base(folder: Path, *, hidden_size: int, num_layers: int, num_heads: int, seed: int) -> None:
    """Writes tokenizer and untrained model to `folder`."""
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=QUERY_LEN + RESPONSE_LEN,
        n_embd=hidden_size,
        n_layer=num_layers,
        n_head=num_heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        # A mistake that is easy to see in the input embedding must not be as easy to avoid: with tied embeddings, what
        # tells right plurals from wrong ones would move the logits of all of them at once.
        tie_word_embeddings=False,
        # The default of 0.02 suits wide models; with it, this one learns much later to read the prompt.
        initializer_range=0.06,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    GPT2LMHeadModel(config).save_pretrained(folder)
