"""A run whose first checkpoint cannot fit on the disk is refused before its first step, and no other run is."""

import shutil
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model

from alpaca_ppo.checkpoint.serialization import Checkpoint
from alpaca_ppo.cli.train import run_training
from alpaca_ppo.models import build_actor_critic
from alpaca_ppo.trainer import from_arguments
from alpaca_ppo.trainer.preflight import check_room, check_room_for_policy
from tests.tiny_models import tiny_causal_lm
from tests.tiny_runs import prompts, tiny_config, tiny_trainer

REWARD = "tests.tiny_runs:count_even"
LORA = {"r": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
REFUSED = r"output_dir \(.*\) has too little room: {} will have more than \d+ bytes, and the disk has {} left"


@pytest.fixture
def free(monkeypatch):
    """Sets the free bytes of every disk."""

    def set_free(free, total=10**12):
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=total, free=free))

    return set_free


def sgd():
    model = build_actor_critic(tiny_causal_lm("llama"), critic_layout="separate")
    return {"model": model, "optimizers": (torch.optim.SGD(model.parameters(), lr=0.1), None)}


@pytest.mark.parametrize(
    ("arguments", "layout"),
    [
        (dict, "separate"),
        (dict, "shared"),
        (dict, "cached"),
        (lambda: {"peft_config": LoraConfig(**LORA)}, "adapter"),
        (lambda: {"peft_config": LoraConfig(**LORA)}, "cached"),
        (sgd, "separate"),
    ],
)
def test_a_disk_without_room_for_one_checkpoint_or_the_final_models_is_refused(arguments, layout, tmp_path, free):
    """The numbers come from the checkpoint and the final models of a run of one step."""
    settings = {"critic_layout": layout, "total_episodes": 10}
    trainer = tiny_trainer(tmp_path, trainer_arguments=arguments(), save_steps=1, **settings)
    trainer.train()
    saved = Checkpoint.read(tmp_path / "checkpoint-1")
    moments = [value for values in saved.optimizer["state"].values() for value in values.values()]
    size = sum(tensor.nbytes for tensor in [*saved.weights.values(), *moments])
    free(size)
    check_room(trainer.args, trainer.start.checkpoint_size)
    free(size * 3 // 4)
    with pytest.raises(ValueError, match=REFUSED.format("one checkpoint", size * 3 // 4)):
        check_room(trainer.args, trainer.start.checkpoint_size)
    # The final models need no moments, two thirds of a checkpoint. A critic that reads the policy lies beside a copy.
    trainer = tiny_trainer(tmp_path, trainer_arguments=arguments(), **settings)
    final = sum(path.stat().st_size for path in (tmp_path / "final").rglob("*.safetensors"))
    free(final)
    check_room(trainer.args, trainer.start.checkpoint_size)
    free(final * 3 // 4)
    with pytest.raises(ValueError, match=REFUSED.format("the final models", final * 3 // 4)):
        check_room(trainer.args, trainer.start.checkpoint_size)


def test_the_room_for_all_checkpoints_that_will_be_kept_is_asked_for(tmp_path, free, monkeypatch):
    size = 1000

    def check(steps, **settings):
        args = tiny_config(tmp_path, **{"save_steps": 10, "save_total_limit": 2, **settings})
        check_room(args, size, steps)

    free(size - 1)
    # A lower limit would not help.
    with pytest.raises(ValueError, match=REFUSED.format("one checkpoint", size - 1) + "; free some space$"):
        check(10)
    # The third is complete before the first is deleted.
    free(3 * size - 1)
    with pytest.raises(ValueError, match=rf"3 checkpoints will have more than {3 * size} .*save_total_limit \(2\)"):
        check(21)
    check(20)
    check(100, save_total_limit=1)
    # Nothing is deleted for the user, who may delete them himself.
    check(100, save_total_limit=None)
    free(3 * size)
    check(1000)
    # Two of them are there.
    for step in (10, 20):
        (tmp_path / f"checkpoint-{step}").mkdir()
    free(size)
    check(1000)
    free(size - 1)
    with pytest.raises(ValueError, match="one checkpoint"):
        check(1000)
    # The main process alone writes.
    monkeypatch.setenv("RANK", "1")
    check(1000)


def test_a_command_refuses_a_full_disk_before_it_loads_the_policy(tmp_path, free):
    policy = tiny_causal_lm("llama")
    weights = 4 * policy.num_parameters()
    policy.save_pretrained(tmp_path / "policy")
    get_peft_model(policy, LoraConfig(**LORA)).save_pretrained(tmp_path / "adapter")
    args = tiny_config(tmp_path / "run", save_steps=1)
    free(3 * weights)
    check_room_for_policy(args, str(tmp_path / "policy"))
    free(3 * weights - 1)
    with pytest.raises(ValueError, match=REFUSED.format("one checkpoint", 3 * weights - 1)):
        check_room_for_policy(args, str(tmp_path / "policy"))
    # An earlier run may be deleted first, and an adapter is not as large as its base.
    check_room_for_policy(tiny_config(tmp_path, save_steps=1, overwrite_output_dir=True), str(tmp_path / "policy"))
    check_room_for_policy(args, str(tmp_path / "adapter"))


def test_a_loaded_model_may_be_evaluated_on_a_full_disk_but_not_trained_and_nothing_is_written(tmp_path, free):
    free(1000)
    trainer = tiny_trainer(tmp_path / "run", trainer_arguments={"eval_dataset": prompts(3)})
    assert "eval/scores" in trainer.evaluate()
    before = sorted(path.name for path in (tmp_path / "run").rglob("*"))
    with pytest.raises(ValueError, match="has too little room: the final models will have"):
        trainer.train()
    assert sorted(path.name for path in (tmp_path / "run").rglob("*")) == before
    # Of a file system whose size is not known nothing is asked.
    free(0, total=0)
    trainer.train()


def test_a_finished_run_that_is_resumed_with_nothing_left_to_do_needs_no_room_for_a_checkpoint(tmp_path, free):
    settings = {"save_steps": 1, "total_episodes": 10}
    tiny_trainer(tmp_path, **settings).train()
    free(1000)
    tiny_trainer(tmp_path, **settings).train(resume_from_checkpoint=True)
    with pytest.raises(ValueError, match="has too little room: one checkpoint"):
        tiny_trainer(tmp_path, **settings | {"total_episodes": 20}).train(resume_from_checkpoint=True)


def test_the_command_looks_at_the_disk_before_it_loads_anything(tmp_path, free, monkeypatch):
    tiny_causal_lm("llama").save_pretrained(tmp_path / "policy")
    monkeypatch.setattr(from_arguments, "load_prompt_dataset", None)
    free(10)
    flags = ["--model_name_or_path", str(tmp_path / "policy"), "--dataset_name", "prompts", "--reward_funcs", REWARD]
    with pytest.raises(ValueError, match="has too little room"):
        run_training([*flags, "--output_dir", str(tmp_path / "run"), "--use_cpu"])
