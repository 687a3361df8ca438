"""The doctor in a running trainer: planted faults are found, reported once, and end the run where `stop_on` says so."""

import json
from pathlib import Path

import pytest

from alpaca_ppo.doctor import check_run, read_findings
from alpaca_ppo.trainer.run_doctor import RunDoctor
from tests.tiny_models import tiny_causal_lm
from tests.tiny_runs import metric_lines, prompts, tiny_trainer


def always_one(prompts, **columns):
    return [1.0] * len(prompts)


def run(folder, *, constant=True, resume=None, **options):
    arguments = {"train_dataset": prompts(8), "model": tiny_causal_lm("llama")}
    if constant:
        arguments["reward_funcs"] = always_one
    small = {"rollout_batch_size": 4, "step_batch_size": 4, "response_len": 4, "num_logged_rollouts": 1}
    trainer = tiny_trainer(folder, trainer_arguments=arguments, **(small | options))
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def _doctor_of(trainer):
    (callback,) = [c for c in trainer.callback_handler.built_in if isinstance(c, RunDoctor)]
    return callback.doctor


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run with a constant reward, ended by it, and what was printed."""
    folder = tmp_path_factory.mktemp("constant")
    run(folder, total_episodes=24, stop_on=["constant_reward"])
    return folder


def test_a_constant_reward_ends_the_run_with_a_checkpoint(stopped):
    assert [(f.rule, f.severity, f.step) for f in read_findings(stopped)] == [("constant_reward", "error", 3)]
    assert (stopped / "checkpoint-3").is_dir() and (stopped / "final/policy").is_dir()
    assert [line["step"] for line in metric_lines(stopped)] == [1, 2, 3]
    assert [finding.rule for finding in check_run(stopped)] == ["constant_reward"]


def test_a_run_that_was_ended_goes_on_when_it_is_resumed_and_says_nothing_twice(stopped, tmp_path, capsys):
    trainer = run(stopped, total_episodes=24, stop_on=["constant_reward"], resume=True)
    assert trainer.state.global_step == 6
    assert [f.step for f in read_findings(stopped)] == [3]
    assert "constant_reward" not in capsys.readouterr().out
    # The history of the steps before is there: without it, step 6 would be the third of a constant reward.
    assert _doctor_of(trainer).history.last("objective/scores_std", 6) != []


def logging_reward(prompts, log_metric, trainer_state, **columns):
    log_metric("steps_done", trainer_state.global_step)
    log_metric("rows", len(prompts))
    log_metric("rows", 0)
    return [float(i) for i in range(len(prompts))]


def test_what_a_reward_function_logs_is_in_the_metrics_of_step_and_evaluation(tmp_path):
    trainer = tiny_trainer(
        tmp_path,
        rollout_batch_size=4,
        step_batch_size=4,
        total_episodes=8,
        num_logged_rollouts=0,
        trainer_arguments={
            "reward_funcs": logging_reward,
            "eval_dataset": prompts(3),
            "metric_funcs": lambda completions, **columns: [1.0] * len(completions),
        },
    )
    trainer.train()
    before, first, second = metric_lines(tmp_path)
    # The mean of 4 and 0 in a step, of 3 and 0 in an evaluation.
    assert (first["reward/steps_done"], first["reward/rows"]) == (0.0, 2.0)
    assert (second["reward/steps_done"], second["reward/rows"]) == (1.0, 2.0)
    assert (before["eval/reward/steps_done"], before["eval/reward/rows"]) == (0.0, 1.5)
    assert (second["eval/reward/steps_done"], second["eval/reward/rows"]) == (2.0, 1.5)


def test_a_rate_of_nearly_nothing_is_found_and_reported_once(tmp_path, capsys):
    run(tmp_path, constant=False, total_episodes=44, learning_rate=1e-9, lr_scheduler_type="constant", ppo_epochs=2)
    lines = [line for line in capsys.readouterr().out.splitlines() if "policy_does_not_move" in line]
    assert len(lines) == 1
    assert lines[0].startswith("step 10: error [policy_does_not_move] the policy does not move: ")
    assert "1e-09" in lines[0] and "Remedy: raise learning_rate" in lines[0]
    (row,) = [json.loads(line) for line in Path(tmp_path, "findings.jsonl").read_text().splitlines()]
    assert list(row) == ["step", "rule", "severity", "sentence", "remedy"]
    assert row["rule"] == "policy_does_not_move"


def test_findings_of_steps_that_are_made_again_are_removed(tmp_path):
    run(tmp_path, total_episodes=16, save_steps=2)
    assert [f.step for f in read_findings(tmp_path)] == [3]
    run(tmp_path, total_episodes=16, save_steps=2, resume=str(tmp_path / "checkpoint-2"))
    assert [f.step for f in read_findings(tmp_path)] == [3]
