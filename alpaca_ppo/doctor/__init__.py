"""The doctor: rules that read a run's metrics and say what is wrong with it, and what to do. No torch here, so that a
report is made at once.
"""

from alpaca_ppo.doctor.examination import Doctor, Finding, check_run, read_findings
from alpaca_ppo.doctor.rules import RULES, History, Rule

__all__ = ["RULES", "Doctor", "Finding", "History", "Rule", "check_run", "read_findings"]
