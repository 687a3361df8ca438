"""The doctor on the files of a run."""

import json

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


def write_rollouts(folder, prompts):
    (folder / "rollouts").mkdir()
    rows = [{"prompt_id": i, "prompt": prompt, "response": "a"} for i, prompt in enumerate(prompts)]
    (folder / "rollouts/step_000001.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


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
    write_run(tmp_path, fault=FAULTS["padding warning"], config=DEFAULTS)
    error, warning = examined(FAULTS["kl_runaway error"])["kl_runaway"], examined(FAULTS["kl_runaway warning"])
    rows = [warning["kl_runaway"].row(), error.row()]
    (tmp_path / "findings.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 9')
    assert read_findings(tmp_path) == [warning["kl_runaway"], error]
    assert [(finding.rule, finding.severity) for finding in check_run(tmp_path)] == [
        ("kl_runaway", "error"),
        ("padding", "warning"),
    ]


def test_repeated_prompts_are_seen_in_the_tables(tmp_path):
    write_run(tmp_path, config=DEFAULTS)
    write_rollouts(tmp_path, ["same"] * 10 + [f"prompt {i}" for i in range(20)])
    (finding,) = check_run(tmp_path)
    assert (finding.rule, finding.evidence) == ("duplicate_prompts", "only 21 of 30 prompts are distinct")


def test_a_prompt_may_hold_line_breaks_that_json_leaves_as_they_are(tmp_path):
    write_run(tmp_path, config=DEFAULTS)
    (tmp_path / "rollouts").mkdir()
    row = json.dumps({"prompt_id": 0, "prompt": "a\u2028b\x85c", "response": "\u2029"}, ensure_ascii=False)
    (tmp_path / "rollouts/step_000001.jsonl").write_text(row + "\n", encoding="utf-8")
    assert check_run(tmp_path) == []


@pytest.mark.parametrize("line", ["garbage", "[]", '{"prompt_id": 0}', '{"prompt_id": null, "prompt": "a"}'])
def test_a_line_that_is_no_answer_is_named(line, tmp_path):
    write_run(tmp_path, config=DEFAULTS)
    write_rollouts(tmp_path, ["a"])
    with open(tmp_path / "rollouts/step_000001.jsonl", "a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match="step_000001.jsonl line 2 is not among the answers of a run.*remove the line"):
        check_run(tmp_path)


def test_a_source_that_is_named_by_a_folder_is_a_reward_model(tmp_path):
    fault = FAULTS["reward_model_out_of_range error"]
    model = check_run(write_run(tmp_path, fault=fault, config=DEFAULTS | {"reward_funcs": ["models/grade/"]}))
    assert [finding.rule for finding in model] == ["reward_model_out_of_range"]
    script = check_run(
        write_run(tmp_path, fault=fault, config=DEFAULTS | {"reward_model_name_or_path": ["models/grade"]})
    )
    assert script == model
    assert check_run(write_run(tmp_path, fault=fault, config=DEFAULTS | {"reward_funcs": ["a.py:grade"]})) == []


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("metrics.jsonl", None, r"metrics.jsonl does not exist; give the folder \(output_dir\) of a run"),
        ("metrics.jsonl", "[]\n", "metrics.jsonl line 1 is not among the metrics of a run: b'\\[\\]'"),
        ("metrics.jsonl", "{]\n", "line 1 is not among the metrics of a run"),
        ("run.yaml", "a: [", "run.yaml cannot be read as YAML"),
        ("run.yaml", "- a", "run.yaml holds a list, not options"),
        ("findings.jsonl", '{"step": 1}\n', "findings.jsonl is no file of findings: a line has no 'rule'"),
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
