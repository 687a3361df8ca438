"""Tokenizers for edge cases of prompts: bytes instead of words, and special tokens added at either end."""

from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from tests.tiny_models import BOS, EOS, tiny_tokenizer

CHAT_TEMPLATE = (
    "{% for m in messages %}<bos> {{ m['role'] }} {{ m['content'] }} <eos> {% if 'name' in m %}named{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<bos> assistant{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, so that ids decode to the exact text; eos is 0 and there is no pad token, as in GPT-2."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: i for i, symbol in enumerate(["<eos>", *alphabet])}
    tokenizer = Tokenizer(BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", bos_token="<eos>")


def framing_tokenizer(words: list[str], *, frame: str) -> PreTrainedTokenizerFast:
    """Word-level; adds special tokens according to `frame`, such as "<bos> $A <eos>"."""
    tokenizer = tiny_tokenizer(words)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=frame, special_tokens=[("<bos>", BOS), ("<eos>", EOS)]
    )
    return tokenizer


def chat_tokenizer(words: list[str]) -> PreTrainedTokenizerFast:
    """Word-level, with CHAT_TEMPLATE; adds bos to plain text, which must not be added to a conversation as well."""
    tokenizer = framing_tokenizer(words, frame="<bos> $A")
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
