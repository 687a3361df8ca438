"""load_best_model_at_end: the best checkpoint's weights are what the trainer and final/ hold, however the run ended."""

import json
import shutil

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import EarlyStoppingCallback, TrainerCallback

from alpaca_ppo import PPOTrainer
from alpaca_ppo.distributed import collectives
from alpaca_ppo.tracking.results import WeightsStep, read_weights_step
from tests.tiny_runs import metric_lines, prompts, tiny_trainer, weights

NAME = "eval/scripted"


def scripted(*values, before=0.9):
    """A trainer class whose evaluations have the metric NAME: `before` training, then `values[0]` after step 1, ..."""

    class Scripted(PPOTrainer):
        def evaluate(self):
            step = self.state.global_step
            return {NAME: values[step - 1] if step else before}

    return Scripted


def best_run(folder, values, *, resume=None, steps=3, arguments=None, **overrides):
    settings = {
        "save_steps": 1,
        "eval_steps": 1,
        "metric_for_best_model": NAME,
        "load_best_model_at_end": True,
        "save_total_limit": 2,
        **overrides,
    }
    trainer = tiny_trainer(
        folder,
        trainer_class=scripted(*values),
        total_episodes=10 * steps,
        trainer_arguments={"eval_dataset": prompts(1), **(arguments or {})},
        **settings,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def saved(folder, step):
    return load_file(folder / f"checkpoint-{step}/model.safetensors")


def assert_holds(trainer, folder, step):
    """Trainer and final/policy hold the weights of the checkpoint of `step`, and none of the last step's."""
    wanted, held = saved(folder, step), weights(trainer)
    trained = [name for name, parameter in trainer.actor_critic.named_parameters() if parameter.requires_grad]
    assert trained and all(torch.equal(held[name], wanted[name]) for name in trained)
    last = saved(folder, trainer.state.global_step)
    assert any(not torch.equal(held[name], last[name]) for name in trained)


@pytest.mark.parametrize("layout", ["separate", "adapter"])
def test_the_best_checkpoint_is_what_trainer_and_final_hold(tmp_path, layout):
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    arguments = {"peft_config": lora} if layout == "adapter" else {}
    trainer = best_run(tmp_path, [1, 3, 2], arguments=arguments, critic_layout=layout)
    assert_holds(trainer, tmp_path, 2)
    entries = {"step": 2, "trained_steps": 3, "metric": NAME, "value": 3.0, "ended_by": None}
    assert json.loads((tmp_path / "final/step.json").read_text()) == entries
    card = (tmp_path / "final/policy/README.md").read_text()
    assert f"the weights are those of step 2 of 3, the best evaluation by {NAME} (3). " in card
    assert "| Metric | Step 2 |" in card and f"| `{NAME}` | 3 |" in card


def test_a_resumed_run_knows_the_best_of_before_and_so_does_one_that_only_writes_its_models_again(tmp_path):
    best_run(tmp_path, [3, 1, 2], steps=2, load_best_model_at_end=False)
    assert read_weights_step(tmp_path / "final") == WeightsStep(2, 2)
    trainer = best_run(tmp_path, [3, 1, 2], resume=True)
    assert_holds(trainer, tmp_path, 1)
    card = (tmp_path / "final/policy/README.md").read_text()
    assert f"| `{NAME}` | 3 |" in card
    with pytest.raises(ValueError, match="checkpoint-3 cannot be saved: load_best_model_at_end has put the "):
        trainer.save_checkpoint()
    shutil.rmtree(tmp_path / "final")
    again = best_run(tmp_path, [], resume=True)
    assert_holds(again, tmp_path, 1)
    assert read_weights_step(tmp_path / "final") == WeightsStep(1, 3, NAME, 3.0)
    # Of a trainer that goes on from the last checkpoint, the weights are the last step's.
    again.checkpoints.load(tmp_path / "checkpoint-3")
    assert again.checkpoints.best_is_loaded is False


@pytest.mark.parametrize(
    ("values", "step"), [([1, 3], WeightsStep(2, 2, NAME, 3.0)), ([float("nan"), float("inf")], WeightsStep(2, 2))]
)
def test_where_the_last_step_is_the_best_or_none_is_the_weights_stay(tmp_path, values, step):
    trainer = best_run(tmp_path, values, steps=2)
    held, last = weights(trainer), saved(tmp_path, 2)
    assert all(torch.equal(held[name], last[name]) for name in last if name in held)
    assert read_weights_step(tmp_path / "final") == step


class Watch(TrainerCallback):
    """Which checkpoints are there whenever one has been saved, and after which step."""

    def __init__(self, folder):
        self.folder, self.seen = folder, []

    def on_save(self, args, state, control, **context):
        self.seen.append((state.global_step, checkpoints(self.folder)))


def checkpoints(folder):
    return sorted(int(path.name.removeprefix("checkpoint-")) for path in folder.glob("checkpoint-*"))


def evaluated_run(folder, *, resume=None, steps=6, **overrides):
    """Six steps evaluated as 0.9 before training, then 0.1, 0.5, 0.3, 0.7, 0.7 and 0.6; checkpoints after 3 and 6."""
    values, watch = [0.1, 0.5, 0.3, 0.7, 0.7, 0.6], Watch(folder)
    settings = {"save_steps": 3, **overrides}
    trainer = best_run(folder, values, arguments={"callbacks": [watch]}, steps=steps, resume=resume, **settings)
    return trainer, watch.seen


def test_the_best_evaluation_is_saved_between_the_checkpoints_loaded_and_resumed_from(tmp_path, capsys):
    whole, saves = evaluated_run(tmp_path / "whole", save_total_limit=1)
    # 1, 2 and 4 are the best so far, the first of equals stays; 3 and 6 are due. The best and the newest are kept.
    assert saves == [(1, [1]), (2, [2]), (3, [2, 3]), (4, [4]), (6, [4, 6])]
    assert_holds(whole, tmp_path / "whole", 4)
    assert read_weights_step(tmp_path / "whole/final") == WeightsStep(4, 6, "eval/scripted", 0.7)
    printed = capsys.readouterr().out
    assert f"best step:   4 (eval/scripted 0.700, kept in {tmp_path / 'whole' / 'checkpoint-4'})" in printed
    assert "/final/policy (of step 4)" in printed
    # A checkpoint that only its evaluation has caused is one to resume from.
    evaluated_run(tmp_path / "parts", steps=4, save_total_limit=None)
    for step in (1, 3):
        shutil.rmtree(tmp_path / f"parts/checkpoint-{step}")
    shutil.rmtree(tmp_path / "parts/final")
    (tmp_path / "parts/checkpoint-4").rename(tmp_path / "elsewhere")
    parts, saves = evaluated_run(tmp_path / "parts", resume=True, save_total_limit=1)
    assert f"resuming from {tmp_path / 'parts' / 'checkpoint-2'} (step 2 of 6)" in capsys.readouterr().out
    assert saves == [(3, [2, 3]), (4, [4]), (6, [4, 6])]
    assert metric_lines(tmp_path / "parts") == metric_lines(tmp_path / "whole")
    held, wanted = weights(parts), weights(whole)
    assert all(torch.equal(held[name], wanted[name]) for name in wanted)


def test_the_main_process_decides_what_is_the_best(tmp_path, monkeypatch):
    """An overridden `evaluate` may return other numbers on other ranks."""
    settings = {"save_steps": 1, "eval_steps": 1, "metric_for_best_model": "eval/scores"}
    trainer = tiny_trainer(tmp_path, trainer_arguments={"eval_dataset": prompts(1)}, **settings)
    for of_main in (True, False):
        monkeypatch.setattr(collectives, "gather_list", lambda item, accelerator, of_main=of_main: [of_main, item])
        assert trainer.checkpoints.is_best({"eval/scores": 1.0 if not of_main else float("nan")}) is of_main


EVALUATIONS = [1, 5, 4, 3, 9, 9]


def stopping_run(folder, steps, *, resume=None):
    """Its evaluations are EVALUATIONS; it may get worse twice."""
    arguments = {"callbacks": [EarlyStoppingCallback(early_stopping_patience=2)]}
    return best_run(folder, EVALUATIONS, arguments=arguments, steps=steps, resume=resume)


def test_a_resumed_run_stops_as_early_as_a_whole_one(tmp_path):
    stopping_run(tmp_path, 3)
    trainer = stopping_run(tmp_path, 6, resume=True)
    # 5 after step 2 is the best, and two evaluations did not reach it.
    assert trainer.state.global_step == 4
    assert read_weights_step(tmp_path / "final") == WeightsStep(2, 4, "eval/scripted", 5.0)


def test_the_step_of_the_weights_is_written_beside_them_and_told_in_words(tmp_path):
    assert read_weights_step(tmp_path) is None
    WeightsStep(20, 40, "eval/scores", 0.934).write(tmp_path)
    assert str(read_weights_step(tmp_path)) == "step 20 of 40, the best evaluation by eval/scores (0.934)"
    assert str(WeightsStep(40, 40)) == "step 40 of 40"
