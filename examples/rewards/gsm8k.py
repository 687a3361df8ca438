"""Rewards for GSM8K (Cobbe et al. 2021, arXiv:2110.14168), whose answers end with a line `#### number`.

    --reward_funcs examples.rewards.gsm8k:correctness examples.rewards.gsm8k:well_formed

Both take TRL's signature. `correctness` needs the dataset's `answer` column. Leaves out any judgement of the reasoning.
"""

import re
from decimal import Decimal
from typing import Any

_NUMBER = r"[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+"
# "$-5" and "-$5" are both written.
_RESULT = re.compile(rf"####\s*([-$\s]*)({_NUMBER})")
_LAST_LINE = re.compile(r"(?:\A|\n)#### -?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?\s*\Z")


def correctness(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    """1.0 where the number after the completion's last `####` equals the one in `answer`, else 0.0.

    Numbers are compared by value: commas, a dollar sign, a final period and trailing zeros do not matter.

    Raises:
        ValueError: where an `answer` has no `#### number`.
    """
    return [
        _is_correct(_text(completion), reference) for completion, reference in zip(completions, answer, strict=True)
    ]


def well_formed(completions: list[Any], **columns: Any) -> list[float]:
    """1.0 where the completion's last line is `#### number`, its only `####`, with nothing after it but blanks; else
    0.0."""
    return [_is_well_formed(_text(completion)) for completion in completions]


def _is_correct(text: str, reference: str) -> float:
    expected = _result(reference)
    if expected is None:
        raise ValueError(f"the answer has no '#### number': {reference!r}")
    return float(_result(text) == expected)


def _is_well_formed(text: str) -> float:
    return float(text.count("####") == 1 and _LAST_LINE.search(text) is not None)


def _result(text: str) -> Decimal | None:
    """The number after the last `####`, or None where it has none: an earlier result was taken back."""
    start = text.rfind("####")
    match = _RESULT.match(text, start) if start >= 0 else None
    if match is None:
        return None
    sign, digits = match.groups()
    number = Decimal(digits.replace(",", ""))
    return -number if "-" in sign else number


def _text(completion: Any) -> str:
    """A completion's text, also where it is a list of messages."""
    return completion if isinstance(completion, str) else completion[-1]["content"]
