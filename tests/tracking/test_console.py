"""What a run prints, from its first line to its last."""

import json
import re
import shlex
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import TrainerCallback

from alpaca_ppo.tracking.console import Console, samples_are_due, step_columns
from alpaca_ppo.tracking.rollout_tables import sample_rows
from tests.tiny_models import tiny_tokenizer
from tests.tiny_runs import count_even, metric_lines, prompts, tiny_config, tiny_trainer


def even_share(completion_ids, **columns):
    return [sum(token % 2 == 0 for token in ids) / max(1, len(ids)) for ids in completion_ids]


def odd(completion_ids, **columns):
    return [float(sum(token % 2 for token in ids)) for ids in completion_ids]


class Interrupt(TrainerCallback):
    """Presses Ctrl-C in the middle of a step, once."""

    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, **context):
        if state.global_step == self.step:
            self.step = -1
            signal.raise_signal(signal.SIGINT)


def run(folder, *, callbacks=(), **overrides):
    data = {"eval_dataset": prompts(4), "reward_funcs": [odd, count_even], "callbacks": list(callbacks)}
    data["metric_funcs"] = even_share
    settings = {"total_episodes": 50, "logging_steps": 2, "eval_steps": 2, "save_steps": 2}
    settings["reward_weights"] = [1.0, 0.5]
    return tiny_trainer(folder, trainer_arguments=data, **settings, **overrides)


def rows(printed):
    """The lines of the table, as the numbers in their columns by title."""
    found, titles = [], []
    for line in printed:
        cells = line.split()
        if cells[:1] == ["step"] and "reward" in cells:
            titles = line.replace("cut off", "cut_off").split()
        elif re.match(r" *\d+/\d+ ", line):
            found.append(dict(zip(titles, cells, strict=True)))
    return found


def test_a_run_says_what_happens_and_nothing_else(tmp_path, capsys, monkeypatch):
    # The table has a column for each reward source where there is room.
    monkeypatch.setenv("COLUMNS", "120")
    folder = tmp_path / "a run"
    trainer = run(folder, report_to=["tensorboard"])
    capsys.readouterr()
    trainer.train()
    out, err = capsys.readouterr()
    assert err == ""
    printed, lines = out.splitlines(), metric_lines(folder, timings=True)
    shown = rows(printed)
    # Every second step of five, and the last.
    assert [row["step"] for row in shown] == ["2/5", "4/5", "5/5"]
    for row, line in zip(shown, [lines[2], lines[4], lines[5]], strict=True):
        for title, name in (("reward", "rewards"), ("count_even", "scores/count_even"), ("odd", "scores/odd")):
            assert row[title] == f"{line[f'objective/{name}']:.3f}"
        assert float(row["sec"]) == pytest.approx(line["time/step"], abs=0.05)
    evaluations = [line for line in printed if line.startswith("eval ")]
    assert [line.partition(":")[0] for line in evaluations] == ["eval before training"] + [
        f"eval at step {step}" for step in (2, 4, 5)
    ]
    assert f"reward {lines[0]['eval/rewards']:.3f} -> {lines[5]['eval/rewards']:.3f} ±" in evaluations[-1]
    samples = [line.partition(":")[0] for line in printed if line.startswith("-- step")]
    assert samples == ["-- step 1, highest score of 10", "-- step 1, lowest score of 10"]
    card = (folder / "final/policy/README.md").read_text()
    assert "- **Reward**: `odd` (weight 1), `count_even` (weight 0.5)\n" in card
    end = printed[next(i for i, line in enumerate(printed) if line.startswith("done: 5 steps in 00:")) :]
    # The sources in their order, as in the table of steps.
    assert [line.split()[0] for line in end if "->" in line and "eval" not in line] == [
        "reward", "odd", "count_even", "KL", "length", "cut",
    ]  # fmt: skip
    assert any(line.startswith("  eval even_share ") for line in end)
    assert [line.partition(":")[0] for line in end[-5:]] == ["best step", "findings", "policy", "curves", "report"]
    assert (Path(end[-3].partition(":")[2].strip()) / "model.safetensors").is_file()
    program, flag, logs = shlex.split(end[-2].partition(":")[2])
    assert (program, flag) == ("tensorboard", "--logdir")
    assert list(Path(logs).glob("events.out.tfevents.*"))
    assert shlex.split(end[-1].partition(":")[2]) == ["alpaca-ppo", "report", str(folder)]


def test_ctrl_c_at_a_prompt_leads_back_to_it_and_the_same_trainer_goes_on(tmp_path, capsys, monkeypatch):
    run(tmp_path / "whole").train()
    whole = rows(capsys.readouterr().out.splitlines())
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # What a run that is to be repeated in a notebook's cell has.
    trainer = run(tmp_path / "parts", callbacks=[Interrupt(step=3)], report=True, overwrite_output_dir=True)
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    with pytest.raises(KeyboardInterrupt, match="SIGINT"):
        trainer.train()
    printed = capsys.readouterr().out
    assert f"SIGINT: run saved to {tmp_path / 'parts' / 'checkpoint-3'}" in printed
    assert "done:" not in printed
    assert (tmp_path / "parts/report.html").is_file()
    with pytest.raises(ValueError, match="parts.* holds checkpoint-3 .*; continue it"):
        trainer.train()
    trainer.train(resume_from_checkpoint=True)
    out = capsys.readouterr().out
    assert out.startswith(f"resuming from {tmp_path / 'parts' / 'checkpoint-3'} (step 3 of 5)\n")
    assert metric_lines(tmp_path / "parts") == metric_lines(tmp_path / "whole")
    timed = {"sec", "tok/s", "left"}
    without = [
        [{k: v for k, v in row.items() if k not in timed} for row in part] for part in (whole, rows(out.splitlines()))
    ]
    assert without[1] == without[0][1:]
    # The evaluation before training was made by the part that was interrupted.
    first = metric_lines(tmp_path / "whole")[0]["eval/rewards"]
    assert f"eval at step 4:  reward {first:.3f} -> " in out
    assert "(resumed after step 3)" in out


class Log:
    """Stands in for a run's log."""

    def __init__(self):
        self.is_main, self.printed, self.samples, self.boards = True, [], [], []

    def message(self, text):
        self.printed += text.split("\n")


STEP = {"objective/rewards": 1.0, "objective/kl_sum_seq": 0.0}


def at(step, *, best=None, metric=None, folder="elsewhere/checkpoint"):
    kept = {"best_global_step": best, "best_metric": metric, "best_model_checkpoint": str(folder)}
    return SimpleNamespace(global_step=step, max_steps=100, **kept)


def console(folder, **overrides):
    log = Log()
    made = Console(tiny_config(folder, **overrides), log)
    made.on_train_begin(None, at(0), None)
    return made, log


def end_of(folder, *lines, state, **overrides):
    """What is printed at the end of a run whose metrics.jsonl has `lines`."""
    shown, log = console(folder, **overrides)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    shown.on_train_end(None, state, None)
    return log.printed


WHOLE = {
    "objective/scores/correct": 0.5,
    "objective/scores/brevity": -12.25,
    "objective/rewards": 1.23456,
    "objective/kl_sum_seq": 0.00004,
    "objective/response_length": 87.25,
    "objective/truncated_fraction": 0.125,
    "ppo/val/explained_variance": -0.001,
    "tokens/per_second": 12_345.0,
    "time/step": 3.26,
}


def test_each_value_stands_under_its_title_and_one_that_is_missing_is_a_dash(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    # Twelve steps take 12 seconds, so the 88 that are left take 88.
    clock = iter([0.0, 12.0, 12.0])
    monkeypatch.setattr("alpaca_ppo.tracking.console.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    shown, log = console(tmp_path)
    shown.on_step_end(None, at(12), None, metrics=WHOLE)
    shown.on_step_end(None, at(13), None, metrics={})
    assert log.printed[:2] == [
        "   step    reward   correct   brevity       KL  length cut off expl.var   tok/s    sec     left",
        " 12/100     1.235     0.500   -12.250  4.0e-05    87.2   12.5%    -0.00  12,345    3.3    01:28",
    ]
    assert log.printed[2].split()[:-1] == ["13/100", *"-" * 9]


def titles(stats, width=120):
    return [column.title for column in step_columns(stats, max_steps=1000, width=width)]


def test_what_a_run_does_not_have_has_no_column():
    one = {key: value for key, value in WHOLE.items() if not key.endswith("brevity")}
    del one["objective/kl_sum_seq"], one["ppo/val/explained_variance"]
    # A single source is the reward.
    assert titles(one) == ["step", "reward", "length", "cut off", "tok/s", "sec", "left"]


@pytest.mark.parametrize(("width", "columns"), [(86, 0), (87, 1), (120, 2)])
def test_sources_have_columns_as_far_as_there_is_room(width, columns):
    names = ["correct", "brevity", "a_judge_with_quite_a_long_name"]
    shown = titles(WHOLE | {f"objective/scores/{names[2]}": 1.0}, width)
    assert [name for name in names if name in shown] == names[:columns]


def test_the_titles_are_repeated_every_twenty_rows_and_after_a_block(tmp_path):
    shown, log = console(tmp_path)
    for step in range(1, 43):
        shown.on_step_end(None, at(step), None, metrics=STEP)
    # A title takes a line itself.
    assert [i for i, line in enumerate(log.printed) if "reward" in line] == [0, 21, 42]
    sample = {"prompt": "", "response": "", "score": 1.0, "kl": 0.0, "length": 0, "stopped": True, "rank": "equal"}
    log.samples = [sample]
    shown.on_step_end(None, at(43), None, metrics=STEP)
    shown.on_step_end(None, at(44), None, metrics=STEP)
    assert "reward" in log.printed[-2]
    assert log.samples == []


def test_a_step_that_a_callback_logs_is_printed_once(tmp_path):
    shown, log = console(tmp_path, logging_steps=10)
    for step, logged in ((9, False), (10, True), (11, True), (12, False)):
        shown.on_step_end(None, at(step), None, metrics=STEP)
        if logged:
            shown.on_log(None, at(step), None, logs=STEP)
    assert [line.split()[0] for line in log.printed] == ["step", "10/100", "11/100"]


def test_the_best_step_is_that_of_the_chosen_metric(tmp_path):
    # That of a run which was resumed from another folder may still be there.
    best = tmp_path / "before/checkpoint-4"
    best.mkdir(parents=True)
    chosen = {"metric_for_best_model": "eval/error", "greater_is_better": False, "save_steps": 2, "eval_steps": 1}
    lines = [{"step": 1, "eval/error": 1.0}, {"step": 4, "eval/error": 0.5}]
    printed = end_of(tmp_path, *lines, state=at(5, best=4, metric=0.5, folder=best), **chosen)
    assert printed[0].startswith("done: stopped at step 5 of 100 in 00:00")
    assert f"best step:   4 (eval/error 0.500, kept in {best})" in printed
    # It is among the changes, too.
    assert printed[2] == "  eval error      1.000 ->      0.500"


@pytest.mark.parametrize(
    ("metric", "values", "text"),
    [
        # Of equal ones the first.
        ("eval/rewards", {1: 1.0, 2: 3.0, 3: None, 4: 3.0}, "best step:   2 (eval/rewards 3.000, not kept; "),
        ("eval/rewards", {2: 1.0, 4: 0.5}, "best step:   2 (eval/rewards 1.000, not kept; metric_for_best_model keeps"),
        ("eval/rewards", {0: 1.0, 2: 0.5}, "best step:   none is better than before training (eval/rewards 1.000)"),
    ],
)
def test_without_a_chosen_metric_the_best_step_is_that_of_the_highest_reward(tmp_path, metric, values, text):
    lines = [{"step": step, metric: value} for step, value in values.items()]
    printed = end_of(tmp_path, *lines, state=at(5))
    assert any(line.startswith(text) for line in printed), printed
    assert not any("tensorboard" in line for line in printed)


def test_no_step_is_the_best_by_its_training_batch_which_measures_the_weights_before_it(tmp_path):
    lines = [{"step": step, "objective/rewards": reward} for step, reward in ((1, 1.0), (2, 3.0), (3, 2.0))]
    assert not any(line.startswith(("best", "highest")) for line in end_of(tmp_path, *lines, state=at(3)))


def test_the_end_of_a_run_without_a_step_is_printed_with_the_number_of_findings(tmp_path):
    assert [line.partition(":")[0] for line in end_of(tmp_path, state=at(0))] == [
        "done", "findings", "policy", "report",
    ]  # fmt: skip
    (tmp_path / "findings.jsonl").write_text('{"step": 1}\n' * 3)
    assert f"findings:    3 (printed above and in {tmp_path / 'findings.jsonl'})" in end_of(tmp_path, state=at(0))


@pytest.mark.parametrize(
    ("greater", "before", "worse"),
    [(True, 0.484, True), (True, 0.355, False), (True, 0.3, False), (False, 0.3, True), (False, 0.484, False)],
)
def test_a_best_checkpoint_that_is_worse_than_before_training_is_called_so(tmp_path, greater, before, worse):
    chosen = {"metric_for_best_model": "eval/x", "greater_is_better": greater, "save_steps": 1, "eval_steps": 1}
    lines = [{"step": 0, "eval/x": before}, {"step": 10, "eval/x": 0.355}]
    printed = end_of(tmp_path, *lines, state=at(25, best=10, metric=0.355), **chosen)
    i = next(i for i, line in enumerate(printed) if line.startswith("best step:   10 (eval/x 0.355"))
    said = [f"             worse than before training (eval/x {before:.3f})"] if worse else []
    assert [line for line in printed[i + 1 :] if line.startswith(" ")] == said


def test_without_a_reference_nothing_says_kl(tmp_path):
    shown, log = console(tmp_path, reference="none", kl_coef=0.0)
    shown.on_evaluate(None, at(0), None, metrics={"eval/rewards": 1.0, "eval/kl_sum_seq": 0.0})
    printed = log.printed + end_of(tmp_path, {"step": 1, **STEP}, state=at(2), reference="none", kl_coef=0.0)
    assert any("reward" in line for line in printed)
    assert not any("KL" in line for line in printed)


def test_a_resumed_run_reads_what_its_first_evaluation_was(tmp_path):
    shown, log = console(tmp_path)
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 0, "eval/rewards": 1.0}\n{"step": 1, "objective/rewards": 2.0}\n{"step": 2, "eval/rewards": 1.5}\n'
    )
    # Also one that was interrupted in its first step.
    for step in (0, 2):
        shown.on_train_begin(None, at(step), None)
        shown.on_evaluate(None, at(3), None, metrics={"eval/rewards": 4.0})
    assert log.printed == ["eval at step 3:  reward 1.000 -> 4.000 (+3.000)"] * 2


def test_a_metric_whose_name_has_a_line_break_of_text_does_not_end_the_run_with_an_error(tmp_path):
    shown, log = console(tmp_path)
    for name in ("metrics.jsonl", "findings.jsonl"):
        (tmp_path / name).write_text('{"step": 1, "objective/rewards": 1.0, "a\u2028b": 2.0}\n', encoding="utf-8")
    shown.on_train_end(None, at(1), None)
    assert f"findings:    1 (printed above and in {tmp_path / 'findings.jsonl'})" in log.printed


def test_samples_are_printed_in_the_first_step_and_every_so_often():
    assert [step for step in range(1, 151) if samples_are_due(step)] == [1, 50, 100, 150]


def test_the_samples_are_the_best_and_the_worst_answer():
    rollouts = {
        "queries": torch.tensor([[0, 9], [8, 9], [8, 9]]),
        "query_attn_masks": torch.tensor([[0, 1], [1, 1], [1, 1]]),
        "prompt_ids": torch.tensor([5, 6, 6]),
        "sample_ids": torch.tensor([0, 0, 1]),
        "responses": torch.tensor([[10, 2], [11, 12], [13, 0]]),
        "response_mask": torch.tensor([[True, True], [True, True], [True, False]]),
        "stopped": torch.tensor([True, False, False]),
        "scores": torch.tensor([1.0, 3.0, -2.0]),
        "kl": torch.tensor([[0.5, 0.25], [1.0, 0.5], [0.125, 0.0]]),
    }
    best, worst = sample_rows(rollouts, tiny_tokenizer())
    assert best == {
        "prompt_id": 6,
        "sample_id": 0,
        "prompt": "w8 w9",
        "response": "w11 w12",
        "score": 3.0,
        "stopped": False,
        "length": 2,
        "kl": 1.5,
        "rank": "highest score of 3",
    }
    assert (worst["response"], worst["score"], worst["kl"], worst["rank"]) == ("w13", -2.0, 0.125, "lowest score of 3")
    rollouts["scores"] = torch.ones(3)
    (only,) = sample_rows(rollouts, tiny_tokenizer())
    assert (only["prompt"], only["rank"]) == ("w9", "all scores equal of 3")
    assert sample_rows({key: value[:0] for key, value in rollouts.items()}, tiny_tokenizer()) == []
