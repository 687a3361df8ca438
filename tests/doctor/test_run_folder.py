"""The doctor on the files of a run."""

import json
from dataclasses import asdict

import pytest
import yaml

from alpaca_ppo.doctor import check_run, read_findings
from tests.doctor.test_rules import DEFAULTS, FAULTS, examined, healthy


def write_run(folder, *, steps=40, fault=None, config=None):
    rows = [{"step": t, **healthy(t), **(fault(t) if fault else {})} for t in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if config is not None:
        (folder / "run.yaml").write_text(yaml.safe_dump(config))
    return folder


def test_a_healthy_run_has_no_findings(tmp_path):
    assert check_run(write_run(tmp_path, config=DEFAULTS)) == []


def test_the_files_show_what_the_run_would_have_found(tmp_path):
    fault = FAULTS["kl_runaway error"]
    assert check_run(write_run(tmp_path, fault=fault, config=DEFAULTS)) == [examined(fault)["kl_runaway"]]


def test_options_decide_as_in_the_run_and_a_run_without_them_is_checked_too(tmp_path):
    fault = FAULTS["kl_runaway error"]
    (without,) = check_run(write_run(tmp_path, fault=fault))
    assert without.severity == "warning"
    assert check_run(write_run(tmp_path, fault=fault, config=DEFAULTS | {"reference": "none"})) == []


def test_findings_of_the_run_are_added_and_the_most_severe_comes_first(tmp_path):
    write_run(tmp_path, fault=FAULTS["uniform_groups warning"], config=DEFAULTS)
    error, warning = examined(FAULTS["kl_runaway error"])["kl_runaway"], examined(FAULTS["kl_runaway warning"])
    rows = [asdict(warning["kl_runaway"]), asdict(error)]
    (tmp_path / "findings.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 9')
    assert read_findings(tmp_path) == [warning["kl_runaway"], error]
    assert [(finding.rule, finding.severity) for finding in check_run(tmp_path)] == [
        ("kl_runaway", "error"),
        ("uniform_groups", "warning"),
    ]


FINDING = {"step": 1, "rule": "kl_runaway", "severity": "error", "sentence": "s", "remedy": "r"}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("metrics.jsonl", None, r"metrics.jsonl does not exist; give the folder \(output_dir\) of a run"),
        ("metrics.jsonl", "[]\n", "metrics.jsonl line 1 is no JSON object with a step: b'\\[\\]'"),
        ("metrics.jsonl", "{]\n", "metrics.jsonl line 1 is no JSON object"),
        ("run.yaml", "a: [", "run.yaml is not YAML"),
        ("findings.jsonl", json.dumps({**FINDING, "severity": "fatal"}), "findings.jsonl holds .*'fatal'.* no finding"),
        ("findings.jsonl", '{"step": 1, "severity": "error"}', "findings.jsonl holds .* no finding; remove the line"),
        ("run.yaml", "- a", "run.yaml holds a list instead of options"),
    ],
)
def test_a_folder_that_is_no_run_is_refused(tmp_path, name, text, message):
    write_run(tmp_path, steps=3, config=DEFAULTS)
    (tmp_path / name).unlink(missing_ok=True)
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        check_run(tmp_path)


def test_the_line_that_a_killed_run_has_not_finished_is_left_out(tmp_path):
    write_run(tmp_path, steps=3)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "objective/sc')
    assert check_run(tmp_path) == []
