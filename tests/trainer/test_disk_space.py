"""A run whose first checkpoint cannot fit on the disk is refused before a model is loaded, and no other run is."""

import shutil
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from alpaca_ppo.models import build_actor_critic
from alpaca_ppo.trainer.preflight import check_disk_space
from tests.tiny_models import tiny_causal_lm, tiny_sequence_classifier, tiny_tokenizer
from tests.tiny_runs import count_even, tiny_config, tiny_trainer

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
    return folder


def lora():
    return {"peft_config": LoraConfig(**LORA)}


CASES = {
    "separate": lambda folder: ({}, {}),
    "wide critic": lambda folder: ({"value_model": str(folder / "wide")}, {}),
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
    "SGD": lambda folder: (sgd(), {}),
}


def sgd():
    model = build_actor_critic(tiny_causal_lm("llama"), critic_layout="separate")
    return {"model": model, "optimizers": (torch.optim.SGD(model.parameters(), lr=0.1), None)}


@pytest.fixture
def free(monkeypatch):
    """Sets the free bytes of every disk."""
    return lambda free: monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))


def start(case, folder, output_dir, **settings):
    arguments, own = CASES[case](folder)
    settings = {"total_episodes": 4, "rollout_batch_size": 4, **own, **settings}
    return tiny_trainer(output_dir, trainer_arguments={"model": str(folder / "policy"), **arguments}, **settings)


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
    size = written(trainer.save_checkpoint())
    trainer.run_lock.release()
    free(size)
    start(case, folder, tmp_path / "another", save_steps=1)
    free(size * 3 // 4)
    with pytest.raises(ValueError, match=REFUSED.format("one checkpoint .*", size * 3 // 4)):
        start(case, folder, tmp_path / "another", save_steps=1)
    if case != "SGD":
        # The final models need no moments, two thirds of a checkpoint.
        start(case, folder, tmp_path / "another", save_steps=0)


@pytest.mark.parametrize("case", ["separate", "no critic", "LoRA, adapter"])
def test_a_disk_without_room_for_the_final_models_is_refused(case, folder, tmp_path, free):
    start(case, folder, tmp_path / "whole").train()
    size = written(tmp_path / "whole/final")
    free(size)
    start(case, folder, tmp_path / "another")
    free(size // 2)
    with pytest.raises(ValueError, match=REFUSED.format("the final models", size // 2)):
        start(case, folder, tmp_path / "another")


@pytest.mark.parametrize("case", ["separate", "wide critic", "LoRA, adapter", "trained adapter"])
def test_no_model_is_loaded_before_the_disk_is_known_to_be_too_small(case, folder, tmp_path, free, monkeypatch):
    def load(*args, **kwargs):
        raise AssertionError("a model is loaded")

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", load)
    free(1000)
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match="has too little room"):
        start(case, folder, tmp_path)
    # A run's random numbers do not depend on the check.
    assert torch.equal(torch.get_rng_state(), state)
    # The main process alone writes.
    monkeypatch.setenv("RANK", "1")
    check_disk_space(tiny_config(tmp_path), str(folder / "policy"), None, None, adamw=True)


def test_what_cannot_be_counted_is_left_to_the_check_that_knows_its_name(folder, tmp_path, free):
    free(0)
    policy = str(folder / "policy")
    nowhere = LoraConfig(**{**LORA, "target_modules": ["nowhere"]})
    for model, value_start, peft_config in (
        (str(tmp_path / "none"), None, None),
        (policy, None, nowhere),
        (policy, None, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)),
        (policy, str(tmp_path / "none"), LoraConfig(**{**LORA, "target_modules": ["nowhere"]})),
    ):
        args = tiny_config(tmp_path, critic_layout="shared" if value_start is None else "separate")
        check_disk_space(args, model, value_start, peft_config, adamw=True)
