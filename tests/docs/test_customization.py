"""Each example of docs/customization.md trains, as a user would run it: registered names and rewards by train_ppo.py
and the YAML beneath them, callbacks and subclasses in a trainer.
"""

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from torch.testing import assert_close
from transformers import TrainerCallback

from alpaca_ppo import PPOConfig, PPOTrainer
from alpaca_ppo.cli.train import run_training
from tests.docs.conftest import RUN
from tests.docs.markdown import Block, all_blocks
from tests.tiny_runs import metric_lines, tiny_config, tiny_trainer, weights

PAGE = [block for block in all_blocks("python", "yaml") if block.page == "docs/customization.md"]
PROGRAMS = {
    block.heading: block for block in PAGE if block.language == "python" and block.heading != "Without the trainer"
}
SETTINGS = {block.heading: block for block in PAGE if block.language == "yaml"}
IN_TRAINERS = sorted(set(PROGRAMS) - set(SETTINGS))
TINY = ("query_len", "response_len", "rollout_batch_size", "step_batch_size", "step_per_device_batch_size")


def names_of(block: Block) -> dict:
    names: dict = {}
    exec(compile("\n" * (block.line - 1) + block.text, block.page, "exec"), names)
    return names


def shown(heading: str, base: type) -> type | None:
    """The subclass of `base` under `heading`."""
    found = [value for value in names_of(PROGRAMS[heading]).values() if isinstance(value, type) and value is not base]
    return next((value for value in found if issubclass(value, base)), None)


def test_the_page_adds_one_of_each():
    registered = {"An advantage estimator", "A policy loss", "A critic head", "A KL estimator", "A reward source"}
    registered |= {"Metrics of a reward function", "A sampler"}
    assert set(SETTINGS) == registered
    assert {"A metric", "A callback", "Tokens from another engine"} <= set(IN_TRAINERS)


@pytest.mark.parametrize("heading", SETTINGS)
def test_what_is_registered_trains_two_steps_from_the_command_line(heading, workplace):
    args = tiny_config("out")
    run = RUN | {name: getattr(args, name) for name in TINY} | {"reward_funcs": ["my_rewards.py:count_even"]}
    run |= {"total_episodes": 20, "report_to": "none", "use_cpu": True, "output_dir": "out", "learning_rate": 1e-3}
    (workplace / "my_rewards.py").write_text(
        "def count_even(completion_ids, **columns):\n"
        "    return [sum(token % 2 == 0 for token in ids) for ids in completion_ids]\n"
    )
    rows = [json.dumps({"prompt": f"w{10 + i}"}) for i in range(40)]
    (workplace / "prompts.jsonl").write_text("\n".join(rows))
    (workplace / "run.yaml").write_text(yaml.safe_dump(run | yaml.safe_load(SETTINGS[heading].text)))
    run_training(["--config", "run.yaml"])
    assert [line["ppo/policy/optimizer_steps"] for line in metric_lines("out")] == [6.0, 6.0]


@pytest.mark.parametrize("heading", IN_TRAINERS)
def test_what_is_passed_in_or_overridden_trains_two_steps(heading, tmp_path):
    trainer_class, callback = shown(heading, PPOTrainer), shown(heading, TrainerCallback)
    assert trainer_class or callback
    trainer = tiny_trainer(
        tmp_path,
        trainer_class=trainer_class or PPOTrainer,
        trainer_arguments={"callbacks": [callback()] if callback else None},
    )
    before = weights(trainer)
    trainer.train()
    assert trainer.state.global_step == 2
    assert any(not torch.equal(before[name], value) for name, value in weights(trainer).items())


def test_the_critic_head_learns_a_mean_and_a_deviation():
    head = names_of(PROGRAMS["A critic head"])["GaussianHead"](4)
    predictions = torch.tensor([[[0.0, 0.0], [1.0, math.log(4.0)]]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    # 0.5 * (0 + 2^2 / 1) = 2 and 0.5 * (log 4 + 2^2 / 4) = 0.5 log 4 + 0.5; deviations 1 and 2
    batch = {"returns": torch.tensor([[2.0, 3.0]]), "response_mask": mask, "denominator": None}
    loss, stats = head.loss(predictions, batch, PPOConfig())
    assert_close(loss, torch.tensor((2.5 + 0.5 * math.log(4.0)) / 2))
    assert_close(stats["deviation"], torch.tensor(1.5))
    states = torch.ones(3, 4)
    assert_close(head(states).values, head.linear(states)[:, 0])


@pytest.fixture(autouse=True)
def _forget_registrations(workplace):
    """What an example registers is forgotten after its test."""


def rollouts_and_shaped(trainer):
    rollouts = trainer.rollout(trainer.prompt_batches(0))
    keys = ("rewards", "responses", "logprobs", "ref_logprobs", "response_mask")
    return rollouts, trainer._shape_reward(*(rollouts[key] for key in keys))["shaped_rewards"]


def test_the_other_engines_log_probs_are_the_trainers(tmp_path):
    trainer = tiny_trainer(tmp_path, trainer_class=shown("Tokens from another engine", PPOTrainer), temperature=0.7)
    rollouts = trainer.rollout(trainer.prompt_batches(0))
    assert_close(rollouts["rollout_logprobs"], rollouts["logprobs"], rtol=1e-4, atol=1e-5)
    lengths = rollouts["response_mask"].sum(dim=1)
    assert_close(rollouts["stopped"], rollouts["responses"].gather(1, lengths.unsqueeze(1) - 1).squeeze(1) == 2)


def test_the_callback_ends_the_run_and_saves(tmp_path):
    callback = shown("A callback", TrainerCallback)()
    control = SimpleNamespace(should_save=False, should_training_stop=False)
    callback.on_log(None, None, control, logs={"objective/scores": 4.5})
    assert not control.should_training_stop
    callback.on_log(None, None, control, logs={"objective/scores": 4.6})
    assert control.should_save and control.should_training_stop


def test_the_length_aware_reward_costs_each_token(tmp_path):
    trainer_class = shown("A length-aware reward", PPOTrainer)
    rollouts, shaped = rollouts_and_shaped(tiny_trainer(tmp_path / "a", trainer_class=trainer_class))
    _, plain = rollouts_and_shaped(tiny_trainer(tmp_path / "b"))
    assert_close(shaped.sum(1), plain.sum(1) - 0.01 * rollouts["response_mask"].sum(1))


def test_process_rewards_pay_new_tokens_and_the_score_at_the_end(tmp_path):
    trainer_class = shown("Rewards for single tokens", PPOTrainer)
    trainer = tiny_trainer(tmp_path, trainer_class=trainer_class, kl_coef=0.0)
    rollouts, shaped = rollouts_and_shaped(trainer)
    for row, keep in enumerate(rollouts["response_mask"]):
        distinct = len(set(rollouts["responses"][row][keep].tolist()))
        assert float(shaped[row].sum()) == pytest.approx(0.1 * distinct + float(rollouts["scores"][row]), abs=1e-5)


def test_the_page_says_what_an_advantage_is_estimated_from(tmp_path):
    seen = {}

    class Recorder(PPOTrainer):
        def _estimate_advantage(self, rewards, values, response_mask, **extra):
            seen.update(extra, rewards=rewards, tokenizer=self.processing_class)
            return super()._estimate_advantage(rewards, values, response_mask, **extra)

    page = (Path(__file__).parents[2] / "docs/customization.md").read_text()
    trainer = tiny_trainer(tmp_path, trainer_class=Recorder, kl_coef=0.5, ppo_epochs=1)
    for step in range(2):
        rollouts = trainer.rollout(trainer.prompt_batches(step))
        trainer.step(trainer.prompt_batches(step))
    rows = set(re.findall(r"^\| `(\w+)` \| \(B", page, re.MULTILINE))
    assert set(seen) - {"rewards", "tokenizer"} == rows
    assert "`self.processing_class`" in page and seen["tokenizer"].decode([10])
    # The policy has moved: the KL counts in them, and the score is a part.
    assert not torch.allclose(seen["rewards"].sum(dim=1), seen["scores"])
    assert torch.equal(seen["scores"], rollouts["rewards"])
