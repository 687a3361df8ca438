"""What trackers show besides the metrics: an overview that TensorBoard opens on, and tables of responses."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from accelerate.tracking import (
    ClearMLTracker,
    CometMLTracker,
    GeneralTracker,
    MLflowTracker,
    TensorBoardTracker,
    TrackioTracker,
    WandBTracker,
)

MAX_ROWS = 16
"""Rows of a table in a tracker; the files have all of them."""
MAX_CHARS = 600
"""Characters of a text in a table of TensorBoard, where a cell cannot be folded."""
_LINE = 34
"""Characters of a line in such a cell. TensorBoard breaks even the numbers of columns beside a long line."""
OVERVIEW = {
    "objective/scores": "0_overview/1_reward",
    "objective/kl_sum_seq": "0_overview/2_kl_to_reference",
    "objective/response_length": "0_overview/3_response_length",
    "eval/scores": "0_overview/4_eval_reward",
    "objective/truncated_fraction": "0_overview/5_truncated_fraction",
    "ppo/val/explained_variance": "0_overview/6_explained_variance",
}
"""TensorBoard's names of the metrics to look at first. It sorts groups and the charts in them by name."""
_FIRST_COLUMNS = ("score", "prompt", "response")
_SPECIAL = str.maketrans(
    {character: f"\\{character}" for character in "\\`*_{}[]#|"} | {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
)


def overview(stats: Mapping[str, float], *, best_by: str | None = None) -> dict[str, float]:
    """Returns the metrics of `OVERVIEW` under TensorBoard's names, the score of each named evaluation set, and
    `best_by`, the `metric_for_best_model`, if it is none of these.
    """
    named = {OVERVIEW[name]: value for name, value in stats.items() if name in OVERVIEW}
    sets = {name: name.split("/")[1] for name in stats if _is_score_of_a_set(name)}
    named |= {f"{OVERVIEW['eval/scores']}_{of_set}": stats[name] for name, of_set in sets.items()}
    if best_by is not None and best_by in stats and best_by not in (*OVERVIEW, *sets):
        # A second slash would put it into a group of its own.
        named[f"0_overview/7_{best_by.replace('/', '_')}"] = stats[best_by]
    return named


def _is_score_of_a_set(name: str) -> bool:
    return name.count("/") == 2 and name.startswith("eval/") and name.endswith("/scores")


def table_rows(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the first `MAX_ROWS` rows with score, prompt and response first, and without per-token numbers."""
    shown = []
    for row in rows[:MAX_ROWS]:
        first = {name: row[name] for name in _FIRST_COLUMNS if name in row}
        shown.append(first | {name: value for name, value in row.items() if name not in (*first, "tokens")})
    return shown


def rows_to_read(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns `rows` with what is not score, prompt or response in one column, a line for each entry that is not empty.

    TensorBoard gives a table its own width: each further column would take it from the texts.
    """
    details = ["\n".join(_details(row)) for row in rows]
    return [
        {name: row[name] for name in _FIRST_COLUMNS if name in row} | ({"details": text} if any(details) else {})
        for row, text in zip(rows, details, strict=True)
    ]


def _details(row: Mapping[str, Any]) -> Iterator[str]:
    for name, value in row.items():
        if name in (*_FIRST_COLUMNS, "turns"):
            continue
        for part, entry in value.items() if isinstance(value, Mapping) else [(name, value)]:
            text = f"{entry:.4g}" if isinstance(entry, float) else " ".join(str(entry).split())
            if entry is not None and text:
                yield f"{part}: {text}"


def markdown_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns `rows` as a Markdown table with the keys of the first row as columns; "" without rows.

    Markdown in a text is shown as it is, and a long text is cut in the middle.
    """
    if not rows:
        return ""
    columns = list(rows[0])
    body = [[_cell(row.get(column, "")) for column in columns] for row in rows]
    lines = [[_cell(column) for column in columns], ["---"] * len(columns), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    if len(text) > MAX_CHARS:
        # The end of a prompt is what the response answers, the end of a response how it stopped.
        text = f"{text[: MAX_CHARS // 2]} ... ({len(text) - MAX_CHARS} characters) ... {text[-MAX_CHARS // 2 :]}"
    lines = [part for line in text.replace("\r", "").split("\n") for part in textwrap.wrap(line, _LINE) or [""]]
    return "<br>".join(line.translate(_SPECIAL) for line in lines)


def log_table(tracker: GeneralTracker, name: str, rows: Sequence[Mapping[str, Any]], path: Path, step: int) -> None:
    """Shows a table of responses in a tracker that can: TensorBoard, W&B, ClearML, trackio, Comet, and MLflow, which
    gets the file. Other trackers are left alone.

    Args:
        tracker: Accelerate's.
        name: "rollouts" or "eval".
        rows: of the table.
        path: the file that has all rows with all columns.
        step: from 1; 0 is before training.
    """
    shown = table_rows(rows)
    if not shown:
        return
    if isinstance(tracker, TensorBoardTracker):
        tracker.tracker.add_text(f"{name}/table", markdown_table(rows_to_read(shown)), step)
        return
    columns = list(shown[0])
    data = [[row.get(column) for column in columns] for row in shown]
    if isinstance(tracker, WandBTracker | ClearMLTracker):
        tracker.log_table(f"{name}/table", columns=columns, data=data, step=step)
    elif isinstance(tracker, TrackioTracker):
        frame = import_module("pandas").DataFrame(shown)
        tracker.log({f"{name}/table": import_module("trackio").Table(dataframe=frame)}, step=step)
    elif isinstance(tracker, CometMLTracker):
        tracker.tracker.log_table(f"{name}_step_{step:06d}.csv", tabular_data=data, headers=columns)
    elif isinstance(tracker, MLflowTracker):
        tracker.log_artifact(str(path), artifact_path=name)
