"""A verifier's task with a sparse reward: a chain of operations in an invented arithmetic, of which the end is checked.

A prompt is seven digits, such as `3 5 1 9 4 0 7 =`. The response applies an operation to the first two, to the result
and the third, and so on, and writes each step as two operands and their result: `3 5 8 8 1 2 ...`. The operation is a
table of 100 entries, in which every row and column has each digit once, so that a chain with one mistake ends in a
wrong digit unless a second one makes up for it. The score is 1 for the right last digit and 0 for any other: nothing
tells which step was wrong.

The teacher of the demonstrations has a habit for each entry, how often it is right, and when it is wrong it always
makes the same mistake. For some entries the mistake is the more frequent one, so a model of the demonstrations does not
improve by becoming more certain.
"""

import random
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerFast

from examples.mini_farm.base import word_tokenizer

STEPS = 6
DIGITS = range(10)
END_OF_PROMPT = "="
WORDS = (*map(str, DIGITS), END_OF_PROMPT)
"""Every word is one token."""
QUERY_LEN, RESPONSE_LEN = STEPS + 2, 3 * STEPS + 1
LEAST_RIGHT, MOST_RIGHT = 0.4, 1.0
"""Bounds of how often the teacher is right about an entry; uniform between them."""
_LANGUAGE_SEED = 0


def _draw_table() -> list[list[int]]:
    generator = random.Random(_LANGUAGE_SEED)
    rows, columns, results = (generator.sample(DIGITS, k=10) for _ in range(3))
    return [[results[(rows[a] + columns[b]) % 10] for b in DIGITS] for a in DIGITS]


TABLE = _draw_table()
"""The result of each pair of digits."""


class Teacher:
    """Writes demonstrations. Its habits and mistakes are drawn from `seed`."""

    def __init__(self, seed: int) -> None:
        generator = random.Random(seed)
        self._right = [[generator.uniform(LEAST_RIGHT, MOST_RIGHT) for _ in DIGITS] for _ in DIGITS]
        self._mistakes = [
            [generator.choice([digit for digit in DIGITS if digit != TABLE[a][b]]) for b in DIGITS] for a in DIGITS
        ]

    def write(self, prompt: str, generator: random.Random) -> str:
        """Returns a chain for `prompt`; `generator` decides which steps are right."""
        first, *others = operands_of(prompt)
        words = []
        for other in others:
            right = generator.random() < self._right[first][other]
            result = TABLE[first][other] if right else self._mistakes[first][other]
            words += [first, other, result]
            first = result
        return " ".join(map(str, words))


def draw_prompt(generator: random.Random) -> str:
    """Returns a random prompt."""
    return " ".join([*map(str, generator.choices(DIGITS, k=STEPS + 1)), END_OF_PROMPT])


def operands_of(prompt: str) -> list[int]:
    """Returns the digits of a prompt."""
    return [int(word) for word in prompt.split()[: STEPS + 1]]


def result_of(prompt: str) -> int:
    """Returns the digit in which the chain of `prompt` ends."""
    first, *others = operands_of(prompt)
    for other in others:
        first = TABLE[first][other]
    return first


def right(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
    """Returns 1 for each completion of `STEPS` steps whose last word is the result, and 0 for others."""
    words = [completion.split() for completion in completions]
    return [
        float(len(chain) == 3 * STEPS and chain[-1] == str(result_of(prompt)))
        for prompt, chain in zip(prompts, words, strict=True)
    ]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer that splits at spaces and has a token for each word of the task."""
    return word_tokenizer(WORDS)
