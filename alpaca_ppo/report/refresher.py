"""The callback that writes the report of a run while it trains, and at its end."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from alpaca_ppo.report.page import write_report
from alpaca_ppo.report.runs import read_run

SHARE = 0.02


class ReportRefresher(TrainerCallback):
    """Writes report.html into the run's folder on the main process: with a log, in at most a `SHARE` of the run's time,
    and at the end. If that fails, `say` is called with a message and the run goes on.
    """

    def __init__(self, output_dir: str, *, is_main: bool, say: Callable[[str], Any] = lambda text: None) -> None:
        self.folder, self.is_main, self._say = Path(output_dir), is_main, say
        self._next_write = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        """Postpones the first report by half a minute."""
        self._next_write = time.monotonic() + 30

    def on_log(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        """Writes the report if it is due."""
        if self.is_main and time.monotonic() >= self._next_write:
            self.write()

    def on_train_end(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        """Writes the report of the whole run."""
        if self.is_main:
            self.write()

    def write(self) -> None:
        """Writes the report of the run so far."""
        start = time.monotonic()
        try:
            write_report([read_run(self.folder, self.folder.resolve().name)], self.folder / "report.html")
        except (OSError, ValueError) as error:
            self._say(f"report.html was not written: {error}; `alpaca-ppo report {self.folder}` writes it later")
        self._next_write = start + (time.monotonic() - start) / SHARE


def refresh_report(callbacks: Iterable[TrainerCallback]) -> None:
    """Writes the report of an interrupted run, if `callbacks` include a `ReportRefresher` and there are metrics."""
    for callback in callbacks:
        if isinstance(callback, ReportRefresher) and callback.is_main and (callback.folder / "metrics.jsonl").exists():
            callback.write()
