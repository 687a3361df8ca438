"""Who decides which of two answers is better: the user's function, or a language model behind an HTTP interface.

A comparison by scores needs no judge: see `win_rates.compare`. Every judge sees each pair in both orders.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from alpaca_ppo.config.fields import shown
from alpaca_ppo.evaluation.win_rates import both_orders


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


class Judge(Protocol):
    """Returns how the first answer of each pair did, averaged over both orders: from 0 to 1; None if undecided."""

    def __call__(self, comparisons: Sequence[Comparison]) -> list[float | None]:
        """The verdicts, in order."""
        ...


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
        """The verdicts.

        Raises:
            ValueError: if the function returns something else than one verdict for each pair.
        """
        first = self._call(comparisons)
        # What the second answer did is what is left of 1.
        second = [None if v is None else 1 - v for v in self._call([pair.swapped() for pair in comparisons])]
        return [both_orders(a, b) for a, b in zip(first, second, strict=True)]

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
