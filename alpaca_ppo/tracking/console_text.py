"""The text of what a run prints: numbers, the table of steps, evaluations, sampled answers and the summary at the end.

Pure functions of metrics and rows. When they are printed is in `console`.
"""

import math
import textwrap
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from alpaca_ppo.tracking.start_and_end import Metrics, start_and_end

MAX_WIDTH = 120
"""Columns of the text where the terminal has more, and where there is none."""

_PROMPT_LINES = (2, 4)
_ANSWER_LINES = (12, 8)
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
    if value < 10:
        return f"{value:.1f}"
    if value < 1000:
        return f"{value:.0f}"
    return f"{value / 1000:.1f}k" if value < 99_950 else f"{value / 1000:.0f}k"


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
    """An explained variance: nobody cares how close to 0 it is, and 0 has no sign."""
    return number(value and round(value, 2) + 0.0, 2)


def _seconds(value: float | None) -> str:
    return number(value, 0 if value is not None and value >= 100 else 1)


class Column(NamedTuple):
    """A column of the table of steps."""

    title: str
    key: str
    width: int
    shown: Callable[[float | None], str] = number


class StepTable:
    """The lines of a table with a row for each step. Which columns it has is decided by the first row.

    Reward sources have a column each, or, where these would be too wide, a line of their own under each row. A single
    source has none if the reward is its score.

    Args:
        width: columns of the screen.
        max_steps: of the run.
        has_reference: False leaves the KL out, which is then 0.
        reward_is_score: whether the reward of a response is what a single source returns for it.
    """

    SOURCES = "objective/scores/"

    def __init__(self, width: int, *, max_steps: int, has_reference: bool, reward_is_score: bool) -> None:
        self._width, self._max_steps = width, max_steps
        self._has_reference, self._reward_is_score = has_reference, reward_is_score
        self._columns: list[Column] = []
        self._below: list[str] = []

    @property
    def header(self) -> str:
        """The line of the titles."""
        return " ".join(column.title.rjust(column.width) for column in self._columns)

    def row(self, stats: Metrics, *, step: int, seconds_left: float | None) -> list[str]:
        """Returns the line of a step, and those of the sources if they have no columns.

        Args:
            stats: the step's metrics; one that is missing is shown as "-".
            step: from 1.
            seconds_left: to the end of the run, if known.
        """
        if not self._columns:
            self._choose_columns(stats)
        cells = {"step": f"{step}/{self._max_steps}", "left": duration(seconds_left)}
        texts = [cells.get(column.key) or column.shown(stats.get(column.key)) for column in self._columns]
        line = " ".join(text.rjust(column.width) for text, column in zip(texts, self._columns, strict=True))
        names = [f"{name} {number(stats.get(self.SOURCES + name)):>8}" for name in self._below]
        return [line, *_filled(names, self._width, indent=self._columns[0].width + 2)]

    def _choose_columns(self, stats: Metrics) -> None:
        sources = [key.removeprefix(self.SOURCES) for key in stats if key.startswith(self.SOURCES)]
        if len(sources) == 1 and self._reward_is_score:
            sources = []
        before = [
            Column("step", "step", max(5, 2 * len(str(self._max_steps)) + 1)),
            Column("reward", "objective/rewards", 9),
        ]
        after = [Column("KL", "objective/kl_sum_seq", 8)] if self._has_reference else []
        after += [
            Column("length", "objective/response_length", 7, lambda value: number(value, 1)),
            *([Column("turns", "objective/turns", 6, _share)] if "objective/turns" in stats else []),
            Column("cut off", "objective/truncated_fraction", 7, percent),
        ]
        if "ppo/val/explained_variance" in stats:
            after.append(Column("expl.var", "ppo/val/explained_variance", 8, _share))
        after += [
            Column("tok/s", "tokens/per_second", 6, rate),
            Column("sec", "time/step", 6, _seconds),
            Column("left", "left", 8),
        ]
        columns = [Column(name, self.SOURCES + name, max(9, _columns_of(name))) for name in sources]
        self._columns = [*before, *columns, *after]
        if len(self.header) > self._width:
            self._columns, self._below = [*before, *after], sources


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
        values = _of_set(stats, prefix)
        parts = [
            _change(name, values, {key: start.get(prefix + key) for key in values} if step else {})
            for name in _shown_of_set(stats, prefix)
        ]
        title = " ".join(["eval", *filter(None, [prefix.removeprefix("eval/").strip("/")])])
        title += f" at step {step}:" if step else " before training:"
        lines += _filled([title, *parts], width, indent=4, first=0)
    return lines


def eval_sets(stats: Metrics) -> list[str]:
    """Returns the prefixes of the metrics of each set of evaluation prompts: `eval/`, `eval/<set>/`."""
    return [key.removesuffix("rewards") for key in stats if key.startswith("eval/") and key.endswith("/rewards")]


_EVALUATED: dict[str, tuple[str, Callable[[float | None], str]]] = {
    "rewards": ("reward", number),
    "kl_sum_seq": ("KL", number),
    "response_length": ("length", lambda value: number(value, 1)),
    "truncated_fraction": ("cut off", percent),
}


def _of_set(stats: Metrics, prefix: str) -> Metrics:
    return {key.removeprefix(prefix): value for key, value in stats.items() if key.startswith(prefix)}


def _shown_of_set(stats: Metrics, prefix: str) -> list[str]:
    """The names of an eval set's metrics, without those of other sets."""
    nested = tuple(other.removeprefix(prefix) for other in eval_sets(stats) if other != prefix)
    names = _shown_metrics(_of_set(stats, prefix))
    return [name for name in names if not (prefix == "eval/" and name.startswith(nested))]


def _titled(name: str) -> tuple[str, Callable[[float | None], str]]:
    return _EVALUATED.get(name, (name.removeprefix("scores/"), number))


def _shown_metrics(values: Metrics) -> list[str]:
    hidden = {"scores_std", *(name for name in values if name.endswith("_se"))}
    sources = [name for name in values if name.startswith("scores/") and not name.endswith("_se")]
    same = ("scores", *(sources if len(sources) == 1 else ()))
    hidden |= {name for name in same if _equal(values.get(name), values.get("rewards"))}
    hidden |= {name for name in ("masked_rows",) if values.get(name) == 0}
    # By name, but the sources in their order.
    rest = sorted(
        (name for name in values if name not in _EVALUATED and name not in hidden),
        key=lambda name: "scores/" if name.startswith("scores/") else name,
    )
    return [*(name for name in _EVALUATED if name in values), *rest]


def in_order_of_sources(stats: Metrics, sources: Sequence[str]) -> dict[str, float | None]:
    """Returns `stats` with the scores of the sources last, in the order of `sources`: a line of metrics.jsonl is sorted
    by name.
    """
    places = {f"scores/{source}": place for place, source in enumerate(sources, 1)}

    def place(name: str) -> int:
        return next((at for source, at in places.items() if name.endswith("/" + source)), 0)

    return {name: stats[name] for name in sorted(stats, key=place)}


def _equal(one: float | None, other: float | None) -> bool:
    """Whether two means are the same, taken in another order."""
    return one == other or (one is not None and other is not None and math.isclose(one, other, rel_tol=1e-6))


def _change(name: str, values: Metrics, start: Metrics) -> str:
    title, shown = _titled(name)
    now, before, error = values[name], start.get(name), values.get(f"{name}_se")
    text = shown(now) + (f" ±{number(error)}" if error is not None else "")
    if before is None or now is None:
        return f"{title} {text}"
    return f"{title} {shown(before)} -> {text}" + (f" ({now - before:+.3f})" if name == "rewards" else "")


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
    first, last = shown
    lines = [part for line in printable(text).split("\n") for part in _wrapped(line, width - len(label) - 3)]
    if len(lines) > first + last + 1:
        left_out = len(lines) - first - last
        lines = [*lines[:first], f"[... {left_out} lines ...]", *lines[-last:]]
    return [f"{label if not i else '':{len(label)}} | {line}".rstrip() for i, line in enumerate(lines)]


def printable(text: str) -> str:
    """Returns `text` with its tabs as blanks and all other control characters but line feeds as escapes: what a model
    samples must not control the terminal.
    """
    text = text.replace("\r\n", "\n").expandtabs(4)
    return "".join(
        char if char == "\n" or unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Zl", "Zp") else ascii(char)[1:-1]
        for char in text
    )


def folded(text: str, width: int) -> str:
    """Returns `text` with its lines of more than `width` columns broken between words; longer words stay whole."""
    how: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
    lines = []
    for line in text.split("\n"):
        lines += [line] if _columns_of(line) <= width else textwrap.wrap(line, width, **how)
    return "\n".join(lines)


def _columns_of(text: str) -> int:
    """How many columns of a terminal `text` takes: two for each wide character, none for a combining one."""
    return sum(0 if unicodedata.combining(char) else 1 + (unicodedata.east_asian_width(char) in "WF") for char in text)


def _wrapped(line: str, width: int) -> list[str]:
    if _columns_of(line) <= width:
        return [line]
    if _columns_of(line) == len(line):
        return textwrap.wrap(line, width, drop_whitespace=False, break_on_hyphens=False)
    # Scripts of wide characters need no blank to break a line.
    pieces, used = [""], 0
    for char in line:
        used += _columns_of(char)
        if used > width:
            pieces.append("")
            used = _columns_of(char)
        pieces[-1] += char
    return pieces


def _filled(parts: Sequence[str], width: int, *, indent: int, first: int | None = None) -> list[str]:
    """Joins `parts` to lines of at most `width` columns, the first one indented by `first` if that is given."""
    lines: list[str] = []
    for part in parts:
        if lines and _columns_of(lines[-1]) + 2 + _columns_of(part) <= width:
            lines[-1] += f"  {part}"
        else:
            lines.append(" " * (indent if lines or first is None else first) + part)
    return lines


class Change(NamedTuple):
    """A metric at the start and the end of a run."""

    title: str
    start: float
    end: float
    shown: Callable[[float | None], str]
    difference: bool
    """Whether the difference is shown too."""


_FROM_START_TO_END = {
    "objective/rewards": ("reward", number, True),
    "objective/kl_sum_seq": ("KL", number, False),
    "objective/response_length": ("length", lambda value: number(value, 1), False),
    "objective/truncated_fraction": ("cut off", percent, False),
}


def changes(history: Sequence[Metrics], *, metric: str | None = None) -> list[Change]:
    """Returns what changed in a run: metrics of its steps, as `start_and_end` averages them, and those of its first and
    last evaluation, which are all that `evaluation_lines` has.

    Args:
        history: the metrics of each step, with `step`; 0 is the evaluation before training.
        metric: `metric_for_best_model`, which is one of them, by its own name if it would not be there otherwise.
    """
    names = {key: None for line in history for key in line}
    sources = [key for key in names if key.startswith(StepTable.SOURCES)]
    shown_steps = {"objective/rewards": _FROM_START_TO_END["objective/rewards"]}
    if len(sources) > 1:
        shown_steps |= {key: (key.removeprefix(StepTable.SOURCES), number, False) for key in sources}
    shown_steps |= _FROM_START_TO_END
    if metric is not None and not metric.startswith("eval/"):
        shown_steps.setdefault(metric, (metric, number, False))
    found = []
    for key, (title, shown, difference) in shown_steps.items():
        if ends := start_and_end(history, key):
            found.append(Change(title, ends.start, ends.end, shown, difference))
    evaluations = [line for line in history if eval_sets(line)]
    if len(evaluations) > 1:
        found += _changes_of_evaluations(evaluations[0], evaluations[-1], metric)
    return found


def _changes_of_evaluations(first: Metrics, last: Metrics, metric: str | None) -> list[Change]:
    found, keys = [], set()
    for prefix in eval_sets(last):
        for name in _shown_of_set(last, prefix):
            keys.add(prefix + name)
            start, end = first.get(prefix + name), last.get(prefix + name)
            if start is not None and end is not None:
                title, shown = _titled(name)
                found.append(
                    Change(f"{prefix.strip('/').replace('/', ' ')} {title}", start, end, shown, name == "rewards")
                )
    start, end = first.get(metric or ""), last.get(metric or "")
    if metric is not None and metric not in keys and start is not None and end is not None:
        prefix = max((each for each in eval_sets(last) if metric.startswith(each)), key=len, default="")
        title, shown = _titled(metric.removeprefix(prefix))
        found.append(Change(f"{prefix.strip('/').replace('/', ' ')} {title}".strip(), start, end, shown, False))
    return found


def severities(counts: Mapping[str, int]) -> str:
    """Returns numbers of findings in words, the most severe first, such as "1 error, 2 warnings"."""
    words = [(name, counts[name]) for name in ("error", "warning", "info") if counts.get(name)]
    return ", ".join(f"{count} {name}{'s' if count > 1 and name != 'info' else ''}" for name, count in words)


def change_lines(found: Sequence[Change]) -> list[str]:
    """Returns a table with a line for each change; "" without one."""
    cells = [
        (change.title, change.shown(change.start), change.shown(change.end), f"({change.end - change.start:+.3f})")
        for change in found
    ]
    wide = max((len(title) for title, *_ in cells), default=0)
    return [
        f"  {title:{wide}} {start:>10} -> {end:>10}" + (f"  {difference}" if change.difference else "")
        for (title, start, end, difference), change in zip(cells, found, strict=True)
    ]
