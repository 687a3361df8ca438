"""`Console`: what a run prints while it trains, and at its end.

The same lines appear on a terminal, in a notebook and in a file: a table with a row for each step, evaluations, sampled
answers, and what has changed. The progress bar and the record of a run are in `run_log`.
"""

import json
import math
import shlex
import shutil
import time
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm
from tqdm.utils import disp_len
from transformers import TrainerCallback

from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.tracking.results import Metrics, better_before_training, means_in_words, start_and_end
from alpaca_ppo.tracking.run_log import RunLog

_ROWS_PER_HEADER = 20
_SOURCES = "objective/scores/"
"""Begins the names of the sources' mean scores."""
_SHOWN = 500
"""Characters of a sampled text that are printed, at its beginning and at its end."""


def number(value: float) -> str:
    """Returns `value` with three decimals, or as a power of ten where these would be all zero or too many."""
    if value and math.isfinite(value) and not 0.0005 <= abs(value) < 1e5:
        return f"{value:.1e}"
    return f"{value:.3f}"


class Column(NamedTuple):
    """A metric as a column of the table of steps, and as it is named in evaluations and at the end."""

    key: str
    title: str
    width: int = 0
    form: str = ""
    """A format specification; "" is `number`."""

    def text(self, value: float | None) -> str:
        """Returns `value` as it is shown, "-" for a missing one."""
        if value is None:
            return "-"
        return format(value, self.form) if self.form else number(value)


COLUMNS = (
    Column("objective/rewards", "reward", 9),
    Column("objective/kl_sum_seq", "KL", 8),
    Column("objective/response_length", "length", 7, ".1f"),
    Column("objective/turns", "turns", 6, ".2f"),
    Column("objective/truncated_fraction", "cut off", 7, ".1%"),
    Column("ppo/val/explained_variance", "expl.var", 8, ".2f"),
    Column("tokens/per_second", "tok/s", 7, ",.0f"),
    Column("time/step", "sec", 6, ".1f"),
)
"""What a step shows if the run has it; reward sources have columns of their own after the first."""
_CHANGES = tuple(column for column in COLUMNS if column.title in ("reward", "KL", "length", "cut off"))
_EMPTY = Column("objective/empty_fraction", "empty", 7, ".1%")
_EVALUATED = {column.key.removeprefix("objective/"): column for column in (*_CHANGES, _EMPTY)}


def samples_are_due(step: int) -> bool:
    """Whether sampled answers of `step` (from 1) are printed: in the first one and in every fiftieth."""
    return step == 1 or step % 50 == 0


class Console(TrainerCallback):
    """Prints a line every `logging_steps` steps, evaluations, sampled answers, and a summary at the end.

    Args:
        args: of the run.
        log: of the run; it prints on the main process.
    """

    def __init__(self, args: PPOConfig, log: RunLog) -> None:
        self._args, self._log = args, log
        self._has_reference = args.reference != "none"

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begins a new table, and, in a run that is resumed, reads what its first evaluation was."""
        self._began, self._printed_step, self._first_step = time.perf_counter(), state.global_step, state.global_step
        self._rows, self._columns = 0, list[Column]()
        self._before: Metrics = next((line for line in self._history() if eval_sets(line)), {})

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Prints a step's line before it is evaluated and saved, and its sampled answers."""
        step = state.global_step
        if step % self._args.logging_steps == 0 or step == state.max_steps:
            self._print_step(kwargs["metrics"], state)
        samples, self._log.samples = self._log.samples, []
        self._print_block(sample_lines(samples, step=step, has_reference=self._has_reference))

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Prints each set's metrics before training and now."""
        metrics = self._known(kwargs["metrics"])
        self._print_block(evaluation_lines(metrics, self._before, step=state.global_step))
        self._before = self._before or metrics

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Prints the line of a step that a callback has asked to log, or that turned out to be the last."""
        if self._printed_step < state.global_step:
            self._print_step(kwargs["logs"], state)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Prints what changed, which step was best, what the doctor has found, where the policy is, and what to do
        next.
        """
        if not self._log.is_main:
            return
        history, folder, step = self._history(), Path(self._args.output_dir), state.global_step
        done = f"{step} steps" if step == state.max_steps else f"stopped at step {step} of {state.max_steps}"
        resumed = f" (resumed after step {self._first_step})" if self._first_step else ""
        lines = [f"done: {done} in {tqdm.format_interval(time.perf_counter() - self._began)}{resumed}"]
        if changed := change_lines(history, metric=self._args.metric_for_best_model):
            lines += [", ".join(filter(None, ["from start to end", means_in_words(history)])) + ":", *changed]
        path = folder / "findings.jsonl"
        count = len(path.read_text(encoding="utf-8").splitlines()) if path.exists() else 0
        found = f"{count} (printed above and in {path})" if count else "none"
        lines += [*self._best(history, state), f"findings:    {found}"]
        best = self._args.load_best_model_at_end and state.best_global_step
        lines.append(f"policy:      {folder / 'final' / 'policy'}{f' (of step {best})' if best else ''}")
        lines += [f"curves:      tensorboard --logdir {shlex.quote(board)}" for board in self._log.boards]
        self._log.message("\n".join([*lines, f"report:      alpaca-ppo report {shlex.quote(str(folder))}"]))

    def _print_step(self, stats: Metrics, state: Any) -> None:
        stats, step, total = self._known(stats), state.global_step, state.max_steps
        self._columns = self._columns or step_columns(
            stats, max_steps=total, width=shutil.get_terminal_size((120, 24)).columns
        )
        if self._rows % _ROWS_PER_HEADER == 0:
            self._log.message(" ".join(column.title.rjust(column.width) for column in self._columns))
        pace = (time.perf_counter() - self._began) / max(1, step - self._first_step)
        cells = {column.key: column.text(stats.get(column.key)) for column in self._columns}
        cells |= {"step": f"{step}/{total}", "left": tqdm.format_interval(pace * (total - step))}
        self._log.message(" ".join(cells[column.key].rjust(column.width) for column in self._columns))
        self._rows, self._printed_step = self._rows + 1, step

    def _print_block(self, lines: list[str]) -> None:
        """Prints lines that are no rows of the table; after several of them, the titles are repeated."""
        if lines:
            self._log.message("\n".join(lines))
        if len(lines) > 1:
            self._rows = 0

    def _best(self, history: Sequence[Metrics], state: Any) -> list[str]:
        """The step with the best `metric_for_best_model`, or else the best evaluation, or else the highest reward."""
        metric, greater = self._args.metric_for_best_model, self._args.greater_is_better
        step, value = state.best_global_step, state.best_metric
        if not step:
            sets, greater = [prefix for line in history for prefix in eval_sets(line)], True
            metric = f"{sets[0]}rewards" if sets else "objective/rewards"
            values = [(value, line["step"]) for line in history if (value := line.get(metric)) is not None]
            if len(values) < 2:
                return []
            value, step = max(values, key=lambda pair: pair[0])
        assert metric is not None
        if not step:
            return [f"best step:   none is better than before training ({metric} {number(value)})"]
        folder = Path(self._args.output_dir) / f"checkpoint-{step}"
        kept = f"kept in {folder}" if folder.is_dir() else "not kept; metric_for_best_model keeps it"
        found = (
            "best step:   " if state.best_global_step or metric.startswith("eval/") else "highest training batch: step "
        )
        lines = [f"{found}{step} ({metric} {number(value)}, {kept})"]
        if (before := better_before_training(history, metric, value, greater_is_better=greater)) is not None:
            lines.append(f"             worse than before training ({metric} {number(before)})")
        return lines

    def _known(self, stats: Metrics) -> Metrics:
        """`stats` without the KL where there is no reference: it is 0 then, and says nothing."""
        return {key: value for key, value in stats.items() if self._has_reference or not key.endswith("kl_sum_seq")}

    def _history(self) -> list[Metrics]:
        """The lines of metrics.jsonl on the main process. A run may be resumed from another folder's checkpoint."""
        path = Path(self._args.output_dir) / "metrics.jsonl"
        if not self._log.is_main or not path.exists():
            return []
        return [self._known(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def step_columns(stats: Metrics, *, max_steps: int, width: int) -> list[Column]:
    """Returns the columns of the table of steps, with the metrics that the first step has.

    Args:
        stats: of that step.
        max_steps: of the run.
        width: columns of the screen; it has as many of the reward sources as there is room for.
    """
    reward, *others = (column for column in COLUMNS if column.key in stats or column is COLUMNS[0])
    first, last = Column("step", "step", max(5, 2 * len(str(max_steps)) + 1)), Column("left", "left", 8)
    sources = source_columns(stats)
    while sources and sum(each.width + 1 for each in [first, reward, *sources, *others, last]) > width + 1:
        sources.pop()
    return [first, reward, *sources, *others, last]


def source_columns(names: Iterable[str]) -> list[Column]:
    """A column for the mean score of each reward source, if there are several: that of a single one is the reward."""
    found = [(key, key.removeprefix(_SOURCES)) for key in names if key.startswith(_SOURCES)]
    return [Column(key, name, max(9, disp_len(name))) for key, name in found] if len(found) > 1 else []


def evaluation_lines(stats: Metrics, start: Metrics, *, step: int) -> list[str]:
    """Returns the metrics of an evaluation, each as it was before training and is now: a line for each set.

    Args:
        stats: names of an evaluation begin with `eval/`, of a named set with `eval/<set>/`.
        start: the metrics of the run's first evaluation.
        step: how many steps have ended.
    """
    lines = []
    for prefix in eval_sets(stats):
        title = f"eval {prefix.removeprefix('eval/').strip('/')}".strip()
        parts = [title + (f" at step {step}:" if step else " before training:")]
        for column in _shown(stats, prefix):
            now, before, error = stats[column.key], start.get(column.key), stats.get(f"{column.key}_se")
            text = column.text(now) + (f" ±{number(error)}" if error is not None else "")
            if step and before is not None and now is not None:
                text = f"{column.text(before)} -> {text}"
                text += f" ({now - before:+.3f})" if column.key.endswith("/rewards") else ""
            parts.append(f"{column.title} {text}")
        lines.append("  ".join(parts))
    return lines


def eval_sets(stats: Metrics) -> list[str]:
    """Returns the prefixes of the metrics of each set of evaluation prompts: `eval/`, `eval/<set>/`."""
    return [key.removesuffix("rewards") for key in stats if key.startswith("eval/") and key.endswith("/rewards")]


def _shown(stats: Metrics, prefix: str) -> list[Column]:
    """The metrics of an eval set that are shown: without those of other sets, spreads, and what the reward sums up.

    Those with the same number and the same standard error, such as reward and pass@1 of one sample, are one.
    """
    nested = tuple(other for other in eval_sets(stats) if other != prefix and other.startswith(prefix))
    keys = [key for key in stats if key.startswith(prefix) and not (nested and key.startswith(nested))]
    names = [key.removeprefix(prefix) for key in keys if not key.endswith(("_se", "scores_std"))]
    sources = [name for name in names if name.startswith("scores/")]
    hidden = ["scores", "masked_rows", *(sources if len(sources) == 1 else [])]
    columns = [column._replace(key=prefix + name) for name, column in _EVALUATED.items() if name in names]
    others = [name for name in names if name not in _EVALUATED and name not in hidden]
    columns += [Column(prefix + name, name.removeprefix("scores/")) for name in others]
    distinct: dict[Any, Column] = {}
    for column in columns:
        value, error = stats[column.key], stats.get(f"{column.key}_se")
        same = column.key if value is None or error is None else (f"{value:.5g}", f"{error:.5g}")
        first = distinct.get(same)
        distinct[same] = first._replace(title=f"{first.title} = {column.title}") if first else column
    return list(distinct.values())


def change_lines(history: Sequence[Metrics], *, metric: str | None = None) -> list[str]:
    """Returns a table of what changed in a run: metrics of its steps, as `start_and_end` averages them, and those of
    its first and last evaluation.

    Args:
        history: the metrics of each step, with `step`; 0 is the evaluation before training.
        metric: `metric_for_best_model`, which is one of them.
    """
    names = dict.fromkeys(key for line in history for key in line)
    columns = [_CHANGES[0], *source_columns(names), *_CHANGES[1:]]
    evaluated = [line for line in history if eval_sets(line)]
    last = evaluated[-1] if len(evaluated) > 1 else {}
    for prefix in eval_sets(last):
        title = prefix.strip("/").replace("/", " ")
        columns += [column._replace(title=f"{title} {column.title}") for column in _shown(last, prefix)]
    if metric is not None and metric not in [column.key for column in columns]:
        columns.append(Column(metric, metric.replace("/", " ") if metric.startswith("eval/") else metric))
    found = [(column, ends) for column in columns if (ends := start_and_end(history, column.key)) is not None]
    wide = max((len(column.title) for column, _ in found), default=0)
    return [
        f"  {column.title:{wide}} {column.text(ends.start):>10} -> {column.text(ends.end):>10}"
        + (f"  ({ends.end - ends.start:+.3f})" if column.key.endswith("/rewards") else "")
        for column, ends in found
    ]


def sample_lines(rows: Sequence[Mapping[str, Any]], *, step: int, has_reference: bool = True) -> list[str]:
    """Returns sampled responses as lines of text, long ones without their middle.

    Args:
        rows: of `rollout_tables.sample_rows`.
        step: from 1.
        has_reference: False leaves the KL out.
    """
    lines = []
    for row in rows:
        kl = f"KL {number(row['kl'])}, " if has_reference else ""
        length = f"{row['length']} tokens, {'stopped' if row['stopped'] else 'cut off'}"
        lines.append(f"-- step {step}, {row['rank']}: score {number(row['score'])}, {kl}{length}")
        for label in ("prompt", "response"):
            text = printable(row[label])
            if (left_out := len(text) - 2 * _SHOWN) > 0:
                text = f"{text[:_SHOWN]} [... {left_out} characters ...] {text[-_SHOWN:]}"
            lines += [f"{'' if i else label:8} | {line}".rstrip() for i, line in enumerate(text.split("\n"))]
    return lines


def printable(text: str) -> str:
    """Returns `text` with its tabs as blanks and all other control characters but line feeds as escapes: what a model
    samples must not control the terminal.
    """
    return "".join(
        char if char == "\n" or unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Zl", "Zp") else ascii(char)[1:-1]
        for char in text.replace("\r\n", "\n").expandtabs(4)
    )
