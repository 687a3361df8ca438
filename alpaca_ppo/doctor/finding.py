"""`Finding`: what a rule has found, as the console, findings.jsonl and the report show it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from alpaca_ppo.registry import DOCTOR_SEVERITIES

Severity = Literal["info", "warning", "error"]
"""An error ruins the run or lets it learn nothing, a warning is worth a look while it goes on, an info says what could
be better."""
ENDED_BY_ERROR = 3
"""The exit status of a command whose run an error in `stop_on` has ended: neither a mistake (2) nor a crash (1)."""


@dataclass(frozen=True)
class Finding:
    """One thing that a run does wrong, or could do better."""

    step: int
    """The step after which it was found."""
    rule: str
    """The name of the rule, as `stop_on` takes it."""
    severity: Severity
    title: str
    """What is wrong, in a few words."""
    evidence: str
    """The numbers that show it."""
    cause: str
    """What usually causes it."""
    remedy: str
    """What to do, with the options to change."""

    def __str__(self) -> str:
        return (
            f"step {self.step}: {self.severity} [{self.rule}] {self.title}: {self.evidence}. "
            f"Likely cause: {self.cause}. Remedy: {self.remedy}"
        )

    def row(self) -> dict[str, Any]:
        """The finding as a line of findings.jsonl."""
        return asdict(self)


def finding_from(row: Mapping[str, Any]) -> Finding:
    """Returns the finding that `row`, a line of findings.jsonl, stands for."""
    return Finding(**{name: row[name] for name in Finding.__dataclass_fields__})


def severity_rank(severity: Severity) -> int:
    """0 for info, 1 for a warning, 2 for an error."""
    return DOCTOR_SEVERITIES.index(severity)
