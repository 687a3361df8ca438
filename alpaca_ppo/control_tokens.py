"""Keeps texts of tools and environments from writing control tokens, such as <|im_end|>.

`ControlTokens.protect` prepares such a text, which then goes through a chat template or follows a prompt; `encode`
makes token ids of the whole. A control token that the template writes is one id; the same characters in protected text
become tokens of ordinary text, even if the template strips, shortens or joins texts, or the tokenizer normalises
look-alikes. `continuing` encodes text that follows other tokens.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

# A code point that Unicode reserves for use within a program.
_GUARD = "\ufdd0"
# A cuneiform punctuation sign, which no vocabulary has.
_RARE = "\U00012470"
_NO_WORD = re.compile(r"[<>\[\]{}|#]")


def _any_of(texts: Iterable[str]) -> str:
    return "|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)"


def _stand_in(letter: str) -> str:
    return f"{_GUARD}{ord(letter)}{_GUARD}"


def _control_tokens_of(tokenizer: Any) -> dict[int, AddedToken]:
    """The special tokens, and the added ones that are no words, by their ids."""
    # The unknown token, if the tokenizer writes it for text that it does not know. One of bytes never does; its unknown
    # token may be the pad token under another name.
    unknown = {tokenizer.unk_token_id} & set(tokenizer(_RARE, add_special_tokens=False)["input_ids"])
    unknown -= {tokenizer.bos_token_id, tokenizer.eos_token_id}
    return {
        number: token
        for number, token in tokenizer.added_tokens_decoder.items()
        if (token.special or _NO_WORD.search(token.content)) and token.content.strip() and number not in unknown
    }


def continuing(tokenizer: Any) -> Callable[..., list[int]]:
    """A function that returns the token ids of a text that continues another, as they are within the whole: without
    the space that tokenizers such as Llama 2's put before a whole text, and with the white space that others strip.
    Given the ids `before` the text, it knows whether an added token ends them.
    """
    encode = partial(tokenizer.encode, add_special_tokens=False)
    added = {k: token.content for k, token in tokenizer.added_tokens_decoder.items() if k != tokenizer.unk_token_id}
    # Texts whose last letter is a token of its own. What follows may merge with some of these letters, not with all.
    anchors = [text for text in map(_RARE.__add__, "q.z:0a") if not {*encode(text)[-1:]} <= {*encode(_RARE)}]

    def encode_rest(text: str, before: Sequence[int] = ()) -> list[int]:
        for anchor in [*(_RARE + added[token] for token in before[-1:] if token in added), *anchors]:
            start, ids = encode(anchor), encode(anchor + text)
            if ids[: len(start)] == start:
                return list(ids[len(start) :])
        return list(encode(text))

    if all(encode_rest(text) == encode(text) for text in ("a", " a", "\na")):
        # Most tokenizers do nothing at the beginning of a text.
        anchors.clear()
    return encode_rest


class ControlTokens:
    """The control tokens of one tokenizer: its special tokens, and added ones that are no words, such as <tool_call>.

    White space does not count, nor does the unknown token if it stands for other text.

    Args:
        trusting: True lets protected text write them all; this works with every tokenizer.

    Raises:
        ValueError: for a tokenizer that cannot write its control tokens as ordinary text.
    """

    def __init__(self, tokenizer: Any, *, trusting: bool = False) -> None:
        self._tokenizer = tokenizer
        tokens = {} if trusting else _control_tokens_of(tokenizer)
        # The id of each control token: {"<|im_end|>": 7}.
        self._ids = {token.content: number for number, token in tokens.items()}
        self._control = frozenset(self._ids.values())
        # What `_rename` calls them: {"<|im_end|>": "\ufdd0<7>\ufdd0"}.
        self._names = {text: f"{_GUARD}<{number}>{_GUARD}" for text, number in self._ids.items()}
        # Finds what `_stand_in` writes (group 1 is the number of the character), and control tokens (group 2).
        self._parts = re.compile(f"{_GUARD}([0-9]+){_GUARD}|({_any_of(self._ids)})")
        # Finds the special ones among them.
        self._special = re.compile(_any_of(token.content for token in tokens.values() if token.special))
        # Their first characters, {"<"}: without these, a text holds no whole control token.
        self._starts = frozenset(text.strip()[0] for text in self._ids)
        # Their ends, "|im_end|>", "im_end|>" to ">": a text that begins with one may complete a token that a template
        # or another text has begun.
        self._rests = tuple({text[i:] for text in self._ids for i in range(1, len(text))})
        # All of them without the first characters, "|im_end|>\0...": a text that is part of this, such as "im_end",
        # may be the middle of a token.
        self._insides = "\0".join(text[1:] for text in self._ids)
        try:
            self._renamed = self._rename() if self._ids else tokenizer
            self._continuing, self._continuing_renamed = continuing(tokenizer), continuing(self._renamed)
            faults = [text for text in self._ids if not self._is_text(text)]
        # The library may raise anything, and a tokenizer that is written in Python lacks `backend_tokenizer`.
        except Exception as error:
            faults = [f"{type(error).__name__}: {error}"]
        if faults:
            name = tokenizer.name_or_path or type(tokenizer).__name__
            raise ValueError(
                f"the tokenizer {name} cannot write its control tokens as ordinary text ({faults[0]}), so tools and "
                "environments could; use a fast tokenizer, or let them: control_tokens_from: everything"
            )

    def protect(self, content: Any) -> Any:
        """A text, a message or several messages, with stand-ins for the characters that control tokens need."""
        if isinstance(content, list):
            return [self.protect(message) for message in content]
        if isinstance(content, dict):
            # A word spells no control token, and templates compare the role.
            plain_role = str(content.get("role")).isidentifier()
            return {k: value if k == "role" and plain_role else self.protect(value) for k, value in content.items()}
        if not isinstance(content, str):
            return content
        text = content.replace(_GUARD, "")
        stripped = text.strip()
        completes_token = stripped.startswith(self._rests) or (stripped or text) in self._insides
        first = text.find(stripped) if completes_token else -1
        return "".join(_stand_in(c) if i == first or c in self._starts else c for i, c in enumerate(text))

    def protect_call(self, call: dict[str, Any]) -> dict[str, Any]:
        """A tool call of the policy, in the form of a message, with its name and arguments protected."""
        return {**call, "function": {name: self._protect_data(value) for name, value in call["function"].items()}}

    def _protect_data(self, value: Any) -> Any:
        """As `protect`, for a JSON value, whose keys may spell control tokens too."""
        if isinstance(value, list):
            return [self._protect_data(entry) for entry in value]
        if isinstance(value, dict):
            return {self.protect(key): self._protect_data(entry) for key, entry in value.items()}
        return self.protect(value)

    def protect_turn(self, text: str) -> str:
        """The text of a turn of the policy, with its special tokens protected. The text is decoded without special
        tokens, so the policy has spelled those in it. Other control tokens, such as <think>, are not protected, because
        the policy may have chosen them.
        """
        return self._special.sub(lambda found: _stand_in(found[0][0]) + found[0][1:], text.replace(_GUARD, ""))

    def restored(self, text: str, names: dict[str, str] | None = None) -> str:
        """`text` as it was before `protect`, with `names` in place of the control tokens that it may write."""
        names = names or {}
        return self._parts.sub(lambda part: chr(int(part[1])) if part[1] else names.get(part[2], part[2]), text)

    def encode(self, text: str, *, add_special_tokens: bool = True, continues: bool = False) -> list[int]:
        """The token ids of text with protected parts. They are the tokenizer's ids for the restored text, unless these
        contain other control tokens than the text may write; then the ids come from the tokenizer of `_rename`.
        `continues` = the text follows another (`continuing`) and gets no special tokens.
        """
        plain, tokenizer, rest = self.restored(text), self._tokenizer, self._continuing
        ids = list(tokenizer(plain, add_special_tokens=False)["input_ids"])
        written = [self._ids[part[2]] for part in self._parts.finditer(text) if part[2]]
        if self._control_of(ids) != written:
            plain, tokenizer, rest = self.restored(text, self._names), self._renamed, self._continuing_renamed
        # A tokenizer's own default is not always True.
        options = {} if add_special_tokens else {"add_special_tokens": False}
        return rest(plain) if continues else list(tokenizer(plain, **options)["input_ids"])

    def _control_of(self, ids: list[int]) -> list[int]:
        return [token for token in ids if token in self._control]

    def _is_text(self, text: str) -> bool:
        """Whether the control token `text` is one id where it may be written, and other ids where it is protected."""
        ids = self.encode(text + self.protect(text), add_special_tokens=False)
        return self._control_of(ids) == [self._ids[text]] != ids

    def _rename(self) -> PreTrainedTokenizerFast:
        """A copy of the tokenizer in which its control tokens have names that occur in no text.

        `split_special_tokens` would still find added tokens that are not special, and control tokens in the vocabulary
        itself, which a unigram model has.
        """
        state = json.loads(self._tokenizer.backend_tokenizer.to_str())
        state |= {"truncation": None, "padding": None}
        for token in state["added_tokens"]:
            if token["content"] in self._names:
                token |= {"content": self._names[token["content"]], "normalized": False, "single_word": False}
        if (unknown := state["model"].get("unk_token")) in self._names:
            state["model"]["unk_token"] = self._names[unknown]
        words = state["model"]["vocab"]
        if isinstance(words, dict):
            words = {self._names.get(text, text): number for text, number in words.items()}
        else:
            words = [[self._names.get(text, text), score] for text, score in words]
        state["model"]["vocab"] = words
        return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(state)))
