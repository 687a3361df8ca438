"""The doctor on the folder of a run: the findings of `alpaca-ppo report --check` and of the report."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from alpaca_ppo.atomic_io import StrPath
from alpaca_ppo.doctor.finding import Finding, finding_from, severity_rank
from alpaca_ppo.doctor.history import History, RunFacts
from alpaca_ppo.doctor.rules import Doctor

_MOST_TABLES = 100
"""Tables of rollouts that are read for duplicate prompts: enough to find them, and read in seconds."""


def check_run(folder: StrPath) -> list[Finding]:
    """Returns what the doctor finds in the run of `folder`, the most severe first; of each rule, the most severe one.

    Every rule is tried on metrics.jsonl, run.yaml and rollouts/. What the run itself has found (findings.jsonl) is
    added where the files do not show it: the run knows its dataset and its reward sources.

    Raises:
        ValueError: if the folder has no metrics.jsonl, or a file in it cannot be read.
    """
    folder = Path(folder)
    config = read_config(folder)
    doctor = Doctor(History(config, _facts(folder, config)))
    found = []
    for row in read_rows(folder / "metrics.jsonl", what="metrics of a run"):
        doctor.history.add(row["step"], row)
        found += doctor.examine()
    return most_severe([*found, *read_findings(folder)])


def read_findings(folder: StrPath) -> list[Finding]:
    """Returns what the run of `folder` has found, in the order of the steps; nothing without findings.jsonl."""
    path = Path(folder) / "findings.jsonl"
    if not path.exists():
        return []
    rows = read_rows(path, what="findings of a run")
    try:
        return [finding_from(row) for row in rows]
    except KeyError as error:
        raise ValueError(f"{path} is no file of findings: a line has no {error}; move it away") from error


def most_severe(findings: list[Finding]) -> list[Finding]:
    """Returns the most severe finding of each rule, errors first; of equals, the first."""
    worst: dict[str, Finding] = {}
    for finding in findings:
        known = worst.get(finding.rule)
        if known is None or severity_rank(finding.severity) > severity_rank(known.severity):
            worst[finding.rule] = finding
    return sorted(worst.values(), key=lambda finding: (-severity_rank(finding.severity), finding.step))


def read_config(folder: Path) -> Mapping[str, Any]:
    """Returns the options in run.yaml; nothing without the file.

    Raises:
        ValueError: if it is not a mapping in YAML.
    """
    path = folder / "run.yaml"
    if not path.exists():
        return {}
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as YAML: {error}; give the folder of a run") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds a {type(config).__name__}, not options; give the folder of a run")
    return config


def read_rows(path: Path, *, what: str) -> list[dict[str, Any]]:
    """Returns the rows of a .jsonl file. A last line that a killed run has not finished is left out.

    Raises:
        ValueError: if the file does not exist, or a line is not an object with a step.
    """
    if not path.exists():
        raise ValueError(f"{path} does not exist; give the folder (output_dir) of a run")
    rows = []
    # The last piece is empty, or a line without its line feed.
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            row = json.loads(line)
            rows.append({**row, "step": int(row["step"])})
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} line {number} is not among the {what}: {line[:80]!r}") from error
    return rows


def _facts(folder: Path, config: Mapping[str, Any]) -> RunFacts:
    prompts = dict(_logged_prompts(folder))
    # A folder or hub id rather than "module:function"; the source is called by the last part of its name.
    functions = [str(source) for source in config.get("reward_funcs") or [] if not re.search(r":\w+$", str(source))]
    models = [*(config.get("reward_model_name_or_path") or []), *functions]
    models = [name.rstrip("/").split("/")[-1] for name in models]
    models += ["reward_adapter"] if config.get("reward_adapter") else []
    return RunFacts(
        model_sources=tuple(models),
        num_prompts=len(prompts) or None,
        num_distinct_prompts=len(set(prompts.values())) or None,
    )


def _logged_prompts(folder: Path) -> Iterator[tuple[int, str]]:
    """Index and text of every prompt in rollouts/."""
    for path in sorted((folder / "rollouts").glob("step_*.jsonl"))[:_MOST_TABLES]:
        # As in `read_rows`, at line feeds alone: JSON leaves other line breaks, such as U+2028, as they are.
        for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
            try:
                row = json.loads(line)
                yield int(row["prompt_id"]), str(row["prompt"])
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{path} line {number} is not among the answers of a run: {line[:80]!r}; remove the line, or the "
                    "file"
                ) from error
