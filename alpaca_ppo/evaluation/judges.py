"""Who decides which of two answers is better: the user's function, or a language model behind an HTTP interface.

Every judge sees each pair in both orders. Leaves out ratings of more than two models (Elo, Bradley-Terry).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from alpaca_ppo.config.fields import shown


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
        if not isinstance(verdicts, list | tuple) or len(verdicts) != len(comparisons):
            raise ValueError(
                f"eval_judge {self._name} returned {shown(verdicts)} for {len(comparisons)} pairs; it must return a "
                "list with one verdict for each"
            )
        for verdict in verdicts:
            if verdict is not None and not (isinstance(verdict, int | float) and 0 <= verdict <= 1):
                raise ValueError(
                    f"eval_judge {self._name} returned the verdict {shown(verdict)}; it must be from 0 (the opponent's "
                    "answer is better) to 1, 0.5 for a tie, or None"
                )
        return [None if verdict is None else float(verdict) for verdict in verdicts]
