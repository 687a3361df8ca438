"""`Updater`: the optimizer steps on global rollouts: each rank's micro-batches, their backward passes, the step.

The losses of micro-batches add up to that of the optimizer step, so the update does not depend on their size or the
number of ranks. If a loss or gradient is not finite, no rank takes the step, and neither optimizer nor schedule counts
it, as in transformers and DeepSpeed.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from itertools import chain
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
from alpaca_ppo.functional.packing import PackedRows
from alpaca_ppo.functional.rng import seeded_generator
from alpaca_ppo.models import ActorCritic, ActorCriticOutputs
from alpaca_ppo.models.policy import use_update_mode
from alpaca_ppo.ppo.batch_packing import plan_micro_batches, row_lengths
from alpaca_ppo.ppo.device_rows import DeviceBatch, device_batches, row_tensors, upload
from alpaca_ppo.ppo.losses import Terms, step_denominators
from alpaca_ppo.ppo.metrics import BatchStats, StatsAccumulator, StepStats, logs_entropies
from alpaca_ppo.ppo.row_masks import gradient_rows
from alpaca_ppo.ppo.state_cache import StateCache
from alpaca_ppo.ppo.update_plan import UpdateStep, step_counts
from alpaca_ppo.types import Rollouts

# `compute_policy_loss` or `compute_value_loss`.
LossHook = Callable[[Rollouts, ActorCriticOutputs], Terms]


class MicroBatch(NamedTuple):
    """Some rows of an optimizer step, on one rank.

    Attributes:
        update: the optimizer step.
        rows: on the device, with `denominator` and what else the loss needs of the whole optimizer step.
        packed: the rows as policy and critic read them.
        lengths: tokens of each row, with `policy_states` only the response's.
        tokens: under the response mask.
        last: whether it is the optimizer step's last one on this rank.
        policy_states: what a cached critic reads; None for other critics and for the policy.
    """

    update: UpdateStep
    rows: Rollouts
    packed: tuple[PackedRows, PackedRows]
    lengths: list[int]
    tokens: int
    last: bool
    policy_states: Tensor | None


class Applied(NamedTuple):
    """Why an optimizer step was not taken, if it was not; the same on every rank.

    Attributes:
        fault: which loss or gradient was not finite.
        stopped: whether the approximate KL exceeded `target_kl_stop`.
    """

    fault: str | None = None
    stopped: bool = False


class Updater:
    """Computes gradients and takes optimizer steps.

    Attributes:
        engine: computes and applies gradients.
        schedules: of the learning rates of policy and critic, each stepped with its optimizer steps.
        accelerator, args: of the run.
        learning_rates: of the last optimizer step of the policy, and of the critic.
        num_updates: optimizer steps taken by this object.
        cache: of the states that a cached critic reads.
    """

    def __init__(self, engine: Engine, schedules: Schedules, args: PPOConfig) -> None:
        self.engine, self.accelerator, self.schedules, self.args = engine, engine.accelerator, schedules, args
        self.learning_rates: LearningRates = engine.learning_rates
        self.num_updates = 0
        critic = engine.actor_critic.critic
        self.cache = StateCache(self.accelerator, None if critic is None else critic.reader)
        self._warned = False

    def micro_batches(self, rollouts: Rollouts, update: UpdateStep) -> Iterator[MicroBatch]:
        """This rank's micro-batches of an optimizer step: equally many on every rank, some perhaps without rows.

        Rows that give no gradient (`gradient_rows`) are left out; if none is left, the gradient is 0.
        """
        actor_critic, device = self.engine.actor_critic, self.accelerator.device
        critic = actor_critic.critic
        rows = update.rows[gradient_rows(rollouts, self.args)[update.rows]]
        shared = step_denominators(rollouts, rows, self.args)
        taus = None if critic is None else critic.head.sample_taus(seeded_generator(*update.key))
        if taus is not None:
            shared["value_taus"] = taus
        shared = {key: upload(value, device) for key, value in shared.items()}
        reads_states = update.part == "critic" and critic is not None and critic.reader is not None
        keys = rollouts.get("state_keys") if reads_states else None
        if reads_states and keys is None:
            problem = "rollouts have no state_keys, by which a cached critic finds the policy's states"
            raise ValueError(f"{problem}; return those of super().rollout(), or set critic_layout: separate")
        if keys is None:
            all_lengths = row_lengths(rollouts["query_attn_masks"], rollouts["response_mask"])
            lengths = [all_lengths[row] for row in rows.tolist()]
            packs, ranks = actor_critic.padding_free, self.accelerator.num_processes
            groups = self._groups_that_share(rollouts, rows)
            plans = plan_micro_batches(lengths, self.args, padding_free=packs, num_ranks=ranks, groups=groups)
        else:
            lengths = rollouts["response_mask"][rows].sum(dim=1).tolist()
            plans = self.cache.plan(keys[rows], lengths, self.args)
        plan = plans[self.accelerator.process_index]
        self.engine.begin(update.part)
        tensors: Any = rollouts
        batches = device_batches(tensors, [rows[positions].tolist() for positions in plan], device)
        for number, (positions, batch) in enumerate(zip(plan, batches, strict=True)):
            lengths_here = [lengths[position] for position in positions]
            states = None if keys is None else self.cache.states(keys[rows[positions]], device, lengths_here)
            yield MicroBatch(
                update,
                rows={**batch.device, **shared},  # type: ignore[typeddict-item]
                packed=self._packed(batch),
                lengths=lengths_here,
                tokens=int(batch.host["response_mask"].sum()),
                last=number + 1 == len(plan),
                policy_states=states,
            )

    # The layout depends on whether gradients are on, and hooks may have left them off, on one rank alone.
    @torch.enable_grad()
    def _groups_that_share(self, rollouts: Rollouts, rows: Tensor) -> list[int]:
        """For each of `rows` a number, the same for those whose prompt is read once."""
        layout = self.engine.actor_critic.layouts[0]
        prompts, lengths = rollouts["prompt_ids"].tolist(), rollouts["query_attn_masks"].sum(dim=1).tolist()
        return [prompts[row] if layout.shares(lengths[row]) else -1 - row for row in rows.tolist()]

    @torch.enable_grad()
    def _packed(self, batch: DeviceBatch) -> tuple[PackedRows, PackedRows]:
        # From the tensors on the CPU, so that reading lengths does not wait for the device.
        return self.engine.actor_critic.pack(*row_tensors(batch.host).values(), device=self.accelerator.device)

    def backward(self, batch: MicroBatch, policy_loss: LossHook, value_loss: LossHook) -> BatchStats:
        """The forward and backward passes of a micro-batch; returns its statistics.

        Raises:
            ValueError: unless a hook returns a scalar loss with a gradient, and statistics.
            torch.OutOfMemoryError: with options that reduce memory.
        """
        hooks, terms = {"policy": policy_loss, "critic": value_loss}, dict[str, Terms]()
        passes = self._backward_passes(batch.update.part)
        with _memory_advice(batch, self.accelerator.process_index, self.args):
            for parts in passes:
                terms |= self._backward_pass(batch, {part: hooks[part] for part in parts}, last=parts == passes[-1])
        # The policy's first, in whatever order the passes ran.
        ordered = [terms[part] for part in hooks if part in terms]
        total = torch.stack([loss for loss, _ in ordered]).sum()
        stats: dict[str, Tensor] = {}
        for _, of_hook in ordered:
            stats |= of_hook
        stats["loss/total"] = total
        fault = non_finite(total, stats)
        if fault is not None:
            fault += f" on rank {self.accelerator.process_index} (prompts {batch.rows['prompt_ids'].tolist()})"
        # What a cached critic reads is never padded.
        padded = batch.policy_states is None and not self.engine.actor_critic.padding_free
        return BatchStats(stats, batch.tokens, batch.lengths, padded, fault)

    def _backward_passes(self, part: Part) -> list[tuple[Part, ...]]:
        """The parts that each backward pass of a micro-batch trains.

        A critic that shares no activations with the policy comes first, in a separate pass, so that the two graphs are
        never in memory together.
        """
        critic = self.engine.actor_critic.critic
        if part != "both":
            return [(part,)]
        if critic is None:
            return [("policy",)]
        return [("policy", "critic")] if critic.layout == "shared" else [("critic",), ("policy",)]

    def _backward_pass(self, batch: MicroBatch, hooks: Mapping[str, LossHook], *, last: bool) -> dict[str, Terms]:
        """One forward and backward pass for the losses of `hooks`; `last` on this micro-batch."""
        engine, with_policy, with_critic = self.engine, "policy" in hooks, "critic" in hooks
        # Gradient checkpointing recomputes the critic's activations during the backward pass, with its adapter.
        adapter = nullcontext() if with_policy else engine.actor_critic.critic_active()
        # A reward function or a callback may have left gradients off.
        with torch.enable_grad(), engine.gradient_sync(last_batch=batch.last, last_pass=last), adapter:
            outputs = engine.forward(
                *row_tensors(batch.rows).values(),
                value_taus=batch.rows.get("value_taus"),
                temperature=self.args.temperature,
                chunk_size=self.args.logprob_chunk_size,
                packed=batch.packed,
                policy_states=batch.policy_states,
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
        """The parameters that a backward pass or an optimizer step does not train."""
        actor_critic = self.engine.actor_critic
        of_policy = [] if with_policy else actor_critic.policy_parameters()
        return of_policy + ([] if with_critic else actor_critic.critic_parameters())

    def apply(self, update: UpdateStep, stats: StepStats, check: Callable[[Mapping[str, float]], Any]) -> Applied:
        """Takes the optimizer step whose gradients `backward` has added up, unless a loss or gradient of any rank is
        not finite or the KL exceeds `target_kl_stop`; records it in `stats`. Every rank must call it.

        Parameters that it does not train keep their values and optimizer state. `check` is called with the statistics
        of all ranks before the policy's first optimizer step, and may raise.
        """
        fault, stopped = None, False
        if any_rank(bool(stats.faults), self.accelerator):
            fault = "; ".join(chain.from_iterable(gather_list(stats.faults, self.accelerator)))
        elif update.part != "critic" and (stats.policy_unchanged or self.args.target_kl_stop is not None):
            # Empty if no row gives a gradient.
            if measured := self._measured(stats):
                if stats.policy_unchanged:
                    check(measured)
                stopped = self._exceeds_kl(measured)
        if fault is None and not stopped:
            fault = self._optimizer_step(update.part, stats)
        stats.end_update(update.part, skipped=fault is not None, stopped=stopped)
        return Applied(fault, stopped)

    def _measured(self, stats: StepStats) -> dict[str, float]:
        """The statistics of the optimizer step in progress, of the rows of all ranks."""
        together = StatsAccumulator()
        for of_rank in gather_list(stats.update, self.accelerator):
            together.merge(of_rank)
        return together.compute() if together.means else {}

    def _exceeds_kl(self, measured: Mapping[str, float]) -> bool:
        """Whether KL(old || new), in nats per token over an optimizer step's rows, exceeds `target_kl_stop`."""
        limit = self.args.target_kl_stop
        if limit is None:
            return False
        if "policy/approx_kl_k3" not in measured:
            raise ValueError(f"target_kl_stop is {limit}, but the loss returned no approx_kl_k3; add it, or set null")
        return measured["policy/approx_kl_k3"] > limit

    def _optimizer_step(self, part: Part, stats: StepStats) -> str | None:
        """Clips the gradients and takes the step; or returns which gradient is not finite, and leaves weights,
        optimizer and schedules as they are.
        """
        with_policy, with_critic = part != "critic", part != "policy"
        rates = self.engine.learning_rates
        norms = self.engine.step(frozen=self._without_gradient(with_policy, with_critic))
        if norms.non_finite is not None:
            return f"{norms.non_finite}, though the losses of all ranks are finite"
        if with_policy:
            self.learning_rates = self.learning_rates._replace(policy=rates.policy)
            stats.update.add({"policy/grad_norm": norms.policy}, tokens=1)
        if with_critic:
            self.learning_rates = self.learning_rates._replace(critic=rates.critic)
            if norms.critic is not None:
                stats.update.add({"val/grad_norm": norms.critic}, tokens=1)
        self.schedules.step(part)
        self.num_updates += 1
        return None

    def warn_outside_support(self, train_stats: Mapping[str, float]) -> None:
        """Warns, once, if returns lie outside the critic's support."""
        outside = train_stats.get("val/outside_support", 0.0)
        # Returns at the edges are no problem, such as 0 and 1 with the support [0, 1].
        if outside > 0.01 and not self._warned:
            self._warned = True
            warnings.warn(f"{outside:.1%} of the returns are outside value_support and clipped; widen it", stacklevel=3)


@contextmanager
def _memory_advice(batch: MicroBatch, process_index: int, args: PPOConfig) -> Iterator[None]:
    """Adds the options that reduce memory to an out-of-memory error of the block."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        rows, tokens = len(batch.lengths), sum(batch.lengths)
        first_line = str(error).partition("\n")[0]
        fewer = f"max_tokens_per_micro_batch: {max(tokens // 2, args.longest_row)} or "
        smaller = fewer if args.longest_row < args.micro_batch_tokens else ""
        # A critic that reads kept states recomputes nothing.
        other = "gradient_checkpointing: true" if batch.policy_states is None else "a smaller critic_width"
        raise torch.OutOfMemoryError(
            f"process {process_index} ran out of memory in a micro-batch of {rows} responses ({tokens} tokens); set "
            f"{smaller}{other} (docs/memory.md has more). {first_line}"
        ) from error


def non_finite(loss: Tensor, stats: Mapping[str, Any]) -> str | None:
    """Which terms (`loss/*` in `stats`) make `loss` non-finite, as text; None if `loss` is finite."""
    if bool(torch.isfinite(loss)):
        return None
    terms = {name: float(value) for name, value in stats.items() if name.startswith("loss/") and name != "loss/total"}
    bad = [f"{name} is {value}" for name, value in terms.items() if not math.isfinite(value)]
    return " and ".join(bad or [f"the loss is {float(loss)}"])


def make_updater(
    accelerator: Accelerator, actor_critic: ActorCritic, optimizers: Any, args: PPOConfig, schedule: PromptSchedule
) -> Updater:
    """The updater of a run, with `optimizers`, an optimizer and a learning-rate schedule, each None for the default.
    Call `agree_on_padding` before.

    Raises:
        ValueError: when an optimizer is passed together with AdamW settings of the critic, or lacks a trainable
            parameter; for a learning-rate schedule that does not fit; and see `use_update_mode`.
    """
    optimizer = prepared_optimizer(optimizers[0], actor_critic, args, accelerator.device)
    n, pretraining = args.num_return_sequences, args.critic_pretraining_steps
    planned = [
        step_counts(schedule.num_prompts_at(step) * n, args, critic_only=step < pretraining)
        for step in range(schedule.num_steps)
    ]
    totals = StepCounts(*map(sum, zip(*planned, strict=True)))
    schedules = Schedules(optimizer, actor_critic, args, totals, own=optimizers[1])
    actor_critic.eval()
    critic = actor_critic.critic
    for backbone in (actor_critic.policy.model, None if critic is None else critic.backbone):
        if backbone is not None:
            use_update_mode(backbone)
    return Updater(make_engine(accelerator, actor_critic, optimizer, args), schedules, args)
