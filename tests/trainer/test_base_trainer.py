"""The loop belongs to BaseTrainer: it counts steps whatever a subclass overrides, and saves what a subclass adds."""

import os
from pathlib import Path

import pytest
import torch
import yaml
from peft import LoraConfig
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from alpaca_ppo import PPOTrainer
from tests.tiny_runs import metric_lines, one_update, prompts, tiny_trainer


def test_an_update_of_ones_own_without_super_works_and_ends(tmp_path):
    class Own(PPOTrainer):
        def step_with_rollouts(self, rollouts):
            rows = torch.arange(rollouts["responses"].size(0))
            return one_update(self, rollouts, rows)[0]

    trainer = tiny_trainer(tmp_path, trainer_class=Own, step_batch_size=10, step_per_device_batch_size=10)
    trainer.train()
    assert trainer.state.global_step == 2 and trainer.state.epoch == 0.5
    assert [line["step"] for line in metric_lines(tmp_path)] == [1, 2]
    assert (tmp_path / "final/policy").is_dir()


def test_tensorboard_has_one_kl_of_the_update_with_its_estimator_in_the_name(tmp_path):
    tiny_trainer(tmp_path, report_to=["tensorboard"]).train()
    board = EventAccumulator(str(tmp_path / "runs"))
    board.Reload()
    names = [name for name in board.Tags()["scalars"] if name.startswith("ppo/") and "kl" in name]
    of_update = [name for name in names if name != "ppo/policy/kl_stopped"]
    assert of_update == ["ppo/policy/approx_kl_k3"] and len(board.Scalars(of_update[0])) == 2


def test_a_step_of_ones_own_and_an_update_made_twice_count_once(tmp_path):
    class Twice(PPOTrainer):
        def step_with_rollouts(self, rollouts):
            super().step_with_rollouts(rollouts)
            return super().step_with_rollouts(rollouts)

    class Nothing(PPOTrainer):
        def step(self, prompt_batches):
            return {"objective/prompts": float(len(prompt_batches[0]["rows"]))}

    for trainer_class in (Twice, Nothing):
        trainer = tiny_trainer(tmp_path / trainer_class.__name__, trainer_class=trainer_class, learning_rate=0.0)
        trainer.train()
        assert trainer.state.global_step == 2
    assert metric_lines(tmp_path / "Nothing")[-1] == {"step": 2, "objective/prompts": 10.0}


def test_policy_and_critic_are_never_in_memory_together_unless_they_share_a_pass(tmp_path):
    # Rows have 5 to 9 tokens, so optimizer steps of 4, 4 and 2 rows are made in 2, 2 and 1 micro-batches.
    settings = {"max_tokens_per_micro_batch": 18, "total_episodes": 10}
    lora = {"peft_config": LoraConfig(r=4, target_modules="all-linear", init_lora_weights=True)}
    adapter = {"critic_layout": "adapter", "gradient_checkpointing": True, "trainer_arguments": lora}
    for layout, passes in (({}, 10), (adapter, 10), ({"critic_layout": "shared"}, 5)):
        trainer, made = tiny_trainer(tmp_path / str(len(layout)), **layout, **settings), []
        backward = trainer.updater.engine.backward
        trainer.updater.engine.backward = lambda loss, made=made, backward=backward: made.append(1) or backward(loss)
        trainer.train()
        assert len(made) == passes


def test_losses_that_are_doubled_double_the_gradients_of_both(tmp_path):
    class Doubled(PPOTrainer):
        def compute_policy_loss(self, batch, outputs):
            loss, stats = super().compute_policy_loss(batch, outputs)
            return 2 * loss, stats

        def compute_value_loss(self, batch, outputs):
            loss, stats = super().compute_value_loss(batch, outputs)
            return 2 * loss, stats

    for layout in ("separate", "shared"):
        settings = {"max_grad_norm": 1e6, "critic_layout": layout, "step_batch_size": 10}
        doubled, plain = (
            tiny_trainer(tmp_path / f"{layout} {cls.__name__}", trainer_class=cls, **settings)
            for cls in (Doubled, PPOTrainer)
        )
        ours, theirs = (trainer.step(trainer.prompt_batches(0)) for trainer in (doubled, plain))
        for name in ("ppo/policy/grad_norm", "ppo/val/grad_norm", "ppo/loss/total"):
            assert ours[name] == pytest.approx(2 * theirs[name], rel=1e-5), (layout, name)


class Counting(PPOTrainer):
    """Has a state of its own."""

    class Counter:
        def __init__(self):
            self.steps = 0

        def state_dict(self):
            return {"steps": self.steps}

        def load_state_dict(self, state):
            self.steps = state["steps"]

    def checkpoint_components(self):
        if not hasattr(self, "counter"):
            self.counter = self.Counter()
        return {"counter": self.counter}

    def record_step_stats(self, train_stats, rollouts, step):
        self.counter.steps += 1
        return super().record_step_stats(train_stats, rollouts, step) | {"own/steps": float(self.counter.steps)}


def test_a_state_of_ones_own_is_saved_and_resumed_and_missed_by_another_trainer(tmp_path):
    run = {"save_steps": 1, "num_logged_rollouts": 0}
    first = tiny_trainer(tmp_path, trainer_class=Counting, total_episodes=20, **run)
    first.checkpoint_components()
    first.train()
    resumed = tiny_trainer(tmp_path, trainer_class=Counting, total_episodes=30, **run)
    resumed.train(resume_from_checkpoint=True)
    assert [line["own/steps"] for line in metric_lines(tmp_path)] == [1.0, 2.0, 3.0]
    theirs = "kl_controller, progress, sampler_check"
    message = f"components callbacks, counter, {theirs}, but this trainer has callbacks, {theirs};"
    with pytest.raises(ValueError, match=message):
        tiny_trainer(tmp_path, total_episodes=40, **run).train(resume_from_checkpoint=True)


def test_a_state_of_ones_own_cannot_replace_the_trainers(tmp_path):
    class Replacing(PPOTrainer):
        def checkpoint_components(self):
            return {"progress": self.kl_controller}

    with pytest.raises(ValueError, match=r"checkpoint_components\(\) returned progress, the trainer's own"):
        tiny_trainer(tmp_path, trainer_class=Replacing).save_checkpoint()


def test_an_early_stop_needs_the_kl_of_the_policy_loss(tmp_path):
    class Silent(PPOTrainer):
        def compute_policy_loss(self, batch, outputs):
            loss, stats = super().compute_policy_loss(batch, outputs)
            return loss, {name: value for name, value in stats.items() if "approx_kl" not in name}

    trainer = tiny_trainer(tmp_path, trainer_class=Silent, target_kl_stop=0.1)
    with pytest.raises(ValueError, match="target_kl_stop is 0.1, but the loss returned no approx_kl_k3"):
        trainer.step(trainer.prompt_batches(0))


def test_a_reward_function_that_changes_the_folder_does_not_split_the_run(tmp_path, monkeypatch):
    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.chdir(tmp_path)

    def moves(completions, **columns):
        os.chdir(other)
        return [float(len(text)) for text in completions]

    trainer = tiny_trainer("run", trainer_arguments={"reward_funcs": moves}, save_steps=1)
    trainer.train()
    assert Path.cwd() == other and list(other.iterdir()) == []
    assert len(metric_lines(tmp_path / "run")) == 2
    assert {"checkpoint-2", "final", "run.yaml"} <= {path.name for path in (tmp_path / "run").iterdir()}
    assert yaml.safe_load((tmp_path / "run/run.yaml").read_text())["output_dir"] == str(tmp_path / "run")


def test_the_bar_is_at_the_step_that_is_evaluated(tmp_path):
    class Steps:
        def __init__(self, total, *, initial):
            self.at = initial

        def update(self):
            self.at += 1

        def __enter__(self):
            bars.append(self)
            return self

        def __exit__(self, *error):
            pass

    class Watched(PPOTrainer):
        def evaluate(self):
            seen.append((self.state.global_step, bars[-1].at if bars else None))
            return super().evaluate()

    bars, seen = [], []
    trainer = tiny_trainer(
        tmp_path, trainer_class=Watched, eval_steps=1, trainer_arguments={"eval_dataset": prompts(2)}
    )
    trainer.run_log.bar.steps = Steps
    trainer.train()
    assert seen == [(0, None), (1, 1), (2, 2)]
