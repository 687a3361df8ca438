"""The untrained model: a byte-pair tokenizer trained on the laboratory's own text, and a small Llama.

Written as an ordinary model folder, so that the training scripts load it as they would load one from a hub.
"""

from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"


def train_tokenizer(texts: Iterable[str], *, vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer: most words become one token, and decoding gives the text back exactly.

    Bytes that `texts` do not hold become <unk>: the vocabulary is small, and its words fill it.
    """
    tokenizer = Tokenizer(models.BPE(unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[PAD, EOS, UNK], show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def build_model(
    tokenizer: PreTrainedTokenizerFast, *, hidden_size: int, num_layers: int, num_heads: int, max_length: int, seed: int
) -> LlamaForCausalLM:
    """A Llama with tied embeddings and random weights; `max_length` is in tokens, prompt and response together."""
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
        # The usual 0.02 suits wide models; at this width it delays by hundreds of steps that words of the prompt are
        # copied into the answer.
        initializer_range=0.06,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config)


def write_base(folder: Path, texts: Iterable[str], *, vocab_size: int, seed: int, **shape: int) -> None:
    """Writes tokenizer and untrained model into `folder`."""
    tokenizer = train_tokenizer(texts, vocab_size=vocab_size)
    tokenizer.save_pretrained(folder)
    build_model(tokenizer, seed=seed, **shape).save_pretrained(folder)
