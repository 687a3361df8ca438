"""The untrained model: a byte-pair tokenizer trained on the laboratory's text, and a small Llama.

It is saved as an ordinary model folder, which the training scripts load like a model from the hub.
"""

from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"


def train_tokenizer(texts: Iterable[str], *, vocab_size: int) -> PreTrainedTokenizerFast:
    """Returns a byte-level BPE tokenizer; most words are a single token, and decoding restores the exact text.

    Bytes that do not occur in `texts` become <unk>, so that they take no place in the small vocabulary.
    """
    tokenizer = Tokenizer(models.BPE(unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[PAD, EOS, UNK], show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return as_pretrained(tokenizer)


def as_pretrained(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """Returns `tokenizer`, whose vocabulary holds PAD, EOS and UNK, as one of transformers that pads on the left."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def word_tokenizer(words: Iterable[str]) -> PreTrainedTokenizerFast:
    """Returns a tokenizer that splits at spaces and has a token for each of `words`."""
    vocabulary = {word: number for number, word in enumerate((PAD, EOS, UNK, *words))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return as_pretrained(tokenizer)


def build_model(
    tokenizer: PreTrainedTokenizerFast, *, hidden_size: int, num_layers: int, num_heads: int, max_length: int, seed: int
) -> LlamaForCausalLM:
    """Returns a Llama with tied embeddings and random weights; `max_length` is in tokens of prompt and response."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        max_position_embeddings=max_length,
        tie_word_embeddings=True,
        # The default of 0.02 suits wide models. At this width, the model would learn hundreds of steps later to copy
        # words of the prompt into the answer.
        initializer_range=0.06,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config)


def write_base(folder: Path, texts: Iterable[str], *, vocab_size: int, seed: int, **shape: int) -> None:
    """Writes tokenizer and untrained model to `folder`."""
    tokenizer = train_tokenizer(texts, vocab_size=vocab_size)
    tokenizer.save_pretrained(folder)
    build_model(tokenizer, seed=seed, **shape).save_pretrained(folder)
