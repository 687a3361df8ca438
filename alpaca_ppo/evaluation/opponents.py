"""Answers to compare with: from a column of the eval set, or from a file that another evaluation has written.

Those of the reference are sampled by `trainer.evaluation`.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

REFERENCE = "reference"
_COLUMN = "column:"


def is_stored(opponent: str) -> bool:
    """Whether `opponent` names stored answers, and not the reference or another model."""
    return opponent.startswith(_COLUMN) or opponent.endswith(".jsonl")


def stored_answers(opponent: str, rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Returns the opponent's answer to the prompt of each dataset row.

    Args:
        opponent: column:<name> of the rows, or a .jsonl file whose lines have `prompt` and `response`, such as the
            answers.jsonl of `alpaca-ppo evaluate`. Of several responses to a prompt the first is taken.
        rows: of the eval set, with `prompt`.

    Raises:
        ValueError: if there is no such column or file, or an answer is missing or not text.
    """
    if opponent.startswith(_COLUMN):
        column = opponent.removeprefix(_COLUMN)
        return [_column_answer(row, column, number) for number, row in enumerate(rows)]
    answers = _read_answers(Path(opponent))
    found = []
    for row in rows:
        key = _key(row["prompt"])
        if key not in answers:
            raise ValueError(
                f"eval_opponent {opponent} has no answer to the prompt {key[:80]}; write it from the same eval set"
            )
        found.append(answers[key])
    return found


def _column_answer(row: Mapping[str, Any], column: str, number: int) -> str:
    if not isinstance(row.get(column), str):
        raise ValueError(
            f"eval_opponent is '{_COLUMN}{column}', but row {number} of the eval set has no text there; its columns "
            f"are {', '.join(row)}"
        )
    return str(row[column])


def _read_answers(path: Path) -> dict[str, str]:
    if not path.is_file():
        raise ValueError(
            f"eval_opponent is {str(path)!r}, which is no file (relative paths count from {Path.cwd()}); use "
            f"{REFERENCE}, {_COLUMN}<name>, or a .jsonl file with prompt and response in each line (those of "
            "another model are written by alpaca-ppo evaluate --model)"
        )
    answers: dict[str, str] = {}
    # At line feeds alone: an answer may hold other line breaks, such as U+2028, which JSON leaves as they are.
    for number, line in enumerate(path.read_text(encoding="utf-8").removesuffix("\n").split("\n"), 1):
        try:
            row = json.loads(line)
            prompt, response = row["prompt"], row["response"]
            if not isinstance(response, str):
                raise TypeError("the response is not text")
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"eval_opponent {path} line {number} is not a row with prompt and response: {type(error).__name__}: "
                f"{error}"
            ) from error
        answers.setdefault(_key(prompt), response)
    return answers


def _key(prompt: Any) -> str:
    return json.dumps(prompt, sort_keys=True)
