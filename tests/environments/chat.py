"""A byte-level chat tokenizer with tools, and models that write what a test wants."""

from typing import Any

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.environments.conversation import Conversation
from alpaca_ppo.environments.episode import EpisodeSettings
from tests.data.tokenizers import byte_tokenizer

WITH_TOOLS = (
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '\n' }}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORGETS_THOUGHTS = WITH_TOOLS.replace(
    "{{ m.content }}", "{{ m.content if loop.last else m.content.split('</think>')[-1] }}"
)


def chat_bytes(template: str = WITH_TOOLS) -> PreTrainedTokenizerFast:
    """One token per byte, and the marks of ChatML; a turn ends with <|im_end|>."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken(mark, special=True) for mark in ("<|im_start|>", "<|im_end|>")])
    tokenizer.eos_token, tokenizer.pad_token = "<|im_end|>", "<eos>"
    tokenizer.chat_template = template
    return tokenizer


def conversation(tokenizer: Any = None, *, messages: bool = True, **keywords: Any) -> Conversation:
    """Of `chat_bytes()` by default."""
    tokenizer = tokenizer or chat_bytes()
    keywords = {"chat_template_kwargs": None, "stop_token_ids": [tokenizer.eos_token_id], **keywords}
    return Conversation(tokenizer, messages=messages, **keywords)


def settings(**keywords: Any) -> EpisodeSettings:
    """Of a chat; `keywords` are those of `EpisodeSettings`, and options of the run."""
    own = {name: keywords.pop(name) for name in ("conversation", "tool_call_parser") if name in keywords}
    args = PPOConfig(**{"query_len": 4000, "response_len": 10**6, **keywords})
    return EpisodeSettings(**{"conversation": conversation(), "args": args, **own})
