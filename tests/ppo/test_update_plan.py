"""Which optimizer steps an update takes, and on which rows: hand-worked cases."""

from itertools import groupby

import pytest

from alpaca_ppo.functional.rng import seeded_permutation
from alpaca_ppo.ppo.update_plan import optimizer_steps, plan_updates, step_counts
from tests.tiny_runs import tiny_config


def test_optimizer_steps_round_up_within_each_epoch():
    # ceil(10 / 4) = 3, twice.
    assert optimizer_steps(10, 4, 2) == 6
    assert optimizer_steps(8, 4, 3) == 6


GROUPS = {"adv_estimator": "grpo", "num_return_sequences": 2}
PLANS_OF_UPDATES = [
    # ceil(10 / 4) = 3 steps an epoch, two epochs.
    ({}, False, [("both", 6)], (6, 6, 6)),
    ({}, True, [("critic", 6)], (6, 0, 6)),
    (GROUPS, False, [("both", 6)], (6, 6, 0)),
    ({"critic_epochs": 3}, False, [("critic", 9), ("policy", 6)], (15, 6, 9)),
    # ceil(10 / 7) = 2.
    ({"critic_step_batch_size": 7}, False, [("critic", 4), ("policy", 6)], (10, 6, 4)),
    ({"critic_step_batch_size": 7, "critic_epochs": 1}, True, [("critic", 2)], (2, 0, 2)),
]


@pytest.mark.parametrize(("settings", "critic_only", "parts", "counts"), PLANS_OF_UPDATES)
def test_an_update_takes_the_critics_steps_and_then_the_policys(settings, critic_only, parts, counts):
    args = tiny_config("unused", ppo_epochs=2, **settings)
    plan = plan_updates(10, args, 3, critic_only=critic_only)
    assert [(part, len(list(steps))) for part, steps in groupby(plan, key=lambda step: step.part)] == parts
    assert step_counts(10, args, critic_only=critic_only) == counts
    assert {step.step for step in plan} == {3}
    # The key is seed, step, epoch and number; each epoch has all rows in an order of its own, alike for both parts.
    assert [(step.key[:2], step.key[3]) for step in plan] == [((args.seed, 3), number) for number in range(len(plan))]
    for part, _ in parts:
        orders = {}
        for step in plan:
            if step.part == part:
                orders[step.key[2]] = [*orders.get(step.key[2], []), *step.rows.tolist()]
        assert list(orders) == list(range(len(orders)))
        for epoch, order in orders.items():
            assert order == seeded_permutation(10, args.seed, 3, epoch).tolist()
