"""`Console`: what a run prints. The progress bar and the files of a run are in `run_log`."""

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
from alpaca_ppo.tracking.run_log import RunLog, complete_lines

_ROWS_PER_HEADER = 20
_SOURCE_PREFIX = "objective/scores/"
# Characters that are printed of a sampled text's beginning and of its end.
_SHOWN = 500


def number(value: float) -> str:
    """Returns `value` with three decimals, or in scientific notation if it is very small or large."""
    if value and math.isfinite(value) and not 0.0005 <= abs(value) < 1e5:
        return f"{value:.1e}"
    return f"{value:.3f}"


class Column(NamedTuple):
    """A metric with its title; `form` is a format specification, or "" for `number`."""

    key: str
    title: str
    width: int = 0
    form: str = ""

    def text(self, value: float | None) -> str:
        if value is None:
            return "-"
        return format(value, self.form) if self.form else number(value)


COLUMNS = (
    Column("objective/rewards", "reward", 9),
    Column("objective/kl_sum_seq", "KL", 8),
    Column("teacher/kl_sum_seq", "teacher", 8),
    Column("objective/response_length", "length", 7, ".1f"),
    Column("objective/turns", "turns", 6, ".2f"),
    Column("objective/truncated_fraction", "cut off", 7, ".1%"),
    Column("ppo/val/explained_variance", "expl.var", 8, ".2f"),
    Column("tokens/per_second", "tok/s", 7, ",.0f"),
    Column("time/step", "sec", 6, ".1f"),
)
_CHANGES = tuple(column for column in COLUMNS if column.title in ("reward", "KL", "teacher", "length", "cut off"))
_EMPTY = Column("objective/empty_fraction", "empty", 7, ".1%")
_EVALUATED = {column.key.removeprefix("objective/"): column for column in (*_CHANGES, _EMPTY)}


def samples_are_due(step: int) -> bool:
    """Whether sampled answers of `step` (from 1) are printed."""
    return step == 1 or step % 50 == 0


class Console(TrainerCallback):
    """Prints a line every `logging_steps` steps, evaluations, sampled answers, and a summary at the end."""

    def __init__(self, args: PPOConfig, log: RunLog) -> None:
        self._args, self._log, self._has_reference = args, log, args.reference != "none"

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._start_time = time.perf_counter()
        self._printed_step = self._first_step = state.global_step
        self._rows, self._columns = 0, list[Column]()
        self._before: Metrics = next((line for line in self._history() if eval_sets(line)), {})

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Prints a step's line, before it is evaluated and saved, and its sampled answers."""
        step = state.global_step
        if step % self._args.logging_steps == 0 or step == state.max_steps:
            self._print_step(kwargs["metrics"], state)
        samples, self._log.samples = self._log.samples, []
        self._print_block(sample_lines(samples, step=step, has_reference=self._has_reference))

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        metrics = self._without_zero_kl(kwargs["metrics"])
        self._print_block(evaluation_lines(metrics, self._before, step=state.global_step))
        self._before = self._before or metrics

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Prints the line of a step that a callback has asked to log, or that ended the run early."""
        if self._printed_step < state.global_step:
            self._print_step(kwargs["logs"], state)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Prints the summary of the run."""
        history, folder = self._history(), Path(self._args.output_dir)
        step, total = state.global_step, state.max_steps
        done = f"{step} steps" if step == total else f"stopped at step {step} of {total}"
        resumed = f" (resumed after step {self._first_step})" if self._first_step else ""
        lines = [f"done: {done} in {tqdm.format_interval(time.perf_counter() - self._start_time)}{resumed}"]
        if changed := change_lines(history, metric=self._args.metric_for_best_model):
            means = means_in_words(history)
            lines += [f"from start to end, {means}:" if means else "from start to end:", *changed]
        lines += self._best_step_lines(history, state)
        findings = folder / "findings.jsonl"
        count = len(complete_lines(findings))
        lines.append(f"findings:    {f'{count} (printed above and in {findings})' if count else 'none'}")
        best = state.best_global_step if self._args.load_best_model_at_end else None
        of_step = f" (of step {best})" if best else ""
        lines.append(f"policy:      {folder / 'final' / 'policy'}{of_step}")
        lines += [f"curves:      tensorboard --logdir {shlex.quote(board)}" for board in self._log.boards]
        lines.append(f"report:      alpaca-ppo report {shlex.quote(str(folder))}")
        self._log.message("\n".join(lines))

    def _print_step(self, stats: Metrics, state: Any) -> None:
        """Prints a row of the table, below its titles where they are due."""
        stats = self._without_zero_kl(stats)
        step, total = state.global_step, state.max_steps
        if not self._columns:
            width = shutil.get_terminal_size((120, 24)).columns
            self._columns = step_columns(stats, max_steps=total, width=width)
        if self._rows % _ROWS_PER_HEADER == 0:
            self._log.message(" ".join(column.title.rjust(column.width) for column in self._columns))
        seconds_per_step = (time.perf_counter() - self._start_time) / max(1, step - self._first_step)
        cells = {column.key: column.text(stats.get(column.key)) for column in self._columns}
        cells |= {"step": f"{step}/{total}", "left": tqdm.format_interval(seconds_per_step * (total - step))}
        self._log.message(" ".join(cells[column.key].rjust(column.width) for column in self._columns))
        self._rows, self._printed_step = self._rows + 1, step

    def _print_block(self, lines: list[str]) -> None:
        """Prints lines that are not rows of the table; after several of them, the table's titles are repeated."""
        if lines:
            self._log.message("\n".join(lines))
        if len(lines) > 1:
            self._rows = 0

    def _best_step_lines(self, history: Sequence[Metrics], state: Any) -> list[str]:
        """Names the step with the best `metric_for_best_model`, else with the highest evaluated reward."""
        if state.best_global_step:
            step, value, metric = state.best_global_step, state.best_metric, self._args.metric_for_best_model
            folder, greater = Path(state.best_model_checkpoint), self._args.greater_is_better
        else:
            metric = next((f"{prefix}rewards" for line in history for prefix in eval_sets(line)), "")
            step_values = [(line["step"], value) for line in history if (value := line.get(metric)) is not None]
            # A teacher alone gives no reward.
            if len(step_values) < 2 or any("eval/scores/teacher_alone" in line for line in history):
                return []
            step, value = max(step_values, key=lambda pair: pair[1])
            if not step:
                return [f"best step:   none is better than before training ({metric} {number(value)})"]
            folder, greater = Path(self._args.output_dir) / f"checkpoint-{step}", True
        kept = f"kept in {folder}" if folder.is_dir() else "not kept; metric_for_best_model keeps it"
        lines = [f"best step:   {step} ({metric} {number(value)}, {kept})"]
        if (before := better_before_training(history, metric, value, greater_is_better=greater)) is not None:
            lines.append(f"             worse than before training ({metric} {number(before)})")
        return lines

    def _without_zero_kl(self, stats: Metrics) -> Metrics:
        """Removes the KL from `stats` where it is always 0, because there is no reference; not that to a teacher."""
        if self._has_reference:
            return stats
        return {k: v for k, v in stats.items() if not k.endswith("/kl_sum_seq") or k.startswith("teacher/")}

    def _history(self) -> list[Metrics]:
        """Returns the lines of metrics.jsonl on the main process."""
        # The file is missing in a run that is resumed from another folder's checkpoint.
        lines = complete_lines(Path(self._args.output_dir) / "metrics.jsonl") if self._log.is_main else []
        return [self._without_zero_kl(json.loads(line)) for line in lines]


def step_columns(stats: Metrics, *, max_steps: int, width: int) -> list[Column]:
    """Returns the columns of the table of steps from the first step's metrics, as many of the reward sources as fit
    into `width` characters.
    """
    reward, *others = (column for column in COLUMNS if column.key in stats or column is COLUMNS[0])
    first, last = Column("step", "step", max(5, 2 * len(str(max_steps)) + 1)), Column("left", "left", 8)
    sources = source_columns(stats)
    while sources and sum(column.width + 1 for column in [first, reward, *sources, *others, last]) > width + 1:
        sources.pop()
    return [first, reward, *sources, *others, last]


def source_columns(names: Iterable[str]) -> list[Column]:
    """Returns a column for each reward source, unless there is a single one, whose score is the reward."""
    sources = [(key, key.removeprefix(_SOURCE_PREFIX)) for key in names if key.startswith(_SOURCE_PREFIX)]
    return [Column(key, name, max(9, disp_len(name))) for key, name in sources] if len(sources) > 1 else []


def evaluation_lines(stats: Metrics, start: Metrics, *, step: int) -> list[str]:
    """Returns a line for each eval set, with its metrics before training (`start`) and after `step` steps (`stats`)."""
    lines = []
    for prefix in eval_sets(stats):
        title = f"eval {prefix.removeprefix('eval/').strip('/')}".strip()
        parts = [title + (f" at step {step}:" if step else " before training:")]
        for column in _evaluation_columns(stats, prefix):
            now, before, error = stats[column.key], start.get(column.key), stats.get(f"{column.key}_se")
            text = column.text(now) + (f" ±{number(error)}" if error is not None else "")
            if step and before is not None and now is not None:
                change = f" ({now - before:+.3f})" if column.key.endswith("/rewards") else ""
                text = f"{column.text(before)} -> {text}{change}"
            parts.append(f"{column.title} {text}")
        lines.append("  ".join(parts))
    return lines


def eval_sets(stats: Metrics) -> list[str]:
    """Returns the prefix of the metrics of each eval set: `eval/`, `eval/<set>/`."""
    keys = [key for key in stats if key.startswith("eval/") and key.endswith("/rewards")]
    # <set>/scores/rewards is the score of a source named rewards, below the metric <set>/scores.
    return [key.removesuffix("rewards") for key in keys if key.removesuffix("/rewards") not in stats]


def _evaluation_columns(stats: Metrics, prefix: str) -> list[Column]:
    """Returns the columns of an eval set, without metrics of other sets, spreads, and the scores behind the reward."""
    nested = tuple(other for other in eval_sets(stats) if other != prefix and other.startswith(prefix))
    keys = [key for key in stats if key.startswith(prefix) and not key.startswith(nested)]
    names = [key.removeprefix(prefix) for key in keys if not key.endswith(("_se", "scores_std"))]
    sources = [name for name in names if name.startswith("scores/")]
    hidden = ["scores", "masked_rows", *(sources if len(sources) == 1 else [])]
    columns = [column._replace(key=prefix + name) for name, column in _EVALUATED.items() if name in names]
    others = [name for name in names if name not in _EVALUATED and name not in hidden]
    columns += [Column(prefix + name, name.removeprefix("scores/")) for name in others]
    return _without_repetition(columns, stats)


def _without_repetition(columns: Iterable[Column], stats: Metrics) -> list[Column]:
    """Joins columns with the same number and standard error, such as reward and pass@1 of one sample."""
    distinct: dict[str | tuple[str, str], Column] = {}
    for column in columns:
        value, error = stats[column.key], stats.get(f"{column.key}_se")
        numbers = column.key if value is None or error is None else (f"{value:.5g}", f"{error:.5g}")
        if first := distinct.get(numbers):
            column = first._replace(title=f"{first.title} = {column.title}")
        distinct[numbers] = column
    return list(distinct.values())


def change_lines(history: Sequence[Metrics], *, metric: str | None = None) -> list[str]:
    """Returns a table of the metrics of steps and evaluations at both ends of a run (`start_and_end`), including
    `metric`, the `metric_for_best_model`. `history` is the lines of metrics.jsonl.
    """
    names = dict.fromkeys(key for line in history for key in line)
    columns = [_CHANGES[0], *source_columns(names), *_CHANGES[1:]]
    evaluated = [line for line in history if eval_sets(line)]
    # One alone shows no change.
    last = evaluated[-1] if len(evaluated) > 1 else {}
    for prefix in eval_sets(last):
        title = prefix.strip("/").replace("/", " ")
        columns += [column._replace(title=f"{title} {column.title}") for column in _evaluation_columns(last, prefix)]
    if metric is not None and metric not in [column.key for column in columns]:
        columns.append(Column(metric, metric.replace("/", " ")))
    with_ends = [(column, ends) for column in columns if (ends := start_and_end(history, column.key)) is not None]
    width = max((len(column.title) for column, _ in with_ends), default=0)
    lines = []
    for column, ends in with_ends:
        change = f"  ({ends.end - ends.start:+.3f})" if column.key.endswith("/rewards") else ""
        ends_shown = f"{column.text(ends.start):>10} -> {column.text(ends.end):>10}"
        lines.append(f"  {column.title:{width}} {ends_shown}{change}")
    return lines


def sample_lines(rows: Sequence[Mapping[str, Any]], *, step: int, has_reference: bool = True) -> list[str]:
    """Returns the `rollout_tables.sample_rows` of `step` as lines of text, long texts without their middle."""
    lines = []
    for row in rows:
        kl = f"KL {number(row['kl'])}, " if has_reference else ""
        length = f"{row['length']} tokens, {'stopped' if row['stopped'] else 'cut off'}"
        lines.append(f"-- step {step}, {row['rank']}: score {number(row['score'])}, {kl}{length}")
        for label in ("prompt", "response"):
            text = printable(row[label])
            if (left_out := len(text) - 2 * _SHOWN) > 0:
                text = f"{text[:_SHOWN]} [... {left_out} characters ...] {text[-_SHOWN:]}"
            first, *others = text.split("\n")
            lines += [f"{label:8} | {first}".rstrip(), *(f"{'':8} | {line}".rstrip() for line in others)]
    return lines


def printable(text: str) -> str:
    """Returns `text` with tabs as blanks and other control characters but line feeds escaped, because a sampled text
    must not control the terminal.
    """
    shown = []
    for char in text.replace("\r\n", "\n").expandtabs(4):
        is_control = unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp") and char != "\n"
        shown.append(ascii(char)[1:-1] if is_control else char)
    return "".join(shown)
