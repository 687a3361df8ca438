"""Tokenizers for edge cases of prompts: bytes instead of words, and special tokens added at either end."""

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from tests.tiny_models import BOS, EOS, tiny_tokenizer

CHAT_TEMPLATE = (
    "{% for m in messages %}<bos> {{ m['role'] }} {{ m['content'] }} <eos> {% if 'name' in m %}named{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<bos> assistant{% endif %}"
)

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, so that ids decode to the exact text; eos is 0 and there is no pad token, as in GPT-2."""
    vocabulary = {symbol: i for i, symbol in enumerate(["<eos>", *BYTES])}
    tokenizer = Tokenizer(BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", bos_token="<eos>")


SPACED = ("<unk>", "<s>", "</s>", "\u2581", *"aeipqrstU:?\n")
"""The entries of `spaced_tokenizer`, whose ids are their places."""


def spaced_tokenizer(before: str) -> PreTrainedTokenizerFast:
    """One token per character; writes a space before a text, as SentencePiece does: by a normalizer ("prepend"), or
    by Metaspace, before a whole text ("first") or also after special tokens ("always"); so before each word ("words"),
    or after white space at either end is removed ("strip"). With "bytes", a space stands before a text of bytes.
    """
    tokenizer = Tokenizer(BPE({entry: i for i, entry in enumerate(SPACED)}, merges=[], unk_token="<unk>"))
    if before == "bytes":
        tokenizer.model = BPE(
            {entry: i for i, entry in enumerate(("<unk>", "\u0120a", *BYTES))}, merges=[("\u0120", "a")]
        )
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    elif before == "words":
        metaspace = pre_tokenizers.Metaspace(prepend_scheme="always")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), metaspace])
    elif before == "strip":
        tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.Strip(), pre_tokenizers.Metaspace()
    elif before == "prepend":
        replaced = normalizers.Replace(" ", SPACED[3])
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACED[3]), replaced])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=before)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


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


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA_3 = (
    "{{ '<bos>' }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}"
    "<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
PHI_3 = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}<eos>{% endif %}"
)
GEMMA = (
    "{{ '<bos>' }}{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
MISTRAL = (
    "{{ '<bos>' }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}<eos>{% endif %}{% endfor %}"
)


def turn_tokenizer(template: str, *, special: Sequence[str] = (), plain: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """Word-level, with the chat template `template`, and `special` and `plain` as its entries 4, 5 and so on: tokens
    that are never split, `special` ones marked so.
    """
    tokenizer = tiny_tokenizer([*special, *plain])
    tokenizer.add_tokens(list(special), special_tokens=True)
    tokenizer.add_tokens(list(plain))
    tokenizer.chat_template = template
    return tokenizer
