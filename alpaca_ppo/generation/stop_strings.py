"""Stop strings: texts that end a response, as an automaton over token ids.

A response ends with the token that completes a string, wherever in its tokens the string begins and ends. The
comparison is one of bytes, which is exact for tokens that hold parts of a character. The automaton of Aho and Corasick
(Communications of the ACM 18, 1975), which reads bytes, is applied to every token of the vocabulary once, before the
run: each row then keeps one number, and a step of the sampler looks up the next one on the device. No text is decoded
while responses are sampled.
"""

import re
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

_UNKNOWN = "\N{REPLACEMENT CHARACTER}"
"""What decoders write for bytes that are no complete character."""
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
_BYTES_OF_LETTERS = {letter: byte for byte, letter in bytes_to_unicode().items()}
_NO_TEXT = b"\xff"
"""A byte that no text contains."""
_CHECKED_TOKENS = 64


class StopStrings:
    """The stop strings of a run for one tokenizer.

    The text of a response is that which its tokens write after the prompt, special tokens included. Where bytes are no
    valid UTF-8, of which decoders make different things, a complete character still counts as what it is.

    Args:
        strings: the texts, at least one, none empty.
        processing_class: the policy's tokenizer.
        vocab_size: of the model, which may be larger than the tokenizer's.

    Raises:
        ValueError: for a tokenizer that writes a token in another way after some tokens than after others.
    """

    def __init__(self, strings: Sequence[str], processing_class: PreTrainedTokenizerBase, *, vocab_size: int) -> None:
        self.strings = tuple(strings)
        texts = token_bytes(processing_class, vocab_size)
        steps = _token_steps(_byte_steps([text.encode() for text in self.strings]), texts)
        self.completed = len(steps) - 1
        """The state of a row that contains a string."""
        # Nearly all tokens lead from every state back to the start; equal columns are stored once.
        moving = steps[:-1].any(axis=0)
        columns, kinds = np.unique(steps[:, moving], axis=1, return_inverse=True)
        start = np.zeros((len(steps), 1), dtype=np.int64)
        start[-1] = self.completed
        self._steps = torch.from_numpy(np.hstack([start, columns]))
        self._kinds = torch.zeros(len(texts), dtype=torch.long)
        self._kinds[torch.from_numpy(moving)] = torch.from_numpy(kinds.reshape(-1) + 1)
        self._on_device: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def advance(self, states: Tensor, tokens: Tensor) -> Tensor:
        """Returns the states (N,) int64 after `tokens` (N,) of rows that were in `states` (N,): 0 at a response's
        start, `completed` from the token on that completes a string.
        """
        steps, kinds = self._tables(tokens.device)
        return steps[states, kinds[tokens]]

    def _tables(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if device not in self._on_device:
            self._on_device[device] = self._steps.to(device), self._kinds.to(device)
        return self._on_device[device]


def token_bytes(processing_class: PreTrainedTokenizerBase, vocab_size: int) -> list[bytes]:
    """Returns the UTF-8 bytes that each token id below `vocab_size` writes after other tokens.

    Ids without a token write nothing, as in `decode`. A token whose part of a character cannot be read from its name
    writes a byte that no text contains.

    Raises:
        ValueError: if tokens write something else together than one after the other.
    """
    before: list[int] = processing_class("a", add_special_tokens=False)["input_ids"]
    texts = _decoded(processing_class, [before, *([*before, token] for token in range(vocab_size))])
    start = texts[0]
    names = {token: name for name, token in processing_class.get_vocab().items()}
    own = [text[len(start) :] if text.startswith(start) else _UNKNOWN for text in texts[1:]]
    _check_concatenation(processing_class, before, start, own)
    return [
        _part_of_character(names.get(token, "")) if _UNKNOWN in text else text.encode()
        for token, text in enumerate(own)
    ]


def _decoded(processing_class: PreTrainedTokenizerBase, rows: list[list[int]]) -> list[str]:
    texts = processing_class.batch_decode(rows, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return [str(text) for text in texts]


def _check_concatenation(
    processing_class: PreTrainedTokenizerBase, before: list[int], start: str, texts: Sequence[str]
) -> None:
    # Parts of characters are whole characters together.
    whole = [token for token, text in enumerate(texts) if _UNKNOWN not in text]
    some = whole[:: max(1, len(whole) // _CHECKED_TOKENS)]
    some += reversed(some)
    expected = start + "".join(texts[token] for token in some)
    (found,) = _decoded(processing_class, [[*before, *some]])
    if found != expected:
        raise ValueError(
            f"stop_strings: {type(processing_class).__name__} writes tokens in another way together than one after the "
            f"other ({found!r} for {expected!r}), so it cannot be said which token completes a string; use "
            "truncate_tokens, or another tokenizer"
        )


def _part_of_character(name: str) -> bytes:
    """The bytes of a token of that name: those of a byte-level vocabulary, or the byte of a fallback such as <0xE2>."""
    if byte := _BYTE_TOKEN.fullmatch(name):
        return bytes([int(byte[1], 16)])
    if name and all(letter in _BYTES_OF_LETTERS for letter in name):
        return bytes(_BYTES_OF_LETTERS[letter] for letter in name)
    return _NO_TEXT


def _byte_steps(texts: Sequence[bytes]) -> np.ndarray:
    """Returns (S, 256) int64, the automaton's next state for each state and byte; state 0 is the start, the last one is
    that of a completed text, which is never left.
    """
    children: list[dict[int, int]] = [{}]
    complete = {0: False}
    for text in texts:
        state = 0
        for byte in text:
            if byte not in children[state]:
                children.append({})
                children[state][byte] = len(children) - 1
                complete[len(children) - 1] = False
            state = children[state][byte]
        complete[state] = True
    steps = np.zeros((len(children) + 1, 256), dtype=np.int64)
    steps[-1] = len(children)
    for byte, child in children[0].items():
        steps[0, byte] = child
    # The longest proper suffix of each state's text that is a state, too; shorter texts come first.
    suffix, waiting = {child: 0 for child in children[0].values()}, deque(children[0].values())
    while waiting:
        state = waiting.popleft()
        complete[state] |= complete[suffix[state]]
        steps[state] = steps[suffix[state]]
        for byte, child in children[state].items():
            suffix[child] = int(steps[state, byte])
            steps[state, byte] = child
            waiting.append(child)
    done = [state for state in range(len(children)) if complete[state]]
    steps[np.isin(steps, done)] = len(children)
    return steps


def _token_steps(byte_steps: np.ndarray, texts: Sequence[bytes]) -> np.ndarray:
    """Returns (S, V) int64, the next state for each state and token, whose bytes are `texts` (V)."""
    lengths = np.array([len(text) for text in texts])
    order = np.argsort(-lengths, kind="stable")
    steps = np.repeat(np.arange(len(byte_steps))[:, None], len(texts), axis=1)
    for position in range(int(lengths.max(initial=0))):
        longer = order[: int((lengths > position).sum())]
        read = np.array([texts[token][position] for token in longer])
        steps[:, longer] = byte_steps[steps[:, longer], read[None]]
    return steps
