"""`RunDoctor`: the doctor in a running trainer. The rules are in `doctor`."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from alpaca_ppo.distributed.collectives import gather_list
from alpaca_ppo.doctor import Doctor, Finding, History, read_findings, stops
from alpaca_ppo.doctor.examination import ENDED_BY_ERROR, read_lines


class RunDoctor(TrainerCallback):
    """Examines the run after every step and evaluation, reports what is new, and ends the run for findings that
    `stop_on` names.

    Every rank examines its metrics, which are the same on all; with `stop_on`, the main process's findings decide, so
    that all of them end the run together. What
    an interrupted run has found and measured is read from its files, and reported no second time: a run that was ended
    by a finding can be resumed, and goes on until there is another one.

    Args:
        trainer: the `BaseTrainer`.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.doctor = Doctor(History(asdict(trainer.args)))
        self.ended_by: list[Finding] = []
        """The findings that have ended the run."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        """Reads what the run has measured and found before it was interrupted."""
        trainer, records = self.trainer, (list[Any](), list[Finding]())
        self.ended_by = []
        folder = Path(args.output_dir)
        if trainer.accelerator.is_main_process and (folder / "metrics.jsonl").exists():
            records = (list(read_lines(folder / "metrics.jsonl")), read_findings(folder))
        # The other nodes may not see the main process's disk.
        rows, known = gather_list(records, trainer.accelerator)[0]
        history = History(asdict(args))
        for row in rows:
            history.add(row["step"], row)
        self.doctor = Doctor(history, known)

    def on_step_end(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        """Examines the run after a step."""
        self._examine(context["metrics"], state, control)

    def on_evaluate(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        """Examines the run after an evaluation."""
        self._examine(context["metrics"], state, control)

    def _examine(self, metrics: Any, state: Any, control: Any) -> None:
        self.doctor.history.add(state.global_step, metrics)
        if state.global_step == 0:
            # A run can only be ended after a step.
            return
        findings, stop_on = self.doctor.examine(), self.trainer.args.stop_on or ()
        if stop_on:
            # A callback or a hook of the user's may have made a metric that differs between ranks.
            findings = gather_list(findings, self.trainer.accelerator)[0]
        for finding in findings:
            self.trainer.run_log.message(str(finding))
            self.trainer.run_log.log_finding(asdict(finding))
            if stops(finding, stop_on):
                control.should_save = control.should_training_stop = True
                self.ended_by.append(finding)
                self.trainer.run_log.message(
                    f"step {finding.step}: {finding.rule} is in stop_on ({', '.join(stop_on)}): the "
                    "run ends here, with a checkpoint. Resuming goes on from it, with another stop_on or with this one "
                    "until there is another finding"
                )


def exit_if_ended_by_an_error(trainer: Any) -> None:
    """Ends the process if an error of the doctor has ended the run of `trainer`; the main process says which one.

    A run that was ended by a warning is one that ended as it was told to.

    Raises:
        SystemExit: with `ENDED_BY_ERROR`, on every rank.
    """
    doctors = [callback for callback in trainer.callback_handler.built_in if isinstance(callback, RunDoctor)]
    errors = [finding for doctor in doctors for finding in doctor.ended_by if finding.severity == "error"]
    if not errors:
        return
    if trainer.accelerator.is_main_process:
        step, named = trainer.state.global_step, ", ".join(f"{found.rule} ({found.sentence})" for found in errors)
        print(
            f"error: stop_on ended the run at step {step} of {trainer.schedule.num_steps}, because of {named}; its "
            f"checkpoint is {trainer.checkpoints.folder(step)}",
            file=sys.stderr,
            flush=True,
        )
    raise SystemExit(ENDED_BY_ERROR)
