"""Writes a report: the runs' data as JSON within one HTML page that needs neither a server nor a network."""

import html
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from alpaca_ppo.atomic_io import write_text_atomically
from alpaca_ppo.report.answers import choose_answers, script_json
from alpaca_ppo.report.runs import Run, plain
from alpaca_ppo.tracking.results import better_before_training, means_in_words, start_and_end

SCRIPTS = (
    "format.js", "charts.js", "metrics.js", "curves.js", "overview.js", "configuration.js", "tokens.js", "answers.js",
    "page.js",
)  # fmt: skip
MAX_POINTS = 1500
"""Most points of a curve; those of longer runs are means over neighbouring steps."""
OF_ONE_RUN = {"seed", "output_dir", "run_name", "provenance", "hub_model_id"}
"""Options in which the seeds of one experiment differ."""


def write_report(runs: Sequence[Run], path: Path, *, token_mb: float = 20.0) -> Path:
    """Writes the report of `runs` to the file `path`, complete or not at all, and returns it.

    Args:
        runs: at least one.
        path: of the HTML file; its folder is made if it is missing.
        token_mb: most megabytes of numbers of tokens.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomically(path, report_page(report_data(runs, token_mb=token_mb)))
    return path


def report_data(runs: Sequence[Run], *, token_mb: float) -> dict[str, Any]:
    """Everything that the page shows, as plain values."""
    answers = choose_answers(runs, token_mb=token_mb)
    left_out = list(answers.left_out)
    groups = _groups(runs)
    return {
        "written": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "runs": [_run_data(run, group, left_out) for run, group in zip(runs, groups, strict=True)],
        "answers": answers.columns,
        "prompts": answers.prompts,
        "tokens": answers.tokens,
        "left_out": left_out,
        "of_one_run": sorted(OF_ONE_RUN),
    }


def report_page(data: Mapping[str, Any]) -> str:
    """The HTML page that shows `data`."""
    assets = files("alpaca_ppo.report") / "assets"
    names = ", ".join(run["name"] for run in data["runs"])
    parts = {
        "title": html.escape(f"Report: {names}"),
        "style": (assets / "page.css").read_text(encoding="utf-8"),
        "data": script_json({name: value for name, value in data.items() if name != "tokens"}),
        "tokens": "{" + ",\n".join(f'"{i}":{text}' for i, text in data["tokens"].items()) + "}",
        "script": "\n".join((assets / name).read_text(encoding="utf-8") for name in SCRIPTS),
    }
    page = []
    for i, piece in enumerate((assets / "page.html").read_text(encoding="utf-8").split("@@")):
        page.append(parts[piece] if i % 2 else piece)
    # A text of a model may hold half of a surrogate pair, which no encoding has.
    return "".join(page).encode(errors="replace").decode()


def _run_data(run: Run, group: int, left_out: list[str]) -> dict[str, Any]:
    lines = run.metrics
    names = sorted({name for line in lines for name in line} - {"step"})
    known = {name: ends for name in names if (ends := start_and_end(lines, name))}
    if len(lines) > MAX_POINTS:
        width = math.ceil(len(lines) / MAX_POINTS)
        left_out.append(f"Curves of {run.name}: every point is the mean of {width} steps.")
        lines = [_mean_line(lines[i : i + width], names) for i in range(0, len(lines), width)]
    return {
        "name": run.name,
        "path": str(run.path),
        "group": group,
        "last_step": run.last_step,
        "steps": [line["step"] for line in lines],
        "metrics": {name: [_short(line.get(name)) for line in lines] for name in names},
        "config": {str(name): plain(value) for name, value in run.config.items()},
        "findings": [asdict(finding) for finding in run.findings],
        "ends": {name: [_short(value) for value in ends] for name, ends in known.items()},
        "ends_are": means_in_words(run.metrics),
        "weights": _weights(run),
        "finished": (run.path / "final").is_dir(),
    }


def _weights(run: Run) -> dict[str, Any] | None:
    """Which step the models in final/ are from, the step of the best checkpoint if they are its, and what to say if
    the policy was better before training.
    """
    weights, before = run.weights, None
    if weights is None:
        return None
    if weights.metric is not None and weights.value is not None:
        greater = run.config.get("greater_is_better") is not False
        before = better_before_training(run.metrics, weights.metric, weights.value, greater_is_better=greater)
    return {
        "text": str(weights),
        "best": None if weights.metric is None else weights.step,
        "before": None if before is None else f"worse than before training, when {weights.metric} was {before:.4g}",
    }


def _mean_line(lines: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    mean: dict[str, Any] = {"step": lines[-1]["step"]}
    for name in names:
        known = [line[name] for line in lines if line.get(name) is not None]
        mean[name] = sum(known) / len(known) if known else None
    return mean


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def _groups(runs: Sequence[Run]) -> list[int]:
    """The number of each run's group: runs of one group differ in `OF_ONE_RUN` at most."""
    seen: dict[str, int] = {}
    keys = []
    for i, run in enumerate(runs):
        same = {name: plain(value) for name, value in run.config.items() if name not in OF_ONE_RUN}
        keys.append(json.dumps(same, sort_keys=True) if run.config else f"run {i}")
    return [seen.setdefault(key, len(seen)) for key in keys]
