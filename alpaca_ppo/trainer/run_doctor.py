"""`RunDoctor`: the doctor in a running trainer. The rules are in `doctor`."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from transformers import TrainerCallback

from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.distributed.collectives import gather_list
from alpaca_ppo.doctor import Doctor, Finding, History, read_findings
from alpaca_ppo.doctor.examination import read_lines
from alpaca_ppo.tracking.run_log import RunLog


class RunDoctor(TrainerCallback):
    """Examines the run after every step and evaluation, reports new findings, and ends the run for those that `stop_on`
    names.

    A resumed run does not report earlier findings again: a run that a finding has ended can be resumed, and goes on
    until there is another.

    Attributes:
        doctor: examines the metrics.
        ended_by: the findings that have ended the run.
    """

    def __init__(self, args: PPOConfig, accelerator: Accelerator, log: RunLog, *, has_adapter: bool) -> None:
        self._args, self._accelerator, self._log = args, accelerator, log
        self._options = {**asdict(args), "use_peft": has_adapter}
        self.doctor = Doctor(History(self._options))
        self.ended_by: list[Finding] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        self.ended_by = []
        found: tuple[list[Any], list[Finding]] = ([], [])
        folder = Path(self._args.output_dir)
        if self._log.is_main and (folder / "metrics.jsonl").exists():
            found = list(read_lines(folder / "metrics.jsonl")), read_findings(folder)
        # Other nodes may not see the main process's disk.
        rows, known = gather_list(found, self._accelerator)[0]
        self.doctor = Doctor(History(self._options), known)
        for row in rows:
            self.doctor.history.add(row["step"], row)

    def on_step_end(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        self.doctor.history.add(state.global_step, context["metrics"])
        if state.global_step == 0:
            # A run can only be ended after a step.
            return
        findings, stop_on = self.doctor.examine(), self._args.stop_on or ()
        if stop_on:
            # Every rank must end the run, even if a metric of a user's hook or callback differs between ranks.
            findings = gather_list(findings, self._accelerator)[0]
        for finding in findings:
            self._log.message(str(finding))
            self._log.append("findings", asdict(finding))
            if finding.rule in stop_on or finding.severity in stop_on:
                control.should_save = control.should_training_stop = True
                self.ended_by.append(finding)
                self._log.message(
                    f"step {finding.step}: {finding.rule} is in stop_on ({', '.join(stop_on)}): the run ends here, "
                    "with a checkpoint. Resuming goes on from it, until there is another finding"
                )

    on_evaluate = on_step_end
