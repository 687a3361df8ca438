"""The doctor: rules that read a run's metrics and say what is wrong with it, why, and what to do.

No torch here, so that a report is made in an instant. In a running trainer, `trainer.run_doctor` calls it.
"""

from alpaca_ppo.doctor.finding import Finding, Severity
from alpaca_ppo.doctor.history import History, RunFacts
from alpaca_ppo.doctor.limits import LIMITS
from alpaca_ppo.doctor.rules import RULES, Doctor, stops
from alpaca_ppo.doctor.run_folder import check_run, read_findings

__all__ = [
    "LIMITS",
    "RULES",
    "Doctor",
    "Finding",
    "History",
    "RunFacts",
    "Severity",
    "check_run",
    "read_findings",
    "stops",
]
