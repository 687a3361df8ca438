"""`ProgressBar`: on the terminal, the steps done and the time left, and below it what the trainer is doing.

The bars are tqdm's. The lines that stay on the screen are in `console`, the record of a run in `run_log`.
"""

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from tqdm.auto import tqdm
from tqdm.notebook import tqdm_notebook

_RECENT_STEPS = 50
IN_NOTEBOOK = issubclass(tqdm, tqdm_notebook)
"""Whether bars are widgets of a notebook; without the package ipywidgets a notebook shows none."""


class ProgressBar:
    """The bars of a run.

    Args:
        is_main: False for all processes but the main one, which alone shows them: on a terminal or in a notebook.
    """

    def __init__(self, *, is_main: bool) -> None:
        self._make = partial(tqdm, disable=not (is_main and (IN_NOTEBOOK or sys.stderr.isatty())), dynamic_ncols=True)
        self._steps: Any = None
        self._phases: list[tuple[str, Any]] = []
        self._total = 0
        self._ends: deque[tuple[int, float]] = deque(maxlen=_RECENT_STEPS + 1)

    @contextmanager
    def steps(self, total: int, *, initial: int) -> Iterator[None]:
        """Shows the steps of a run for the duration of the block: `initial` of `total` are done at its begin."""
        self._total = total
        self._ends.clear()
        self._ends.append((initial, time.perf_counter()))
        with self._make(total=total, initial=initial, desc="step") as self._steps:
            yield
        self._steps = None

    def advance(self) -> None:
        """Counts a step that has ended."""
        self._ends.append((self._ends[-1][0] + 1, time.perf_counter()))
        self._steps.update()

    def seconds_left(self, step: int) -> float | None:
        """Returns the seconds to the end of the run, if the remaining steps take as long as recent ones did on average,
        with evaluations and checkpoints; None before a step has ended.

        Args:
            step: how many have ended; the last of them may be one that `advance` has not counted yet.
        """
        if not self._ends or step <= self._ends[0][0]:
            return None
        first, began = self._ends[0]
        # Between two steps the time goes on, but the last known pace is that of the last end.
        last, ended = (step, time.perf_counter()) if step > self._ends[-1][0] else self._ends[-1]
        return (ended - began) / (last - first) * (self._total - step)

    @contextmanager
    def phase(self, name: str, total: int | None = None) -> Iterator[Callable[[int], Any]]:
        """Shows `name` for the duration of the block, with the parts done of `total`; yields a function that adds to
        these. In a block of the same name it goes on with that one's.
        """
        if self._phases and self._phases[-1][0] == name:
            yield self._phases[-1][1].update
            return
        how = {"bar_format": "{desc}{postfix}"} if total is None else {}
        with self._make(total=total, desc=name, leave=False, **how) as bar:
            self._phases.append((name, bar))
            try:
                yield bar.update
            finally:
                self._phases.pop()

    def detail(self, text: str) -> None:
        """Shows `text` beside the name of the innermost phase, until it ends."""
        if self._phases:
            self._phases[-1][1].set_postfix_str(text)


def write(text: str) -> None:
    """Prints `text` on stdout, above the progress bars, at once even if stdout is a file or a pipe. Characters that
    stdout cannot encode are written as backslash escapes.
    """
    encoding = sys.stdout.encoding or "utf-8"
    tqdm.write(text.encode(encoding, "backslashreplace").decode(encoding))
    sys.stdout.flush()
