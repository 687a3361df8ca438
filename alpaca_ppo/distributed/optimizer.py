"""Optimizer and engine from a run's configuration. A new engine is one file, and one entry in `make_engine`."""

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

    The critic's parameters (`ActorCritic.critic_parameters`) use `critic_learning_rate`, or `learning_rate` where that
    is None. On CPU and CUDA one kernel updates weight and moments in a single pass, which computes in float32 (float64
    weights: float64) and rounds once at its end.
    """
    critic_rate = args.learning_rate if args.critic_learning_rate is None else args.critic_learning_rate
    common = {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    groups: list[dict[str, Any]] = []
    for parameters, rate in (
        (model.policy_parameters(), args.learning_rate),
        (model.critic_parameters(), critic_rate),
    ):
        matrices, vectors = [p for p in parameters if p.dim() >= 2], [p for p in parameters if p.dim() < 2]
        for own, decay in ((matrices, args.weight_decay), (vectors, 0.0)):
            if own:
                groups.append({"params": own, "weight_decay": decay, "lr": rate, **common})
    # None, not False: torch then chooses between its loop and its foreach implementation.
    return torch.optim.AdamW(groups, lr=args.learning_rate, fused=True if device.type in _FUSED_DEVICES else None)


def prepared_optimizer(
    given: torch.optim.Optimizer | None, model: ActorCritic, args: PPOConfig, device: torch.device
) -> torch.optim.Optimizer:
    """The optimizer that the user gave, without parameters that are frozen, or AdamW.

    Raises:
        ValueError: when it is given together with AdamW settings of the critic, or leaves out trainable parameters.
    """
    if given is None:
        return make_optimizer(model, args, device)
    if args.critic_learning_rate is not None:
        raise ValueError(
            f"critic_learning_rate is {args.critic_learning_rate}, but the optimizer in `optimizers` has rates of its "
            "own; give the critic's parameters a group with theirs, and set critic_learning_rate: null"
        )
    covered = {id(p) for group in given.param_groups for p in group["params"]}
    missing = [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in covered]
    if missing:
        raise ValueError(
            f"the optimizer leaves out {len(missing)} trainable parameters, the first is {missing[0]}; create it from "
            "build_actor_critic(...).parameters() and pass that ActorCritic as the model"
        )
    # DeepSpeed has no state for frozen ones.
    for group in given.param_groups:
        group["params"] = [parameter for parameter in group["params"] if parameter.requires_grad]
    given.param_groups[:] = [group for group in given.param_groups if group["params"]]
    return given


def make_engine(
    accelerator: Accelerator, actor_critic: ActorCritic, optimizer: torch.optim.Optimizer, args: PPOConfig
) -> Engine:
    """The engine of the accelerator's way to distribute.

    Raises:
        ValueError: under DeepSpeed, for an optimizer group with parameters of both policy and critic.
    """
    engines = {DistributedType.DEEPSPEED: DeepSpeedEngine}
    return engines.get(accelerator.distributed_type, Engine)(accelerator, actor_critic, optimizer, args)
