"""Other rewards for the same texts: pass or fail, as for right and wrong answers, and whether the marks are true."""

from collections.abc import Sequence
from typing import Any

from examples.long_horizon.task import RIGHT, STEPS, TOKENS_PER_STEP, right_steps

SHARE_TO_PASS = 0.7
"""Right steps of a text that passes. About one in nine texts of the pretrained model does."""


def passes(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
    """Returns 1 for each completion that passes, and 0 for the others."""
    pairs = zip(prompts, completions, strict=True)
    return [float(sum(right_steps(*pair)) / STEPS >= SHARE_TO_PASS) for pair in pairs]


def true_marks(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
    """Returns for each completion how many of its steps have a true mark, in per mille: a scale on which it
    varies more than the grade.
    """
    return [1000 * _true_marks(*pair) / STEPS for pair in zip(prompts, completions, strict=True)]


def _true_marks(prompt: str, completion: str) -> int:
    marks = completion.split()[TOKENS_PER_STEP - 1 :: TOKENS_PER_STEP]
    return sum((mark == RIGHT) == right for mark, right in zip(marks, right_steps(prompt, completion), strict=False))
