"""A pool of simulated annotators, in place of AlpacaFarm's prompted language models (arXiv:2305.14387).

Each annotator reads the same few facts from an answer and weighs them by a taste of their own: is what was asked for
there, is the tone right, is the length right, does it repeat itself. No taste is monotone in warmth or length, so an
answer can be spoilt by too much of what is usually missing. The mean over the pool is the gold score; a single
annotator, whose verdict is flipped a quarter of the time, labels a pair for reward modelling.
"""

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from examples.mini_farm import lexicon

LABEL_NOISE = 0.25
"""Share of preferences that are flipped, AlpacaFarm's value."""


@dataclass(frozen=True)
class Reading:
    """What any annotator notices in an answer."""

    content: float
    """Share of the words asked for that are there, less a half for each wrong claim; at most 1."""
    warm: int
    """Warm words."""
    rude: int
    """Rude or evasive phrases."""
    length: int
    """Words."""
    repetition: float
    """Share of word pairs that came before in the same answer, in [0, 1]."""


def read(answer: str, *, asks: Sequence[str], avoids: Sequence[str]) -> Reading:
    """What there is to notice in `answer`; `asks` and `avoids` come with the task."""
    words = re.findall(r"[a-z]+", answer.lower())
    text, present = " ".join(words), set(words)
    pairs = list(zip(words, words[1:], strict=False))
    return Reading(
        content=sum(word.lower() in present for word in asks) / len(asks)
        - 0.5 * sum(word in present for word in avoids),
        warm=sum(word in lexicon.WARM_WORDS for word in words),
        rude=sum(phrase in text for phrase in lexicon.RUDE_PHRASES),
        length=len(words),
        repetition=1 - len(set(pairs)) / len(pairs) if pairs else 0.0,
    )


@dataclass(frozen=True)
class Annotator:
    """One taste: how much each fact matters, and where the best warmth and the best length lie."""

    name: str
    content: float
    tone: float
    warm_words: float
    brevity: float
    words: float
    repetition: float

    def utility(self, reading: Reading) -> float:
        """How much this annotator likes an answer: below 1 it lets them down, above 3 it leaves no wish."""
        tone = 1 - abs(reading.warm - self.warm_words) / self.warm_words - reading.rude
        length = 1 - abs(reading.length - self.words) / self.words
        return (
            self.content * reading.content
            + self.tone * max(tone, -2.0)
            + self.brevity * max(length, -2.0)
            - self.repetition * reading.repetition
        )


#                 name        content  tone  warm words  brevity  words  repetition
POOL = (
    Annotator("teacher", 3.0, 0.5, 1.0, 0.5, 16.0, 2.0),
    Annotator("editor", 2.5, 0.3, 1.0, 1.5, 10.0, 4.0),
    Annotator("host", 1.5, 1.5, 2.0, 0.5, 18.0, 2.0),
    Annotator("clerk", 3.0, 0.3, 1.0, 1.2, 11.0, 2.0),
    Annotator("neighbour", 1.5, 1.2, 2.0, 0.8, 16.0, 1.0),
    Annotator("critic", 2.0, 0.8, 1.0, 1.0, 14.0, 6.0),
    Annotator("grandmother", 1.0, 1.6, 3.0, 0.5, 20.0, 1.0),
    Annotator("traveller", 2.5, 0.6, 1.0, 1.0, 13.0, 2.0),
)


def gold_score(answer: str, task: Mapping[str, Any]) -> float:
    """The mean utility of `answer` over the pool, without noise; `task` is a row with `asks` and `avoids`."""
    reading = read(answer, asks=task["asks"], avoids=task["avoids"])
    return fmean(annotator.utility(reading) for annotator in POOL)


def win_rate(answer: str, other: str, task: Mapping[str, Any]) -> float:
    """Share of the pool that prefers `answer` to `other`, without noise; a tie counts half."""
    first, second = (read(text, asks=task["asks"], avoids=task["avoids"]) for text in (answer, other))
    votes = [annotator.utility(first) - annotator.utility(second) for annotator in POOL]
    return fmean(1.0 if vote > 0 else 0.5 if vote == 0 else 0.0 for vote in votes)


def prefers_first(answer: str, other: str, task: Mapping[str, Any], rng: random.Random) -> bool:
    """A noisy label: one annotator of the pool decides, a tie by coin, and `LABEL_NOISE` of the labels are flipped."""
    annotator = rng.choice(POOL)
    first, second = (
        annotator.utility(read(text, asks=task["asks"], avoids=task["avoids"])) for text in (answer, other)
    )
    verdict = first > second if first != second else rng.random() < 0.5
    return verdict != (rng.random() < LABEL_NOISE)


def gold(
    completions: Sequence[str], asks: Sequence[Sequence[str]], avoids: Sequence[Sequence[str]], **columns: Any
) -> list[float]:
    """`gold_score` as a reward function, so that a PPO run can log it with weight 0."""
    return [
        gold_score(answer, {"asks": wanted, "avoids": unwanted})
        for answer, wanted, unwanted in zip(completions, asks, avoids, strict=True)
    ]
