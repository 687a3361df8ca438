"""The comparison of `make same-numbers` finds one bit, and takes nothing for a difference that is none. The trainings
themselves are made there, not here.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tools.same_numbers import __main__ as driver
from tests.tools.same_numbers import compare, runs
from tests.tools.same_numbers.compare import compare_runs
from tests.tools.same_numbers.settings import RUNS, Run

NAN = float("nan")
WEIGHTS = {"head.weight": torch.tensor([[1.0, 0.0], [NAN, -3.5]]), "half": torch.ones(3, dtype=torch.bfloat16)}
ROW = {"prompt": "w4", "score": 0.1, "stopped": True, "tokens": [{"id": 7, "kl": 0.25}, {"id": 2, "kl": 1e-3}]}


def write_outputs(folder: Path) -> None:
    for place in ("rollouts", "eval", "final/policy", "final/value", "checkpoint-2"):
        (folder / place).mkdir(parents=True)
    lines = [{"step": step, "objective/kl": 0.1 * step, "ppo/padding": None} for step in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for table in ("rollouts/step_000001.jsonl", "eval/step_000000.jsonl", "skipped_updates.jsonl"):
        (folder / table).write_text(json.dumps(ROW) + "\n")
    for name in ("final/policy/model", "final/value/model", "checkpoint-2/state"):
        save_file(WEIGHTS, folder / f"{name}.safetensors")


@pytest.fixture
def outputs(tmp_path):
    """Output folders of the same run on both sides."""
    write_outputs(tmp_path / "base")
    shutil.copytree(tmp_path / "base", tmp_path / "tree")
    return tmp_path / "base", tmp_path / "tree"


def differences(outputs):
    return compare_runs(*outputs).differences


def replace(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def change_weights(path, **changes):
    save_file({**load_file(path), **changes}, path)


def test_equal_runs_are_equal_and_everything_was_compared(outputs):
    found = compare_runs(*outputs)
    assert not found.differences and not found.notes
    # Two lines of three metrics; three tables of one row: three columns, and two tokens of two.
    assert found.numbers == 2 * 3 + 3 * (3 + 2 * 2)
    assert found.tensors == 3 * 2


@pytest.mark.parametrize("name", ["final/policy/model", "final/value/model", "checkpoint-2/state"])
def test_one_bit_of_one_weight_is_found(name, outputs):
    weight = WEIGHTS["head.weight"].clone()
    # -3.5 is 0xC0600000; the next number away from zero has the last bit set: -3.5 - 2**-22.
    weight.view(torch.int32)[1, 1] += 1
    change_weights(outputs[1] / f"{name}.safetensors", **{"head.weight": weight})
    (line,) = differences(outputs)
    place = "final/value" if name == "final/value/model" else f"{name}.safetensors"
    assert line == (
        f"{place} head.weight: 1 of 4 elements differ, first element 3: -3.5 in base, -3.500000238418579 in tree"
    )


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (torch.tensor([[1.0, -0.0], [NAN, -3.5]]), "first element 1: 0.0 in base, -0.0 in tree"),
        (WEIGHTS["head.weight"].double(), "torch.float32 (2, 2) in base, torch.float64 (2, 2) in tree"),
        (WEIGHTS["head.weight"].reshape(4), "torch.float32 (2, 2) in base, torch.float32 (4,) in tree"),
    ],
)
def test_another_zero_type_or_shape_of_a_weight_is_found(changed, says, outputs):
    change_weights(outputs[1] / "final/policy/model.safetensors", **{"head.weight": changed})
    (line,) = differences(outputs)
    assert line.endswith(says)


def test_a_weight_of_another_name_is_found(outputs):
    path = outputs[1] / "final/value/model.safetensors"
    weights = load_file(path)
    save_file({"score.weight": weights["head.weight"], "half": weights["half"]}, path)
    # The weight of a classifier is the head's, under which name it is compared.
    assert differences(outputs) == []
    save_file({"scores": weights["head.weight"], "half": weights["half"]}, path)
    assert differences(outputs) == ["final/value head.weight: only in base", "final/value scores: only in tree"]


def test_the_last_digit_of_one_metric_is_found(outputs):
    replace(outputs[1] / "metrics.jsonl", '"objective/kl": 0.2,', '"objective/kl": 0.20000000000000004,')
    assert differences(outputs) == [
        "metrics.jsonl line 2 (step 2) objective/kl: 0.2 in base, 0.20000000000000004 in tree"
    ]


@pytest.mark.parametrize("table", ["rollouts/step_000001.jsonl", "eval/step_000000.jsonl", "skipped_updates.jsonl"])
def test_one_cell_of_a_table_is_found(table, outputs):
    replace(outputs[1] / table, "0.001", "0.002")
    assert differences(outputs) == [f"{table} line 1 tokens[1].kl: 0.001 in base, 0.002 in tree"]


@pytest.mark.parametrize(("old", "new"), [("0.25", "-0.25"), ("true", "1"), ("0.1,", "null,"), ("7", "7.0")])
def test_another_sign_or_kind_of_value_is_found(old, new, outputs):
    replace(outputs[1] / "eval/step_000000.jsonl", old, new)
    assert len(differences(outputs)) == 1


def test_a_metric_or_a_line_that_one_side_lacks_is_found(outputs):
    replace(outputs[1] / "metrics.jsonl", ', "ppo/padding": null}\n{"step": 2', '}\n{"step": 2')
    assert differences(outputs) == ["metrics.jsonl line 1 (step 1) ppo/padding: only in base"]
    (outputs[0] / "metrics.jsonl").write_text("")
    assert differences(outputs) == ["metrics.jsonl: 0 lines in base, 2 in tree"]


@pytest.mark.parametrize(
    "name",
    [
        "metrics.jsonl",
        "skipped_updates.jsonl",
        "rollouts/step_000001.jsonl",
        "eval/step_000000.jsonl",
        "final/policy/model.safetensors",
    ],
)
@pytest.mark.parametrize(("gone", "left"), [(0, "tree"), (1, "base")])
def test_a_missing_file_is_found(name, gone, left, outputs):
    (outputs[gone] / name).unlink()
    assert f"{name}: only in {left}" in differences(outputs)


def test_runs_that_left_nothing_are_not_equal(tmp_path):
    assert len(differences((tmp_path / "base", tmp_path / "tree"))) == 1


def test_what_clock_and_memory_decide_is_not_compared(outputs):
    for folder, value in zip(outputs, (1.0, 2.0), strict=True):
        measured = dict.fromkeys(["time/step", "memory/peak_gib", "tokens/per_second"], value)
        (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "tokens/response": 3.0, **measured}) + "\n")
        (folder / "run.yaml").write_text(f"output_dir: {folder}")
    assert differences(outputs) == []
    replace(outputs[1] / "metrics.jsonl", '"tokens/response": 3.0', '"tokens/response": 4.0')
    assert len(differences(outputs)) == 1


def test_a_renamed_metric_is_compared_under_its_new_name(outputs, monkeypatch):
    monkeypatch.setattr(compare, "RENAMED", {"objective/kl": "objective/divergence", "kl": "divergence"})
    for name in ("metrics.jsonl", "rollouts/step_000001.jsonl"):
        for key in ("objective/kl", "kl"):
            path = outputs[1] / name
            path.write_text(path.read_text().replace(f'"{key}"', f'"{compare.RENAMED[key]}"'))
    assert differences(outputs) == []
    replace(outputs[1] / "metrics.jsonl", "0.2", "0.3")
    assert differences(outputs) == ["metrics.jsonl line 2 (step 2) objective/divergence: 0.2 in base, 0.3 in tree"]


def test_the_share_of_responses_that_did_not_stop_has_either_name():
    old, new = "objective/unstopped_share", "objective/truncated_fraction"
    assert compare.renamed({old: 1.0}) == compare.renamed({new: 1.0}) == {new: 1.0}
    with pytest.raises(ValueError, match=f"a record has .*{old}.* and the new names too"):
        compare.renamed({old: 1.0, new: 1.0})


def test_a_checkpoint_of_another_layout_is_noted_and_no_difference(outputs):
    (outputs[1] / "checkpoint-2/state.safetensors").rename(outputs[1] / "checkpoint-2/optimizer.safetensors")
    found = compare_runs(*outputs)
    assert found.differences == [] and found.tensors == 2 * 2
    assert found.notes == [
        "checkpoint files in one only, not compared: checkpoint-2/optimizer.safetensors, checkpoint-2/state.safetensors"
    ]
    (outputs[0] / "checkpoint-2/state.safetensors").rename(outputs[0] / "checkpoint-2/optimizer.safetensors")
    change_weights(outputs[1] / "checkpoint-2/optimizer.safetensors", more=torch.ones(1))
    found = compare_runs(*outputs)
    assert found.differences == [] and found.tensors == 3 * 2
    assert found.notes == ["checkpoint-2/optimizer.safetensors: 1 tensors in one only, not compared"]


@pytest.fixture
def command(monkeypatch, capsys):
    """Exit status and output of the command for one run, whose outputs (equal until then) a function has changed."""

    def made(change):
        def make_runs(commit, folder, names):
            for side in driver.SIDES:
                write_outputs(folder / side / "scalar")
            change(folder)

        monkeypatch.setattr(driver, "make_runs", make_runs)
        monkeypatch.setattr(driver, "git", lambda *arguments: "a" * 40)
        return driver.main(["HEAD", "--only", "scalar"]), capsys.readouterr().out

    return made


def test_the_command_ends_with_0_where_all_runs_are_equal(command):
    status, output = command(lambda folder: None)
    assert status == 0 and "all 1 runs are equal: aaaaaaa and the working tree" in output


def test_the_command_ends_with_1_where_a_run_differs(command):
    status, output = command(lambda folder: replace(folder / "tree/scalar/metrics.jsonl", "0.2", "0.3"))
    assert status == 1 and "DIFFERS (1)" in output and "1 of 1 runs differ: aaaaaaa and the working tree" in output
    assert "scalar: metrics.jsonl line 2 (step 2) objective/kl: 0.2 in base, 0.3 in tree" in output


def test_of_many_differences_the_first_of_each_kind_are_shown_and_the_others_counted():
    many = [f"{kind} line {i} x: 0 in base, 1 in tree" for kind in ("metrics.jsonl", "eval/a.jsonl") for i in range(8)]
    output = driver.report({"scalar": compare.Comparison(differences=many)}).splitlines()
    # Six and a count, twice; an empty line, the head of the table and its only row.
    assert len(output) == 2 * 7 + 3 and output[:6] == [f"scalar: {line}" for line in many[:6]]
    assert output[6] == "scalar: and 2 more in metrics.jsonl" and output[13] == "scalar: and 2 more in eval"
    assert output[-1].split() == ["scalar", "0", "0", "DIFFERS", "(16)"]


@pytest.mark.parametrize("side", driver.SIDES)
def test_the_command_ends_with_1_where_a_run_failed(side, command):
    status, output = command(lambda folder: (folder / side / "scalar/failed.txt").write_text("ValueError: no"))
    assert status == 1 and f"scalar: failed in {side}: ValueError: no" in output


@pytest.mark.parametrize("name", RUNS)
def test_every_run_has_a_configuration(name, tmp_path):
    config = runs.config_of(RUNS[name], tmp_path / name, tmp_path / "inputs")
    assert config.report_to == ["none"] and config.use_cpu
    assert config.deepspeed in (None, str(tmp_path / f"inputs/{name.split('_')[0]}.json"))


def test_a_tree_that_lacks_the_new_name_of_a_field_gets_the_old_one(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "RENAMED_FIELDS", {"cliprange": "clip_range"})
    assert runs.config_of(Run({"clip_range": 0.3}), tmp_path, tmp_path).cliprange == 0.3
    monkeypatch.setattr(runs, "RENAMED_FIELDS", {"clip_range": "cliprange"})
    assert runs.config_of(Run({"cliprange": 0.3}), tmp_path, tmp_path).cliprange == 0.3


def test_a_package_from_another_tree_is_refused(tmp_path):
    runs.check_tree(Path(__file__).resolve().parents[2])
    with pytest.raises(RuntimeError, match="alpaca_ppo.* was imported from .*PYTHONPATH must begin there"):
        runs.check_tree(tmp_path)
