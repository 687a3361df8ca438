"""Reads the folder of a run."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from alpaca_ppo.doctor.examination import Finding, examined, read_config, read_findings, read_lines
from alpaca_ppo.tracking.results import WeightsStep, read_weights_step, table_files


@dataclass(frozen=True)
class TableFile:
    """A file with answers of one step; `table` is the folder below the run's, such as eval/math, `size` is in bytes."""

    table: str
    step: int
    path: Path
    size: int


@dataclass(frozen=True)
class Run:
    """What the folder of a run holds, but for the answers in `tables`, which are read when needed.

    Attributes:
        metrics: the lines of metrics.jsonl; None for a number that was not finite.
        config: run.yaml; empty without one.
        findings: the doctor's, the most severe first.
        weights: the step of the models in final/; None without them.
    """

    name: str
    path: Path
    metrics: list[dict[str, Any]]
    config: dict[str, Any]
    findings: list[Finding]
    tables: list[TableFile] = field(default_factory=list)
    weights: WeightsStep | None = None

    @property
    def last_step(self) -> int:
        """The last step with metrics, or 0."""
        return int(self.metrics[-1]["step"]) if self.metrics else 0


def read_runs(folders: Sequence[str | Path]) -> list[Run]:
    """Returns the runs in `folders`, examined by the doctor, with distinct names.

    Raises:
        ValueError: if a folder is not that of a run or is given twice, or one of its files is damaged.
    """
    paths = [Path(folder).resolve() for folder in folders]
    if len(set(paths)) < len(paths):
        raise ValueError(f"a run is given twice: {', '.join(map(str, paths))}; name each folder once")
    # The last parts of each path, as many as make the names distinct.
    depth = 1
    while len({path.parts[-depth:] for path in paths}) < len(paths):
        depth += 1
    return [read_run(path, "/".join(path.parts[-depth:]), examine=True) for path in paths]


def read_run(path: Path, name: str, *, examine: bool = False) -> Run:
    """Returns the run in the folder `path`, called `name`. With `examine`, the doctor examines the metrics again and
    adds to the findings from training.
    """
    lines = read_lines(path / "metrics.jsonl")
    metrics = [{key: number_or_none(v) for key, v in line.items()} | {"step": int(line["step"])} for line in lines]
    config = read_config(path)
    return Run(
        name=name,
        path=path,
        metrics=metrics,
        config=config,
        findings=examined(config, metrics if examine else (), read_findings(path)),
        weights=read_weights_step(path / "final"),
        tables=[TableFile(table, step, file, file.stat().st_size) for table, step, file in sorted(table_files(path))],
    )


def number_or_none(value: Any) -> float | None:
    """Returns `value` as a finite float; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def rounded(value: Any) -> float | None:
    """Returns `value` as a finite float with six significant digits; None for anything else."""
    number = number_or_none(value)
    return None if number is None else float(f"{number:.6g}")


def plain(value: Any) -> Any:
    """Returns `value` for JSON: dates, and floats that are not finite, become text."""
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value) or not isinstance(value, str | int | float | None):
        return str(value)
    return value
