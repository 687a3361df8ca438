"""Other data for the same task: prompts of uneven difficulty, and texts beside which the right plurals stand."""

import random
from collections.abc import Sequence

from examples.long_horizon.task import END_OF_PROMPT, NOUNS, PLURALS, STEPS, Teacher, draw_prompt

PLURALS_COLUMN = "plurals"
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


def plurals_of(prompt: str) -> str:
    """Returns the right plural of each noun of `prompt`: what a privileged critic reads."""
    return " ".join(PLURALS[noun] for noun in prompt.split()[:STEPS])


def privileged_texts(seed: int, count: int) -> list[dict[str, str]]:
    """Returns `count` of the teacher's texts, each after its right plurals and its prompt."""
    generator, teacher = random.Random(seed), Teacher(seed)
    rows = []
    for _ in range(count):
        prompt = draw_prompt(generator)
        text = teacher.write(prompt, generator)
        rows.append({"prompt": f"{plurals_of(prompt)} {prompt}", "completion": f" {text}"})
    return rows


def _prompt(generator: random.Random, nouns: Sequence[str]) -> str:
    return " ".join([*generator.choices(nouns, k=STEPS), END_OF_PROMPT])
