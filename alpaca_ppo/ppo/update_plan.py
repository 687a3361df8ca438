"""The optimizer steps of the update on a rollout: the rows that each trains on, and their order.

They do not depend on the number of processes.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.distributed.optimizer import Part, StepCounts
from alpaca_ppo.functional.rng import seeded_permutation


class UpdateStep(NamedTuple):
    """An optimizer step of the update on a rollout.

    Attributes:
        part: whether it trains policy, critic or both.
        rows: (step batch,) int64, its rows of the global rollouts.
        step: the run's step, from 0.
        key: the seed of its random numbers.
    """

    part: Part
    rows: Tensor
    step: int
    key: tuple[int, ...]


def optimizer_steps(rows: int, step_batch_size: int, epochs: int) -> int:
    """The optimizer steps of a rollout of `rows` responses: epochs * ceil(rows / step_batch_size)."""
    return epochs * -(-rows // step_batch_size)


def step_counts(rows: int, args: PPOConfig, *, critic_only: bool) -> StepCounts:
    """How many optimizer steps `plan_updates` plans for the same arguments."""
    critic = optimizer_steps(rows, args.critic_batch_rows, args.num_critic_epochs) if args.uses_critic else 0
    policy = 0 if critic_only else optimizer_steps(rows, args.step_batch_size, args.ppo_epochs)
    joint = not critic_only and not args.separate_critic_steps
    return StepCounts(policy if joint else policy + critic, policy, critic)


def plan_updates(rows: int, args: PPOConfig, step: int, *, critic_only: bool) -> list[UpdateStep]:
    """The optimizer steps of the update on a rollout of `rows` responses in `step` (from 0), in their order.

    Each epoch is a permutation of all rows, the same for policy and critic, split into batches; the last may be
    smaller. Separate steps of the critic come first: they precede changes of the base model, which the critic may
    share with the policy, and `target_kl_stop` skips none of them.
    """
    phases: list[tuple[Part, int, int]] = []
    if args.separate_critic_steps or critic_only:
        phases.append(("critic", args.critic_batch_rows, args.num_critic_epochs))
    if not critic_only:
        phases.append(("policy" if args.separate_critic_steps else "both", args.step_batch_size, args.ppo_epochs))
    plan: list[UpdateStep] = []
    for part, batch_size, epochs in phases:
        for epoch in range(epochs):
            for batch in torch.split(seeded_permutation(rows, args.seed, step, epoch), batch_size):
                plan.append(UpdateStep(part, batch, step, (args.seed, step, epoch, len(plan))))
    return plan
