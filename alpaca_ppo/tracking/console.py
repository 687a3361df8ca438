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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.tracking import console_text
from alpaca_ppo.tracking.console_text import Metrics, StepTable, eval_sets
from alpaca_ppo.tracking.run_log import RunLog
from alpaca_ppo.tracking.start_and_end import better_before_training, means_in_words

_ROWS_PER_HEADER = 20
_NARROWEST = 80


def samples_are_due(step: int, args: PPOConfig) -> bool:
    """Whether sampled answers of `step` (from 1) are printed: every `print_samples_every` steps, and the first."""
    every = args.print_samples_every
    return bool(every) and (step == 1 or step % every == 0)


class Console(TrainerCallback):
    """Prints a line every `logging_steps` steps, evaluations, sampled answers, and a summary at the end.

    Args:
        args: of the run.
        run_log: returns the run's log, which prints on the main process.
        max_steps: of the run.
        sources: returns the names of the reward sources.
    """

    def __init__(
        self, args: PPOConfig, run_log: Callable[[], RunLog], *, max_steps: int, sources: Callable[[], Sequence[str]]
    ) -> None:
        self._args, self._run_log, self._max_steps, self._sources = args, run_log, max_steps, sources
        self._printed_step = 0
        self._before: Metrics = {}
        self._start_table()

    def _start_table(self) -> None:
        args, width = self._args, console_text.MAX_WIDTH
        if sys.stdout.isatty():
            width = max(_NARROWEST, min(width, shutil.get_terminal_size().columns))
        own = args.penalty_reward_value is None and args.overlong_buffer_len is None
        self._width, self._rows = width, 0
        self._table = StepTable(
            width,
            max_steps=self._max_steps,
            has_reference=args.reference != "none",
            reward_is_score=own and args.reward_weights in (None, [1.0]),
        )

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begins a new table, and, in a run that is resumed, reads what its first evaluation was."""
        self._began, self._printed_step, self._before = time.perf_counter(), state.global_step, {}
        self._first_step = state.global_step
        self._start_table()
        if self._run_log().is_main:
            self._before = next((line for line in self._history() if eval_sets(line)), {})

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Prints a step's line before it is evaluated and saved, and its sampled answers."""
        step = state.global_step
        if step % self._args.logging_steps == 0 or step == self._max_steps:
            self._print_step(kwargs["metrics"], step)
        log = self._run_log()
        if log.samples:
            shown = console_text.sample_lines(
                log.samples, step=step, width=self._width, has_reference=self._args.reference != "none"
            )
            self._print_block(shown)
            log.samples = []

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Prints each set's metrics before training and now."""
        metrics = console_text.in_order_of_sources(self._known(kwargs["metrics"]), self._sources())
        lines = console_text.evaluation_lines(metrics, self._before, step=state.global_step, width=self._width)
        self._before = self._before or dict(metrics)
        self._print_block(lines)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Prints the line of a step that a callback has asked to log, or that turned out to be the last."""
        if self._printed_step < state.global_step:
            self._print_step(kwargs["logs"], state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Prints what changed, which step was best, what the doctor has found, where the policy is, and what to do
        next.
        """
        if self._run_log().is_main:
            self._run_log().message("\n".join(self._summary(state)))

    def _print_step(self, stats: Metrics, step: int) -> None:
        left = self._run_log().bar.seconds_left(step)
        lines = self._table.row(stats, step=step, seconds_left=left)
        if self._rows % _ROWS_PER_HEADER == 0:
            lines.insert(0, self._table.header)
        self._rows, self._printed_step = self._rows + 1, step
        self._run_log().message("\n".join(lines))

    def _print_block(self, lines: list[str]) -> None:
        """Prints lines that are no rows of the table; after several of them, the titles are repeated."""
        if lines:
            self._run_log().message("\n".join(lines))
        if len(lines) > 1:
            self._rows = 0

    def _summary(self, state: Any) -> list[str]:
        history, folder, step = list(self._history()), Path(self._args.output_dir), state.global_step
        done = f"{step} steps" if step == self._max_steps else f"stopped at step {step} of {self._max_steps}"
        resumed = f" (resumed after step {self._first_step})" if self._first_step else ""
        lines = [f"done: {done} in {console_text.duration(time.perf_counter() - self._began)}{resumed}"]
        if found := console_text.changes(history, metric=self._args.metric_for_best_model):
            over = ", ".join(filter(None, ["from start to end", means_in_words(history)]))
            lines += [f"{over}:", *console_text.change_lines(found)]
        lines += self._best(history, state)
        lines.append(f"findings:    {self._findings()}")
        best = self._args.load_best_model_at_end and state.best_global_step
        commands = [f"policy:      {folder / 'final' / 'policy'}{f' (of step {best})' if best else ''}"]
        commands += [f"curves:      tensorboard --logdir {shlex.quote(board)}" for board in self._run_log().boards]
        commands += [f"report:      alpaca-ppo report {shlex.quote(str(folder))}"]
        return lines + commands

    def _best(self, history: list[Metrics], state: Any) -> list[str]:
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
        kept = Path(self._args.output_dir) / f"checkpoint-{int(step or 0)}"
        where = ""
        if kept.is_dir():
            where = f", kept in {kept}"
        elif step and metric.startswith("eval/"):
            where = ", not kept: metric_for_best_model was not set"
        if not step:
            return [f"best step:   none is better than before training ({metric} {console_text.number(value)})"]
        lines = [f"best step:   {int(step)}{among} ({metric} {console_text.number(value)}{where})"]
        if (before := better_before_training(history, metric, value, greater_is_better=greater)) is not None:
            lines.append(f"             worse than before training ({metric} {console_text.number(before)})")
        return lines

    def _known(self, stats: Metrics) -> Metrics:
        """`stats` without the KL where there is no reference: it is 0 then, and says nothing."""
        if self._args.reference != "none":
            return stats
        return {key: value for key, value in stats.items() if not key.endswith("kl_sum_seq")}

    def _findings(self) -> str:
        """How many findings the doctor has printed, and where they are."""
        path = Path(self._args.output_dir) / "findings.jsonl"
        found = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        counts = Counter(json.loads(line)["severity"] for line in found)
        if not counts:
            return "none"
        report = ", in report.html" if self._args.report else ""
        return f"{console_text.severities(counts)} (printed above{report} and in {path})"

    def _history(self) -> list[Metrics]:
        """The lines of metrics.jsonl, as far as the summary needs them."""
        kept = ("step", "eval/", *(f"objective/{name}" for name in ("rewards", "kl_sum", "response_l", "truncated")))
        kept += (StepTable.SOURCES, *filter(None, [self._args.metric_for_best_model]))
        path = Path(self._args.output_dir) / "metrics.jsonl"
        lines, sources = list[Metrics](), self._sources()
        # A run may be resumed from a checkpoint in another folder.
        if not path.exists():
            return lines
        with path.open(encoding="utf-8") as file:
            for line in file:
                known = console_text.in_order_of_sources(self._known(json.loads(line)), sources)
                lines.append({key: value for key, value in known.items() if key.startswith(kept)})
        return lines
