"""What a run prints, from its first line to its last."""

import re
import shlex
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import TrainerCallback

from alpaca_ppo.rewards import build_reward
from alpaca_ppo.tracking.console import Console, samples_are_due
from alpaca_ppo.tracking.rollout_tables import sample_rows
from alpaca_ppo.tracking.run_log import ProgressBar
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
        assert row["reward"] == f"{line['objective/rewards']:.3f}"
        assert row["count_even"] == f"{line['objective/scores/count_even']:.3f}"
        assert row["odd"] == f"{line['objective/scores/odd']:.3f}"
        assert row["length"] == f"{line['objective/response_length']:.1f}"
        assert row["cut_off"] == f"{100 * line['objective/truncated_fraction']:.1f}%"
        assert float(row["KL"]) == pytest.approx(line["objective/kl_sum_seq"], abs=5e-4)
        assert float(row["expl.var"]) == pytest.approx(line["ppo/val/explained_variance"], abs=5e-3)
        assert float(row["sec"]) == pytest.approx(line["time/step"], abs=0.05)
        assert row["tok/s"] == f"{line['tokens/per_second']:,.0f}"
    assert shown[-1]["left"] == "00:00"
    evaluations = [line for line in printed if line.startswith("eval ")]
    assert [line.partition(":")[0] for line in evaluations] == ["eval before training"] + [
        f"eval at step {step}" for step in (2, 4, 5)
    ]
    first, last = lines[0]["eval/rewards"], lines[5]["eval/rewards"]
    error = lines[5]["eval/rewards_se"]
    assert f"reward {first:.3f} -> {last:.3f} ±{error:.3f} ({last - first:+.3f})" in evaluations[-1]
    with_sources = [line for line in printed if " odd " in line and "even_share" in line]
    assert with_sources and all(" count_even " in line.partition(" odd ")[2] for line in with_sources)
    samples = [line for line in printed if line.startswith("-- step")]
    assert [line.partition(":")[0] for line in samples] == [
        f"-- step {step}, {which} of 10" for step in [1] for which in ("highest score", "lowest score")
    ]
    card = (folder / "final/policy/README.md").read_text()
    assert "- **Reward**: `odd` (weight 1), `count_even` (weight 0.5)\n" in card
    check_end(printed[printed.index(next(line for line in printed if line.startswith("done: "))) :], lines, folder)


def check_end(end, lines, folder):
    assert end[0].startswith("done: 5 steps in 00:")
    means = {line.split("  ")[1]: line.split()[-4:] for line in end if "->" in line}
    # The sources in their order, as in the table of steps.
    assert [name for name in means if name.removeprefix("eval ") in ("odd", "count_even")] == [
        "odd", "count_even", "eval odd", "eval count_even",
    ]  # fmt: skip
    of_both = ["reward", "KL", "length", "cut off", "count_even", "odd"]
    assert {*of_both, *(f"eval {name}" for name in of_both), "eval even_share"} == set(means)
    for source in ("count_even", "odd"):
        first, last = (lines[step][f"objective/scores/{source}"] for step in (1, 5))
        assert means[source][1:] == [f"{first:.3f}", "->", f"{last:.3f}"]
    first, last = (lines[step]["eval/even_share"] for step in (0, 5))
    assert means["eval even_share"][1:] == [f"{first:.3f}", "->", f"{last:.3f}"]
    assert f"{lines[1]['objective/rewards']:.3f} ->" in " ".join(end[2].split())
    assert f"-> {lines[5]['objective/rewards']:.3f}" in " ".join(end[2].split())
    rewards = [(line["eval/rewards"], -line["step"]) for line in lines if "eval/rewards" in line]
    best, at = max(rewards)
    named = next(line for line in end if line.startswith("best step:"))
    assert f"(eval/rewards {best:.3f}" in named
    assert named.split()[2] == (str(-at) if at else "none")
    assert [line.partition(":")[0] for line in end[-4:]] == ["findings", "policy", "curves", "report"]
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

    def __init__(self, is_main=True):
        self.is_main, self.printed, self.samples, self.boards = is_main, [], [], []
        self.bar = ProgressBar(is_main=False)

    def message(self, text):
        self.printed += text.split("\n")


STEP = {"objective/scores/count_even": 1.0, "objective/rewards": 1.0, "objective/kl_sum_seq": 0.0}


def console(folder, **overrides):
    log = Log()
    made = Console(tiny_config(folder, **overrides), log, max_steps=100)
    made.on_train_begin(None, SimpleNamespace(global_step=0), None)
    return made, log


def test_the_titles_are_repeated_every_twenty_rows_and_after_a_block(tmp_path):
    shown, log = console(tmp_path)
    for step in range(1, 43):
        shown.on_step_end(None, SimpleNamespace(global_step=step), None, metrics=STEP)
    titles = [i for i, line in enumerate(log.printed) if "reward" in line]
    # A title takes a line itself.
    assert titles == [0, 21, 42]
    log.samples = [
        {
            "prompt": "",
            "response": "",
            "score": 1.0,
            "kl": 0.0,
            "length": 0,
            "stopped": True,
            "rank": "all scores equal of 1",
        }
    ]
    shown.on_step_end(None, SimpleNamespace(global_step=43), None, metrics=STEP)
    shown.on_step_end(None, SimpleNamespace(global_step=44), None, metrics=STEP)
    assert "reward" in log.printed[-2]
    assert log.samples == []


def test_a_step_that_a_callback_logs_is_printed_once(tmp_path):
    shown, log = console(tmp_path, logging_steps=10)
    for step, logged in ((9, False), (10, True), (11, True), (12, False)):
        state = SimpleNamespace(global_step=step)
        shown.on_step_end(None, state, None, metrics=STEP)
        if logged:
            shown.on_log(None, state, None, logs=STEP)
    assert [line.split()[0] for line in log.printed] == ["step", "10/100", "11/100"]


@pytest.mark.parametrize(
    ("best", "text"),
    [
        (
            {"best_global_step": 4, "best_metric": 0.5},
            "best step:   4 (objective/kl_sum_seq 0.500, kept in ",
        ),
        # Of equal ones the first: 2, with a reward of 3.
        (
            {"best_global_step": None, "best_metric": None},
            "best step:   2 (objective/rewards 3.000, not kept; metric_for_best_model keeps it)",
        ),
    ],
)
def test_the_best_step_is_that_of_the_chosen_metric_or_of_the_highest_reward(tmp_path, best, text):
    shown, log = console(tmp_path, metric_for_best_model="objective/kl_sum_seq", greater_is_better=False, save_steps=2)
    (tmp_path / "checkpoint-4").mkdir()
    rewards = [1.0, 3.0, "null", 3.0, 2.0]
    (tmp_path / "metrics.jsonl").write_text(
        "".join(f'{{"step": {i}, "objective/rewards": {value}}}\n' for i, value in enumerate(rewards, 1))
    )
    shown.on_train_end(None, SimpleNamespace(global_step=5, **best), None)
    assert log.printed[0].startswith("done: stopped at step 5 of 100 in 00:00")
    assert any(line.startswith(text) for line in log.printed), log.printed
    assert not any("tensorboard" in line for line in log.printed)


def test_the_end_of_a_run_without_a_step_is_printed(tmp_path):
    shown, log = console(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    shown.on_train_end(None, SimpleNamespace(global_step=0, best_global_step=None, best_metric=None), None)
    assert [line.partition(":")[0] for line in log.printed] == ["done", "findings", "policy", "report"]


def test_the_end_counts_the_findings_and_says_where_they_are_and_that_a_best_evaluation_was_not_kept(tmp_path):
    shown, log = console(tmp_path)
    (tmp_path / "findings.jsonl").write_text('{"step": 1}\n' * 3)
    (tmp_path / "metrics.jsonl").write_text('{"step": 2, "eval/rewards": 1.0}\n{"step": 4, "eval/rewards": 0.5}\n')
    shown.on_train_end(None, SimpleNamespace(global_step=5, best_global_step=None, best_metric=None), None)
    assert f"findings:    3 (printed above and in {tmp_path / 'findings.jsonl'})" in log.printed
    assert "best step:   2 (eval/rewards 1.000, not kept; metric_for_best_model keeps it)" in log.printed


@pytest.mark.parametrize(
    ("greater", "before", "said"),
    [
        (True, 0.484, ["             worse than before training (eval/x 0.484)"]),
        (True, 0.355, []),
        (True, 0.3, []),
        (False, 0.3, ["             worse than before training (eval/x 0.300)"]),
        (False, 0.484, []),
    ],
)
def test_a_best_checkpoint_that_is_worse_than_before_training_is_called_so(tmp_path, greater, before, said):
    shown, log = console(
        tmp_path, metric_for_best_model="eval/x", greater_is_better=greater, save_steps=1, eval_steps=1
    )
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 0, "eval/x": {before}}}\n{{"step": 10, "eval/x": 0.355}}\n')
    state = SimpleNamespace(global_step=25, best_global_step=10, best_metric=0.355)
    shown.on_train_end(None, state, None)
    at = next(i for i, line in enumerate(log.printed) if line.startswith("best step:   10 (eval/x 0.355"))
    assert [line for line in log.printed[at + 1 :] if line.startswith(" ")] == said


def test_where_no_evaluation_is_better_than_the_first_there_is_no_best_step(tmp_path):
    shown, log = console(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "eval/rewards": 1.0}\n{"step": 2, "eval/rewards": 0.5}\n')
    shown.on_train_end(None, SimpleNamespace(global_step=2, best_global_step=None, best_metric=None), None)
    assert "best step:   none is better than before training (eval/rewards 1.000)" in log.printed


def test_the_metric_of_the_best_model_is_among_the_changes(tmp_path):
    shown, log = console(tmp_path, metric_for_best_model="ppo/val/error", save_steps=1)
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "ppo/val/error": 1.0, "x": 1}\n{"step": 2, "ppo/val/error": 0.5, "x": 1}\n'
    )
    shown.on_train_end(None, SimpleNamespace(global_step=2, best_global_step=2, best_metric=0.5), None)
    assert log.printed[2] == "  ppo/val/error      1.000 ->      0.500"


def test_without_a_reference_nothing_says_kl(tmp_path):
    shown, log = console(tmp_path, reference="none", kl_coef=0.0)
    metrics = {"eval/rewards": 1.0, "eval/kl_sum_seq": 0.0}
    shown.on_evaluate(None, SimpleNamespace(global_step=0), None, metrics=metrics)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "objective/rewards": 1, "objective/kl_sum_seq": 0}\n' * 2)
    shown.on_train_end(None, SimpleNamespace(global_step=2, best_global_step=None, best_metric=None), None)
    assert any("reward" in line for line in log.printed)
    assert not any("KL" in line for line in log.printed)


def test_a_resumed_run_reads_what_its_first_evaluation_was(tmp_path):
    shown, log = console(tmp_path)
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 0, "eval/rewards": 1.0}\n{"step": 1, "objective/rewards": 2.0}\n{"step": 2, "eval/rewards": 1.5}\n'
    )
    # Also one that was interrupted in its first step.
    for step in (0, 2):
        shown.on_train_begin(None, SimpleNamespace(global_step=step), None)
        shown.on_evaluate(None, SimpleNamespace(global_step=3), None, metrics={"eval/rewards": 4.0})
    assert log.printed == ["eval at step 3:  reward 1.000 -> 4.000 (+3.000)"] * 2


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


def test_each_source_is_announced_before_it_is_called():
    calls = []

    async def judge(completions, **columns):
        calls.append("in judge")
        return [1.0] * len(completions)

    def rule(completions, **columns):
        calls.append("in rule")
        return [1.0] * len(completions)

    scorer = build_reward([rule, judge])
    scorer.on_source = calls.append
    scorer(["a"], ["b"], [[1]], [{"prompt": "a"}])
    # The body of an async function runs after all functions have been called.
    assert calls == ["rule", "in rule", "judge", "in judge"]
