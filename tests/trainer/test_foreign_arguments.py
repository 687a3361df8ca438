"""Arguments of other trainers' constructors: one error says what all of them are here, before anything is loaded."""

import dataclasses
import inspect

import pytest

from alpaca_ppo import PPOConfig, PPOTrainer


@dataclasses.dataclass
class GRPOConfig:
    """As TRL's: it sets some of its own fields."""

    output_dir: str = "out"
    num_generations: int = 8
    beta: float = 0.0
    top_p: float = 1.0
    include_for_metrics: list[str] = dataclasses.field(default_factory=list)

    def __post_init__(self):
        self.beta = self.beta or 0.0


def refusal(**arguments):
    with pytest.raises(ValueError) as caught:
        PPOTrainer(**arguments)
    return str(caught.value)


def test_all_arguments_of_trls_trainers_are_explained_and_missing_ones_named():
    text = refusal(reward_model="r", data_collator=None, rollout_func=len, num_generations=8)
    assert (
        text.splitlines()[0] == "PPOTrainer does not take reward_model, data_collator, rollout_func, num_generations "
        "(help(PPOTrainer) has its names):"
    )
    assert "  reward_model (TRL): reward_funcs: r" in text
    assert "  data_collator (TRL): not needed: " in text
    assert "  rollout_func (TRL): no counterpart: override PPOTrainer._generate" in text
    assert "  num_generations (TRL): num_return_sequences: 8" in text
    assert "\nThe arguments model are missing." in text


def test_a_typo_in_an_argument_is_met_with_the_right_name():
    assert "  train_datset: did you mean train_dataset?" in refusal(model="m", train_datset=[])


def test_another_trainers_configuration_is_explained():
    text = refusal(model="m", reward_funcs=len, args=GRPOConfig(num_generations=4, beta=0.1), train_dataset=[])
    assert text.startswith(f"args is of the class {GRPOConfig.__module__}.GRPOConfig; PPOTrainer takes a PPOConfig")
    assert "  num_generations (TRL): num_return_sequences: 4" in text and "kl_loss_coef: 0.1" in text
    assert "top_p" not in text and "output_dir" not in text and "include_for_metrics" not in text
    plain = refusal(model="m", reward_funcs=len, args={"seed": 1}, train_dataset=[])
    assert (
        plain == "args is of the class builtins.dict; PPOTrainer takes a PPOConfig, `from alpaca_ppo import PPOConfig`"
    )


def test_a_subclass_may_take_arguments_of_its_own():
    class Own(PPOTrainer):
        def __init__(self, bonus, **kwargs):
            self.bonus = bonus, kwargs

    assert Own(2.0, tools=3).bonus == (2.0, {"tools": 3})
    assert list(inspect.signature(PPOTrainer).parameters)[:3] == ["model", "reward_funcs", "args"]
    assert PPOConfig().seed == 42
