"""Comparisons of the policy's answers with an opponent's, and who decides which is better.

The opponent's answers come from a column of the eval set or from a file; `trainer.evaluation` samples those of the
reference. Leaves out ratings of more than two models (Elo, Bradley-Terry).
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from alpaca_ppo.config.fields import shown
from alpaca_ppo.doctor.examination import read_lines
from alpaca_ppo.tracking.results import without_nan

REFERENCE = "reference"
_COLUMN = "column:"


def stored_answers(opponent: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the opponent's answer to the prompt of each row of the eval set.

    Args:
        opponent: column:<name>, or a .jsonl file whose lines have `prompt` and `response`, such as the answers.jsonl of
            `alpaca-ppo evaluate`. The first of several responses to a prompt counts.

    Raises:
        ValueError: if there is no such column or file, or an answer is missing or not text.
    """
    if opponent.startswith(_COLUMN):
        column = opponent.removeprefix(_COLUMN)
        for number, row in enumerate(rows):
            if not isinstance(row.get(column), str):
                raise ValueError(f"eval_opponent is {opponent!r}, but row {number} has no text in it, only {list(row)}")
        return [row[column] for row in rows]
    path = Path(opponent)
    if not path.is_file():
        raise ValueError(
            f"eval_opponent is {opponent!r}, no file in {Path.cwd()}; use {REFERENCE}, {_COLUMN}<name> or a .jsonl file"
        )
    answers: dict[str, str] = {}
    for row in read_lines(path, key="prompt"):
        if not isinstance(row.get("response"), str):
            raise ValueError(f"eval_opponent {path} has a row without a text as response: {row!r:.200}; add it")
        answers.setdefault(_key(row["prompt"]), row["response"])
    keys = [_key(row["prompt"]) for row in rows]
    for key in keys:
        if key not in answers:
            raise ValueError(f"eval_opponent {opponent} does not answer {key[:80]}; write it from the same eval set")
    return [answers[key] for key in keys]


def _key(prompt: Any) -> str:
    return json.dumps(without_nan(prompt), sort_keys=True)


def compare(own: float, other: float) -> float:
    """Returns 1, 0.5 or 0 if the score `own` is above, equal to or below `other`. Scores that differ by float32
    rounding count as equal, because a text's score varies that much from batch to batch.
    """
    return 0.5 if math.isclose(own, other, rel_tol=1e-5, abs_tol=1e-6) else float(own > other)


class FunctionJudge:
    """Asks `f(prompts, completions, others, **columns)` for a verdict on each completion: 1 = a win, 0.5 = a tie, 0 = a
    loss, anything between for a probability, None = undecided.
    """

    def __init__(self, function: Callable[..., Any], *, name: str) -> None:
        self._function, self._name = function, name

    def __call__(
        self, rows: Sequence[Mapping[str, Any]], own: Sequence[str], others: Sequence[str]
    ) -> list[float | None]:
        """Returns the verdict on each of the answers `own` to the prompts in `rows`, against that of `others`, averaged
        over both orders, so that a judge that always prefers the answer shown first makes a tie; None if one of the two
        verdicts is None.

        Raises:
            ValueError: for a column with the name of an argument; if the function returns something else than one
                verdict for each pair.
        """
        both_orders = zip(self._verdicts(rows, own, others), self._verdicts(rows, others, own), strict=True)
        return [None if one is None or other is None else (one + (1 - other)) / 2 for one, other in both_orders]

    def _verdicts(
        self, rows: Sequence[Mapping[str, Any]], completions: Sequence[str], others: Sequence[str]
    ) -> list[float | None]:
        """Returns the function's verdict on each completion, checked."""
        columns = {name: [row[name] for row in rows] for name in rows[0] if name != "prompt"}
        if taken := columns.keys() & {"prompts", "completions", "others"}:
            raise ValueError(
                f"the dataset's column {min(taken)!r} is an argument of eval_judge {self._name}; rename it"
            )
        prompts = [row["prompt"] for row in rows]
        verdicts = self._function(prompts=prompts, completions=list(completions), others=list(others), **columns)
        is_complete = isinstance(verdicts, list | tuple) and len(verdicts) == len(rows)
        if not is_complete or not all(v is None or (isinstance(v, int | float) and 0 <= v <= 1) for v in verdicts):
            raise ValueError(
                f"eval_judge {self._name} returned {shown(verdicts)} for {len(rows)} pairs; return for each a "
                "number from 0 (the opponent's is better) to 1, or None"
            )
        return [None if verdict is None else float(verdict) for verdict in verdicts]
