"""`Console`: what a run prints while it trains, and at its end.

The same lines appear on a terminal, in a notebook and in a file. The text is made in `console_text`, the progress bar
in `progress_bar`.
"""

import json
import shlex
import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.tracking import console_text
from alpaca_ppo.tracking.console_text import StepTable, eval_sets
from alpaca_ppo.tracking.run_log import RunLog
from alpaca_ppo.tracking.start_and_end import Metrics, better_before_training, means_in_words

_ROWS_PER_HEADER = 20
_NARROWEST = 80


def samples_are_due(step: int) -> bool:
    """Whether sampled answers of `step` (from 1) are printed: in the first one and in every fiftieth."""
    return step == 1 or step % 50 == 0


class Console(TrainerCallback):
    """Prints a line every `logging_steps` steps, evaluations, sampled answers, and a summary at the end.

    Args:
        args: of the run.
        log: of the run; it prints on the main process.
        max_steps: of the run.
    """

    def __init__(self, args: PPOConfig, log: RunLog, *, max_steps: int) -> None:
        self._args, self._log, self._max_steps = args, log, max_steps
        self._has_reference = args.reference != "none"

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begins a new table, and, in a run that is resumed, reads what its first evaluation was."""
        self._began, self._printed_step, self._first_step = time.perf_counter(), state.global_step, state.global_step
        self._rows, self._width = 0, console_text.MAX_WIDTH
        if sys.stdout.isatty():
            self._width = max(_NARROWEST, min(self._width, shutil.get_terminal_size().columns))
        plain = self._args.penalty_reward_value is None and self._args.overlong_buffer_len is None
        is_score = plain and self._args.reward_weights in (None, [1.0])
        self._table = StepTable(self._width, max_steps=self._max_steps, reward_is_score=is_score)
        self._before: Metrics = next((line for line in self._history() if eval_sets(line)), {})

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Prints a step's line before it is evaluated and saved, and its sampled answers."""
        step = state.global_step
        if step % self._args.logging_steps == 0 or step == self._max_steps:
            self._print_step(kwargs["metrics"], step)
        samples, self._log.samples = self._log.samples, []
        self._print_block(
            console_text.sample_lines(samples, step=step, width=self._width, has_reference=self._has_reference)
        )

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Prints each set's metrics before training and now."""
        metrics = self._known(kwargs["metrics"])
        lines = console_text.evaluation_lines(metrics, self._before, step=state.global_step, width=self._width)
        self._before = self._before or metrics
        self._print_block(lines)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Prints the line of a step that a callback has asked to log, or that turned out to be the last."""
        if self._printed_step < state.global_step:
            self._print_step(kwargs["logs"], state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Prints what changed, which step was best, what the doctor has found, where the policy is, and what to do
        next.
        """
        if self._log.is_main:
            self._log.message("\n".join(self._summary(state)))

    def _print_step(self, stats: Metrics, step: int) -> None:
        lines = self._table.row(self._known(stats), step=step, seconds_left=self._log.bar.seconds_left(step))
        if self._rows % _ROWS_PER_HEADER == 0:
            lines.insert(0, self._table.header)
        self._rows, self._printed_step = self._rows + 1, step
        self._log.message("\n".join(lines))

    def _print_block(self, lines: list[str]) -> None:
        """Prints lines that are no rows of the table; after several of them, the titles are repeated."""
        if lines:
            self._log.message("\n".join(lines))
        if len(lines) > 1:
            self._rows = 0

    def _summary(self, state: Any) -> list[str]:
        history, folder, step = self._history(), Path(self._args.output_dir), state.global_step
        done = f"{step} steps" if step == self._max_steps else f"stopped at step {step} of {self._max_steps}"
        resumed = f" (resumed after step {self._first_step})" if self._first_step else ""
        lines = [f"done: {done} in {console_text.duration(time.perf_counter() - self._began)}{resumed}"]
        if changed := console_text.change_lines(history, metric=self._args.metric_for_best_model):
            lines += [", ".join(filter(None, ["from start to end", means_in_words(history)])) + ":", *changed]
        lines += [*self._best(history, state), f"findings:    {self._findings()}"]
        best = self._args.load_best_model_at_end and state.best_global_step
        lines.append(f"policy:      {folder / 'final' / 'policy'}{f' (of step {best})' if best else ''}")
        lines += [f"curves:      tensorboard --logdir {shlex.quote(board)}" for board in self._log.boards]
        return [*lines, f"report:      alpaca-ppo report {shlex.quote(str(folder))}"]

    def _best(self, history: Sequence[Metrics], state: Any) -> list[str]:
        """The step with the best `metric_for_best_model`, or else the best evaluation, or else the highest reward.

        By a metric of the steps, `metric_for_best_model` chooses among those with a checkpoint.
        """
        among, greater = "", True
        if state.best_global_step:
            metric, value, step = str(self._args.metric_for_best_model), state.best_metric, state.best_global_step
            greater = self._args.greater_is_better
            among = "" if metric.startswith("eval/") else " of those with a checkpoint"
        else:
            evaluated = [prefix for line in history for prefix in eval_sets(line)]
            metric = f"{evaluated[0]}rewards" if evaluated else "objective/rewards"
            values = [(value, line["step"]) for line in history if (value := line.get(metric)) is not None]
            if len(values) < 2:
                return []
            value, step = max(values, key=lambda pair: pair[0])
        shown, kept = f"{metric} {console_text.number(value)}", Path(self._args.output_dir) / f"checkpoint-{step}"
        if not step:
            return [f"best step:   none is better than before training ({shown})"]
        where = f", kept in {kept}" if kept.is_dir() else ""
        if not where and metric.startswith("eval/"):
            where = ", not kept: metric_for_best_model was not set"
        lines = [f"best step:   {step}{among} ({shown}{where})"]
        if (before := better_before_training(history, metric, value, greater_is_better=greater)) is not None:
            lines.append(f"             worse than before training ({metric} {console_text.number(before)})")
        return lines

    def _known(self, stats: Metrics) -> Metrics:
        """`stats` without the KL where there is no reference: it is 0 then, and says nothing."""
        return {key: value for key, value in stats.items() if self._has_reference or not key.endswith("kl_sum_seq")}

    def _findings(self) -> str:
        """How many findings the doctor has printed, and where they are."""
        path = Path(self._args.output_dir) / "findings.jsonl"
        found = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        counts = Counter(json.loads(line)["severity"] for line in found)
        report = ", in report.html" if self._args.report else ""
        return f"{console_text.severities(counts)} (printed above{report} and in {path})" if counts else "none"

    def _history(self) -> list[Metrics]:
        """The lines of metrics.jsonl on the main process. A run may be resumed from another folder's checkpoint."""
        path = Path(self._args.output_dir) / "metrics.jsonl"
        if not self._log.is_main or not path.exists():
            return []
        return [self._known(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
