"""Finds the stop and truncate tokens of a tokenizer, and compiles stop strings to an automaton over token ids.
`generation.responses.StopRule` applies all three.

A response ends with the token that completes a stop string, wherever in its tokens the string begins and ends. Bytes
are compared, because tokens may hold parts of a character. Before the run, the automaton of Aho and Corasick
(Communications of the ACM 18, 1975) is applied to the bytes of every token. So each row keeps one number, and a step
looks up the next one on the device, without decoding text.
"""

import copy
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.utils import GENERATION_CONFIG_NAME

from alpaca_ppo.control_tokens import continuing

# Written by decoders for bytes that are no complete character.
_UNKNOWN = "\N{REPLACEMENT CHARACTER}"
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
_BYTES_OF_LETTERS = {letter: byte for byte, letter in bytes_to_unicode().items()}
# A byte that no text contains.
_NO_TEXT = b"\xff"
_CHECKED_TOKENS = 64
_ANSWER = "SentinelAnswer"


def resolve_stop_tokens(
    processing_class: PreTrainedTokenizerBase, generation_config: GenerationConfig | None, extra_ids: Sequence[int] = ()
) -> tuple[int, ...]:
    """Returns the ids that end a response, sorted: the eos of the tokenizer, those of the model's generation config,
    and `extra_ids`. Raises ValueError if there are none.
    """
    configured = None if generation_config is None else generation_config.eos_token_id
    ids = {configured} if isinstance(configured, int) else set(configured or ())
    ids |= {*extra_ids, processing_class.eos_token_id} - {None}
    if not ids:
        raise ValueError("eos_token_id is None in tokenizer and generation config; set processing_class.eos_token")
    return tuple(sorted(ids))


def write_stop_tokens(folder: Path, generation_config: GenerationConfig, stop_token_ids: Sequence[int]) -> None:
    """Writes `generation_config` to `folder` with the tokens that end a response, for `generate` and vLLM."""
    changed = copy.deepcopy(generation_config)
    changed.eos_token_id = [*stop_token_ids]
    # `save_pretrained` would refuse other entries, such as a temperature without do_sample, once one has changed.
    changed.to_json_file(folder / GENERATION_CONFIG_NAME)


def resolve_turn_end(
    processing_class: PreTrainedTokenizerBase, chat_template_kwargs: Mapping[str, Any] | None = None
) -> int | None:
    """Returns the token with which the tokenizer's chat template ends a turn of the assistant, or None.

    That is a special or added token which the template writes after an answer:

    - the first one, such as Phi-3's `<|end|>`, which precedes the eos;
    - if the conversation ends with several such tokens, without words between them and with the eos among them, the
      first of these several: earlier ones belong to a section between the answer and the end of the turn;
    - the pad token only if there is no other;
    - if there is none, the token that starts the next turn, unless that is the bos.

    None for a template that cannot render an answer, changes its text, or ends turns with plain text.
    """
    # Templates of multimodal models take a list of parts, and some render nothing for a string.
    keywords = chat_template_kwargs or {}
    for content in (lambda text: text, lambda text: [{"type": "text", "text": text}]):
        user = {"role": "user", "content": content("Question")}
        answer = {"role": "assistant", "content": content(_ANSWER)}
        rest = _text_after_answer(processing_class, [user, answer], keywords)
        if rest is None:
            continue
        token = _end_of_turn(processing_class, rest)
        if token is None:
            longer = _text_after_answer(processing_class, [user, answer, user], keywords)
            token = None if longer is None else _end_of_turn(processing_class, longer)
        starts_text = token == processing_class.bos_token_id and token != processing_class.eos_token_id
        return None if starts_text else token
    return None


def _text_after_answer(processing_class: Any, messages: list[Any], keywords: Mapping[str, Any]) -> str | None:
    """What the chat template writes after `_ANSWER`; None if it cannot render `messages`."""
    try:
        text = str(processing_class.apply_chat_template(messages, tokenize=False, **keywords))
    except Exception:
        # A template may raise anything. Errors about prompts are reported where these are rendered.
        return None
    # A template may change the case of a message.
    rendered = list(re.finditer(_ANSWER, text, re.IGNORECASE))
    return text[rendered[-1].end() :] if rendered else None


def _end_of_turn(processing_class: PreTrainedTokenizerBase, text: str) -> int | None:
    """The token that ends the turn by the rules of `resolve_turn_end`, or None; `text` is what follows the answer."""
    # Added tokens too: some fine-tunes add `<|im_end|>` as an ordinary token.
    names = dict(zip(processing_class.all_special_ids, processing_class.all_special_tokens, strict=True))
    names |= {i: token.content for i, token in processing_class.added_tokens_decoder.items()}
    ids: list[int] = processing_class(text, add_special_tokens=False)["input_ids"]
    special: list[int] = []
    before_words = 0  # how many of `special` precede the last words
    for token in ids:
        # Gemma's tokenizer has runs of blanks as added tokens. The unknown token does not occur in the text.
        if names.get(token, "").strip() and names[token] in text:
            special.append(token)
        elif str(processing_class.decode([token])).strip():
            before_words = len(special)
    # Without an eos after them, the last words may start the next answer, as in Llama 3's first template.
    candidates = special[before_words:] if processing_class.eos_token_id in special[before_words:] else special
    preferred = [i for i in candidates if i != processing_class.pad_token_id or i == processing_class.eos_token_id]
    return next(iter(preferred or candidates), None)


def resolve_truncate_tokens(
    processing_class: PreTrainedTokenizerBase, truncate_tokens: Sequence[str | int]
) -> tuple[int, ...]:
    """Returns the ids of `truncate_tokens`, sorted; a string is looked up in the vocabulary, then tokenized as text.

    Raises:
        ValueError: if a string is not a single token, or an id is outside the vocabulary.
    """
    return tuple(sorted({_truncate_token(processing_class, token) for token in truncate_tokens}))


def _truncate_token(processing_class: PreTrainedTokenizerBase, token: str | int) -> int:
    vocabulary = processing_class.get_vocab()
    if isinstance(token, int):
        if token not in vocabulary.values():
            raise ValueError(f"truncate_tokens holds {token}, no id in the vocabulary of {len(vocabulary)}; use one")
        return token
    if token in vocabulary:
        return vocabulary[token]
    ids = continuing(processing_class)(token)
    if len(ids) != 1 or ids[0] == processing_class.unk_token_id:
        pieces = processing_class.convert_ids_to_tokens(ids)
        remedy = "give a text that is one token, or a token's id"
        raise ValueError(f"truncate_tokens holds {token!r}, which the tokenizer reads as {pieces}; {remedy}")
    return int(ids[0])


class StopStrings:
    """The stop strings of a run for one tokenizer.

    They are searched for in the bytes of the response, special tokens included, also where these are no valid UTF-8.
    `vocab_size`, of the model, may be larger than the tokenizer's.

    Raises:
        ValueError: for a tokenizer that writes a token differently after different tokens.
    """

    def __init__(self, strings: Sequence[str], processing_class: PreTrainedTokenizerBase, *, vocab_size: int) -> None:
        self.strings = tuple(strings)
        texts = token_bytes(processing_class, vocab_size)
        steps = _token_steps(_byte_steps([text.encode() for text in self.strings]), texts)
        self.completed = len(steps) - 1
        self._steps = torch.from_numpy(steps)

    def advance(self, states: Tensor, tokens: Tensor) -> Tensor:
        """Returns the states (N,) int64 after `tokens` (N,) of rows in `states` (N,): 0 at a response's start,
        `completed` from the token on that completes a string.
        """
        self._steps = self._steps.to(tokens.device)
        return self._steps[states, tokens].long()


def token_bytes(processing_class: PreTrainedTokenizerBase, vocab_size: int) -> list[bytes]:
    """Returns the bytes that each token id below `vocab_size` writes after other tokens: none for an id without a
    token, `_NO_TEXT` for a part of a character whose name does not give its bytes.

    Raises:
        ValueError: see `StopStrings`.
    """
    # Some tokenizers strip the first space.
    before: list[int] = processing_class("a", add_special_tokens=False)["input_ids"]
    (start,) = _decoded(processing_class, [before])
    rows = _decoded(processing_class, [[*before, token] for token in range(vocab_size)])
    names = {token: name for name, token in processing_class.get_vocab().items()}
    texts = [row[len(start) :] if row.startswith(start) else _UNKNOWN for row in rows]
    # Some tokens, forwards and then backwards, must be decoded as their texts joined. Parts of characters would not be.
    with_text = [token for token, text in enumerate(texts) if _UNKNOWN not in text]
    checked = with_text[:: max(1, len(with_text) // _CHECKED_TOKENS)]
    checked += checked[::-1]
    expected = start + "".join(texts[token] for token in checked)
    (decoded,) = _decoded(processing_class, [[*before, *checked]])
    if decoded != expected:
        kind = type(processing_class).__name__
        raise ValueError(f"stop_strings: {kind} writes {decoded!r} for the tokens {expected!r}; use truncate_tokens")
    return [
        _part_of_character(names.get(token, "")) if _UNKNOWN in text else text.encode()
        for token, text in enumerate(texts)
    ]


def _decoded(processing_class: PreTrainedTokenizerBase, rows: list[list[int]]) -> list[str]:
    return processing_class.batch_decode(rows, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _part_of_character(name: str) -> bytes:
    """The bytes of a token of that name: those of a byte-level vocabulary, or the byte of a fallback such as <0xE2>."""
    if byte := _BYTE_TOKEN.fullmatch(name):
        return bytes([int(byte[1], 16)])
    if name and all(letter in _BYTES_OF_LETTERS for letter in name):
        return bytes(_BYTES_OF_LETTERS[letter] for letter in name)
    return _NO_TEXT


def _byte_steps(texts: Sequence[bytes]) -> np.ndarray:
    """Returns (S, 256) int32, the next state for each state and byte. A state is the longest end of the bytes read so
    far that is the beginning of a text. State 0 is the start; the last one, of a completed text, is never left.
    """
    beginnings = {b"", *(text[:end] for text in texts for end in range(1, len(text) + 1))}
    # Shorter ones come first.
    states = {beginning: state for state, beginning in enumerate(sorted(beginnings, key=lambda b: (len(b), b)))}
    used = set(b"".join(texts))
    steps = np.zeros((len(states) + 1, 256), dtype=np.int32)
    steps[-1] = len(states)
    for beginning, state in states.items():
        if beginning:
            # A token that continues none of the texts is read as it is after the next longest end of this beginning.
            ends = (beginning[start:] for start in range(1, len(beginning) + 1))
            steps[state] = steps[next(states[end] for end in ends if end in states)]
        for byte in used:
            if (longer := beginning + bytes([byte])) in states:
                steps[state, byte] = states[longer]
    complete = [state for beginning, state in states.items() if beginning.endswith(tuple(texts))]
    steps[np.isin(steps, complete)] = len(states)
    return steps


def _token_steps(byte_steps: np.ndarray, texts: Sequence[bytes]) -> np.ndarray:
    """Returns (S, V) int32, the next state for each state and token."""
    lengths = np.array([len(text) for text in texts])
    order = np.argsort(-lengths, kind="stable")
    steps = np.repeat(np.arange(len(byte_steps), dtype=np.int32)[:, None], len(texts), axis=1)
    for position in range(int(lengths.max(initial=0))):
        longer = order[: int((lengths > position).sum())]
        read = np.array([texts[token][position] for token in longer])
        steps[:, longer] = byte_steps[steps[:, longer], read[None]]
    return steps
