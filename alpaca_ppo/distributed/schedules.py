"""The learning-rate schedules of policy and critic, each of which counts the optimizer steps of its own.

The formulas are transformers'. How many optimizer steps a run takes is counted in `ppo.minibatches`.
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
        self._groups: dict[Part, _Groups] = {}
        self._schedules: dict[Part, Any] = {"both": own}
        if own is not None:
            _check_no_critic_schedule(args, "`optimizers` has a schedule", "leave the schedule out")
            return
        critic = {id(parameter) for parameter in actor_critic.critic_parameters()}
        roles = [{id(p) in critic for p in group["params"]} for group in optimizer.param_groups]
        if {True, False} in roles:
            cause = f"group {roles.index({True, False})} of the optimizer has parameters of policy and critic"
            _check_no_critic_schedule(args, cause, "make a group of policy_parameters() and one of critic_parameters()")
            self._schedules = {"both": make_scheduler(optimizer, args, totals.total)}
            return
        self._groups = {
            "policy": _Groups(optimizer, [i for i, role in enumerate(roles) if role == {False}]),
            "critic": _Groups(optimizer, [i for i, role in enumerate(roles) if role == {True}]),
        }
        self._schedules = {
            "policy": make_scheduler(self._groups["policy"], args, totals.policy),
            "critic": make_scheduler(self._groups["critic"], args, totals.critic, of_critic=True),
        }

    @property
    def of_policy(self) -> Any:
        """The schedule of the policy's learning rate."""
        return self._schedules["both" if "both" in self._schedules else "policy"]

    def step(self, part: Part) -> None:
        """Counts an optimizer step that trained `part`, and sets the learning rates of the next."""
        for of, schedule in self._schedules.items():
            if of == "both" or part in ("both", of):
                if of in self._groups:
                    # A schedule of torch wants to see its optimizer step first.
                    self._groups[of].step()
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
        numbers: of the groups.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, numbers: Sequence[int]) -> None:
        self._whole, self._numbers = optimizer, numbers
        self.defaults = optimizer.defaults

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups, as they are now."""
        return [self._whole.param_groups[i] for i in self._numbers]

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Does nothing: the whole optimizer has taken the step."""


def make_scheduler(
    optimizer: torch.optim.Optimizer, args: PPOConfig, total_steps: int, *, of_critic: bool = False
) -> Any:
    """The schedule that `args` name for the policy, or `of_critic`, over `total_steps` optimizer steps. Of a
    warm-up that is a share of these, the number of steps is rounded up, as in transformers.

    Raises:
        ValueError: when transformers has no schedule of that name.
    """
    name, warmup = args.lr_scheduler_type, args.warmup_steps
    if of_critic and args.critic_lr_warmup_steps is not None:
        warmup = args.critic_lr_warmup_steps
    warmup = math.ceil(warmup * total_steps) if warmup < 1 else warmup
    try:
        return get_scheduler(name, optimizer, num_warmup_steps=int(warmup), num_training_steps=total_steps)
    except ValueError as error:
        raise ValueError(f"lr_scheduler_type is {name!r}: {error}") from error


def _check_no_critic_schedule(args: PPOConfig, cause: str, remedy: str) -> None:
    """Checks that the critic has no schedule of its own.

    Raises:
        ValueError: naming the option that gives it one.
    """
    if args.critic_lr_warmup_steps is not None:
        raise ValueError(
            f"critic_lr_warmup_steps is {args.critic_lr_warmup_steps}, but {cause}, so policy and critic have one "
            f"schedule; set critic_lr_warmup_steps: null, or {remedy}"
        )
