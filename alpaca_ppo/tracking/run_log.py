"""The log of a run: metrics.jsonl, run.yaml, trackers, tables of responses, messages.

Only the main process writes; on other processes every method does nothing. What is printed and when is in `console`.
"""

import hashlib
import json
import os
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import ClearMLTracker, TensorBoardTracker, WandBTracker, get_available_trackers
from accelerate.utils import LoggerType
from tqdm.auto import tqdm
from tqdm.notebook import tqdm_notebook

from alpaca_ppo.atomic_io import explain_disk_full, write_text_atomically
from alpaca_ppo.config.parser import as_yaml
from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.config.run_file import PROVENANCE
from alpaca_ppo.tracking.results import json_line, table_files

# Each tracker's keyword for the run's name; Accelerate passes only the project's name.
_RUN_NAME_OPTION = {"mlflow": "run_name", "swanlab": "experiment_name", "trackio": "name", "wandb": "name"}
MAX_ROWS = 16
Rows = Sequence[Mapping[str, Any]]


def tracker_names(report_to: Sequence[str]) -> list[str]:
    """Returns the trackers in `report_to` without duplicates, in its order; "all" means every installed tracker.

    Raises:
        ValueError: for a tracker that is unknown or not installed, and for "none" together with others.
    """
    installed = [str(name) for name in get_available_trackers()]
    if set(report_to) == {"none"}:
        return []
    names = dict.fromkeys(name for entry in report_to for name in (installed if entry == "all" else [entry]))
    if unknown := [name for name in names if name not in installed]:
        remedy = f"pip install {unknown[0]}, or choose" if unknown[0] in map(str, LoggerType) else "choose"
        raise ValueError(f"report_to names {unknown[0]!r}; {remedy} of {', '.join(installed)} (installed), all or none")
    return list(names)


class ProgressBar:
    """The bars of a run, on a terminal or in a notebook: the steps, and below them what the trainer is doing."""

    def __init__(self, *, is_main: bool) -> None:
        # In a notebook without ipywidgets, tqdm would write lines.
        shown = issubclass(tqdm, tqdm_notebook) or sys.stderr.isatty()
        self._make = partial(tqdm, disable=not (is_main and shown), dynamic_ncols=True)
        self._phases: list[tuple[str, Callable[[int], Any]]] = []

    def steps(self, total: int, *, initial: int) -> Any:
        """Returns the bar of a run's steps, of which `initial` are done."""
        return self._make(total=total, initial=initial, desc="step")

    @contextmanager
    def phase(self, name: str, total: int | None = None) -> Iterator[Callable[[int], Any]]:
        """Shows `name` during the block. Yields a function that adds to the number of parts done, of `total`. A block
        within one of the same name continues its bar.
        """
        if self._phases and self._phases[-1][0] == name:
            yield self._phases[-1][1]
            return
        form = "{desc}" if total is None else None
        with self._make(total=total, desc=name, leave=False, bar_format=form) as bar:
            self._phases.append((name, bar.update))
            try:
                yield bar.update
            finally:
                self._phases.pop()


class RunLog:
    """Writes the records of one run to `output_dir` and, from `begin` to `finish`, to the trackers: those that
    `accelerator` already has, or else those in `report_to`.

    Attributes:
        samples: `rollout_tables.sample_rows` of the step, which the console prints at its end.
    """

    def __init__(self, accelerator: Accelerator, args: PPOConfig) -> None:
        self.accelerator, self._args = accelerator, args
        self.output_dir, self.is_main = Path(args.output_dir), accelerator.is_main_process
        self.bar = ProgressBar(is_main=self.is_main)
        self.samples: Rows = []
        self._begun = False
        self._trackers_of_user = bool(accelerator.trackers)

    def begin(self, config: dict[str, Any], provenance: dict[str, Any], *, step: int, lines: int) -> None:
        """Writes run.yaml, removes what a run resumed after `step` writes again, and starts the trackers.

        Args:
            config: all options of the run, without credentials.
            provenance: where the run came from, for run.yaml only.
            step: completed steps; -1 for a new run. Tables and skipped updates of later steps are removed.
            lines: how many of metrics.jsonl are kept. Later steps' findings and TensorBoard events are removed.
        """
        self._begun = True
        last_logged = -1
        if self.is_main:
            self.output_dir.mkdir(parents=True, exist_ok=True)
            metrics = self.output_dir / "metrics.jsonl"
            _keep_lines(metrics, lines)
            last_logged = max((json.loads(line)["step"] for line in complete_lines(metrics)), default=-1)
            for name, last_step in (("findings.jsonl", last_logged), ("skipped_updates.jsonl", step)):
                path = self.output_dir / name
                _keep_lines(path, sum(json.loads(line)["step"] <= last_step for line in complete_lines(path)))
            for _, table_step, path in list(table_files(self.output_dir)):
                if table_step > step:
                    path.unlink()
            write_text_atomically(self.output_dir / "run.yaml", as_yaml({**config, PROVENANCE: provenance}))
        if not self._trackers_of_user:
            self._start_trackers(config, purge_step=last_logged + 1)

    def log(self, stats: Mapping[str, float], step: int, *, report: bool = True) -> None:
        """Appends the metrics of `step` (from 1; 0 is before training) to metrics.jsonl and, with `report`, to the
        trackers.
        """
        if not self.is_main:
            return
        numbers = {key: float(value) for key, value in stats.items()}
        self.append("metrics", {"step": step, **numbers})
        if report:
            with explain_disk_full(self.output_dir / "runs"):
                self.accelerator.log(numbers, step=step)

    def append(self, name: str, row: Mapping[str, Any]) -> None:
        """Appends a line to <name>.jsonl."""
        if self.is_main:
            path = self.output_dir / f"{name}.jsonl"
            with explain_disk_full(path), open(path, "ab") as file:
                file.write(json_line(row).encode())
                file.flush()
                os.fsync(file.fileno())

    def log_table(self, name: str, rows: Rows, step: int) -> None:
        """Writes `rows` to <name>/step_<step>.jsonl, and the first `MAX_ROWS` without their tokens to W&B and
        ClearML.

        Before `begin`, a table beside checkpoints is kept, because a run that resumes from one would not write it
        again.
        """
        if not self.is_main:
            return
        path = self.output_dir / name / f"step_{step:06d}.jsonl"
        if not self._begun and path.exists() and any(self.output_dir.glob("checkpoint-*")):
            self.message(f"{path} stays as the run in this folder wrote it; for another choose another output_dir")
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomically(path, "".join(map(json_line, rows)))
        for tracker in self.accelerator.trackers:
            if rows and isinstance(tracker, WandBTracker | ClearMLTracker):
                columns = [column for column in rows[0] if column != "tokens"]
                data = [[row.get(column) for column in columns] for row in rows[:MAX_ROWS]]
                tracker.log_table(f"{name}/table", columns=columns, data=data, step=step)

    def message(self, text: str) -> None:
        """Prints `text` above the progress bar and flushes; characters that stdout cannot encode are escaped."""
        if self.is_main:
            encoding = sys.stdout.encoding or "utf-8"
            tqdm.write(text.encode(encoding, "backslashreplace").decode(encoding))
            sys.stdout.flush()

    @property
    def boards(self) -> list[str]:
        """The folders of TensorBoard's events."""
        boards = [tracker for tracker in self.accelerator.trackers if isinstance(tracker, TensorBoardTracker)]
        return [str(Path(board.tracker.log_dir)) for board in boards] if self.is_main else []

    def finish(self) -> None:
        """Closes the trackers that this log started."""
        # Accelerator.end_training would also destroy the process group, which the caller may still need.
        if not self._trackers_of_user:
            for tracker in self.accelerator.trackers:
                tracker.finish()
            self.accelerator.trackers = []

    def _start_trackers(self, config: dict[str, Any], *, purge_step: int) -> None:
        """Starts the trackers in `report_to`, and gives them the run's options."""
        runs = self.output_dir / "runs"
        # TensorBoard hides what an interrupted run wrote for purge_step and later steps. Accelerate would start it
        # without, and in a folder of the project's name.
        board = TensorBoardTracker("", runs, purge_step=purge_step)
        # Of others that write files.
        self.accelerator.project_configuration.logging_dir = str(runs)
        names = tracker_names(self._args.report_to)
        self.accelerator.log_with = [board if name == "tensorboard" else name for name in names]
        run_name = self._args.run_name or self.output_dir.resolve().name
        options = {name: {option: run_name} for name, option in _RUN_NAME_OPTION.items()}
        # Accelerate passes the project on to W&B, where it would win over the variable.
        self.accelerator.init_trackers(os.environ.get("WANDB_PROJECT", "alpaca_ppo"), init_kwargs=options)
        for tracker in self.accelerator.trackers:
            # TensorBoardTracker would reject lists, and add a separate run for the hyperparameters.
            if tracker is not board:
                tracker.store_init_configuration(config)
            elif self.is_main:
                board.tracker.add_text("run.yaml", textwrap.indent(as_yaml(config), "    "))


def metrics_identity(output_dir: Path, most: int | None = None) -> dict[str, Any]:
    """Returns number and hash of the first lines of metrics.jsonl, at most `most`; their timings make a run unique."""
    lines = complete_lines(output_dir / "metrics.jsonl")[:most]
    return {"lines": len(lines), "sha256": hashlib.sha256(b"".join(lines)).hexdigest()}


def check_metrics(output_dir: Path, written: Mapping[str, Any]) -> None:
    """Raises a ValueError, so that resuming does not mix runs, unless metrics.jsonl is missing or starts with the lines
    of the checkpoint's run (`written`, by `metrics_identity`).
    """
    path, present = output_dir / "metrics.jsonl", metrics_identity(output_dir, written["lines"])
    if path.exists() and present != written:
        raise ValueError(f"{path} belongs to another run than the checkpoint; move it, or choose another output_dir")


def complete_lines(path: Path) -> list[bytes]:
    """Returns a file's lines but for an incomplete last one, which a killed run leaves; none without the file."""
    # Bytes, because text also has line breaks that JSON does not escape, such as U+2028.
    return [line + b"\n" for line in path.read_bytes().split(b"\n")[:-1]] if path.exists() else []


def _keep_lines(path: Path, count: int) -> None:
    if path.exists():
        write_text_atomically(path, b"".join(complete_lines(path)[:count]).decode())
