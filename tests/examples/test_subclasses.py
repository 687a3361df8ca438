"""The subclasses that examples/README.md shows, run as they stand there."""

import re
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from alpaca_ppo import PPOTrainer
from tests.tiny_runs import tiny_trainer, weights

README = Path(__file__).parents[2] / "examples/README.md"


def shown_trainers() -> dict[str, tuple[type[PPOTrainer], str]]:
    found = {}
    for code in re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL):
        names: dict = {}
        exec(compile(code, str(README), "exec"), names)
        for value in names.values():
            if isinstance(value, type) and issubclass(value, PPOTrainer) and value is not PPOTrainer:
                found[value.__name__] = (value, code)
    return found


def rollouts_and_shaped(trainer):
    rollouts = trainer.rollout(trainer.prompt_batches(0))
    keys = ("rewards", "responses", "logprobs", "ref_logprobs", "response_mask")
    return rollouts, trainer._shape_reward(*(rollouts[key] for key in keys))["shaped_rewards"]


@pytest.mark.parametrize("name", ["LengthAwareTrainer", "ReinforceTrainer", "ProcessRewardTrainer"])
def test_each_subclass_is_short_and_trains(name, tmp_path):
    trainer_class, code = shown_trainers()[name]
    assert len(code.split("class ")[1].strip().splitlines()) < 25
    trainer = tiny_trainer(tmp_path, trainer_class=trainer_class)
    before = weights(trainer)
    trainer.step(trainer.prompt_batches(0))
    assert any(not torch.equal(before[name], value) for name, value in weights(trainer).items())


def test_the_length_aware_reward_costs_each_token(tmp_path):
    trainer_class, _ = shown_trainers()["LengthAwareTrainer"]
    rollouts, shaped = rollouts_and_shaped(tiny_trainer(tmp_path / "a", trainer_class=trainer_class))
    _, plain = rollouts_and_shaped(tiny_trainer(tmp_path / "b"))
    assert_close(shaped.sum(1), plain.sum(1) - 0.01 * rollouts["response_mask"].sum(1))


def test_the_other_advantage_is_the_whitened_return_to_go(tmp_path):
    trainer_class, _ = shown_trainers()["ReinforceTrainer"]
    trainer = tiny_trainer(tmp_path, trainer_class=trainer_class)
    mask = torch.tensor([[1, 1], [1, 0]], dtype=torch.bool)
    outcome = trainer._estimate_advantage(torch.tensor([[1.0, 2.0], [0.0, 0.0]]), torch.zeros(2, 2), mask)
    # returns 3 2 0, mean 5/3, unbiased variance (16 + 1 + 25) / 9 / 2 = 7/3
    assert_close(outcome["returns"], torch.tensor([[3.0, 2.0], [0.0, 0.0]]))
    expected = (torch.tensor([3.0, 2.0, 0.0]) - 5 / 3) / (7 / 3) ** 0.5
    assert_close(outcome["advantages"][mask], expected)


def test_process_rewards_pay_new_tokens_and_the_score_at_the_end(tmp_path):
    trainer_class, _ = shown_trainers()["ProcessRewardTrainer"]
    trainer = tiny_trainer(tmp_path, trainer_class=trainer_class, kl_coef=0.0)
    rollouts, shaped = rollouts_and_shaped(trainer)
    for row, keep in enumerate(rollouts["response_mask"]):
        distinct = len(set(rollouts["responses"][row][keep].tolist()))
        assert float(shaped[row].sum()) == pytest.approx(0.1 * distinct + float(rollouts["scores"][row]), abs=1e-5)
