import io
import json
import math
import os
import sys

import pytest
import yaml
from accelerate import Accelerator, tracking
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from alpaca_ppo.tracking import run_log
from alpaca_ppo.tracking.run_log import MAX_ROWS, RunLog, check_metrics, metrics_identity, tracker_names
from tests.tiny_runs import tiny_config

CONFIG = {"seed": 42, "report_to": ["tensorboard"], "run_name": None, "learning_rate": 1e-06}
NEW = {"step": -1, "lines": 0}


def make_log(folder, report_to=("none",), begin=NEW, **options):
    log = RunLog(Accelerator(cpu=True), tiny_config(folder, report_to=list(report_to), **options))
    log.begin(CONFIG, {"folder": "here"}, **begin)
    return log


def lines(folder):
    return (folder / "metrics.jsonl").read_text().splitlines()


def board(folder):
    accumulator = EventAccumulator(str(folder / "runs"))
    accumulator.Reload()
    return accumulator


def text(accumulator, tag):
    return accumulator.Tensors(f"{tag}/text_summary")[-1].tensor_proto.string_val[0].decode()


def test_a_line_has_the_step_first_and_then_the_metrics_in_their_order(tmp_path):
    log = make_log(tmp_path)
    log.log({"ppo/loss": 0.1, "objective/kl": 2}, 1)
    log.log({"ppo/loss": 1 / 3}, 2)
    assert lines(tmp_path) == [
        '{"step": 1, "ppo/loss": 0.1, "objective/kl": 2.0}',
        '{"step": 2, "ppo/loss": 0.3333333333333333}',
    ]


def test_numbers_that_json_cannot_represent_are_null(tmp_path):
    make_log(tmp_path).log({"a": math.nan, "b": math.inf, "c": -math.inf}, 1)
    assert lines(tmp_path) == ['{"step": 1, "a": null, "b": null, "c": null}']


def test_a_resumed_run_keeps_what_it_had_written_byte_for_byte(tmp_path):
    log = make_log(tmp_path)
    for step in range(5):
        log.log({"x": step / 7}, step)
        log.append("findings", {"step": step})
        log.append("skipped_updates", {"step": step})
        log.log_table("rollouts", [{"response": "r"}], step)
        log.log_table("eval/hard", [{"response": "r"}], step)
        if step == 2:
            identity = metrics_identity(tmp_path)
    whole = (tmp_path / "metrics.jsonl").read_bytes()
    assert metrics_identity(tmp_path, 3) == identity and metrics_identity(tmp_path, 4) != identity
    check_metrics(tmp_path, identity)
    for other in ("rollouts/step_notes.jsonl", "step_000060.jsonl"):
        (tmp_path / other).write_text("mine")
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "x": 0.7')  # killed in the middle of a line
    # Step 3 has been trained, but it was interrupted before its line was written.
    resumed = make_log(tmp_path, begin={"step": 3, "lines": identity["lines"]})
    assert [json.loads(line)["step"] for line in lines(tmp_path)] == [0, 1, 2]
    for name, kept in (("findings", [0, 1, 2]), ("skipped_updates", [0, 1, 2, 3])):
        text = (tmp_path / f"{name}.jsonl").read_text()
        assert [json.loads(line)["step"] for line in text.splitlines()] == kept
    for folder in ("rollouts", "eval/hard"):
        assert sorted(p.stem[-1] for p in (tmp_path / folder).glob("step_0*")) == ["0", "1", "2", "3"]
    assert (tmp_path / "rollouts/step_notes.jsonl").exists() and (tmp_path / "step_000060.jsonl").exists()
    for step in (3, 4):
        resumed.log({"x": step / 7}, step)
    assert (tmp_path / "metrics.jsonl").read_bytes() == whole


def test_a_new_run_removes_the_records_of_an_older_one(tmp_path):
    log = make_log(tmp_path)
    log.log({"x": 1.0}, 0)
    log.log_table("eval", [{"prompt": "p"}], 0)
    make_log(tmp_path)
    assert lines(tmp_path) == []
    assert list((tmp_path / "eval").iterdir()) == []


def test_lines_of_another_run_are_refused(tmp_path):
    make_log(tmp_path).log({"x": 1.0}, 1)
    with pytest.raises(ValueError, match=r"metrics.jsonl belongs to another run than the checkpoint"):
        check_metrics(tmp_path, {"lines": 1, "sha256": "0"})
    # One that lost its lines, and what is no text.
    for content in (b"", b"\x00\xff\x00", b"\x00\n"):
        (tmp_path / "metrics.jsonl").write_bytes(content)
        with pytest.raises(ValueError, match=r"metrics.jsonl belongs to another run than the checkpoint"):
            check_metrics(tmp_path, {"lines": 2, "sha256": "0"})
    # In an empty folder a run may go on from a checkpoint of another one.
    (tmp_path / "metrics.jsonl").unlink()
    check_metrics(tmp_path, {"lines": 1, "sha256": "0"})


def test_rows_are_strict_json_one_per_line_whatever_the_text(tmp_path):
    row = {"response": "a\nb\u2028c \ud83d | é", "tokens": [{"id": 1, "kl": math.nan}], "pair": (1.5, math.inf)}
    make_log(tmp_path).log_table("rollouts", [row, {"response": ""}], 20)
    written = (tmp_path / "rollouts" / "step_000020.jsonl").read_bytes().decode("utf-8").split("\n")
    assert len(written) == 3 and written[2] == ""
    assert json.loads(written[0], parse_constant=pytest.fail) == {
        "response": row["response"],
        "tokens": [{"id": 1, "kl": None}],
        "pair": [1.5, None],
    }


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    log = make_log(tmp_path)
    log.log_table("rollouts", [{"response": "old"}], 1)

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        log.log_table("rollouts", [{"response": "new"}], 1)
    assert json.loads((tmp_path / "rollouts" / "step_000001.jsonl").read_text()) == {"response": "old"}


def test_run_yaml_has_the_resolved_configuration(tmp_path):
    make_log(tmp_path)
    assert yaml.safe_load((tmp_path / "run.yaml").read_text()) == CONFIG | {"provenance": {"folder": "here"}}


def test_tensorboard_gets_metrics_and_configuration(tmp_path):
    log = make_log(tmp_path, ["tensorboard"])
    log.log({"objective/kl": 0.5}, 1)
    log.log({"objective/kl": 0.75}, 2, report=False)
    log.log_table("eval", [{"prompt": "p", "score": 0.5}] * 20, 2)
    log.finish()
    events = board(tmp_path)
    assert [(e.step, e.value) for e in events.Scalars("objective/kl")] == [(1, 0.5)]
    assert len(lines(tmp_path)) == 2
    assert len((tmp_path / "eval" / "step_000002.jsonl").read_text().splitlines()) == 20
    assert "    learning_rate: 1.0e-06" in text(events, "run.yaml")


@pytest.mark.parametrize(("kept", "steps"), [(2, [1, 2, 3]), (0, [3])])
def test_tensorboard_hides_the_steps_that_a_resumed_or_new_run_removes(tmp_path, kept, steps):
    for first, last in ((1, 4), (3, 3)):
        begin = NEW if first == 1 else {"step": kept or -1, "lines": kept}
        log = make_log(tmp_path, ["tensorboard"], begin=begin)
        for step in range(first, last + 1):
            log.log({"x": step / 2}, step)
        log.finish()
    assert [e.step for e in board(tmp_path).Scalars("x")] == steps


def test_trackers_that_the_accelerator_already_has_are_kept_and_left_open(tmp_path):
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=tmp_path / "mine")
    accelerator.init_trackers("project")
    log = RunLog(accelerator, tiny_config(tmp_path / "run", report_to=["tensorboard"]))
    log.begin(CONFIG, {}, **NEW)
    log.log({"x": 1.0}, 1)
    log.finish()
    assert not (tmp_path / "run" / "runs").exists()
    assert len(accelerator.trackers) == 1
    accelerator.trackers[0].finish()


@pytest.mark.parametrize("project", ["alpaca_ppo", "mine"])
def test_another_tracker_gets_the_runs_name_configuration_and_metrics(tmp_path, monkeypatch, project):
    calls = []

    class Tracker(run_log.TensorBoardTracker.__mro__[1]):
        name, requires_logging_directory, tracker = "wandb", False, None

        def __init__(self, project, **options):
            calls.append(("init", project, options))

        def start(self):
            pass

        def store_init_configuration(self, values):
            calls.append(("config", values))

        def log(self, values, step, **_):
            calls.append(("log", values, step))

        def finish(self):
            calls.append("finish")

    monkeypatch.setattr(run_log, "get_available_trackers", lambda: ["tensorboard", "wandb"])
    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "wandb", Tracker)
    if project == "mine":
        monkeypatch.setenv("WANDB_PROJECT", project)
    log = make_log(tmp_path / "lucky", ["wandb"])
    log.log({"x": 1.0}, 3)
    log.finish()
    name = ("init", project, {"name": "lucky"})
    assert calls == [name, ("config", CONFIG), ("log", {"x": 1.0}, 3), "finish"]


def test_other_processes_write_nothing(tmp_path, monkeypatch, capsys):
    accelerator = Accelerator(cpu=True)
    monkeypatch.setattr(type(accelerator), "is_main_process", False)
    log = RunLog(accelerator, tiny_config(tmp_path / "run"))
    log.begin(CONFIG, {}, **NEW)
    log.log({"x": 1.0}, 1)
    log.log_table("rollouts", [{"response": "r"}], 1)
    log.log_table("eval", [{"response": "r"}], 1)
    log.message("hello")
    log.finish()
    assert not (tmp_path / "run").exists()
    assert capsys.readouterr().out == ""


def test_a_message_appears_at_once_and_in_any_encoding(tmp_path, monkeypatch):
    raw = io.BytesIO()
    stdout = io.TextIOWrapper(io.BufferedWriter(raw, buffer_size=10_000), encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", stdout)
    make_log(tmp_path).message("\xb1\u5b57")
    assert raw.getvalue() == b"\xb1\\u5b57\n"


def test_a_tracker_named_twice_is_used_once(monkeypatch):
    monkeypatch.setattr(run_log, "get_available_trackers", lambda: ["tensorboard", "wandb"])
    assert tracker_names(["wandb", "all"]) == ["wandb", "tensorboard"]
    assert tracker_names(["none"]) == tracker_names([]) == []


def test_a_tracker_without_its_package_says_how_to_install_it_and_a_misspelt_one_does_not(monkeypatch):
    monkeypatch.setattr(run_log, "get_available_trackers", lambda: ["tensorboard"])
    for name in ("wandb", "mlflow", "comet_ml", "trackio"):
        with pytest.raises(ValueError, match=f"'{name}'; pip install {name}, or choose of tensorboard "):
            tracker_names([name])
    with pytest.raises(ValueError, match="'tensorbord'; choose of tensorboard "):
        tracker_names(["tensorbord"])


@pytest.mark.parametrize("report_to", [["tensorbord"], ["tensorboard", "wandb"], ["none", "tensorboard"]])
def test_an_unavailable_tracker_is_an_error_that_lists_the_available_ones(monkeypatch, report_to):
    monkeypatch.setattr(run_log, "get_available_trackers", lambda: ["tensorboard"])
    wrong = next(name for name in report_to if name != "tensorboard")
    with pytest.raises(ValueError, match=f"report_to .*'{wrong}'.* tensorboard"):
        tracker_names(report_to)


@pytest.mark.parametrize("kind", [tracking.WandBTracker, tracking.ClearMLTracker, tracking.AimTracker])
def test_trackers_that_have_tables_get_the_first_rows_without_their_tokens(tmp_path, kind):
    calls = []

    class Player(kind):
        def __init__(self):
            pass

        def log_table(self, name, **arguments):
            calls.append((name, arguments))

    log = make_log(tmp_path)
    log.accelerator.trackers = [Player()]
    log.log_table("eval", [{"prompt": "p", "score": 0.5, "tokens": [1]}] * (MAX_ROWS + 1), 7)
    shown = {"columns": ["prompt", "score"], "data": [["p", 0.5]] * MAX_ROWS, "step": 7}
    expected = [("eval/table", shown)]
    assert calls == ([] if kind is tracking.AimTracker else expected)
