"""Rewards for GSM8K (Cobbe et al. 2021, arXiv:2110.14168), whose answers end with a line `#### number`.

    --reward_funcs examples.rewards.gsm8k:correctness examples.rewards.gsm8k:well_formed

Both have TRL's signature. `correctness` needs the dataset's `answer` column, or `extra_info`, in which verl's files
have the answer. The reasoning is not judged.
"""

import re
from decimal import Decimal
from typing import Any

_NUMBER = r"[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+"
# Both "$-5" and "-$5" occur.
_RESULT = re.compile(rf"####\s*([-$\s]*)({_NUMBER})")
_LAST_LINE = re.compile(r"(?:\A|\n)#### -?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?\s*\Z")


def correctness(
    completions: list[Any],
    answer: list[str] | None = None,
    extra_info: list[dict[str, Any]] | None = None,
    **columns: Any,
) -> list[float]:
    """Returns 1.0 if the number after the completion's last `####` equals the one in `answer`, else 0.0.

    Numbers are compared by value: commas, a dollar sign, a final period and trailing zeros do not matter.

    Raises:
        ValueError: if an `answer` has no `#### number`, or the dataset no answers.
    """
    if answer is None and extra_info is None:
        raise ValueError("the dataset has no column answer, and no extra_info; use GSM8K's own or verl's files of it")
    answers = answer if answer is not None else [info["answer"] for info in extra_info or []]
    return [
        _is_correct(_text(completion), reference) for completion, reference in zip(completions, answers, strict=True)
    ]


def well_formed(completions: list[Any], **columns: Any) -> list[float]:
    """Returns 1.0 if the completion ends with a line `#### number` and has no other `####`, else 0.0.

    White space may follow the number.
    """
    return [_is_well_formed(_text(completion)) for completion in completions]


def _is_correct(text: str, reference: str) -> float:
    expected = _result(reference)
    if expected is None:
        raise ValueError(f"the answer has no '#### number': {reference!r}; use a dataset with GSM8K's answers")
    return float(_result(text) == expected)


def _is_well_formed(text: str) -> float:
    return float(text.count("####") == 1 and _LAST_LINE.search(text) is not None)


def _result(text: str) -> Decimal | None:
    """Returns the number after the last `####`, or None; a number after an earlier `####` was superseded."""
    start = text.rfind("####")
    match = _RESULT.match(text, start) if start >= 0 else None
    if match is None:
        return None
    sign, digits = match.groups()
    number = Decimal(digits.replace(",", ""))
    return -number if "-" in sign else number


def _text(completion: Any) -> str:
    """Returns the text of a completion, which may be a list of messages."""
    return completion if isinstance(completion, str) else completion[-1]["content"]
