"""`ProgressBar`: one line on the terminal with the steps done, the time left, and what the trainer is doing.

The lines that stay on the screen are in `console`, the record of a run in `run_log`.
"""

import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tqdm.auto import tqdm
from tqdm.notebook import tqdm_notebook

from alpaca_ppo.tracking.console_text import duration, folded

_REDRAW_SECONDS = 0.1
_RECENT_STEPS = 50
IN_NOTEBOOK = issubclass(tqdm, tqdm_notebook)
"""Whether bars are widgets of a notebook; without the package ipywidgets a notebook shows none."""


@dataclass
class _Phase:
    """Something that the trainer does, and how much of it is done."""

    name: str
    total: int | None = None
    done: int = 0
    detail: str = ""

    @property
    def is_done(self) -> bool:
        """Whether all of its parts are done, if it has parts."""
        return self.total is not None and self.done >= self.total

    def __str__(self) -> str:
        count = "" if self.total is None else f" {self.done}/{self.total}"
        return f"{self.name}{count}{f': {self.detail}' if self.detail else ''}"


class ProgressBar:
    """The bar of a run. Outside `steps`, it is on the screen only during a phase.

    Args:
        is_main: False for all processes but the main one, which alone shows it: on a terminal or in a notebook.
    """

    def __init__(self, *, is_main: bool) -> None:
        self._shown = is_main and (IN_NOTEBOOK or sys.stderr.isatty())
        self._phases: list[_Phase] = []
        self._bar: Any = None
        self._of_steps = False
        self._drawn = 0.0
        self._step = self._total = 0
        self._ends: deque[tuple[int, float]] = deque(maxlen=_RECENT_STEPS + 1)

    @contextmanager
    def steps(self, total: int, *, initial: int) -> Iterator[None]:
        """Shows the steps of a run for the duration of the block: `initial` of `total` are done at its begin."""
        self._step, self._total = initial, total
        self._ends.clear()
        self._ends.append((initial, time.perf_counter()))
        # A bar of constant width, so that the text beside it stays where it is.
        width = "" if IN_NOTEBOOK else ":24"
        self._open(f"step {{n_fmt}}/{{total_fmt}} |{{bar{width}}}| {{elapsed}}{{desc}}", total=total, initial=initial)
        self._of_steps = True
        try:
            yield
        except BaseException:
            # A bar that stands still would look like a run that hangs.
            if self._bar is not None:
                self._bar.leave = False
            raise
        finally:
            self._of_steps = False
            self._draw()
            self._close()

    def advance(self) -> None:
        """Counts a step that has ended."""
        self._step += 1
        self._ends.append((self._step, time.perf_counter()))
        if self._bar is not None:
            self._bar.update(1)
        self._draw()

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
    def phase(self, name: str, total: int | None = None, done: int = 0) -> Iterator[Callable[[int], None]]:
        """Shows `name` for the duration of the block; yields a function that adds to the number of parts done.

        Within a block of the same name it goes on with that one's count.

        Args:
            name: what the trainer does.
            total: number of its parts; None shows no count.
            done: parts that are done already.
        """
        of_name = (phase for phase in self._phases if phase.name == name)
        phase = (None if total is not None else next(of_name, None)) or _Phase(name, total, done)
        self._phases.append(phase)
        if self._bar is None:
            self._open("{desc}")
        self._draw()
        try:
            yield lambda parts: self._count(phase, parts)
        finally:
            self._phases.pop()
            # Sampling that is done is not what the trainer goes on with after log-probs.
            if self._phases and self._phases[-1].is_done:
                pass
            elif self._phases or self._of_steps:
                self._draw()
            else:
                self._close()

    def detail(self, text: str) -> None:
        """Shows `text` beside the name of the innermost phase, until it ends."""
        if self._phases:
            self._phases[-1].detail = text
            self._draw()

    def _count(self, phase: _Phase, parts: int) -> None:
        phase.done += parts
        if time.perf_counter() - self._drawn > _REDRAW_SECONDS:
            self._draw()

    def _text(self) -> str:
        names = [str(self._phases[-1])] if self._phases else []
        # An evaluation samples and scores too.
        if len(self._phases) > 1 and self._phases[0].name == "evaluating":
            names.insert(0, "evaluating")
        left = self.seconds_left(self._step) if self._of_steps else None
        if left is not None and self._step < self._total:
            names.insert(0, f"{duration(left)} left")
        return (", " if self._bar.total else "") + ", ".join(names) if names else ""

    def _open(self, bar_format: str, **counts: Any) -> None:
        if self._shown:
            leave = bool(counts)
            self._bar = tqdm(bar_format=bar_format, leave=leave, dynamic_ncols=True, **counts)

    def _draw(self) -> None:
        if self._bar is not None:
            self._drawn = time.perf_counter()
            self._bar.set_description_str(self._text())

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def write(text: str) -> None:
    """Prints `text` on stdout, above the progress bars, at once even if stdout is a file or a pipe. On a terminal,
    lines that are too long for it are broken between words; in a file they stay whole, for `grep`.

    Characters that stdout cannot encode are written as backslash escapes.
    """
    if sys.stdout.isatty():
        text = folded(text, shutil.get_terminal_size().columns)
    try:
        tqdm.write(text)
    except UnicodeEncodeError:
        tqdm.write(text.encode(sys.stdout.encoding, "backslashreplace").decode(sys.stdout.encoding))
    sys.stdout.flush()
