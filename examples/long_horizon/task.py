"""A text of 30 decisions, a teacher who gets some of them wrong, and the grade of a text.

A prompt is a list of 30 nouns of an invented language, such as `ba fol kir ... write`. The response writes the plural
of one after the other and marks it, as in `s1 : ba -> bat ; right s2 : fol -> folt ; wrong`, and ends. A plural ends in
n or t, and no rule says which: it has to be known for each of the 300 nouns. The grade depends on the share of right
plurals and is known only at the end.

The teacher has a habit for each noun: how often it writes the right plural. It is mostly wrong about some. A model of
its demonstrations therefore cannot improve by becoming more certain of what it would write anyway; it has to find out,
noun by noun, which plural is right. What the teacher does know is whether a plural was right once it stands there: its
marks are true. So mistakes are easier to see than to avoid, as in reasoning; the marks themselves earn nothing. An
estimator without a critic gives all tokens of a response the credit for its grade. A critic can read the marks, and
knows after each step how it changed the grade to expect.
"""

import random
from collections.abc import Sequence
from typing import Any

STEPS = 30
"""Steps of a text, each a decision."""
TOKENS_PER_STEP = 7
NOUNS = tuple(onset + vowel + coda for coda in ("", "l", "r") for onset in "bcdfghjklmnpqrstvwxz" for vowel in "aeiou")
ENDINGS = "nt"
FORMS = tuple(noun + ending for noun in NOUNS for ending in ENDINGS)
LABELS = tuple(f"s{number}" for number in range(1, STEPS + 1))
MARKS = RIGHT, WRONG = ("right", "wrong")
END_OF_PROMPT = "write"
WORDS = (*NOUNS, *FORMS, *LABELS, *MARKS, ":", "->", ";", END_OF_PROMPT)
"""Every word is one token."""
QUERY_LEN = STEPS + 1
"""Tokens of a prompt."""
RESPONSE_LEN = TOKENS_PER_STEP * STEPS + 1
"""Tokens of a complete response, its end included."""
BEST_GRADE = 5.0
LEAST_RIGHT, MOST_RIGHT = 0.3, 0.9
"""Bounds of how often the teacher is right about a noun; uniform between them."""
_LANGUAGE_SEED = 0


def _draw_plurals() -> dict[str, str]:
    generator = random.Random(_LANGUAGE_SEED)
    return {noun: noun + generator.choice(ENDINGS) for noun in NOUNS}


PLURALS = _draw_plurals()
"""The right plural of each noun."""


class Teacher:
    """Writes demonstrations. Its habits are drawn from `seed`."""

    def __init__(self, seed: int) -> None:
        generator = random.Random(seed)
        self.right = {noun: generator.uniform(LEAST_RIGHT, MOST_RIGHT) for noun in NOUNS}
        """How often it writes the right plural of each noun."""

    def write(self, prompt: str, generator: random.Random) -> str:
        """Returns a text for `prompt`; `generator` decides which plurals are right."""
        words: list[str] = []
        for label, noun in zip(LABELS, _nouns(prompt), strict=True):
            right = generator.random() < self.right[noun]
            form = PLURALS[noun] if right else _wrong_plural(noun)
            words += [label, ":", noun, "->", form, ";", RIGHT if right else WRONG]
        return " ".join(words)


def draw_prompt(generator: random.Random) -> str:
    """Returns a random prompt."""
    return " ".join([*generator.choices(NOUNS, k=STEPS), END_OF_PROMPT])


def right_steps(prompt: str, completion: str) -> list[bool]:
    """Returns for each step whether it is right: written as it should be up to its `;`, with the right plural.

    The mark after it makes no difference.
    """
    words = completion.split()
    right = []
    for number, (label, noun) in enumerate(zip(LABELS, _nouns(prompt), strict=True)):
        step = words[number * TOKENS_PER_STEP :][: TOKENS_PER_STEP - 1]
        right.append(step == [label, ":", noun, "->", PLURALS[noun], ";"])
    return right


def grades(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
    """Returns the grade of each completion, the only reward: from -5 without any right step to 5 if all are right."""
    return [BEST_GRADE * (2 * sum(right_steps(*pair)) / STEPS - 1) for pair in zip(prompts, completions, strict=True)]


def share_right(grade: float) -> float:
    """Returns the share of right steps, from the mean of the grades."""
    return (grade / BEST_GRADE + 1) / 2


def _nouns(prompt: str) -> list[str]:
    return prompt.split()[:STEPS]


def _wrong_plural(noun: str) -> str:
    return next(noun + ending for ending in ENDINGS if noun + ending != PLURALS[noun])
