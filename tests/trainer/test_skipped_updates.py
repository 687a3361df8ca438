"""An update that is not finite is refused, recorded, and skipped as often as `max_skipped_updates` says."""

import json
import math

import pytest
import torch

from alpaca_ppo.ppo.updates import non_finite
from tests.tiny_runs import before_update, metric_lines, poisoned, tiny_trainer, weights, with_advantages


def skipped_lines(folder):
    return [json.loads(line) for line in (folder / "skipped_updates.jsonl").read_text().splitlines()]


def test_a_loss_that_is_not_finite_is_told_by_its_terms():
    stats = {"loss/policy": torch.tensor(1.0), "loss/value": torch.tensor(math.inf), "loss/total": torch.tensor(3.0)}
    assert non_finite(torch.tensor(1.0), stats) is None
    assert non_finite(torch.tensor(math.inf), stats) == "loss/value is inf"
    assert non_finite(torch.tensor(math.nan), {"loss/total": math.nan}) == "the loss is nan"


def test_the_run_ends_at_the_first_one_by_default_and_says_which_prompts(tmp_path):
    trainer = tiny_trainer(tmp_path, trainer_class=poisoned((1, 0)), save_steps=1, total_episodes=30)
    with pytest.raises(FloatingPointError, match=r"step 2: loss/policy is nan on rank 0 .*max_skipped_updates is 0"):
        trainer.train()
    (line,) = skipped_lines(tmp_path)
    assert line["number"] == 1 and line["step"] == 2
    assert len(line["prompt_ids"]) == 4
    suspects = json.loads(line["cause"].partition("prompts ")[2].rstrip(")"))
    assert 0 < len(suspects) <= 3 and set(suspects) <= set(line["prompt_ids"])
    # The last checkpoint is whole: the run goes on from it, with leave to skip.
    resumed = tiny_trainer(tmp_path, trainer_class=poisoned((1, 0)), total_episodes=30, max_skipped_updates=1)
    resumed.train(resume_from_checkpoint=True)
    assert [line["step"] for line in metric_lines(tmp_path)] == [1, 2, 3]
    assert len(skipped_lines(tmp_path)) == 1


def test_a_skipped_update_leaves_no_trace_but_its_record(tmp_path, capsys):
    """Weights, optimizer state and schedule after the skipped update, which is the last, are those before it."""
    settings = {"ppo_epochs": 1, "lr_scheduler_type": "linear", "total_episodes": 10}
    trainer = tiny_trainer(tmp_path, trainer_class=poisoned((0, 2)), max_skipped_updates=1, **settings)
    seen = []

    def watch():
        optimizer, scheduler = trainer.updater.engine.optimizer, trainer.updater.schedules
        seen.append((weights(trainer), str(optimizer.state_dict()), str(scheduler.state_dict())))

    before_update(trainer, 3, watch)
    stats = trainer.step(trainer.prompt_batches(0))
    before, optimizer, scheduler = seen[0]
    assert all(torch.equal(before[name], value) for name, value in weights(trainer).items())
    assert optimizer == str(trainer.updater.engine.optimizer.state_dict())
    assert scheduler == str(trainer.updater.schedules.state_dict())
    assert stats["ppo/policy/skipped_updates"] == 1 and stats["ppo/policy/optimizer_steps"] == 2
    assert stats["ppo/policy/kl_stopped"] == 0
    assert math.isfinite(stats["ppo/loss/total"])
    assert "step 1: loss/policy is nan on rank 0" in capsys.readouterr().out


def test_a_step_that_stops_at_its_kl_does_not_take_a_nan_for_one(tmp_path):
    settings = {"ppo_epochs": 2, "target_kl_stop": 10.0, "max_skipped_updates": 1}
    trainer = tiny_trainer(tmp_path, trainer_class=poisoned((0, 1)), **settings)
    stats = trainer.step(trainer.prompt_batches(0))
    assert stats["ppo/policy/skipped_updates"] == 1 and stats["ppo/policy/kl_stopped"] == 0
    assert stats["ppo/policy/optimizer_steps"] == 5


@pytest.mark.proof
def test_the_count_goes_on_in_a_resumed_run_which_is_the_uninterrupted_one_to_the_last_bit(tmp_path):
    run = {"trainer_class": poisoned((0, 1), (2, 0), (3, 3)), "save_steps": 1, "total_episodes": 50, "ppo_epochs": 2}
    whole = tiny_trainer(tmp_path / "whole", max_skipped_updates=3, **run)
    whole.train()
    assert [line["step"] for line in skipped_lines(tmp_path / "whole")] == [1, 3, 4]
    parts = tiny_trainer(tmp_path / "parts", max_skipped_updates=2, **run)
    with pytest.raises(FloatingPointError, match="step 4: .* 3 updates in this run had a non-finite loss or gradient"):
        parts.train()
    resumed = tiny_trainer(tmp_path / "parts", max_skipped_updates=2, **run)
    with pytest.raises(FloatingPointError, match="step 4: .* 3 updates in this run had a non-finite loss or gradient"):
        resumed.train(resume_from_checkpoint=True)
    resumed = tiny_trainer(tmp_path / "parts", max_skipped_updates=3, **run)
    resumed.train(resume_from_checkpoint=str(tmp_path / "parts/checkpoint-2"))
    assert skipped_lines(tmp_path / "parts") == skipped_lines(tmp_path / "whole")
    assert metric_lines(tmp_path / "parts") == metric_lines(tmp_path / "whole")
    assert all(torch.equal(weights(resumed)[name], value) for name, value in weights(whole).items())
    # A new run in the folder forgets them.
    tiny_trainer(tmp_path / "new").train()
    assert not (tmp_path / "new/skipped_updates.jsonl").exists()


@pytest.mark.parametrize("cause", ["all responses were cut off", "all rewards failed", "no token is the policy's"])
def test_updates_without_a_trained_row_move_nothing_and_are_counted(tmp_path, cause):
    """Momentum and weight decay of earlier steps would move the weights, and the schedules would go on."""
    settings = {"mask_truncated": True, "max_grad_norm": 1.0, "lr_scheduler_type": "linear", "total_episodes": 30}
    trainer = tiny_trainer(tmp_path, critic_epochs=2, **settings)

    def state():
        optimizer, schedules = trainer.updater.engine.optimizer, trainer.updater.schedules
        return str([optimizer.state_dict(), schedules.state_dict()])

    rollouts = with_advantages(trainer, trainer.prompt_batches(0))
    rollouts["stopped"] = torch.ones_like(rollouts["stopped"])
    trained = trainer.step_with_rollouts(rollouts)
    assert trained["policy/empty_updates"] == 0
    before, weights_before = state(), weights(trainer)
    rollouts = with_advantages(trainer, trainer.prompt_batches(1))
    rollouts["stopped"] = torch.full_like(rollouts["stopped"], cause != "all responses were cut off")
    if cause == "all rewards failed":
        rollouts["trained_rows"] = torch.zeros_like(rollouts["stopped"])
    elif cause == "no token is the policy's":
        rollouts["response_mask"] = torch.zeros_like(rollouts["response_mask"])
    stats = trainer.step_with_rollouts(rollouts)
    assert state() == before
    assert all(torch.equal(weights_before[name], value) for name, value in weights(trainer).items())
    planned = trained["policy/optimizer_steps"] + trained["val/optimizer_steps"]
    assert stats == {
        "policy/optimizer_steps": 0,
        "policy/skipped_updates": 0,
        "policy/empty_updates": planned,
        "policy/kl_stopped": 0,
        "val/optimizer_steps": 0,
    }
