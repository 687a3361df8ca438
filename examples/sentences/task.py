"""One sentence that uses three or four given words of one topic, and a rule with partial credit that grades it.

Prompts for training are of 30 topics, those of the evaluation of six others.
"""

import random
import re
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

TRAINING, HELD_OUT = "train", "held_out"
BROKEN = 0.3
"""The part of its score that an answer keeps which is not one sentence."""
LONGEST = 160
"""Characters of a sentence."""
_TOPICS = [line.split() for line in Path(__file__).with_name("words.txt").read_text("utf-8").splitlines()]
_FORMS = dict(entry.split("=") for topic in _TOPICS for entry in topic if "=" in entry)
"""Irregular forms, with commas between them."""


def draw_prompts(number: int, *, split: str, seed: int) -> list[dict[str, Any]]:
    """Returns `number` different rows, each a `prompt` of messages and its `words`; `split` is TRAINING or HELD_OUT.

    Raises:
        ValueError: if there are not so many.
    """
    topics = _TOPICS[::6] if split == HELD_OUT else [topic for i, topic in enumerate(_TOPICS) if i % 6]
    words = [[entry.partition("=")[0] for entry in topic] for topic in topics]
    sets = [chosen for topic in words for size in (3, 4) for chosen in combinations(topic, size)]
    if number > len(sets):
        raise ValueError(f"{number} prompts are asked for, but there are {len(sets)}; take fewer steps, or more topics")
    return [_row(chosen) for chosen in random.Random(seed).sample(sets, number)]


def _row(words: Sequence[str]) -> dict[str, Any]:
    text = f"Write one short sentence that uses all of these words: {', '.join(words)}."
    return {"prompt": [{"role": "user", "content": text}], "words": list(words)}


def chat_text(row: Mapping[str, Any]) -> str:
    """Returns the prompt of a row as the chat template writes it, without the system message that it adds, which is
    half of the prompt.
    """
    return f"<|im_start|>user\n{row['prompt'][0]['content']}<|im_end|>\n<|im_start|>assistant\n"


def words_of(prompt: Any) -> list[str]:
    """Returns the words that a prompt of `draw_prompts` asks for; it may be the text of a chat template."""
    return _text(prompt).rpartition("these words: ")[2].partition(".")[0].split(", ")


def _pattern(word: str) -> str:
    """Returns a regular expression of `word`, plural, past, participle and person."""
    if re.fullmatch("[^aeiou]*[aeiou][^aeiouwxy]", word):
        # A short vowel, as in "stop": "staring" is no form of "star".
        regular = rf"{word}(e?s|{word[-1]}(ed|er|ers|ing))?"
    else:
        short = re.sub("(e|(?<![aeiou])y)$", "", word)
        regular = rf"{word}(e?s|ing|{word[-1]}?(ed|er|ers|ing))?|{short}(es|ed|er|ers|ies|ied|ier|ing)"
    return rf"\b({regular}|{_FORMS.get(word, word).replace(',', '|')})\b"


def used(word: str, text: str) -> bool:
    """Whether `text` has `word` or a form of it."""
    return re.search(_pattern(word), text.lower()) is not None


def is_sentence(text: str, words: Sequence[str]) -> bool:
    """Whether `text` is one whole sentence of at most `LONGEST` characters that has at least two more words than
    `words`, and no list of these: with commas, dashes or "and" between them, or as they were given.
    """
    text = text.strip()
    whole = re.fullmatch(r"[A-Z\"'][^.!?\n]*[.!?][\"']?", text) is not None and len(text) <= LONGEST
    word = f"({'|'.join(map(_pattern, words))})"
    joint = r"(\s*[,;:/&-]+\s*(and\s+|or\s+)?|\s+(and|or)\s+)((an?|the)\s+)?"
    patterns = rf"{word}({joint}{word}){{{len(words) - 1}}}", r"\W+".join(words) + r"\b"
    listed = text.count(",") >= len(words) - 1 or re.search("|".join(patterns), text.lower()) is not None
    return whole and len(text.split()) > len(words) + 1 and not listed


def share_used(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float]:
    """The reward: the share of the words that an answer uses; of an answer that is no sentence a part of it."""
    graded = []
    for text, given in zip(map(_text, completions), map(words_of, prompts), strict=True):
        share = sum(used(word, text) for word in given) / len(given)
        graded.append(share if is_sentence(text, given) else BROKEN * share)
    return graded


def all_used(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float]:
    """The metric: 1 for a sentence with all words, else 0."""
    return [float(score == 1) for score in share_used(prompts, completions)]


def _text(turns: Any) -> str:
    return turns if isinstance(turns, str) else turns[-1]["content"]
