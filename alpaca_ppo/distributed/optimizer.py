"""A run's optimizer, and the learning-rate schedules of policy and critic, each of which counts its own steps.

The formulas of the schedules are transformers'. How many optimizer steps a run takes is counted in `ppo.update_plan`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from transformers import get_scheduler

from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.models import ActorCritic

Part = Literal["both", "policy", "critic"]
"""What an optimizer step trains."""

# Devices that have torch's fused AdamW for every floating-point dtype.
_FUSED_DEVICES = ("cpu", "cuda")


def make_optimizer(model: ActorCritic, args: PPOConfig, device: torch.device) -> torch.optim.Optimizer:
    """AdamW over the trainable parameters; weight decay applies to matrices only, not to biases and norms.

    The critic's parameters (`ActorCritic.critic_parameters`) use `critic_rate`. On CPU and CUDA one kernel updates
    weight and moments in a single pass, which computes in float32 (float64 weights: float64) and rounds once at its
    end.
    """
    common = {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    groups: list[dict[str, Any]] = []
    parts = ((model.policy_parameters(), args.learning_rate), (model.critic_parameters(), args.critic_rate))
    for parameters, rate in parts:
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


def group_parts(optimizer: torch.optim.Optimizer, actor_critic: ActorCritic) -> list[Part]:
    """Whose parameters each of the optimizer's groups holds."""
    critic = {id(parameter) for parameter in actor_critic.critic_parameters()}
    found: list[Part] = []
    for group in optimizer.param_groups:
        of_critic = sum(id(parameter) in critic for parameter in group["params"])
        found.append("policy" if not of_critic else "critic" if of_critic == len(group["params"]) else "both")
    return found


class StepCounts(NamedTuple):
    """How many optimizer steps there are."""

    total: int
    policy: int
    """Those that train the policy."""
    critic: int
    """Those that train the critic; 0 without one."""

    def __str__(self) -> str:
        if self.critic in (0, self.policy):
            return f"{self.policy} optimizer steps"
        return f"{self.policy} optimizer steps of the policy and {self.critic} of the critic"


class Schedules:
    """The learning rates of an optimizer: the policy's groups follow one schedule, the critic's groups another.

    A schedule of the user's own sets all of them and counts all optimizer steps. So does the default one for an
    optimizer of the user's own in which a group has parameters of both.

    Args:
        optimizer: over the parameters of `actor_critic`.
        actor_critic: policy and critic, before they are wrapped or sharded.
        args: of the run.
        totals: optimizer steps of the whole run.
        own: a schedule of the user's own; None for those that `args` name.

    Raises:
        ValueError: for a schedule that transformers does not have, or a warm-up of the critic where there can be only
            one schedule.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        actor_critic: ActorCritic,
        args: PPOConfig,
        totals: StepCounts,
        *,
        own: Any = None,
    ) -> None:
        self.totals = totals
        """Optimizer steps of the whole run, as they were planned at its start."""
        parts = group_parts(optimizer, actor_critic)
        self._schedules: dict[Part, Any]
        if own is not None or "both" in parts:
            if args.critic_lr_warmup_steps is not None:
                one = "`optimizers` has a schedule" if own is not None else "a group of the optimizer trains both"
                raise ValueError(
                    f"critic_lr_warmup_steps is {args.critic_lr_warmup_steps}, but {one}, so policy and critic have "
                    "one schedule; set critic_lr_warmup_steps: null"
                )
            self._schedules = {"both": own or make_scheduler(optimizer, args, args.warmup_steps, totals.total)}
            return
        policy, critic = (_Groups(optimizer, parts, of) for of in ("policy", "critic"))
        warmup = args.warmup_steps if args.critic_lr_warmup_steps is None else args.critic_lr_warmup_steps
        self._schedules = {
            "policy": make_scheduler(policy, args, args.warmup_steps, totals.policy),
            "critic": make_scheduler(critic, args, warmup, totals.critic),
        }

    @property
    def of_policy(self) -> Any:
        """The schedule of the policy's learning rate."""
        return self._schedules["both" if "both" in self._schedules else "policy"]

    def step(self, part: Part) -> None:
        """Counts an optimizer step that trained `part`, and sets the learning rates of the next."""
        for of, schedule in self._schedules.items():
            if of == "both" or part in ("both", of):
                if of != "both":
                    # A schedule of torch wants to see its optimizer step first.
                    schedule.optimizer.step()
                schedule.step()

    def state_dict(self) -> dict[str, Any]:
        """How far each schedule has come."""
        return {of: schedule.state_dict() for of, schedule in self._schedules.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned. The learning rates themselves are part of the optimizer's state."""
        for of, schedule in self._schedules.items():
            schedule.load_state_dict(state[of])


class _Groups(torch.optim.Optimizer):
    """Some groups of an optimizer, as a schedule needs them to set their learning rates; it updates nothing.

    Args:
        optimizer: holds the groups. Restoring its state replaces them, so they are looked up each time.
        parts: of the groups.
        part: of those to show.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parts: Sequence[Part], part: Part) -> None:
        self._whole, self._numbers = optimizer, [i for i, found in enumerate(parts) if found == part]
        self.defaults = optimizer.defaults

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups, as they are now."""
        return [self._whole.param_groups[i] for i in self._numbers]

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Does nothing: the whole optimizer has taken the step."""


def make_scheduler(optimizer: torch.optim.Optimizer, args: PPOConfig, warmup: float, total_steps: int) -> Any:
    """The schedule that `args` name, over `total_steps` optimizer steps. Of a `warmup` that is a share of these, the
    number of steps is rounded up, as in transformers.
    """
    steps = math.ceil(warmup * total_steps) if warmup < 1 else int(warmup)
    return get_scheduler(args.lr_scheduler_type, optimizer, num_warmup_steps=steps, num_training_steps=total_steps)
