"""The text of what a run prints: numbers, the table of steps, evaluations, sampled answers and the changes at the end.

Pure functions of metrics and rows. When they are printed is in `console`.
"""

import math
import textwrap
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tqdm.utils import disp_len

from alpaca_ppo.tracking.start_and_end import Metrics, start_and_end

MAX_WIDTH = 120
"""Columns of the text where the terminal has more, and where there is none."""
SOURCES = "objective/scores/"
"""Begins the names of the sources' mean scores."""
_PROMPT_LINES, _ANSWER_LINES = (2, 4), (12, 8)
"""Lines of a sampled text that are printed, at its beginning and at its end."""


def number(value: float | None, digits: int = 3) -> str:
    """Returns `value` with `digits` decimals, or as a power of ten where these would be all zero or too many."""
    if value is None:
        return "-"
    if value and math.isfinite(value) and not 0.5 * 10**-digits <= abs(value) < 1e5:
        return f"{value:.1e}"
    return f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    """Returns a share as a percentage."""
    return "-" if value is None else f"{100 * value:.1f}%"


def rate(value: float | None) -> str:
    """Returns a number per second with three digits or so: 47, 1.2k, 310k."""
    if value is None or not math.isfinite(value):
        return "-"
    if value < 1000:
        return f"{value:.{int(value < 10)}f}"
    return f"{value / 1000:.{int(value < 99_950)}f}k"


def duration(seconds: float | None) -> str:
    """Returns a time as minutes:seconds, hours:minutes:seconds, or days and hours:minutes."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours:02}:{minutes:02}"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _share(value: float | None) -> str:
    """Nobody cares how close to 0 an explained variance is, and 0 has no sign."""
    return number(value and round(value, 2) + 0.0, 2)


class Column(NamedTuple):
    """A metric as a column of the table of steps, and as it is named in evaluations and at the end."""

    key: str
    title: str
    width: int
    text: Callable[[float | None], str] = number


COLUMNS = (
    Column("objective/rewards", "reward", 9),
    Column("objective/kl_sum_seq", "KL", 8),
    Column("objective/response_length", "length", 7, lambda value: number(value, 1)),
    Column("objective/turns", "turns", 6, _share),
    Column("objective/truncated_fraction", "cut off", 7, percent),
    Column("ppo/val/explained_variance", "expl.var", 8, _share),
    Column("tokens/per_second", "tok/s", 6, rate),
    Column("time/step", "sec", 6, lambda value: number(value, 0 if value is not None and value >= 100 else 1)),
)
"""What a step shows if the run has it; reward sources have columns of their own after the first."""
_CHANGES = tuple(column for column in COLUMNS if column.title in ("reward", "KL", "length", "cut off"))
_EVALUATED = {column.key.removeprefix("objective/"): column for column in _CHANGES}


class StepTable:
    """The lines of a table with a row for each step. Which columns it has is decided by the first row.

    Reward sources have a column each, or, where these would be too wide, a line of their own under each row. A single
    source has none if the reward is its score.

    Args:
        width: columns of the screen.
        max_steps: of the run.
        reward_is_score: whether the reward of a response is what a single source returns for it.
    """

    def __init__(self, width: int, *, max_steps: int, reward_is_score: bool) -> None:
        self._width, self._max_steps, self._reward_is_score = width, max_steps, reward_is_score
        self._columns: list[Column] = []
        self._below: list[str] = []

    @property
    def header(self) -> str:
        """The line of the titles."""
        return " ".join(column.title.rjust(column.width) for column in self._columns)

    def row(self, stats: Metrics, *, step: int, seconds_left: float | None) -> list[str]:
        """Returns the line of `step` (from 1), and those of the sources if they have no columns; a metric that is
        missing is shown as "-".
        """
        if not self._columns:
            self._choose_columns(stats)
        cells = {"step": f"{step}/{self._max_steps}", "left": duration(seconds_left)}
        line = " ".join(
            (cells.get(column.key) or column.text(stats.get(column.key))).rjust(column.width)
            for column in self._columns
        )
        below = [f"{name} {number(stats.get(SOURCES + name)):>8}" for name in self._below]
        return [line, *_filled(below, self._width, indent=self._columns[0].width + 2)]

    def _choose_columns(self, stats: Metrics) -> None:
        sources = [key.removeprefix(SOURCES) for key in stats if key.startswith(SOURCES)]
        sources = [] if len(sources) == 1 and self._reward_is_score else sources
        step = Column("step", "step", max(5, 2 * len(str(self._max_steps)) + 1))
        reward, *others = (column for column in COLUMNS if column.key in stats or column is COLUMNS[0])
        of_sources = [Column(SOURCES + name, name, max(9, disp_len(name))) for name in sources]
        self._columns = [step, reward, *of_sources, *others, Column("left", "left", 8)]
        if len(self.header) > self._width:
            self._columns, self._below = [step, reward, *others, self._columns[-1]], sources


def evaluation_lines(stats: Metrics, start: Metrics, *, step: int, width: int) -> list[str]:
    """Returns a line for each set of evaluation prompts, or more where one is too short: each metric before training
    and now.

    Args:
        stats: metrics; those of an evaluation begin with `eval/`, of a named set with `eval/<set>/`.
        start: the metrics of the run's first evaluation.
        step: how many steps have ended.
        width: columns of the screen.
    """
    lines = []
    for prefix in eval_sets(stats):
        title = f"eval {prefix.removeprefix('eval/').strip('/')}".strip()
        title += f" at step {step}:" if step else " before training:"
        parts = [_change(stats, start if step else {}, prefix, name) for name in _names_of_set(stats, prefix)]
        lines += _filled([title, *parts], width, indent=4, first=0)
    return lines


def eval_sets(stats: Metrics) -> list[str]:
    """Returns the prefixes of the metrics of each set of evaluation prompts: `eval/`, `eval/<set>/`."""
    return [key.removesuffix("rewards") for key in stats if key.startswith("eval/") and key.endswith("/rewards")]


def _names_of_set(stats: Metrics, prefix: str) -> list[str]:
    """The metrics of an eval set that are shown, without those of other sets and those that repeat the reward."""
    nested = tuple(other for other in eval_sets(stats) if other != prefix and other.startswith(prefix))
    found = [key for key in stats if key.startswith(prefix) and not (nested and key.startswith(nested))]
    names = [name for key in found if not (name := key.removeprefix(prefix)).endswith(("_se", "scores_std"))]
    sources, reward = [name for name in names if name.startswith("scores/")], stats.get(f"{prefix}rewards")
    for name in ("scores", *(sources if len(sources) == 1 else ())):
        value = stats.get(prefix + name)
        # A mean of the same numbers, taken in another order.
        if value is not None and reward is not None and math.isclose(value, reward, rel_tol=1e-6):
            names.remove(name)
    if stats.get(f"{prefix}masked_rows") == 0:
        names.remove("masked_rows")
    return [name for name in _EVALUATED if name in names] + [name for name in names if name not in _EVALUATED]


def _column(name: str) -> Column:
    return _EVALUATED.get(name) or Column(name, name.removeprefix("scores/"), 0)


def _change(stats: Metrics, start: Metrics, prefix: str, name: str) -> str:
    column, key = _column(name), prefix + name
    now, before, error = stats[key], start.get(key), stats.get(f"{key}_se")
    text = column.text(now) + (f" ±{number(error)}" if error is not None else "")
    if before is None or now is None:
        return f"{column.title} {text}"
    difference = f" ({now - before:+.3f})" if name == "rewards" else ""
    return f"{column.title} {column.text(before)} -> {text}{difference}"


def change_lines(history: Sequence[Metrics], *, metric: str | None = None) -> list[str]:
    """Returns a table of what changed in a run: metrics of its steps, as `start_and_end` averages them, and those of
    its first and last evaluation.

    Args:
        history: the metrics of each step, with `step`; 0 is the evaluation before training.
        metric: `metric_for_best_model`, which is one of them.
    """
    names = dict.fromkeys(key for line in history for key in line)
    sources = [Column(key, key.removeprefix(SOURCES), 0) for key in names if key.startswith(SOURCES)]
    columns = [_CHANGES[0], *(sources if len(sources) > 1 else []), *_CHANGES[1:]]
    evaluated = [line for line in history if eval_sets(line)]
    last = evaluated[-1] if len(evaluated) > 1 else {}
    for prefix in eval_sets(last):
        for name in _names_of_set(last, prefix):
            column = _column(name)
            columns.append(
                Column(prefix + name, f"{prefix.strip('/').replace('/', ' ')} {column.title}", 0, column.text)
            )
    if metric is not None and metric not in [column.key for column in columns]:
        columns.append(Column(metric, metric.replace("/", " ") if metric.startswith("eval/") else metric, 0))
    found = [(column, ends) for column in columns if (ends := start_and_end(history, column.key)) is not None]
    wide = max((len(column.title) for column, _ in found), default=0)
    return [
        f"  {column.title:{wide}} {column.text(ends.start):>10} -> {column.text(ends.end):>10}"
        + (f"  ({ends.end - ends.start:+.3f})" if column.title.endswith("reward") else "")
        for column, ends in found
    ]


def sample_lines(rows: Sequence[Mapping[str, Any]], *, step: int, width: int, has_reference: bool = True) -> list[str]:
    """Returns sampled responses as text of at most `width` columns, long ones without their middle.

    Args:
        rows: of `rollout_tables.sample_rows`.
        step: from 1.
        width: columns of the screen.
        has_reference: False leaves the KL out.
    """
    lines = []
    for row in rows:
        kl = f"KL {number(row['kl'])}, " if has_reference else ""
        ended = "stopped" if row["stopped"] else "cut off"
        title = f"-- step {step}, {row['rank']}: score {number(row['score'])}, {kl}{row['length']} tokens, {ended} "
        lines.append(title.ljust(width, "-"))
        lines += _labelled("prompt", row["prompt"], _PROMPT_LINES, width)
        lines += _labelled("answer", row["response"], _ANSWER_LINES, width)
    return [*lines, "-" * width] if lines else []


def _labelled(label: str, text: str, shown: tuple[int, int], width: int) -> list[str]:
    room, lines = width - len(label) - 3, list[str]()
    for line in printable(text).split("\n"):
        lines += textwrap.wrap(line, room, drop_whitespace=False, break_on_hyphens=False) or [""]
    first, last = shown
    if len(lines) > first + last + 1:
        lines = [*lines[:first], f"[... {len(lines) - first - last} lines ...]", *lines[-last:]]
    return [f"{label if not i else '':{len(label)}} | {line}".rstrip() for i, line in enumerate(lines)]


def printable(text: str) -> str:
    """Returns `text` with its tabs as blanks and all other control characters but line feeds as escapes: what a model
    samples must not control the terminal.
    """
    return "".join(
        char if char == "\n" or unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Zl", "Zp") else ascii(char)[1:-1]
        for char in text.replace("\r\n", "\n").expandtabs(4)
    )


def _filled(parts: Sequence[str], width: int, *, indent: int, first: int | None = None) -> list[str]:
    """Joins `parts` to lines of at most `width` columns, the first one indented by `first` if that is given."""
    lines: list[str] = []
    for part in parts:
        if lines and disp_len(lines[-1]) + 2 + disp_len(part) <= width:
            lines[-1] += f"  {part}"
        else:
            lines.append(" " * (indent if lines or first is None else first) + part)
    return lines


def severities(counts: Mapping[str, int]) -> str:
    """Returns numbers of findings in words, the most severe first, such as "1 error, 2 warnings"."""
    words = [(name, counts[name]) for name in ("error", "warning") if counts.get(name)]
    return ", ".join(f"{count} {name}{'s' if count > 1 else ''}" for name, count in words)
