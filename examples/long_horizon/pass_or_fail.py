"""A coarser reward for the same texts: passed or failed, as right and wrong answers are."""

from collections.abc import Sequence
from typing import Any

from examples.long_horizon.task import STEPS, right_steps

SHARE_TO_PASS = 0.7
"""Right steps of a text that passes. About one in nine texts of the pretrained model does."""


def passes(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
    """Returns 1 for each completion that passes, and 0 for the others."""
    pairs = zip(prompts, completions, strict=True)
    return [float(sum(right_steps(*pair)) / STEPS >= SHARE_TO_PASS) for pair in pairs]
