r"""A reward for mathematics whose answer is a number in `\boxed{}`, as in DAPO-Math-17k.

    --reward_funcs examples.rewards.boxed:correctness

It compares texts: expressions of the same value, such as 1/2 and 0.5, are different.
"""

import re
from typing import Any

_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")


def correctness(completions: list[Any], solution: list[str], **columns: Any) -> list[float]:
    r"""Returns 1.0 if the completion's last `\boxed{}` holds the text of `solution`, else 0.0.

    White space, commas and dollar signs do not matter.
    """
    return [
        float(_boxed(_text(completion)) == _bare(right))
        for completion, right in zip(completions, solution, strict=True)
    ]


def _boxed(text: str) -> str | None:
    """Returns what the last box holds, or None without one."""
    found = _BOXED.findall(text)
    return _bare(found[-1]) if found else None


def _bare(text: str) -> str:
    return re.sub(r"[\s,$]", "", text)


def _text(completion: Any) -> str:
    """Returns the text of a completion, which may be a list of messages."""
    return completion if isinstance(completion, str) else completion[-1]["content"]
