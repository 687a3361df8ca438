"""Optimizer and engine from a run's configuration."""

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType

from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.distributed.deepspeed_engine import DeepSpeedEngine
from alpaca_ppo.distributed.engine import Engine
from alpaca_ppo.models import ActorCritic
from alpaca_ppo.registry import GENERATION_BACKENDS

# Devices that have torch's fused AdamW for every floating-point dtype.
_FUSED_DEVICES = ("cpu", "cuda")


def make_optimizer(model: ActorCritic, args: PPOConfig, device: torch.device) -> torch.optim.Optimizer:
    """AdamW over the trainable parameters; weight decay applies to matrices only, not to biases and norms.

    The critic's parameters (`ActorCritic.critic_parameters`) use `critic_learning_rate`, `critic_weight_decay` and
    `critic_adam_*`, and the policy's value of each that is None. With `optim: adamw_torch_fused`, one kernel updates
    weight and moments in a single pass, which computes in float32 (float64 weights: float64) and rounds once at its
    end; torch's default computes in the weight's dtype, one operator after another. Each group's `fused` is part of the
    optimizer's state: a resumed run goes on with its checkpoint's.

    Args:
        model: policy and critic.
        args: of the run.
        device: where the run trains; devices other than CPU and CUDA get torch's default implementation.
    """
    critic_decay = _first_given(args.critic_weight_decay, args.weight_decay)
    policy = {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    critic = {
        "lr": _first_given(args.critic_learning_rate, args.learning_rate),
        "betas": (
            _first_given(args.critic_adam_beta1, args.adam_beta1),
            _first_given(args.critic_adam_beta2, args.adam_beta2),
        ),
        "eps": _first_given(args.critic_adam_epsilon, args.adam_epsilon),
    }
    groups: list[dict[str, Any]] = []
    for parameters, settings, decay in (
        (model.policy_parameters(), policy, args.weight_decay),
        (model.critic_parameters(), critic, critic_decay),
    ):
        groups.append({"params": [p for p in parameters if p.dim() >= 2], "weight_decay": decay, **settings})
        groups.append({"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0, **settings})
    fused = args.optim == "adamw_torch_fused" and device.type in _FUSED_DEVICES
    # None, not False: torch then chooses between its loop and its foreach implementation.
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=args.learning_rate, fused=True if fused else None
    )


def check_no_critic_settings(args: PPOConfig) -> None:
    """Checks that `args` has no AdamW settings of the critic, because the optimizer is the user's.

    Raises:
        ValueError: naming the first that is set.
    """
    settings = {
        "critic_learning_rate": args.critic_learning_rate,
        "critic_weight_decay": args.critic_weight_decay,
        "critic_adam_beta1": args.critic_adam_beta1,
        "critic_adam_beta2": args.critic_adam_beta2,
        "critic_adam_epsilon": args.critic_adam_epsilon,
    }
    for name, value in settings.items():
        if value is not None:
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
        gather_for_generation=args.ds3_gather_for_generation,
    )


def replays_decoding(args: PPOConfig) -> bool:
    """Whether the run may capture and replay decode steps if it trains on a GPU (`generation.graphs`)."""
    return args.cuda_graphs and bool(GENERATION_BACKENDS.trait(args.generation_backend, "refills"))


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
