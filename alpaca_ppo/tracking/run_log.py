"""What a run tells the world: metrics.jsonl, run.yaml, trackers, tables of responses, progress bars.

Only the main process writes; on the others every method does nothing. Which numbers are logged is decided elsewhere
(`metrics`, `inspection`); checkpoints and models are not here either (`checkpointing`, `export`).
"""

import hashlib
import json
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, TensorBoardTracker, get_available_trackers
from tqdm import tqdm

from alpaca_ppo.atomic_io import explain_disk_full, write_text_atomically

PROJECT = "alpaca_ppo"
# What each tracker calls the name of a run; Accelerate hands all of them the project's name only.
_RUN_NAME_OPTION = {"mlflow": "run_name", "swanlab": "experiment_name", "trackio": "name", "wandb": "name"}
_TABLE_ROWS = 16
_ROW_FOLDERS = ("rollouts", "eval")


def tracker_names(report_to: Sequence[str]) -> list[str]:
    """Trackers that `report_to` asks for, each once, in its order; `none` is no tracker and `all` every installed one.

    Raises:
        ValueError: for a name that Accelerate does not know or whose package is not installed, and `none` beside
            others.
    """
    installed = [str(name) for name in get_available_trackers()]
    if "none" in report_to:
        if set(report_to) != {"none"}:
            raise ValueError(f"report_to is {list(report_to)}; 'none' excludes the others, drop one or the other")
        return []
    names = [name for entry in report_to for name in (installed if entry == "all" else [entry])]
    for name in names:
        if name not in installed:
            why = "is not installed" if name in LOGGER_TYPE_TO_CLASS else "is no tracker of Accelerate"
            raise ValueError(
                f"report_to names {name!r}, which {why}; available here: {', '.join(installed)}, all, none"
            )
    return list(dict.fromkeys(names))


class RunLog:
    """The written record of one run under `output_dir`, and its way to the trackers.

    Args:
        accelerator: of the run. Trackers that are already initialised on it are kept, and `report_to` adds none.
        output_dir: gets metrics.jsonl, run.yaml, runs/ (TensorBoard), rollouts/, eval/ and skipped_updates.jsonl.
        report_to: names for `tracker_names`.
        run_name: of the run at the trackers; the output folder's name by default.
        config: the resolved configuration, plain values only.
        resume_step: steps already done, -1 for a run that starts anew, None to leave everything. Records of later
            steps, which a resumed run will write again, are dropped.
        step_ended: False where that step's own line is still to be written; its table of rollouts is there.
        resume_skipped: updates skipped until then; records of later ones are dropped too.

    Raises:
        ValueError: as `tracker_names`.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        *,
        output_dir: str | os.PathLike[str],
        report_to: Sequence[str] = ("tensorboard",),
        run_name: str | None = None,
        config: Mapping[str, Any],
        resume_step: int | None = -1,
        step_ended: bool = True,
        resume_skipped: int = 0,
    ) -> None:
        self.accelerator = accelerator
        self.output_dir = Path(output_dir)
        self.is_main = accelerator.is_main_process
        names = tracker_names(report_to)
        if self.is_main:
            self.output_dir.mkdir(parents=True, exist_ok=True)
            if resume_step is not None:
                _drop_records_after(self.output_dir, resume_step, lines=resume_step - (not step_ended))
                _keep_lines(self.output_dir / "skipped_updates.jsonl", "number", resume_skipped)
            text = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)
            write_text_atomically(self.output_dir / "run.yaml", text)
        self._owns_trackers = not accelerator.trackers
        if self._owns_trackers:
            purge = None if resume_step is None else resume_step + step_ended
            self._start_trackers(names, run_name or self.output_dir.resolve().name, dict(config), purge)

    def log(self, stats: Mapping[str, float], step: int, *, report: bool = True) -> None:
        """Adds a line to metrics.jsonl, `step` first and then the sorted keys; `report` says whether trackers get it
        too.

        A number that is not finite is written as null, because JSON has no other word for it.
        """
        if self.is_main:
            numbers = {key: float(stats[key]) for key in sorted(stats)}
            _append(self.output_dir / "metrics.jsonl", {"step": step, **numbers})
            if report:
                with explain_disk_full(self.output_dir / "runs"):
                    self.accelerator.log(numbers, step=step)

    def log_skipped_update(self, row: Mapping[str, Any]) -> None:
        """Adds a line to skipped_updates.jsonl; `row["number"]` counts from 1 over the whole run."""
        if self.is_main:
            _append(self.output_dir / "skipped_updates.jsonl", row)

    def log_rollouts(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Writes `rows` to rollouts/step_<step>.jsonl, one JSON object a line."""
        if self.is_main:
            self._write_rows("rollouts", rows, step)

    def log_table(self, name: str, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Writes all `rows` to <name>/step_<step>.jsonl, and the first of them as a text table to TensorBoard."""
        if self.is_main:
            self._write_rows(name, rows, step)
            for tracker in self._tensorboards():
                tracker.tracker.add_text(f"{name}/table", markdown_table(rows[:_TABLE_ROWS]), step)

    def progress(self, total: int, description: str, *, initial: int = 0, leave: bool = True) -> "tqdm[Any]":
        """A progress bar that shows on the main process, and only where stderr is a terminal; `update` and `close`
        it.
        """
        quiet = not (self.is_main and sys.stderr.isatty())
        return tqdm(total=total, desc=description, initial=initial, leave=leave, disable=quiet, dynamic_ncols=True)

    def message(self, text: str) -> None:
        """Prints a line that does not tear the progress bars."""
        if self.is_main:
            tqdm.write(text)

    def finish(self) -> None:
        """Closes the trackers that this log opened; files need no closing."""
        # Not Accelerator.end_training: it also ends the process group, which whoever made the accelerator may still
        # need.
        if self._owns_trackers:
            for tracker in self.accelerator.trackers:
                tracker.finish()
            self.accelerator.trackers = []

    def _start_trackers(
        self, names: Sequence[str], run_name: str, config: dict[str, Any], purge_step: int | None
    ) -> None:
        runs = self.output_dir / "runs"
        # TensorBoard hides what an interrupted run wrote from purge_step on.
        board = TensorBoardTracker("", runs, purge_step=purge_step)
        self.accelerator.project_configuration.logging_dir = str(runs)
        self.accelerator.log_with = [board if name == "tensorboard" else name for name in names]
        options = {name: {option: run_name} for name, option in _RUN_NAME_OPTION.items()}
        self.accelerator.init_trackers(PROJECT, init_kwargs=options)
        for tracker in self.accelerator.trackers:
            # TensorBoard's own way would refuse lists and add a run of its own for the hyper-parameters.
            if tracker is not board:
                tracker.store_init_configuration(config)
        if self.is_main:
            for tracker in self._tensorboards():
                tracker.tracker.add_text(
                    "run.yaml", markdown_table([{"option": k, "value": v} for k, v in config.items()])
                )

    def _tensorboards(self) -> list[TensorBoardTracker]:
        return [tracker for tracker in self.accelerator.trackers if isinstance(tracker, TensorBoardTracker)]

    def _write_rows(self, folder: str, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        (self.output_dir / folder).mkdir(exist_ok=True)
        write_text_atomically(
            self.output_dir / folder / f"step_{step:06d}.jsonl", "".join(_json_line(row) for row in rows)
        )


def markdown_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table of `rows`; its columns are the first row's keys. Empty for no rows."""
    if not rows:
        return ""
    columns = list(rows[0])
    body = [[_cell(row.get(column, "")) for column in columns] for row in rows]
    lines = [[_cell(column) for column in columns], ["---"] * len(columns), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\r", "").replace("\n", "<br>")


def _json_line(row: Mapping[str, Any]) -> str:
    return json.dumps(_strict(row), ensure_ascii=False, allow_nan=False) + "\n"


def _strict(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _strict(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(entry) for entry in value]
    return value


def _drop_records_after(output_dir: Path, step: int, *, lines: int) -> None:
    """Drops what a resumed run will write again: tables of steps after `step` and lines of steps after `lines`."""
    _keep_lines(output_dir / "metrics.jsonl", "step", lines)
    for folder in _ROW_FOLDERS:
        for path in (output_dir / folder).glob("step_*.jsonl"):
            number = re.fullmatch(r"step_(\d+)\.jsonl", path.name)
            if number and int(number[1]) > step:
                path.unlink()


def metrics_identity(output_dir: Path, step: int) -> dict[str, Any]:
    """Number and hash of the lines of metrics.jsonl up to `step`; what a run timed makes them its own."""
    path = output_dir / "metrics.jsonl"
    lines = _lines_until(path, "step", step) if path.exists() else []
    return {"lines": len(lines), "sha256": hashlib.sha256("".join(lines).encode()).hexdigest()}


def check_metrics(output_dir: Path, written: Mapping[str, Any], step: int) -> None:
    """Checks that metrics.jsonl has no lines until `step`, or those that `metrics_identity` has seen.

    Raises:
        ValueError: when it is of another run: going on would mix the two.
    """
    found = metrics_identity(output_dir, step)
    if found["lines"] and found != written:
        raise ValueError(
            f"{output_dir / 'metrics.jsonl'} is of another run than the checkpoint: it has {found['lines']} lines "
            f"until step {step} that the checkpoint's run did not write (it had {written['lines']}); choose another "
            "output_dir, or move the file away"
        )


def _append(path: Path, row: Mapping[str, Any]) -> None:
    line = _json_line(row).encode()
    with explain_disk_full(path, needed=len(line)), open(path, "ab") as file:
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def _keep_lines(path: Path, key: str, last: int) -> None:
    """Keeps the lines of `path` whose `key` is at most `last`."""
    if path.exists():
        write_text_atomically(path, "".join(_lines_until(path, key, last)))


def _lines_until(path: Path, key: str, last: int) -> list[str]:
    # What stands after the last line's end is half a line, left by a run that was killed as it wrote.
    lines = path.read_bytes().split(b"\n")[:-1]
    return [line.decode() + "\n" for i, line in enumerate(lines, 1) if _count_of(line, key, path, i) <= last]


def _count_of(line: bytes, key: str, path: Path, number: int) -> int:
    try:
        return int(json.loads(line)[key])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} line {number} is not a record of a run: {line[:80]!r}; move the file away to go on"
        ) from error
