"""`ProgressBar`: on the terminal, the steps done and the time left, and below it what the trainer is doing.

The bars are tqdm's. The lines that stay on the screen are in `console`, the record of a run in `run_log`.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from tqdm.auto import tqdm
from tqdm.notebook import tqdm_notebook

IN_NOTEBOOK = issubclass(tqdm, tqdm_notebook)
"""Whether bars are widgets of a notebook; without the package ipywidgets a notebook shows none."""


class ProgressBar:
    """The bars of a run.

    Args:
        is_main: False for all processes but the main one, which alone shows them: on a terminal or in a notebook.
    """

    def __init__(self, *, is_main: bool) -> None:
        self._make = partial(tqdm, disable=not (is_main and (IN_NOTEBOOK or sys.stderr.isatty())), dynamic_ncols=True)
        self._phases: list[tuple[str, Any]] = []

    def steps(self, total: int, *, initial: int) -> Any:
        """Returns the bar of the steps of a run, of which `initial` of `total` are done; `update` counts one more."""
        return self._make(total=total, initial=initial, desc="step")

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
