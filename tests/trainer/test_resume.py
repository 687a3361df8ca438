"""A run that was stopped and resumed is the run that was never stopped, to the last bit."""

import shutil

import pytest
import torch
from transformers import TrainerCallback

from tests.tiny_models import tiny_causal_lm
from tests.tiny_runs import metric_lines, prompts, tiny_trainer, weights

RUN = {
    "total_episodes": 50,
    "ppo_epochs": 2,
    "save_steps": 2,
    "eval_steps": 2,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 3,
    "trainer_arguments": {"eval_dataset": prompts(3)},
}


class StopAfter(TrainerCallback):
    """Ends training after `step`, as a person would who interrupts the run."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step
        return control


def stopped_run(folder, *, after: int, **settings) -> None:
    arguments = {**RUN["trainer_arguments"], "callbacks": [StopAfter(after)]}
    tiny_trainer(folder, **{**RUN, **settings, "trainer_arguments": arguments}).train()


@pytest.mark.parametrize(
    ("after", "controller"),
    [
        (2, {"kl_controller": "scaled"}),
        (3, {"kl_controller": "proportional", "target_kl": 0.1}),
        (3, {"critic_layout": "cached", "critic_width": 64, "critic_epochs": 2}),
    ],
)
def test_a_resumed_run_writes_the_same_metrics_and_weights_to_the_last_bit(after, controller, tmp_path):
    whole = tiny_trainer(tmp_path / "whole", **RUN, **controller)
    whole.train()
    # Stopped after step 3 the newest checkpoint is step 2's: step 3 is computed again, and its line replaced.
    stopped_run(tmp_path / "parts", after=after, **controller)
    assert len(metric_lines(tmp_path / "parts")) == after + 1
    torch.manual_seed(123)
    resumed = tiny_trainer(tmp_path / "parts", **RUN, **controller)
    resumed.train(resume_from_checkpoint=True)
    assert metric_lines(tmp_path / "parts") == metric_lines(tmp_path / "whole")
    assert [line["step"] for line in metric_lines(tmp_path / "whole")] == list(range(6))
    for name, value in weights(whole).items():
        assert torch.equal(weights(resumed)[name], value), name
    for step in range(1, 6):
        name = f"rollouts/step_{step:06d}.jsonl"
        assert (tmp_path / "parts" / name).read_text() == (tmp_path / "whole" / name).read_text()


def test_what_a_trainer_does_before_it_resumes_keeps_no_later_records(tmp_path):
    settings = {**RUN, "save_steps": 1, "total_episodes": 20, "lr_scheduler_type": "constant", "warmup_steps": 0}
    tiny_trainer(tmp_path, **{**settings, "total_episodes": 30}).train()
    (tmp_path / "skipped_updates.jsonl").write_text('{"number": 1, "step": 3}\n')
    (tmp_path / "rollouts/step_000009.jsonl").write_text("")
    trainer = tiny_trainer(tmp_path, **settings)
    trainer.evaluate()
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert [line["step"] for line in metric_lines(tmp_path)] == [0, 1, 2]
    assert {path.name for path in (tmp_path / "rollouts").iterdir()} == {"step_000001.jsonl", "step_000002.jsonl"}
    assert (tmp_path / "skipped_updates.jsonl").read_text() == ""


def test_what_is_logged_before_resuming_does_not_change_the_records(tmp_path):
    arguments = {"eval_dataset": prompts(3)}
    settings = {"save_steps": 1, "trainer_arguments": arguments}
    tiny_trainer(tmp_path, **settings, total_episodes=10).train()
    table = (tmp_path / "eval/step_000000.jsonl").read_bytes()
    before = (tmp_path / "metrics.jsonl").read_text()
    trainer = tiny_trainer(tmp_path, **settings, total_episodes=20, model=tiny_causal_lm("llama"))
    for parameter in trainer.actor_critic.policy.parameters():
        # Of other weights than the run began with, so that its table would be another.
        parameter.data.mul_(-1)
    stats = trainer.evaluate()
    assert (tmp_path / "eval/step_000000.jsonl").read_bytes() == table
    trainer.run_log.log(stats, 0)
    trainer.run_log.log(stats, 1)
    trainer.train(resume_from_checkpoint=True)
    assert (tmp_path / "eval/step_000000.jsonl").read_bytes() == table
    after = (tmp_path / "metrics.jsonl").read_text()
    assert after.startswith(before) and [line["step"] for line in metric_lines(tmp_path)] == [0, 1, 2]
    assert len(list((tmp_path / "eval").iterdir())) == 3
    # A folder without checkpoints holds the tables of whoever evaluates there.
    for path in tmp_path.glob("checkpoint-*"):
        shutil.rmtree(path)
    tiny_trainer(tmp_path, **settings, model=tiny_causal_lm("llama", seed=9)).evaluate()
    assert (tmp_path / "eval/step_000000.jsonl").read_bytes() != table


def test_a_checkpoint_of_other_data_or_another_model_is_refused_before_anything_changes(tmp_path):
    stopped_run(tmp_path, after=2)
    other_data = tiny_trainer(tmp_path, **{**RUN, "rollout_batch_size": 8})
    before = weights(other_data)
    with pytest.raises(ValueError, match="rollout_batch_size"):
        other_data.train(resume_from_checkpoint=True)
    assert all(torch.equal(before[name], value) for name, value in weights(other_data).items())
    other_model = tiny_trainer(tmp_path, model=tiny_causal_lm("gpt2"), **RUN)
    with pytest.raises(ValueError, match="checkpoint-2"):
        other_model.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert len(metric_lines(tmp_path)) == 3, "nothing was overwritten"


def test_a_checkpoint_that_was_moved_to_another_disk_and_linked_is_resumed_from_and_rotated(tmp_path):
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    settings = {"total_episodes": 30, "save_steps": 1, "save_total_limit": 1}
    tiny_trainer(run, **{**settings, "total_episodes": 20}).train()
    (run / "checkpoint-2").rename(elsewhere)
    (run / "checkpoint-2").symlink_to(elsewhere)
    held = sorted(path.name for path in elsewhere.iterdir())
    for _ in range(2):
        tiny_trainer(run, **settings).train(resume_from_checkpoint=True)
        assert [path.name for path in run.glob("*checkpoint-*")] == ["checkpoint-3"]
    assert sorted(path.name for path in elsewhere.iterdir()) == held


@pytest.mark.proof
def test_a_run_resumed_from_an_older_checkpoint_goes_its_own_way_and_resumes_from_that(tmp_path):
    settings = {"total_episodes": 50, "save_steps": 1}
    tiny_trainer(tmp_path, **{**settings, "total_episodes": 40}).train()
    whole = metric_lines(tmp_path)
    trainer = tiny_trainer(tmp_path, **settings)
    trainer._begin(str(tmp_path / "checkpoint-2"))
    trainer._end_step(trainer.step(trainer.prompt_batches(2)))
    tiny_trainer(tmp_path, **settings).train(resume_from_checkpoint=True)
    assert metric_lines(tmp_path)[:4] == whole[:4]
    assert {path.name for path in tmp_path.glob("*checkpoint-*")} >= {"abandoned-checkpoint-3", "checkpoint-5"}
