"""`Updater`: the optimizer steps on global rollouts: the micro-batches of each rank, their backward passes, the step.

A micro-batch's loss is its part of the whole optimizer step's loss, so the update does not depend on the size of
micro-batches or the number of ranks. A loss or gradient that is not finite never reaches the weights: no rank steps,
and neither the optimizer nor the schedule counts the update, as in transformers and DeepSpeed.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from alpaca_ppo import hook_checks
from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.data.schedule import PromptSchedule
from alpaca_ppo.distributed.accelerator import make_engine
from alpaca_ppo.distributed.collectives import any_rank, gather_list
from alpaca_ppo.distributed.engine import Engine, LearningRates
from alpaca_ppo.distributed.optimizer import Part, Schedules, StepCounts, prepared_optimizer
from alpaca_ppo.functional.packing import PackedRows, row_lengths
from alpaca_ppo.functional.rng import seeded_generator
from alpaca_ppo.models import ActorCritic, ActorCriticOutputs
from alpaca_ppo.ppo.batch_packing import plan_micro_batches
from alpaca_ppo.ppo.device_rows import DeviceRows, row_tensors, upload
from alpaca_ppo.ppo.losses import Terms, step_denominators
from alpaca_ppo.ppo.metrics import BatchStats, StatsAccumulator, StepStats, logs_entropies
from alpaca_ppo.ppo.row_masks import gradient_rows
from alpaca_ppo.ppo.update_plan import UpdateStep, step_counts
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

        Rows that give no gradient (`gradient_rows`) are left out; without any other, the gradient is 0.
        """
        actor_critic, rank = self.engine.actor_critic, self.accelerator.process_index
        rows = update.rows[gradient_rows(rollouts, self.args)[update.rows]]
        shared = step_denominators(rollouts, rows, self.args)
        if actor_critic.critic is not None:
            taus = actor_critic.critic.head.sample_taus(seeded_generator(*update.key))
            shared |= {} if taus is None else {"value_taus": taus}
        lengths = row_lengths(rollouts["query_attn_masks"], rollouts["response_mask"])[rows].tolist()
        plan = plan_micro_batches(
            lengths, self.args, padding_free=actor_critic.padding_free, num_ranks=self.accelerator.num_processes
        )[rank]
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

        Raises:
            ValueError: unless a hook returns a scalar loss with a gradient, and statistics.
            torch.OutOfMemoryError: with what to set.
        """
        hooks = {"policy": policy_loss, "critic": value_loss}
        passes, terms = self._passes(batch.update.part), dict[str, Terms]()
        with _memory_advice(batch, self.accelerator.process_index):
            for parts in passes:
                terms |= self._backward_pass(batch, {part: hooks[part] for part in parts}, last=parts == passes[-1])
        measured = [terms[part] for part in hooks if part in terms]
        total = torch.stack([loss for loss, _ in measured]).sum()
        stats = {name: value for _, of_hook in measured for name, value in of_hook.items()} | {"loss/total": total}
        fault = non_finite(total, stats)
        if fault is not None:
            fault += f" on rank {self.accelerator.process_index} (prompts {batch.rows['prompt_ids'].tolist()})"
        return BatchStats(stats, batch.tokens, batch.lengths, not self.engine.actor_critic.padding_free, fault)

    def _passes(self, part: Part) -> list[tuple[Part, ...]]:
        """What each backward pass of a micro-batch trains.

        A critic that shares no activations with the policy goes first, in a pass of its own, so that the two graphs are
        never in memory together.
        """
        critic = self.engine.actor_critic.critic
        if part != "both":
            return [(part,)]
        if critic is None:
            return [("policy",)]
        return [("policy", "critic")] if critic.shares_states else [("critic",), ("policy",)]

    def _backward_pass(self, batch: MicroBatch, hooks: Mapping[str, LossHook], *, last: bool) -> dict[str, Terms]:
        """One forward and backward pass for the losses of `hooks`; `last` on this micro-batch."""
        engine, with_policy, with_critic = self.engine, "policy" in hooks, "critic" in hooks
        # Gradient checkpointing recomputes activations of the critic with its adapter.
        adapter = nullcontext() if with_policy else engine.actor_critic.critic_active()
        # A reward function or a callback may have left gradients off.
        with torch.enable_grad(), engine.gradient_sync(last_batch=batch.last, last_pass=last), adapter:
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
            terms = {part: hook_checks.checked_terms(part, hook(batch.rows, outputs)) for part, hook in hooks.items()}
            loss = torch.stack([loss for loss, _ in terms.values()]).sum()
            if last:
                loss = loss + engine.unused_parameter_loss(self._without_gradient(with_policy, with_critic))
            engine.backward(loss)
        return {part: (loss.detach(), stats) for part, (loss, stats) in terms.items()}

    def _without_gradient(self, with_policy: bool, with_critic: bool) -> list[nn.Parameter]:
        """The parameters that a pass or step of policy, critic or both gives no gradient."""
        actor_critic = self.engine.actor_critic
        of_policy = [] if with_policy else actor_critic.policy_parameters()
        return of_policy + ([] if with_critic else actor_critic.critic_parameters())

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
        elif update.part != "critic":
            stopped = self._exceeds_kl(stats, check)
        if fault is None and not stopped:
            fault = self._take(update.part, stats)
        stats.end_update(update.part, taken=not stopped, skipped=fault is not None)
        return Applied(fault, stopped)

    def _exceeds_kl(self, stats: StepStats, check: Callable[[Mapping[str, float]], Any]) -> bool:
        """Whether the KL(old || new) of the optimizer step's rows on all ranks, in nats per token, is above
        `target_kl_stop`. Calls `check` before the first step of the policy.
        """
        limit, first = self.args.target_kl_stop, stats.policy_unchanged
        if limit is None and not first:
            return False
        whole = StatsAccumulator()
        for of_rank in gather_list(stats.update, self.accelerator):
            whole.merge(of_rank)
        measured = whole.compute()
        if not whole.means:
            # No row of the step gives a gradient.
            return False
        if first:
            check(measured)
        if limit is None:
            return False
        if "policy/approx_kl_k3" not in measured:
            raise ValueError(
                f"target_kl_stop is {limit}, but the policy loss measured no approx_kl_k3; add it to its statistics, "
                "or set target_kl_stop: null"
            )
        return measured["policy/approx_kl_k3"] > limit

    def _take(self, part: Part, stats: StepStats) -> str | None:
        """Clips and steps; returns whose gradient is not finite, with which the step is not taken."""
        before, now = self.learning_rates, self.engine.learning_rates
        with_policy, with_critic = part != "critic", part != "policy"
        self.learning_rates = LearningRates(
            now.policy if with_policy else before.policy, now.critic if with_critic else before.critic
        )
        norms = self.engine.step(frozen=self._without_gradient(with_policy, with_critic))
        if norms.non_finite is not None:
            return f"{norms.non_finite}, though the losses of all ranks are finite"
        self.schedules.step(part)
        self.num_updates += 1
        measured = {"policy/grad_norm": norms.policy} if with_policy else {}
        if with_critic and norms.critic is not None:
            measured["val/grad_norm"] = norms.critic
        stats.update.add({name: torch.tensor(n, dtype=torch.float64) for name, n in measured.items()}, tokens=1)
        return None

    def warn_outside_support(self, train_stats: Mapping[str, float]) -> None:
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


@contextmanager
def _memory_advice(batch: MicroBatch, process_index: int) -> Iterator[None]:
    """Adds to an out-of-memory error in the block what to set."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        rows, tokens = len(batch.lengths), sum(batch.lengths)
        raise torch.OutOfMemoryError(
            f"process {process_index} ran out of memory in a micro-batch of {rows} responses ({tokens} tokens); set "
            f"max_tokens_per_micro_batch: {max(tokens // 2, 1)} or gradient_checkpointing: true (docs/memory.md has "
            f"more). {str(error).partition(chr(10))[0]}"
        ) from error


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
