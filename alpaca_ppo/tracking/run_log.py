"""The log of a run: metrics.jsonl, run.yaml, trackers, tables of responses, messages.

Only the main process writes; on other processes every method does nothing. The numbers come from `ppo.metrics` and
`rollout_tables`; checkpoints and models are written by `checkpoint`. What is printed and when is in `console`.
"""

import hashlib
import json
import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, TensorBoardTracker, get_available_trackers

from alpaca_ppo.atomic_io import explain_disk_full, write_text_atomically
from alpaca_ppo.config.run_file import PROVENANCE
from alpaca_ppo.tracking import tracker_tables
from alpaca_ppo.tracking.progress_bar import ProgressBar, write

PROJECT = "alpaca_ppo"
# Each tracker's keyword for the run's name; Accelerate passes only the project's name.
_RUN_NAME_OPTION = {"mlflow": "run_name", "swanlab": "experiment_name", "trackio": "name", "wandb": "name"}
_TABLE_FOLDERS = ("rollouts", "eval", "inspected")


def tracker_names(report_to: Sequence[str]) -> list[str]:
    """Returns the trackers in `report_to` without duplicates, in its order; "all" means every installed tracker.

    Raises:
        ValueError: for a tracker that Accelerate does not support or whose package is not installed, and for "none"
            together with other names.
    """
    installed = [str(name) for name in get_available_trackers()]
    if "none" in report_to:
        if set(report_to) != {"none"}:
            raise ValueError(
                f"report_to is {list(report_to)}; 'none' cannot be combined with other trackers; remove 'none', or the "
                "others"
            )
        return []
    names = [name for entry in report_to for name in (installed if entry == "all" else [entry])]
    for name in names:
        if name not in installed:
            why = "is not installed" if name in LOGGER_TYPE_TO_CLASS else "is not a tracker of Accelerate"
            raise ValueError(
                f"report_to names {name!r}, which {why}; available here: {', '.join(installed)}, all, none"
            )
    return list(dict.fromkeys(names))


class RunLog:
    """Writes the records of one run to `output_dir` and to the trackers.

    Args:
        accelerator: the run's accelerator. If it already has trackers, they are used, and `report_to` adds none.
        output_dir: folder of metrics.jsonl, run.yaml, runs/ (TensorBoard), rollouts/, eval/, inspected/, findings.jsonl
            and skipped_updates.jsonl.
        report_to: trackers; see `tracker_names`.
        run_name: the run's name in the trackers; by default the name of the output folder.
        config: all options of the run, as plain values without credentials.
        provenance: where the run came from, for run.yaml alone.
        resume_step: the number of steps already done, or -1 for a new run. Records of later steps are removed, because
            the run will write them again. None keeps all records.
        step_ended: False if step `resume_step` has written its table of rollouts, but not its line of metrics.
        resume_skipped: the number of updates skipped up to `resume_step`; records of later ones are removed too.
        resume_lines: the number of lines of metrics that the run had written up to `resume_step`; later ones are
            removed too, whatever their step. None keeps them.

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
        provenance: Mapping[str, Any] | None = None,
        resume_step: int | None = -1,
        step_ended: bool = True,
        resume_skipped: int = 0,
        resume_lines: int | None = None,
    ) -> None:
        self.accelerator = accelerator
        self.output_dir = Path(output_dir)
        self.is_main = accelerator.is_main_process
        self.bar = ProgressBar(is_main=self.is_main)
        """The progress bar."""
        self.samples: Sequence[Mapping[str, Any]] = []
        """Sampled responses of the step, to be printed at its end (`rollout_tables.sample_rows`)."""
        self._before_train = resume_step is None
        self._best_by: str | None = config.get("metric_for_best_model")
        self._rollouts: dict[int, Sequence[Mapping[str, Any]]] = {}
        names = tracker_names(report_to)
        if self.is_main:
            self.output_dir.mkdir(parents=True, exist_ok=True)
            if resume_step is not None:
                _remove_records_after(self.output_dir, resume_step, step_ended, resume_skipped, resume_lines)
            content = dict(config) if provenance is None else {**config, PROVENANCE: dict(provenance)}
            text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
            write_text_atomically(self.output_dir / "run.yaml", text)
        self._owns_trackers = not accelerator.trackers
        if self._owns_trackers:
            purge = None if resume_step is None else resume_step + step_ended
            self._start_trackers(names, run_name or self.output_dir.resolve().name, dict(config), purge)

    def rewind(self, *, resume_step: int, step_ended: bool, resume_skipped: int, resume_lines: int | None) -> None:
        """Removes the records of later steps, as the constructor does, from a log that is open already."""
        self._before_train = False
        if not self.is_main:
            return
        _remove_records_after(self.output_dir, resume_step, step_ended, resume_skipped, resume_lines)
        for board in self._tensorboards() if self._owns_trackers else []:
            # The next event opens a new file, which starts with the purge.
            board.tracker.close()
            _wait_for_a_later_name(self.output_dir / "runs")
            board.tracker.purge_step = resume_step + step_ended

    def log(self, stats: Mapping[str, float], step: int, *, report: bool = True) -> None:
        """Appends a line to metrics.jsonl, `step` first and then the metrics by name, and logs it to the trackers.

        A number that is not finite is written as null, because JSON cannot represent it.

        Args:
            stats: the metrics.
            step: the step, from 1; 0 is before training.
            report: False leaves the trackers out.
        """
        if self.is_main:
            numbers = {key: float(stats[key]) for key in sorted(stats)}
            _append(self.output_dir / "metrics.jsonl", {"step": step, **numbers})
            if report:
                with explain_disk_full(self.output_dir / "runs"):
                    self.accelerator.log(numbers, step=step)
                    for board in self._tensorboards():
                        board.log(tracker_tables.overview(numbers, best_by=self._best_by), step=step)
                    self._show_table("rollouts", self._rollouts.pop(step, ()), step)
            self._rollouts.clear()

    def log_skipped_update(self, row: Mapping[str, Any]) -> None:
        """Appends a line to skipped_updates.jsonl; `row["number"]` counts from 1 over the whole run."""
        if self.is_main:
            _append(self.output_dir / "skipped_updates.jsonl", row)

    def log_finding(self, row: Mapping[str, Any]) -> None:
        """Appends a line to findings.jsonl: what the doctor has found after `row["step"]`."""
        if self.is_main:
            _append(self.output_dir / "findings.jsonl", row)

    def log_rollouts(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Writes `rows` to rollouts/step_<step>.jsonl, one JSON object per line; the trackers get a table of them with
        the step's metrics.
        """
        if self.is_main:
            self._write_rows("rollouts", rows, step)
            self._rollouts = {step: rows}

    def log_inspected(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Writes `rows` to inspected/step_<step>.jsonl, one JSON object per line."""
        if self.is_main:
            self._write_rows("inspected", rows, step)

    def log_table(self, name: str, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Writes all `rows` to <name>/step_<step>.jsonl, and the first 16 as a table to the trackers.

        A table of step 0 that a run with checkpoints left is kept until `train` begins (`rewind`): a resumed run does
        not write it again.
        """
        path = self.output_dir / name / f"step_{step:06d}.jsonl"
        kept = self._before_train and step == 0 and path.exists() and any(self.output_dir.glob("checkpoint-*"))
        if kept:
            self.message(
                f"{path} stays as the run in this folder wrote it; for another table choose another output_dir"
            )
        elif self.is_main:
            self._write_rows(name, rows, step)
            self._show_table(name, rows, step)

    def message(self, text: str) -> None:
        """Prints a line above the progress bar."""
        if self.is_main:
            write(text)

    @property
    def boards(self) -> list[str]:
        """The folders to which TensorBoard's events are written."""
        return [str(Path(tracker.tracker.log_dir)) for tracker in self._tensorboards()] if self.is_main else []

    def finish(self) -> None:
        """Closes the trackers that this log started."""
        # Accelerator.end_training would also destroy the process group, which the caller may still need.
        if self._owns_trackers:
            for tracker in self.accelerator.trackers:
                tracker.finish()
            self.accelerator.trackers = []

    def _start_trackers(
        self, names: Sequence[str], run_name: str, config: dict[str, Any], purge_step: int | None
    ) -> None:
        runs = self.output_dir / "runs"
        # TensorBoard hides what an interrupted run wrote for purge_step and later steps.
        if self.is_main and purge_step is not None:
            _wait_for_a_later_name(runs)
        board = TensorBoardTracker("", runs, purge_step=purge_step)
        self.accelerator.project_configuration.logging_dir = str(runs)
        self.accelerator.log_with = [board if name == "tensorboard" else name for name in names]
        options = {name: {option: run_name} for name, option in _RUN_NAME_OPTION.items()}
        self.accelerator.init_trackers(PROJECT, init_kwargs=options)
        for tracker in self.accelerator.trackers:
            # TensorBoardTracker would reject lists, and add a separate run for the hyperparameters.
            if tracker is not board:
                tracker.store_init_configuration(config)
        if self.is_main:
            for tracker in self._tensorboards():
                tracker.tracker.add_text(
                    "run.yaml", tracker_tables.markdown_table([{"option": k, "value": v} for k, v in config.items()])
                )

    def _show_table(self, name: str, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        for tracker in self.accelerator.trackers:
            path = self.output_dir / name / f"step_{step:06d}.jsonl"
            tracker_tables.log_table(tracker, name, rows, path, step)

    def _tensorboards(self) -> list[TensorBoardTracker]:
        return [tracker for tracker in self.accelerator.trackers if isinstance(tracker, TensorBoardTracker)]

    def _write_rows(self, folder: str, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        (self.output_dir / folder).mkdir(parents=True, exist_ok=True)
        write_text_atomically(
            self.output_dir / folder / f"step_{step:06d}.jsonl", "".join(_json_line(row) for row in rows)
        )


def _json_line(row: Mapping[str, Any]) -> str:
    return json.dumps(_without_nan(row), ensure_ascii=False, allow_nan=False) + "\n"


def _without_nan(value: Any) -> Any:
    """Replaces floats that are not finite by None, also inside mappings and lists."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _without_nan(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(entry) for entry in value]
    return value


def _remove_records_after(output_dir: Path, step: int, step_ended: bool, skipped: int, lines: int | None) -> None:
    """Removes what a run that resumes after `step` writes again: tables of later steps, lines of metrics (that of
    `step` too, unless `step_ended`), and updates skipped after the first `skipped`. Also lines of metrics that were
    added after the first `lines`.
    """
    _keep_lines_up_to(output_dir / "metrics.jsonl", "step", step - (not step_ended), lines)
    _keep_lines_up_to(output_dir / "findings.jsonl", "step", step - (not step_ended))
    _keep_lines_up_to(output_dir / "skipped_updates.jsonl", "number", skipped)
    for folder in _TABLE_FOLDERS:
        # Also those of named eval sets, which have folders of their own.
        for path in (output_dir / folder).rglob("step_*.jsonl"):
            number = re.fullmatch(r"step_(\d+)\.jsonl", path.name)
            if number and int(number[1]) > step:
                path.unlink()


def metrics_identity(output_dir: Path, step: int, most: int | None = None) -> dict[str, Any]:
    """Returns number and hash of the lines of metrics.jsonl up to `step`, at `most` so many of them.

    The timings in them make a run unique.
    """
    path = output_dir / "metrics.jsonl"
    lines = _lines_up_to(path, "step", step)[:most] if path.exists() else []
    return {"lines": len(lines), "sha256": hashlib.sha256("".join(lines).encode()).hexdigest()}


def check_metrics(output_dir: Path, written: Mapping[str, Any], step: int) -> None:
    """Checks that metrics.jsonl, up to `step`, is empty or starts with the lines that the checkpoint's run had written.

    More lines may follow, such as those of an evaluation that was logged before resuming; `RunLog` removes them.

    Args:
        output_dir: folder of metrics.jsonl.
        written: what `metrics_identity` returned when the checkpoint was saved.
        step: the last step whose line is compared.

    Raises:
        ValueError: if the lines belong to another run, which resuming would mix with this one.
    """
    found = metrics_identity(output_dir, step, written["lines"])
    if found["lines"] and found != written:
        raise ValueError(
            f"{output_dir / 'metrics.jsonl'} does not belong to the run that wrote the checkpoint: its "
            f"{found['lines']} lines up to step {step} differ from the {written['lines']} lines that run wrote; "
            "choose another output_dir, or move the file away"
        )


def _wait_for_a_later_name(folder: Path) -> None:
    """Waits until a new event file in `folder` comes after those that are there.

    TensorBoard reads them in the order of their names, which begin with whole seconds. What follows the seconds says
    nothing about which file came first: a counter, say, with 10 before 9.
    """
    newest = max((int(path.name.split(".")[3]) for path in folder.glob("events.out.tfevents.*")), default=0)
    # A file from a clock that was ahead is not waited for.
    time.sleep(max(0.0, min(1.0, newest + 1 - time.time())))


def _append(path: Path, row: Mapping[str, Any]) -> None:
    line = _json_line(row).encode()
    with explain_disk_full(path, needed=len(line)), open(path, "ab") as file:
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def _keep_lines_up_to(path: Path, key: str, last: int, most: int | None = None) -> None:
    """Removes the lines of `path` whose `key` is above `last`, and of the others all after the first `most`."""
    if path.exists():
        write_text_atomically(path, "".join(_lines_up_to(path, key, last)[:most]))


def _lines_up_to(path: Path, key: str, last: int) -> list[str]:
    # A run that was killed while writing leaves an incomplete line without a line feed at the end.
    lines = path.read_bytes().split(b"\n")[:-1]
    return [line.decode() + "\n" for i, line in enumerate(lines, 1) if _read_count(line, key, path, i) <= last]


def _read_count(line: bytes, key: str, path: Path, number: int) -> int:
    try:
        # From bytes, json would read UTF-16 too.
        return int(json.loads(line.decode())[key])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(
            f"{path} line {number} is not a record of a run: {line[:80]!r}; move the file away to continue"
        ) from error
