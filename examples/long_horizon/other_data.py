"""Other data for the same task: prompts of uneven difficulty."""

import random
from collections.abc import Sequence

from examples.long_horizon.task import END_OF_PROMPT, NOUNS, STEPS, Teacher

PROMPTS_PER_LEVEL = 12
LEVELS = ((0.3, 0.5), (0.65, 0.75), (0.8, 0.9))
"""How often the teacher is right about the nouns of a prompt: hardly any text passes, half of them, nearly all."""


def uneven_prompts(seed: int) -> list[str]:
    """Returns prompts that are too hard, of use, and too easy for pass or fail, mixed."""
    generator, teacher = random.Random(seed), Teacher(seed)
    levels = [[noun for noun in NOUNS if low <= teacher.right[noun] <= high] for low, high in LEVELS]
    prompts = [_prompt(generator, nouns) for nouns in levels for _ in range(PROMPTS_PER_LEVEL)]
    generator.shuffle(prompts)
    return prompts


def _prompt(generator: random.Random, nouns: Sequence[str]) -> str:
    return " ".join([*generator.choices(nouns, k=STEPS), END_OF_PROMPT])
