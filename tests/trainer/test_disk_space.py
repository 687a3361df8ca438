"""A run whose first checkpoint cannot fit on the disk is refused before its first step, and no other run is."""

import re
import shutil
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from alpaca_ppo.checkpoint.serialization import Checkpoint
from alpaca_ppo.models import build_actor_critic
from alpaca_ppo.trainer.preflight import DiskCheck
from tests.tiny_models import tiny_causal_lm, tiny_sequence_classifier, tiny_tokenizer
from tests.tiny_runs import count_even, prompts, tiny_config, tiny_trainer

LORA = {"r": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A policy, an adapter on it, and a classifier twice as wide."""
    folder = tmp_path_factory.mktemp("models")
    policy = tiny_causal_lm("llama")
    policy.save_pretrained(folder / "policy")
    tiny_tokenizer().save_pretrained(folder / "policy")
    on_disk = AutoModelForCausalLM.from_pretrained(folder / "policy")
    get_peft_model(on_disk, LoraConfig(**LORA)).save_pretrained(folder / "adapter")
    tiny_sequence_classifier("llama", hidden_size=64).save_pretrained(folder / "wide")
    tiny_causal_lm("llama", hidden_size=16, num_hidden_layers=1).save_pretrained(folder / "small")
    return folder


def lora():
    return {"peft_config": LoraConfig(**LORA)}


CASES = {
    "separate": lambda folder: ({}, {}),
    "wide critic": lambda folder: ({"value_model": str(folder / "wide")}, {}),
    "small language model": lambda folder: ({"value_model": str(folder / "small")}, {}),
    "wide critic from the reward": lambda folder: (
        {"reward_funcs": [count_even, str(folder / "wide")], "reward_processing_classes": [None, tiny_tokenizer()]},
        {"init_value_with_reward": True},
    ),
    "shared": lambda folder: ({}, {"critic_layout": "shared"}),
    "no critic": lambda folder: ({}, {"adv_estimator": "reinforce_plus_plus"}),
    "LoRA, separate": lambda folder: (lora(), {}),
    "LoRA, adapter": lambda folder: (lora(), {"critic_layout": "adapter"}),
    "trained adapter": lambda folder: ({"model": str(folder / "adapter")}, {"critic_layout": "shared"}),
    "model in memory": lambda folder: ({"model": tiny_causal_lm("llama")}, {}),
    "adapter in memory": lambda folder: (
        {"model": get_peft_model(tiny_causal_lm("llama"), LoraConfig(**LORA))},
        {"critic_layout": "adapter"},
    ),
    "adapter in memory, separate": lambda folder: (
        {"model": get_peft_model(tiny_causal_lm("llama"), LoraConfig(**LORA))},
        {},
    ),
    "frozen in memory": lambda folder: ({"model": mostly_frozen()}, {}),
    "frozen classifier": lambda folder: (
        {"model": mostly_frozen(), "value_model": tiny_sequence_classifier("llama").requires_grad_(False)},
        {},
    ),
    "LoRA on a frozen model": lambda folder: ({"model": mostly_frozen(), **lora()}, {}),
    "SGD": lambda folder: (sgd(), {}),
}


def mostly_frozen():
    model = tiny_causal_lm("llama").requires_grad_(False)
    model.model.layers[-1].requires_grad_(True)
    return model


def sgd():
    model = build_actor_critic(tiny_causal_lm("llama"), critic_layout="separate")
    return {"model": model, "optimizers": (torch.optim.SGD(model.parameters(), lr=0.1), None)}


@pytest.fixture
def free(monkeypatch):
    """Sets the free bytes of every disk."""

    def set_free(free, total=10**12):
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=total, free=free))

    return set_free


def start(case, folder, output_dir, **settings):
    arguments, own = CASES[case](folder)
    settings = {"total_episodes": 4, "rollout_batch_size": 4, **own, **settings}
    return tiny_trainer(output_dir, trainer_arguments={"model": str(folder / "policy"), **arguments}, **settings)


def check(case, folder, output_dir, **settings):
    """What `train` refuses."""
    start(case, folder, output_dir, **settings).disk_check.check()


def written(folder):
    return sum(path.stat().st_size for path in folder.rglob("*.safetensors"))


REFUSED = (
    r"output_dir \(.*\) has too little room: {} will have more than \d+ bytes, and the disk has {} left; free some"
)


@pytest.mark.parametrize("case", CASES)
def test_a_disk_without_room_for_one_checkpoint_is_refused_and_one_with_room_is_not(case, folder, tmp_path, free):
    """The numbers come from the checkpoint of a run of one step."""
    trainer = start(case, folder, tmp_path / "whole")
    trainer.step(trainer.prompt_batches(0))
    saved = Checkpoint.read(trainer.save_checkpoint())
    moments = [value for values in saved.optimizer["state"].values() for value in values.values()]
    size = sum(tensor.nbytes for tensor in [*saved.weights.values(), *moments])
    trainer.run_lock.release()
    free(size)
    check(case, folder, tmp_path / "another", save_steps=1)
    free(size * 3 // 4)
    with pytest.raises(ValueError, match=REFUSED.format("one checkpoint .*", size * 3 // 4)):
        check(case, folder, tmp_path / "another", save_steps=1)
    if case != "SGD":
        # The final models need no moments, two thirds of a checkpoint.
        check(case, folder, tmp_path / "another", save_steps=0)


@pytest.mark.parametrize("case", ["separate", "no critic", "LoRA, adapter"])
def test_a_disk_without_room_for_the_final_models_is_refused(case, folder, tmp_path, free):
    start(case, folder, tmp_path / "whole").train()
    size = written(tmp_path / "whole/final")
    free(size)
    check(case, folder, tmp_path / "another")
    free(size // 2)
    with pytest.raises(ValueError, match=REFUSED.format("the final models", size // 2)):
        check(case, folder, tmp_path / "another")


def test_the_room_for_all_checkpoints_that_will_be_kept_is_asked_for(tmp_path, free):
    free(0)
    built = build_actor_critic(tiny_causal_lm("llama"), critic_layout="separate")

    def check(steps, **settings):
        args = tiny_config(tmp_path, overwrite_output_dir=True, **{"save_steps": 10, "save_total_limit": 2, **settings})
        DiskCheck(args, built, adamw=True).check(steps)

    with pytest.raises(ValueError, match=r"one checkpoint .*save none \(save_steps: 0\), or train fewer") as caught:
        check(10)
    size = int(re.search(r"more than (\d+) bytes", str(caught.value))[1])
    # The third is complete before the first is deleted.
    free(3 * size - 1)
    with pytest.raises(
        ValueError, match=rf"3 checkpoints .*limit: 2\), will have more than {3 * size} .*limit: 1\) or"
    ):
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


def test_a_loaded_model_may_be_evaluated_on_a_full_disk_but_not_trained_and_nothing_is_written(
    folder, tmp_path, free, monkeypatch
):
    free(1000)
    trainer = tiny_trainer(tmp_path / "run", trainer_arguments={"eval_dataset": prompts(3)})
    assert "eval/scores" in trainer.evaluate()
    before = sorted(path.name for path in (tmp_path / "run").rglob("*"))
    with pytest.raises(ValueError, match="has too little room: the final models will have"):
        trainer.train()
    assert sorted(path.name for path in (tmp_path / "run").rglob("*")) == before
    # Of a file system whose size is not known nothing is asked.
    free(0, total=0)
    start("separate", folder, tmp_path / "unknown").train()


def test_a_finished_run_that_is_resumed_with_nothing_left_to_do_needs_no_room_for_a_checkpoint(folder, tmp_path, free):
    start("separate", folder, tmp_path, save_steps=1).train()
    free(1000)
    start("separate", folder, tmp_path, save_steps=1).train(resume_from_checkpoint=True)
    with pytest.raises(ValueError, match="has too little room: one checkpoint"):
        start("separate", folder, tmp_path, save_steps=1, total_episodes=8).train(resume_from_checkpoint=True)


def test_only_the_main_process_needs_room(tmp_path, free, monkeypatch):
    free(0)
    monkeypatch.setenv("RANK", "1")
    built = build_actor_critic(tiny_causal_lm("llama"), critic_layout="separate")
    DiskCheck(tiny_config(tmp_path), built, adamw=True).check()
