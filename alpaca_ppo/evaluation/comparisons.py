"""What an answer is compared with, and who decides which is better.

The opponent's answers come from a column of the eval set, or from a file that another evaluation has written; those of
the reference are sampled by `trainer.evaluation`. A judge is a score or the user's function, which sees each pair in
both orders. Leaves out ratings of more than two models (Elo, Bradley-Terry).
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from alpaca_ppo.config.fields import shown
from alpaca_ppo.doctor.examination import read_lines

REFERENCE = "reference"
_COLUMN = "column:"


def stored_answers(opponent: str, rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Returns the opponent's answer to the prompt of each dataset row.

    Args:
        opponent: column:<name> of the rows, or a .jsonl file whose lines have `prompt` and `response`, such as the
            answers.jsonl of `alpaca-ppo evaluate`. Of several responses to a prompt the first is taken.
        rows: of the eval set, with `prompt`.

    Raises:
        ValueError: if there is no such column or file, or an answer is missing or not text.
    """
    found: list[Any] = []
    if opponent.startswith(_COLUMN):
        for number, row in enumerate(rows):
            found.append(row.get(opponent.removeprefix(_COLUMN)))
            if not isinstance(found[-1], str):
                raise ValueError(
                    f"eval_opponent is {opponent!r}, but row {number} of the eval set has no text there; its columns "
                    f"are {', '.join(row)}"
                )
        return found
    path, answers = Path(opponent), dict[str, str]()
    if not path.is_file():
        raise ValueError(
            f"eval_opponent is {opponent!r}, which is no file (relative paths count from {Path.cwd()}); use "
            f"{REFERENCE}, {_COLUMN}<name>, or a .jsonl file of alpaca-ppo evaluate"
        )
    for row in read_lines(path, key="prompt"):
        if not isinstance(row.get("response"), str):
            raise ValueError(f"eval_opponent {path} has a row without a text as response: {row!r:.200}; add it")
        answers.setdefault(_key(row["prompt"]), row["response"])
    for row in rows:
        key = _key(row["prompt"])
        if key not in answers:
            raise ValueError(
                f"eval_opponent {opponent} has no answer to the prompt {key[:80]}; write it from the same eval set"
            )
        found.append(answers[key])
    return found


def _key(prompt: Any) -> str:
    return json.dumps(prompt, sort_keys=True)


def compare(own: float, other: float) -> float:
    """Returns 1, 0.5 or 0: whether the score `own` is above, equal to or below `other`.

    Numbers are equal up to the rounding of float32: a model gives one text scores that differ so much in other batches.
    """
    return 0.5 if math.isclose(own, other, rel_tol=1e-5, abs_tol=1e-6) else float(own > other)


@dataclass(frozen=True)
class Comparison:
    """An answer of the policy and one of its opponent to the same prompt."""

    prompt: Any
    """Text or messages."""
    own: str
    other: str
    columns: dict[str, Any] = field(default_factory=dict)
    """The dataset's other columns."""

    def swapped(self) -> "Comparison":
        """The same pair with the opponent's answer first."""
        return Comparison(self.prompt, self.other, self.own, self.columns)


class FunctionJudge:
    """Asks `f(prompts, completions, others, **columns)`, which returns for each pair how `completions` did: 1 for a
    win, 0.5 for a tie, 0 for a loss, anything between for a probability, None to leave it undecided.

    Args:
        function: called twice, the second time with the two answers swapped.
        name: for errors.
    """

    def __init__(self, function: Callable[..., Any], *, name: str) -> None:
        self._function, self._name = function, name

    def __call__(self, comparisons: Sequence[Comparison]) -> list[float | None]:
        """The win of each pair's own answer, averaged over both orders: a judge that always prefers the answer shown
        first makes a tie. None if either verdict is missing.

        Raises:
            ValueError: if the function returns something else than one verdict for each pair.
        """
        first, second = self._call(comparisons), self._call([pair.swapped() for pair in comparisons])
        # What the second answer did is what is left of 1.
        return [None if a is None or b is None else (a + (1 - b)) / 2 for a, b in zip(first, second, strict=True)]

    def _call(self, comparisons: Sequence[Comparison]) -> list[float | None]:
        columns = {name: [pair.columns[name] for pair in comparisons] for name in comparisons[0].columns}
        verdicts = self._function(
            prompts=[pair.prompt for pair in comparisons],
            completions=[pair.own for pair in comparisons],
            others=[pair.other for pair in comparisons],
            **columns,
        )
        listed = isinstance(verdicts, list | tuple) and len(verdicts) == len(comparisons)
        if not listed or not all(v is None or (isinstance(v, int | float) and 0 <= v <= 1) for v in verdicts):
            raise ValueError(
                f"eval_judge {self._name} returned {shown(verdicts)} for {len(comparisons)} pairs; it must return a "
                "list with one verdict for each, from 0 (the opponent's answer is better) to 1, or None"
            )
        return [None if verdict is None else float(verdict) for verdict in verdicts]
