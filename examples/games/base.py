"""The untrained models: a tokenizer for each game, in which few tokens make a turn, and a small Llama."""

import re
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from examples.games.calculator import CHAT_TEMPLATE, PIECES
from examples.games.guessing import WORDS
from examples.mini_farm.base import EOS, PAD, UNK, as_pretrained, build_model, word_tokenizer

DIGITS = tuple(map(str, range(10)))
PAIRS = tuple(a + b for a in DIGITS for b in DIGITS)


def guessing_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer that splits at spaces and has a token for each word of the game."""
    return word_tokenizer(WORDS)


def calculator_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer with a chat template that writes tools. Its tokens are the pieces of a conversation, and the
    digits of a number in pairs from the left; decoding restores the exact text, but for what no piece stands for.
    """
    tokenizer = Tokenizer(_vocabulary((*PIECES, *PAIRS, *DIGITS)))
    pieces = "|".join(re.escape(piece) for piece in sorted(PIECES, key=len, reverse=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(rf"{pieces}|[0-9]{{1,2}}"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    pretrained = as_pretrained(tokenizer)
    pretrained.chat_template = CHAT_TEMPLATE
    return pretrained


def _vocabulary(words: tuple[str, ...]) -> models.WordLevel:
    return models.WordLevel({word: number for number, word in enumerate((PAD, EOS, UNK, *words))}, unk_token=UNK)


TOKENIZERS = {"guessing": guessing_tokenizer, "calculator": calculator_tokenizer}


def write_base(folder: Path, *, game: str, hidden_size: int, num_layers: int, max_length: int, seed: int) -> None:
    """Writes the tokenizer of `game` and an untrained model to `folder`; `max_length` is that of a whole game."""
    tokenizer = TOKENIZERS[game]()
    tokenizer.save_pretrained(folder)
    shape = {"hidden_size": hidden_size, "num_layers": num_layers, "num_heads": 4}
    build_model(tokenizer, max_length=max_length, seed=seed, **shape).save_pretrained(folder)
