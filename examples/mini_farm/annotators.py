"""A pool of simulated annotators, instead of AlpacaFarm's prompted language models (arXiv:2305.14387).

Every annotator looks at the same features of an answer: whether it has the words asked for, its tone, its length, and
repetition. The annotators weight them differently. No utility is monotone in warmth or length, so too much of either
makes an answer worse. The gold score is the mean utility over the pool. For reward modeling, a pair of answers is
labeled by one annotator, and a quarter of the labels are flipped.
"""

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from examples.mini_farm import lexicon

LABEL_NOISE = 0.25
"""Fraction of preference labels that are flipped; AlpacaFarm's value."""


@dataclass(frozen=True)
class Features:
    """The features of an answer that annotators look at."""

    content: float
    """Fraction of the words asked for that occur, less a half for each wrong claim; at most 1."""
    warm: int
    """Number of warm words."""
    rude: int
    """Number of rude or evasive phrases."""
    length: int
    """Number of words."""
    repetition: float
    """Fraction of word pairs that occur earlier in the answer, in [0, 1]."""


def extract_features(answer: str, *, asks: Sequence[str], avoids: Sequence[str]) -> Features:
    """Returns the features of `answer`; `asks` and `avoids` are those of the task."""
    words = re.findall(r"[a-z]+", answer.lower())
    text, present = " ".join(words), set(words)
    pairs = list(zip(words, words[1:], strict=False))
    return Features(
        content=sum(word.lower() in present for word in asks) / len(asks)
        - 0.5 * sum(word in present for word in avoids),
        warm=sum(word in lexicon.WARM_WORDS for word in words),
        rude=sum(phrase in text for phrase in lexicon.RUDE_PHRASES),
        length=len(words),
        repetition=1 - len(set(pairs)) / len(pairs) if pairs else 0.0,
    )


@dataclass(frozen=True)
class Annotator:
    """The preferences of one annotator: weights of the features, and the preferred warmth and length."""

    name: str
    content: float
    tone: float
    warm_words: float
    brevity: float
    words: float
    repetition: float

    def utility(self, features: Features) -> float:
        """Returns how much this annotator likes an answer: below 1 is disappointing, above 3 is excellent."""
        tone = 1 - abs(features.warm - self.warm_words) / self.warm_words - features.rude
        length = 1 - abs(features.length - self.words) / self.words
        return (
            self.content * features.content
            + self.tone * max(tone, -2.0)
            + self.brevity * max(length, -2.0)
            - self.repetition * features.repetition
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
    """Returns the mean utility of `answer` over the pool, without noise; `task` is a row with `asks` and `avoids`."""
    features = extract_features(answer, asks=task["asks"], avoids=task["avoids"])
    return fmean(annotator.utility(features) for annotator in POOL)


def win_rate(answer: str, other: str, task: Mapping[str, Any]) -> float:
    """Returns the fraction of the pool that prefers `answer` to `other`, without noise; a tie counts half."""
    first, second = (extract_features(text, asks=task["asks"], avoids=task["avoids"]) for text in (answer, other))
    votes = [annotator.utility(first) - annotator.utility(second) for annotator in POOL]
    return fmean(1.0 if vote > 0 else 0.5 if vote == 0 else 0.0 for vote in votes)


def prefers_first(answer: str, other: str, task: Mapping[str, Any], rng: random.Random) -> bool:
    """Returns a noisy label: whether a random annotator prefers `answer` to `other`, flipped with `LABEL_NOISE`.

    A tie is decided by a coin.
    """
    annotator = rng.choice(POOL)
    first, second = (
        annotator.utility(extract_features(text, asks=task["asks"], avoids=task["avoids"])) for text in (answer, other)
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
