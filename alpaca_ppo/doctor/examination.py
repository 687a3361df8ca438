"""`Doctor`, which examines a run as it trains, and `check_run`, which examines its folder."""

import dataclasses
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import yaml

from alpaca_ppo.atomic_io import StrPath
from alpaca_ppo.config.fields import shown
from alpaca_ppo.doctor.rules import RULES, History
from alpaca_ppo.registry import DoctorSeverity

ENDED_BY_ERROR = 3
"""The exit status of a command whose run an error in `stop_on` has ended; 1 is a crash, 2 a user's mistake."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """What a rule has found after a step: a line of findings.jsonl."""

    step: int
    rule: str
    severity: DoctorSeverity
    sentence: str
    remedy: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.severity} [{self.rule}] {self.sentence}. Remedy: {self.remedy}"


class Doctor:
    """Applies the rules to a run. A finding is reported once, and again only if a warning has become an error.

    Args:
        history: the caller adds each step before `examine`.
        known: the findings from before the run was resumed.
    """

    def __init__(self, history: History, known: Collection[Finding] = ()) -> None:
        self.history = history
        self._reported = {(finding.rule, finding.severity) for finding in known}

    def examine(self) -> list[Finding]:
        """Returns the new findings after the history's last step."""
        new = []
        for name, rule in RULES.items():
            found = rule.condition(self.history)
            if found and not {(name, found.severity), (name, "error")} & self._reported:
                self._reported.add((name, found.severity))
                texts = (text.format(**found.numbers) for text in (rule.sentence, rule.remedy))
                new.append(Finding(self.history.step, name, found.severity, *texts))
        return new


def check_run(folder: StrPath) -> list[Finding]:
    """Returns the findings in the folder of a run, those in its metrics and in findings.jsonl, as `examined` does.

    Raises:
        ValueError: if the folder has no metrics.jsonl, or a file in it cannot be read.
    """
    folder = Path(folder)
    return examined(read_config(folder), read_lines(folder / "metrics.jsonl"), read_findings(folder))


def examined(
    config: Mapping[str, Any], metrics: Iterable[Mapping[str, Any]], known: Collection[Finding] = ()
) -> list[Finding]:
    """Returns one finding for each rule, of those in `metrics` and in `known`: the earliest error, or else the earliest
    warning. Errors come first.
    """
    doctor = Doctor(History(config))
    findings = list(known)
    for row in metrics:
        doctor.history.add(int(row["step"]), row)
        findings += doctor.examine()
    worst: dict[str, Finding] = {}
    for finding in sorted(findings, key=lambda finding: (finding.severity != "error", finding.step)):
        worst.setdefault(finding.rule, finding)
    return list(worst.values())


def read_findings(folder: StrPath) -> list[Finding]:
    """Returns the findings in findings.jsonl; none without it.

    Raises:
        ValueError: if the file holds something else.
    """
    path = Path(folder) / "findings.jsonl"
    keys = {field.name for field in dataclasses.fields(Finding)}
    rows = list(read_lines(path)) if path.exists() else []
    for row in rows:
        if row.keys() != keys or row["severity"] not in get_args(DoctorSeverity):
            raise ValueError(f"{path} holds {shown(row)}, which is no finding; remove the line, or the file")
    return [Finding(**row) for row in rows]


def read_config(folder: Path) -> dict[str, Any]:
    """Returns the options in run.yaml; none without it.

    Raises:
        ValueError: if it is not a mapping in YAML.
    """
    path = folder / "run.yaml"
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {error}; restore or remove the file") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds a {type(config).__name__} instead of options; restore or remove the file")
    return config


def read_lines(path: Path, *, key: str = "step") -> Iterator[dict[str, Any]]:
    """Yields the JSON object of each line of a file. An incomplete last line, which a killed run leaves, is skipped.

    Raises:
        ValueError: if there is no such file, and for any other line that is not a JSON object with a `key`.
    """
    if not path.exists():
        raise ValueError(f"{path} does not exist; give the folder (output_dir) of a run")
    # Not splitlines(), because JSON does not escape other line breaks, such as U+2028.
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode(errors="surrogateescape"))
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict) and key in row:
            yield row
        elif number < len(lines):
            raise ValueError(f"{path} line {number} is no JSON object with a {key}: {line[:80]!r}; remove it")
