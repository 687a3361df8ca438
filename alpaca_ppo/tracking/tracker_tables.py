"""What trackers show besides the metrics: an overview that TensorBoard opens on, and tables of responses."""

import html
from collections.abc import Mapping, Sequence
from typing import Any

from accelerate.tracking import ClearMLTracker, GeneralTracker, TensorBoardTracker, WandBTracker

MAX_ROWS = 16
"""Rows of a table in a tracker; the files have all of them."""
MAX_CHARS = 600
"""Characters of a text in a table of TensorBoard, where a cell cannot be folded."""
OVERVIEW = {
    "objective/scores": "0_overview/1_reward",
    "objective/kl_sum_seq": "0_overview/2_kl_to_reference",
    "objective/response_length": "0_overview/3_response_length",
    "eval/scores": "0_overview/4_eval_reward",
    "objective/truncated_fraction": "0_overview/5_truncated_fraction",
    "ppo/val/explained_variance": "0_overview/6_explained_variance",
}
"""TensorBoard's names of the metrics to look at first. It sorts groups and the charts in them by name."""
_SPECIAL = str.maketrans({character: f"\\{character}" for character in "\\`*_{}[]#|"})


def overview(stats: Mapping[str, float], *, best_by: str | None = None) -> dict[str, float]:
    """Returns the metrics of `OVERVIEW` under TensorBoard's names, the score of each named evaluation set, and
    `best_by`, the `metric_for_best_model`, if it is none of these.
    """
    names = dict(OVERVIEW)
    for name in stats:
        if name.count("/") == 2 and name.startswith("eval/") and name.endswith("/scores"):
            names[name] = f"{OVERVIEW['eval/scores']}_{name.split('/')[1]}"
    if best_by is not None:
        # A second slash would put it into a group of its own.
        names.setdefault(best_by, f"0_overview/7_{best_by.replace('/', '_')}")
    return {shown: stats[name] for name, shown in names.items() if name in stats}


def markdown_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns `rows` as a Markdown table with the keys of the first row as columns.

    Markdown in a text is shown as it is, and a long text is cut in the middle.
    """
    columns = list(rows[0])
    lines = [columns, *([row.get(column, "") for column in columns] for row in rows)]
    shown = [f"| {' | '.join(map(_cell, line))} |" for line in lines]
    return "\n".join([shown[0], f"| {' | '.join(['---'] * len(columns))} |", *shown[1:]])


def _cell(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    if len(text) > MAX_CHARS:
        # The end of a prompt is what the response answers, the end of a response how it stopped.
        text = f"{text[: MAX_CHARS // 2]} ... ({len(text) - MAX_CHARS} characters) ... {text[-MAX_CHARS // 2 :]}"
    return html.escape(text, quote=False).translate(_SPECIAL).replace("\r", "").replace("\n", "<br>")


def log_table(tracker: GeneralTracker, name: str, rows: Sequence[Mapping[str, Any]], step: int) -> None:
    """Shows score, prompt and response of the first rows in TensorBoard, and all columns but the tokens in W&B and
    ClearML; other trackers are left alone.
    """
    first = [column for column in ("score", "prompt", "response") if column in rows[0]]
    if isinstance(tracker, TensorBoardTracker):
        shown = [{column: row.get(column, "") for column in first} for row in rows[:MAX_ROWS]]
        tracker.tracker.add_text(f"{name}/table", markdown_table(shown), step)
    elif isinstance(tracker, WandBTracker | ClearMLTracker):
        columns = first + [column for column in rows[0] if column not in (*first, "tokens")]
        data = [[row.get(column) for column in columns] for row in rows[:MAX_ROWS]]
        tracker.log_table(f"{name}/table", columns=columns, data=data, step=step)
