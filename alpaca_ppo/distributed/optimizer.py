"""Optimizer and engine from a run's configuration."""

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType

from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.distributed.deepspeed_engine import DeepSpeedEngine
from alpaca_ppo.distributed.engine import Engine
from alpaca_ppo.models import ActorCritic

# Devices that have torch's fused AdamW for every floating-point dtype.
_FUSED_DEVICES = ("cpu", "cuda")


def make_optimizer(model: ActorCritic, args: PPOConfig, device: torch.device) -> torch.optim.Optimizer:
    """AdamW over the trainable parameters; weight decay applies to matrices only, not to biases and norms.

    The critic's parameters (`ActorCritic.critic_parameters`) use `critic_learning_rate`, and
    the policy's value of one that is None. On CPU and CUDA one kernel updates weight and moments in a single pass,
    which computes in float32 (float64 weights: float64) and rounds once at its end. Each group's `fused` is part of
    the optimizer's state: a resumed run goes on with its checkpoint's.
    """
    betas = (args.adam_beta1, args.adam_beta2)
    groups: list[dict[str, Any]] = []
    for parameters, rate, epsilon in (
        (model.policy_parameters(), args.learning_rate, args.adam_epsilon),
        (
            model.critic_parameters(),
            _first_given(args.critic_learning_rate, args.learning_rate),
            args.adam_epsilon,
        ),
    ):
        matrices, vectors = [p for p in parameters if p.dim() >= 2], [p for p in parameters if p.dim() < 2]
        for own, decay in ((matrices, args.weight_decay), (vectors, 0.0)):
            if own:
                groups.append({"params": own, "weight_decay": decay, "lr": rate, "betas": betas, "eps": epsilon})
    # None, not False: torch then chooses between its loop and its foreach implementation.
    return torch.optim.AdamW(groups, lr=args.learning_rate, fused=True if device.type in _FUSED_DEVICES else None)


def check_no_critic_settings(args: PPOConfig) -> None:
    """Checks that `args` has no AdamW settings of the critic, because the optimizer is the user's.

    Raises:
        ValueError: naming the first that is set.
    """
    for name in ("critic_learning_rate",):
        if (value := getattr(args, name)) is not None:
            raise ValueError(
                f"{name} is {value}, but the optimizer in `optimizers` has its own settings; give the critic's "
                f"parameters a group with theirs, and set {name}: null"
            )


def _first_given(own: float | None, default: float) -> float:
    return default if own is None else own


def make_engine(
    accelerator: Accelerator,
    actor_critic: ActorCritic,
    optimizer: torch.optim.Optimizer,
    args: PPOConfig,
    micro_batches: int,
) -> Engine:
    """A `DeepSpeedEngine` if the accelerator has a DeepSpeed plugin, else an `Engine`.

    Raises:
        ValueError: under DeepSpeed, for an optimizer group with parameters of both policy and critic.
    """
    critic_max_grad_norm = _first_given(args.critic_max_grad_norm, args.max_grad_norm)
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        return Engine(
            accelerator,
            actor_critic,
            optimizer,
            max_grad_norm=args.max_grad_norm,
            critic_max_grad_norm=critic_max_grad_norm,
        )
    _check_groups(optimizer, actor_critic)
    return DeepSpeedEngine(
        accelerator,
        actor_critic,
        optimizer,
        max_grad_norm=args.max_grad_norm,
        critic_max_grad_norm=critic_max_grad_norm,
        micro_batches=micro_batches,
        step_per_device_batch_size=args.step_per_device_batch_size,
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


def _check_groups(optimizer: torch.optim.Optimizer, actor_critic: ActorCritic) -> None:
    """Checks that each group belongs to the policy or to the critic: DeepSpeed flattens a group into one tensor, so it
    clips whole groups, and leaves whole groups out of a step.

    Raises:
        ValueError: for a group with parameters of both policy and critic.
    """
    policy = {id(parameter) for parameter in actor_critic.policy_parameters()}
    for number, group in enumerate(optimizer.param_groups):
        if len({id(parameter) in policy for parameter in group["params"]}) > 1:
            raise ValueError(
                f"group {number} of the optimizer has parameters of policy and critic: under DeepSpeed a group is one "
                "tensor, of which no part can be clipped or frozen; make one group of policy_parameters() and one of "
                "critic_parameters()"
            )
