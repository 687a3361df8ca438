"""Reward functions that draw from the global generators of Python, NumPy and torch."""

import random

import numpy as np
import torch

from tests.integration.run_tiny import noisy_reward
from tests.tiny_runs import metric_lines, tiny_trainer


def seed_all(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def draws():
    return [random.random(), np.random.rand(), float(torch.rand(()))]


def noisy(folder, **overrides):
    return tiny_trainer(folder, trainer_arguments={"reward_funcs": noisy_reward}, **overrides)


def test_a_reward_that_draws_repeats_from_run_to_run_and_depends_on_the_seed(tmp_path):
    for name, state in (("first", 1), ("second", 2)):
        seed_all(state)
        noisy(tmp_path / name).train()
    seed_all(3)
    noisy(tmp_path / "other", seed=7).train()
    lines = {name: metric_lines(tmp_path / name) for name in ("first", "second", "other")}
    assert lines["first"] == lines["second"]
    scores = [line["objective/scores"] % 1 for name in ("first", "other") for line in lines[name]]
    assert len(set(scores)) == 4


def test_building_a_trainer_and_sampling_leave_the_generators_to_the_reward(tmp_path):
    seed_all(5)
    numbers = [draws() for _ in range(12)]
    seed_all(5)
    trainer = noisy(tmp_path)
    assert draws() == numbers[0]
    # The reward draws once for each of the 10 responses.
    trainer.rollout(trainer.prompt_batches(0))
    assert draws() == numbers[11]
