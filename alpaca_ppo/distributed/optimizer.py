"""A run's optimizer, and the learning-rate schedules of policy and critic, each of which counts its own steps.

How many optimizer steps a run takes is counted in `ppo.update_plan`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch.optim import Optimizer
from transformers import get_scheduler

from alpaca_ppo.config.learning_options import chosen_rate
from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.distributed.launcher import launched_rank
from alpaca_ppo.models import ActorCritic

# What an optimizer step trains.
Part = Literal["both", "policy", "critic"]
RATES = {5e7: ((1e-4, 1e-2), (5e-4, 2e-2)), 1e9: ((1e-6, 1e-5), (5e-6, 2e-4)), math.inf: ((3e-7, 1e-5), (5e-6, 5e-5))}
"""For models with fewer weights than the key: the lowest and highest usual learning rate of all weights, and of LoRA.
docs/getting-started.md has the sources."""


def unusual_rate(model: ActorCritic, rate: float) -> str:
    """A sentence if the policy's learning `rate` is outside of `RATES`; else, and for a rate of 0, an empty text."""
    weights = sum(parameter.numel() for parameter in model.policy.model.parameters())
    has_adapter = model.policy.adapters is not None
    low, high = next(ranges for limit, ranges in RATES.items() if weights < limit)[has_adapter]
    what = f"{'LoRA on' if has_adapter else 'all weights of'} a model of {weights / 1e6:,.4g} million weights"
    usual = f"usually take {low:g} to {high:g}: see docs/getting-started.md#learning-rates"
    return "" if rate == 0 or low <= rate <= high else f"warning: learning_rate is {rate:g}, but {what} {usual}"


def make_optimizer(model: ActorCritic, args: PPOConfig, device: torch.device) -> Optimizer:
    """AdamW over the trainable parameters, with weight decay only of matrices, not of biases and norms.

    On CPU and CUDA a fused kernel computes in float32 (float64 weights: float64) and rounds once at its end. Prints the
    learning rate if it is ten times the default because an adapter is trained.
    """
    has_adapter = model.policy.adapters is not None
    rate = chosen_rate(args.learning_rate, has_adapter=has_adapter)
    critic_rate = args.critic_rate(has_adapter=has_adapter)
    if args.learning_rate is None and has_adapter and launched_rank() == 0:
        print(f"learning_rate: {rate:g}, ten times the default, because an adapter is trained")
    common = {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    groups: list[dict[str, Any]] = []
    for parameters, part_rate in ((model.policy_parameters(), rate), (model.critic_parameters(), critic_rate)):
        for are_matrices, decay in ((True, args.weight_decay), (False, 0.0)):
            if members := [p for p in parameters if (p.dim() >= 2) == are_matrices]:
                groups.append({"params": members, "weight_decay": decay, "lr": part_rate, **common})
    # These devices have the fused kernel for every floating-point dtype. With None, not False, torch chooses between
    # its loop and its foreach implementation.
    return torch.optim.AdamW(groups, lr=rate, fused=True if device.type in ("cpu", "cuda") else None)


def prepared_optimizer(given: Optimizer | None, model: ActorCritic, args: PPOConfig, device: torch.device) -> Optimizer:
    """The user's optimizer, from which frozen parameters are removed, or else AdamW. Raises a ValueError for a user's
    optimizer with `critic_learning_rate`, or without some trainable parameter.
    """
    if given is None:
        return make_optimizer(model, args, device)
    if args.critic_learning_rate is not None:
        rate = f"critic_learning_rate is {args.critic_learning_rate}"
        raise ValueError(f"{rate}, but the optimizer in `optimizers` has rates of its own; set it to null")
    covered = {id(p) for group in given.param_groups for p in group["params"]}
    missing = [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in covered]
    if missing:
        remedy = "create it from build_actor_critic(...).parameters() and pass that ActorCritic as the model"
        raise ValueError(f"the optimizer leaves out {len(missing)} trained parameters, such as {missing[0]}; {remedy}")
    # DeepSpeed has no state for frozen parameters.
    for group in given.param_groups:
        group["params"] = [parameter for parameter in group["params"] if parameter.requires_grad]
    given.param_groups[:] = [group for group in given.param_groups if group["params"]]
    return given


def group_parts(optimizer: Optimizer, actor_critic: ActorCritic) -> list[Part]:
    """Whose parameters each of the optimizer's groups holds."""
    critic = {id(parameter) for parameter in actor_critic.critic_parameters()}
    in_critic = ([id(parameter) in critic for parameter in group["params"]] for group in optimizer.param_groups)
    return ["policy" if not any(group) else "critic" if all(group) else "both" for group in in_critic]


class StepCounts(NamedTuple):
    """Numbers of optimizer steps: in total, and of those that train the policy and the critic (0 without one)."""

    total: int
    policy: int
    critic: int

    def __str__(self) -> str:
        if self.critic in (0, self.policy):
            return f"{self.policy} optimizer steps"
        return f"{self.policy} optimizer steps of the policy and {self.critic} of the critic"


class Schedules:
    """The learning rates of an optimizer: the policy's groups follow one schedule, the critic's groups another.

    A user's schedule (`own`) sets the rates of all groups and counts all optimizer steps; so does that of `args` if a
    group has parameters of both. `actor_critic` is not yet wrapped or sharded, and `totals` are those of the whole run.
    Raises a ValueError for an unknown schedule, and for `critic_lr_warmup_steps` if the critic has none of its own.

    Attributes:
        totals: as given.
        unusual_rate: of the function of that name, for the policy's rate.
    """

    def __init__(
        self, optimizer: Optimizer, actor_critic: ActorCritic, args: PPOConfig, totals: StepCounts, *, own: Any = None
    ) -> None:
        self.totals = totals
        parts = group_parts(optimizer, actor_critic)
        # The schedules below start by changing the rates.
        rates = [group["lr"] for group, part in zip(optimizer.param_groups, parts, strict=True) if part != "critic"]
        self.unusual_rate = unusual_rate(actor_critic, float(max(rates, default=0.0)))
        self._schedules: dict[Part, Any]
        if own is not None or "both" in parts:
            if args.critic_lr_warmup_steps is not None:
                reason = "`optimizers` has a schedule" if own is not None else "a group of the optimizer trains both"
                raise ValueError(f"critic_lr_warmup_steps is {args.critic_lr_warmup_steps}, but {reason}; leave it out")
            self._schedules = {"both": own or make_scheduler(optimizer, args, "both", totals)}
            return
        separate: tuple[Part, ...] = ("policy", "critic")
        self._schedules = {p: make_scheduler(_Groups(optimizer, parts, p), args, p, totals) for p in separate}

    @property
    def of_policy(self) -> Any:
        """The schedule of the policy's learning rate."""
        return self._schedules["both" if "both" in self._schedules else "policy"]

    def step(self, part: Part) -> None:
        """Counts an optimizer step that trained `part`, and sets the learning rates of the next."""
        for scheduled, schedule in self._schedules.items():
            if scheduled == "both":
                schedule.step()
            elif part in (scheduled, "both"):
                # torch warns if a schedule steps before its optimizer.
                schedule.optimizer.step()
                schedule.step()

    def state_dict(self) -> dict[str, Any]:
        """How far each schedule has come."""
        return {part: schedule.state_dict() for part, schedule in self._schedules.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned. The learning rates themselves are part of the optimizer's state."""
        for part, schedule in self._schedules.items():
            schedule.load_state_dict(state[part])


class _Groups(Optimizer):
    """The groups of `optimizer` that hold `part`, for a schedule that sets their learning rates; updates nothing."""

    def __init__(self, optimizer: Optimizer, parts: Sequence[Part], part: Part) -> None:
        self._optimizer, self._indices = optimizer, [i for i, group_part in enumerate(parts) if group_part == part]
        # With this rate, a polynomial schedule computes the factor by which it ends.
        self.defaults = optimizer.defaults | ({"lr": self.param_groups[0]["lr"]} if self._indices else {})

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Looked up each time, because restoring the optimizer's state replaces its groups."""
        return [self._optimizer.param_groups[i] for i in self._indices]

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Does nothing: the whole optimizer has taken the step."""


def make_scheduler(optimizer: Optimizer, args: PPOConfig, part: Part, totals: StepCounts) -> Any:
    """The schedule of `part` that `args` name. A warm-up below 1 is a share of all steps, rounded up as in
    transformers; one that lasts for the whole run is printed.
    """
    name = "warmup_steps" if part != "critic" or args.critic_lr_warmup_steps is None else "critic_lr_warmup_steps"
    warmup = getattr(args, name)
    total = totals.total if part == "both" else getattr(totals, part)
    steps = math.ceil(warmup * total) if warmup < 1 else int(warmup)
    if 0 < total <= steps and launched_rank() == 0:
        print(f"{name} is {warmup}, but the run has {total} optimizer steps for {part}: the learning rate only rises")
    # A polynomial schedule divides by the difference of the two.
    return get_scheduler(args.lr_scheduler_type, optimizer, steps, max(total, steps + 1))
