"""Optimizer, learning-rate schedule and engine from a run's configuration."""

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from transformers import get_scheduler

from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.distributed.deepspeed_engine import DeepSpeedEngine
from alpaca_ppo.distributed.engine import Engine
from alpaca_ppo.models import ActorCritic


def make_optimizer(model: ActorCritic, args: PPOConfig) -> torch.optim.Optimizer:
    """AdamW over the trainable parameters; weight decay applies to matrices only, not to biases and norms.

    The critic's parameters (`ActorCritic.critic_parameters`) use `critic_learning_rate` if it is set.
    """
    critic_rate = args.learning_rate if args.critic_learning_rate is None else args.critic_learning_rate
    groups: list[dict[str, Any]] = []
    for parameters, rate in (
        (model.policy_parameters(), args.learning_rate),
        (model.critic_parameters(), critic_rate),
    ):
        matrices = [p for p in parameters if p.dim() >= 2]
        groups.append({"params": matrices, "lr": rate, "weight_decay": args.weight_decay})
        groups.append({"params": [p for p in parameters if p.dim() < 2], "lr": rate, "weight_decay": 0.0})
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=args.learning_rate,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon,
    )


def make_scheduler(optimizer: torch.optim.Optimizer, args: PPOConfig, total_steps: int) -> Any:
    """The named learning-rate schedule over `total_steps` optimizer steps.

    Raises:
        ValueError: when transformers has no schedule of that name.
    """
    try:
        return get_scheduler(
            args.lr_scheduler_type, optimizer, num_warmup_steps=args.warmup_steps, num_training_steps=total_steps
        )
    except ValueError as error:
        raise ValueError(f"lr_scheduler_type is {args.lr_scheduler_type!r}: {error}") from error


def make_engine(
    accelerator: Accelerator,
    actor_critic: ActorCritic,
    optimizer: torch.optim.Optimizer,
    args: PPOConfig,
    micro_batches: int,
) -> Engine:
    """A `DeepSpeedEngine` if the accelerator has a DeepSpeed plugin, else an `Engine`."""
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        return Engine(accelerator, actor_critic, optimizer, max_grad_norm=args.max_grad_norm)
    if args.critic_warmup_steps:
        _check_groups(optimizer, actor_critic, args.critic_warmup_steps)
    return DeepSpeedEngine(
        accelerator,
        actor_critic,
        optimizer,
        max_grad_norm=args.max_grad_norm,
        micro_batches=micro_batches,
        step_per_device_batch_size=args.step_per_device_batch_size,
        gather_for_generation=args.ds3_gather_for_generation,
    )


def check_covers_trainable(optimizer: torch.optim.Optimizer, actor_critic: ActorCritic) -> None:
    """Checks that `optimizer` holds every parameter that trains.

    Raises:
        ValueError: with the number of missing parameters and the name of the first.
    """
    covered = {id(p) for group in optimizer.param_groups for p in group["params"]}
    missing = [n for n, p in actor_critic.named_parameters() if p.requires_grad and id(p) not in covered]
    if missing:
        raise ValueError(
            f"the optimizer leaves out {len(missing)} trainable parameters, the first is {missing[0]}; create it from "
            "build_actor_critic(...).parameters() and pass that ActorCritic as the model"
        )


def drop_frozen_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Removes frozen parameters from the groups: DeepSpeed has no state for them."""
    for group in optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if parameter.requires_grad]
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]


def _check_groups(optimizer: torch.optim.Optimizer, actor_critic: ActorCritic, critic_warmup_steps: int) -> None:
    """Checks that a critic warm-up is possible: DeepSpeed flattens a group into one tensor, so it freezes whole groups.

    Raises:
        ValueError: for a group with parameters of both policy and critic.
    """
    policy = {id(parameter) for parameter in actor_critic.policy_parameters()}
    for number, group in enumerate(optimizer.param_groups):
        if len({id(parameter) in policy for parameter in group["params"]}) > 1:
            raise ValueError(
                f"critic_warmup_steps is {critic_warmup_steps}, and group {number} of the optimizer has parameters of "
                "policy and critic: DeepSpeed can only freeze a whole group; make one group of policy_parameters() and "
                "one of critic_parameters(), or set critic_warmup_steps to 0"
            )
