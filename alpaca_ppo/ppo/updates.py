"""`Updater`: the optimizer steps on global rollouts: the micro-batches of each rank, their backward passes, the step.

A micro-batch's loss is its part of the whole optimizer step's loss, so the update does not depend on the size of
micro-batches or the number of ranks. A loss or gradient that is not finite never reaches the weights: no rank steps,
and neither the optimizer nor the schedule counts the update, as in transformers and DeepSpeed.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.data.schedule import PromptSchedule
from alpaca_ppo.distributed.accelerator import make_engine
from alpaca_ppo.distributed.collectives import any_rank, gather_list
from alpaca_ppo.distributed.engine import Engine, LearningRates
from alpaca_ppo.distributed.optimizer import Part, Schedules, StepCounts, prepared_optimizer
from alpaca_ppo.functional.packing import PackedRows, row_lengths
from alpaca_ppo.functional.rng import seeded_generator
from alpaca_ppo.models import ActorCritic, ActorCriticOutputs
from alpaca_ppo.ppo.losses import Terms, step_denominators
from alpaca_ppo.ppo.metrics import BatchStats, StatsAccumulator, StepStats, logs_entropies
from alpaca_ppo.ppo.minibatches import (
    DeviceRows,
    UpdateStep,
    plan_micro_batches,
    row_tensors,
    step_counts,
    trained_rows,
    upload,
)
from alpaca_ppo.types import Rollouts

LossHook = Callable[[Rollouts, ActorCriticOutputs], Terms]
"""`compute_policy_loss` or `compute_value_loss`."""


@dataclass(frozen=True)
class MicroBatch:
    """Some rows of an optimizer step, on one rank."""

    update: UpdateStep
    rows: Rollouts
    """On the device, with `denominator` and what else the loss needs of the whole optimizer step."""
    packed: tuple[PackedRows, PackedRows]
    """The rows as policy and critic read them."""
    lengths: list[int]
    """Tokens of each row, in the pass where it has the most."""
    tokens: int
    """Tokens under the response mask."""
    last: bool
    """Whether it is the optimizer step's last one on this rank."""


class Applied(NamedTuple):
    """What became of an optimizer step, the same on every rank."""

    fault: str | None = None
    """Which loss or gradient was not finite; the step was not taken then."""
    stopped: bool = False
    """Whether the approximate KL exceeded `target_kl_stop`; the step was not taken then."""


class Updater:
    """The optimizer steps of a run.

    Args:
        engine: computes and applies gradients; `engine.model` is the wrapped policy and critic.
        schedules: of the learning rates, stepped once per optimizer step of what they are for.
        args: of the run.
    """

    def __init__(self, engine: Engine, schedules: Schedules, args: PPOConfig) -> None:
        self.engine, self.accelerator, self.schedules, self.args = engine, engine.accelerator, schedules, args
        self.learning_rates: LearningRates = engine.learning_rates
        """The learning rates of the last optimizer step of the policy, and of that of the critic."""
        self.num_updates = 0
        """Optimizer steps taken by this object."""
        self._warned = False

    def micro_batches(self, rollouts: Rollouts, update: UpdateStep) -> Iterator[MicroBatch]:
        """This rank's micro-batches of an optimizer step: as many on every rank, some of them without rows, perhaps.

        Rows that give no gradient (`trained_rows`) are left out; without any other, the gradient is 0.
        """
        rows = update.rows[trained_rows(rollouts, self.args)[update.rows]]
        lengths = row_lengths(rollouts["query_attn_masks"], rollouts["response_mask"])[rows].tolist()
        actor_critic, rank = self.engine.actor_critic, self.accelerator.process_index
        plan = plan_micro_batches(
            lengths, self.args, padding_free=actor_critic.padding_free, num_ranks=self.accelerator.num_processes
        )[rank]
        shared = step_denominators(rollouts, rows, self.args)
        if actor_critic.critic is not None:
            taus = actor_critic.critic.head.sample_taus(seeded_generator(*update.key))
            shared |= {} if taus is None else {"value_taus": taus}
        device = self.accelerator.device
        common = {key: upload(value, device) for key, value in shared.items()}
        tensors: Any = rollouts
        self.engine.begin()
        batches = DeviceRows(tensors, [rows[positions].tolist() for positions in plan], device)
        for number, (positions, batch) in enumerate(zip(plan, batches, strict=True)):
            # Packed on the CPU, so that no length is asked of the device.
            packed = actor_critic.pack(*row_tensors(batch.host).values(), device=device)
            micro: Any = {**batch.device, **common}
            tokens = int(batch.host["response_mask"].sum())
            own = [lengths[position] for position in positions]
            yield MicroBatch(update, micro, packed, own, tokens, last=number + 1 == len(plan))

    def backward(self, batch: MicroBatch, policy_loss: LossHook, value_loss: LossHook) -> BatchStats:
        """The forward and backward passes of a micro-batch; returns what its losses have measured.

        A critic that shares no activations with the policy goes first, in passes of its own, so that the two graphs are
        never in memory together.

        Raises:
            ValueError: unless a hook returns a scalar loss with a gradient, and statistics.
            torch.OutOfMemoryError: with what to set.
        """
        engine, part = self.engine, batch.update.part
        critic = engine.actor_critic.critic
        passes = [(part != "critic", part != "policy" and critic is not None)]
        if passes == [(True, True)] and critic is not None and not critic.shares_states:
            passes = [(False, True), (True, False)]
        found: dict[str, Terms] = {}
        try:
            for with_policy, with_critic in passes:
                ends = (with_policy, with_critic) == passes[-1]
                with (
                    # A reward function or a callback may have left them off.
                    torch.enable_grad(),
                    engine.gradient_sync(last_batch=batch.last, last_pass=ends),
                    # Gradient checkpointing recomputes activations of the critic with its adapter.
                    nullcontext() if with_policy else engine.actor_critic.critic_active(),
                ):
                    outputs: ActorCriticOutputs = engine.model(
                        *row_tensors(batch.rows).values(),
                        value_taus=batch.rows.get("value_taus"),
                        temperature=self.args.temperature,
                        chunk_size=self.args.logprob_chunk_size,
                        packed=batch.packed,
                        with_policy=with_policy,
                        with_critic=with_critic,
                        with_entropies=self.args.entropy_coef > 0 or logs_entropies(batch.update.step),
                    )
                    hooks = {"compute_policy_loss": policy_loss} if with_policy else {}
                    hooks |= {"compute_value_loss": value_loss} if with_critic else {}
                    own = {name: _checked(name, hook(batch.rows, outputs)) for name, hook in hooks.items()}
                    loss = torch.stack([loss for loss, _ in own.values()]).sum()
                    if ends:
                        loss = loss + engine.unused_parameter_loss(self._untouched(with_policy, with_critic))
                    engine.backward(loss)
                    found |= {name: (loss.detach(), stats) for name, (loss, stats) in own.items()}
        except torch.OutOfMemoryError as error:
            rows, tokens = len(batch.lengths), sum(batch.lengths)
            raise torch.OutOfMemoryError(
                f"process {self.accelerator.process_index} ran out of memory in a micro-batch of {rows} responses "
                f"({tokens} tokens); set max_tokens_per_micro_batch: {max(tokens // 2, 1)} or gradient_checkpointing: "
                f"true (docs/memory.md has more). {str(error).partition(chr(10))[0]}"
            ) from error
        terms = [found[name] for name in ("compute_policy_loss", "compute_value_loss") if name in found]
        total = torch.stack([loss for loss, _ in terms]).sum()
        stats = {name: value for _, of_hook in terms for name, value in of_hook.items()} | {"loss/total": total}
        fault = non_finite(total, stats)
        if fault is not None:
            fault += f" on rank {self.accelerator.process_index} (prompts {batch.rows['prompt_ids'].tolist()})"
        return BatchStats(stats, batch.tokens, batch.lengths, not engine.actor_critic.padding_free, fault)

    def _untouched(self, with_policy: bool, with_critic: bool) -> list[nn.Parameter]:
        """The parameters that a pass gives no gradient to."""
        actor_critic = self.engine.actor_critic
        policy, critic = (actor_critic.policy_parameters(), actor_critic.critic_parameters())
        return ([] if with_policy else policy) + ([] if with_critic else critic)

    def apply(self, update: UpdateStep, stats: StepStats, check: Callable[[Mapping[str, float]], Any]) -> Applied:
        """Takes the optimizer step whose gradients `backward` has added up, and counts it in `stats`; every rank must
        call it.

        Args:
            update: the optimizer step. The parameters that it does not train, and their optimizer state, stay.
            stats: of the step's update so far.
            check: called with the statistics of all ranks before the first step of the policy; may raise.
        """
        fault, stopped = None, False
        if any_rank(bool(stats.faults), self.accelerator):
            everywhere = gather_list(stats.faults, self.accelerator)
            fault = "; ".join(each for of_rank in everywhere for each in of_rank)
        limit, first = self.args.target_kl_stop, stats.policy_unchanged
        if fault is None and update.part != "critic" and (first or limit is not None):
            whole = StatsAccumulator()
            for of_rank in gather_list(stats.update, self.accelerator):
                whole.merge(of_rank)
            measured = whole.compute()
            # Without a mean, no row of the step gives a gradient.
            if first and whole.means:
                check(measured)
            if limit is not None and whole.means:
                # KL(old || new) of the step's rows on all ranks, in nats per token.
                if "policy/approx_kl_k3" not in measured:
                    raise ValueError(
                        f"target_kl_stop is {limit}, but the policy loss measured no approx_kl_k3; add it to its "
                        "statistics, or set target_kl_stop: null"
                    )
                stopped = measured["policy/approx_kl_k3"] > limit
        if fault is None and not stopped:
            fault = self._take(update.part, stats)
        stats.end_update(update.part, taken=not stopped, skipped=fault is not None)
        return Applied(fault, stopped)

    def _take(self, part: Part, stats: StepStats) -> str | None:
        """Clips and steps; returns whose gradient is not finite, with which the step is not taken."""
        before, now = self.learning_rates, self.engine.learning_rates
        self.learning_rates = LearningRates(
            before.policy if part == "critic" else now.policy, before.critic if part == "policy" else now.critic
        )
        norms = self.engine.step(frozen=self._untouched(part != "critic", part != "policy"))
        if norms.non_finite is not None:
            return f"{norms.non_finite}, though the losses of all ranks are finite"
        self.schedules.step(part)
        self.num_updates += 1
        measured = {} if part == "critic" else {"policy/grad_norm": norms.policy}
        if part != "policy" and norms.critic is not None:
            measured["val/grad_norm"] = norms.critic
        stats.update.add({name: torch.tensor(n, dtype=torch.float64) for name, n in measured.items()}, tokens=1)
        return None

    def warn(self, train_stats: Mapping[str, float]) -> None:
        """Warns, once, if returns lie outside the critic's support."""
        outside = train_stats.get("val/outside_support", 0.0)
        # Probability mass at the edges is no problem in itself: returns may be 0 or 1 with the support [0, 1].
        if outside > 0.01 and not self._warned:
            self._warned = True
            warnings.warn(
                f"{outside:.1%} of the returns lie outside the critic's support, so the values are clipped; widen "
                "value_support, or scale the reward down with reward_weights",
                stacklevel=3,
            )


def _checked(hook: str, returned: Any) -> Terms:
    loss = returned[0] if isinstance(returned, tuple) and len(returned) == 2 else None
    if not isinstance(loss, Tensor) or loss.dim() != 0 or not loss.requires_grad:
        raise ValueError(f"{hook}() returned {returned!r:.200}; return (loss, stats), a scalar with a gradient first")
    terms: Terms = returned
    return terms


def non_finite(loss: Tensor, stats: Mapping[str, Any]) -> str | None:
    """Describes which terms (`loss/*` in `stats`) make `loss` non-finite; None if `loss` is finite."""
    if bool(torch.isfinite(loss)):
        return None
    terms = {name: float(value) for name, value in stats.items() if name.startswith("loss/") and name != "loss/total"}
    bad = [f"{name} is {value}" for name, value in terms.items() if not math.isfinite(value)]
    return " and ".join(bad or [f"the loss is {float(loss)}"])


def make_updater(
    accelerator: Accelerator,
    actor_critic: ActorCritic,
    optimizer: torch.optim.Optimizer | None,
    scheduler: Any,
    *,
    args: PPOConfig,
    schedule: PromptSchedule,
) -> Updater:
    """The updater of a run; if `optimizer` or `scheduler` is None, the default one is created. All processes must have
    agreed on padding (`agreements`).

    Raises:
        ValueError: when `optimizer` is given together with AdamW settings of the critic, or does not hold every
            trainable parameter; or for a learning-rate schedule that does not fit.
    """
    optimizer = prepared_optimizer(optimizer, actor_critic, args, accelerator.device)
    n, pretraining = args.num_return_sequences, args.critic_pretraining_steps
    planned = [
        step_counts(schedule.num_prompts_at(step) * n, args, critic_only=step < pretraining)
        for step in range(schedule.num_steps)
    ]
    totals = StepCounts(*map(sum, zip(*planned, strict=True)))
    schedules = Schedules(optimizer, actor_critic, args, totals, own=scheduler)
    actor_critic.train()
    return Updater(make_engine(accelerator, actor_critic, optimizer, args), schedules, args)
