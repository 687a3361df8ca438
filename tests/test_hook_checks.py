import pytest
import torch

from alpaca_ppo import PPOTrainer
from alpaca_ppo.hook_checks import RETURNED, check_rollouts, checked
from tests.tiny_runs import tiny_trainer


def rollouts():
    return {"responses": torch.zeros(2, 3, dtype=torch.long), "response_mask": torch.ones(2, 3, dtype=torch.bool)}


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, r"rollout\(\) returned a NoneType; .* responses"),
        ({"logprobs": torch.zeros(2, 3)}, "a dict without responses"),
        ({**rollouts(), "texts": ["a", "b"]}, "texts as a list"),
        ({**rollouts(), "extra": torch.zeros(3)}, r"extra of shape \(3,\).* \(2,\)"),
        ({**rollouts(), "extra": torch.tensor(1.0)}, r"extra of shape \(\)"),
    ],
)
def test_rollouts_must_be_tensors_with_a_row_a_response(returned, message):
    with pytest.raises(ValueError, match=message):
        check_rollouts(returned)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, r"_shape_reward\(\) returned a NoneType; it must return a dict with shaped_rewards, non_"),
        ({"kl": torch.zeros(2, 3)}, "without shaped_rewards, non_score_rewards; it must"),
        ({name: torch.zeros(2) for name in RETURNED["_shape_reward"]}, r"shaped_rewards of shape \(2,\).* \(2, 3\)"),
        (
            {name: torch.zeros(2, 3) for name in RETURNED["_shape_reward"]} | {"mine": [1, 2]},
            r"returned mine as a list; it must be a tensor of shape \(2,\)",
        ),
    ],
)
def test_what_a_hook_returns_is_named_where_it_is_wrong(returned, message):
    with pytest.raises(ValueError, match=message):
        checked("_shape_reward", returned, rollouts())


def test_numbers_that_are_not_finite_are_refused_before_any_update():
    shaped = {name: torch.zeros(2, 3) for name in RETURNED["_shape_reward"]}
    shaped["kl"][1, 2] = torch.inf
    with pytest.raises(FloatingPointError, match=r"_shape_reward\(\) returned non-finite kl"):
        checked("_shape_reward", shaped, rollouts())
    outside = rollouts()
    outside["response_mask"][1, 2] = False
    assert checked("_shape_reward", shaped, outside)["kl"] is shaped["kl"]


class Careless(PPOTrainer):
    fault = ""

    def rollout(self, prompt_batches):
        rollouts = super().rollout(prompt_batches)
        return {**rollouts, "texts": ["a"]} if self.fault == "rollout" else rollouts

    def _estimate_advantage(self, **arguments):
        estimated = super()._estimate_advantage(**arguments)
        return {"advantages": estimated["advantages"]} if self.fault == "estimate" else estimated

    def compute_value_loss(self, batch, outputs):
        return None if self.fault == "nothing" else super().compute_value_loss(batch, outputs)

    def compute_policy_loss(self, batch, outputs):
        loss, stats = super().compute_policy_loss(batch, outputs)
        if self.fault == "floats":
            stats = {name: float(value) for name, value in stats.items()}
        if self.fault == "vector":
            stats["mine"] = torch.zeros(3)
        if self.fault == "whole":
            loss = loss.expand(2)
        return (loss.detach(), stats) if self.fault == "loss" else (loss, stats)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("rollout", r"rollout\(\) returned texts"),
        ("estimate", r"_estimate_advantage\(\) returned a dict without returns"),
        ("loss", r"compute_policy_loss\(\) returned"),
        ("whole", r"compute_policy_loss\(\) returned"),
        ("nothing", r"compute_value_loss\(\) returned None"),
        ("vector", r"the statistic 'mine' of a loss has shape \(3,\)"),
    ],
)
def test_a_step_names_the_hook_that_is_wrong(fault, message, tmp_path):
    trainer = tiny_trainer(tmp_path, trainer_class=Careless)
    trainer.fault = fault
    with pytest.raises(ValueError, match=message):
        trainer.step(trainer.prompt_batches(0))


def test_statistics_may_be_plain_numbers(tmp_path):
    trainers = [tiny_trainer(tmp_path / name, trainer_class=Careless) for name in ("a", "b")]
    trainers[1].fault = "floats"
    first, second = (trainer.step(trainer.prompt_batches(0)) for trainer in trainers)
    assert second["ppo/loss/policy"] == pytest.approx(first["ppo/loss/policy"], abs=1e-7)
