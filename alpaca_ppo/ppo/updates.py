"""Optimizer steps on global rollouts: the rows and micro-batches of each rank, and how their losses add up.

A micro-batch's loss is its part of the whole optimizer step's loss, so the update does not depend on the size of
micro-batches or the number of ranks. A loss or gradient that is not finite never reaches the weights: no rank steps,
and neither the optimizer nor the schedule counts the update, as in transformers and DeepSpeed. An optimizer step during
which a device runs out of memory is made again in smaller micro-batches.
"""

import math
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils.memory import clear_device_cache
from torch import Tensor

from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.data.schedule import PromptSchedule
from alpaca_ppo.distributed.collectives import any_rank, gather_list
from alpaca_ppo.distributed.engine import Engine, GradNorms, LearningRates
from alpaca_ppo.distributed.optimizer import (
    check_covers_trainable,
    check_no_critic_settings,
    drop_frozen_parameters,
    make_engine,
    make_optimizer,
)
from alpaca_ppo.distributed.random_states import random_states, set_random_states
from alpaca_ppo.distributed.schedules import Part, Schedules, StepCounts
from alpaca_ppo.functional.packing import PackedRows, row_lengths
from alpaca_ppo.models import ActorCritic
from alpaca_ppo.ppo.device_rows import DeviceRows, row_tensors, upload
from alpaca_ppo.ppo.hook_checks import NonFiniteUpdate, check_loss, non_finite
from alpaca_ppo.ppo.losses import Terms, step_denominators
from alpaca_ppo.ppo.metrics import StatsAccumulator
from alpaca_ppo.ppo.minibatches import step_counts
from alpaca_ppo.ppo.mismatch import in_half_precision
from alpaca_ppo.ppo.token_budget import OutOfMemory, TokenBudget
from alpaca_ppo.ppo.trained_rows import trained_rows
from alpaca_ppo.types import Rollouts

LossFunction = Callable[[Rollouts], Terms]


class Updater:
    """The optimizer steps of a run.

    Args:
        engine: computes and applies gradients; `engine.model` is the wrapped policy and critic.
        schedules: of the learning rates, stepped once per optimizer step of what they are for.
        budget: decides on the micro-batches, whose number may differ from step to step, but not between ranks.
        args: of the run.
    """

    def __init__(self, engine: Engine, schedules: Schedules, *, budget: TokenBudget, args: PPOConfig) -> None:
        self.engine, self.accelerator, self.schedules = engine, engine.accelerator, schedules
        self.budget, self.args = budget, args
        self.learning_rates: LearningRates = engine.learning_rates
        """The learning rates of the last optimizer step of the policy, and of that of the critic."""
        self.part: Part = "both"
        """What the optimizer step in progress trains; "both" outside `step`."""
        self.moved_policy = False
        """Whether the last `step` was taken with a gradient and a learning rate of the policy that are not 0."""
        self.num_updates = 0
        """Optimizer steps taken by this object."""
        self._inside_step = False
        self._packed: tuple[PackedRows, PackedRows] | None = None
        # The tensors that `_packed` was made of, and the number of changes in place that they had seen.
        self._packed_tensors: list[tuple[Tensor, int]] = []
        self._faults: list[str] = []
        # For each early backward pass of the critic: the weight it was run with, and the weight in the returned loss.
        self._critic_weights: list[tuple[list[Tensor], list[Tensor]]] = []
        self._ratio_warned = self._edges_warned = False

    @property
    def model(self) -> Any:
        """Policy and critic, wrapped."""
        return self.engine.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The engine's optimizer."""
        return self.engine.optimizer

    def step(
        self,
        rollouts: Rollouts,
        rows: Tensor,
        compute_loss: LossFunction,
        *,
        policy_unchanged: bool,
        part: Part = "both",
        value_taus: Tensor | None = None,
        target_kl_stop: float | None = None,
        check_first: Callable[[Mapping[str, float]], Any] | None = None,
        poll: Callable[[], Any] = lambda: None,
        message: Callable[[str], Any] = lambda text: None,
    ) -> tuple[StatsAccumulator, bool]:
        """One optimizer step on the global rows `rows`, of which this rank trains its share; returns its statistics,
        and whether the step was taken.

        Args:
            rollouts: the global rollouts.
            rows: (step batch,) int64, the rows of this optimizer step, the same on every rank. Those that give no
                gradient (`trained_rows`) are left out; without any other, the gradient is 0.
            compute_loss: the trainer's hook.
            policy_unchanged: True if the policy has not been updated since the rollout: the deviation of the ratio from
                1 and the sampler/trainer mismatch are then recorded.
            part: what to train; the parameters of the other and their optimizer state stay unchanged.
            value_taus: (K,) quantile levels of this step for an iqn critic.
            target_kl_stop: skip the step if the approximate KL of its rows exceeds this.
            check_first: called with the statistics of all ranks before the step is taken, if `policy_unchanged`; it may
                raise, on every rank.
            poll: called before each micro-batch; an exception in it discards the optimizer step's gradient.
            message: called with a line for the user when the micro-batches become smaller.

        Raises:
            NonFiniteUpdate: on every rank, when a loss of any rank or the gradient is not finite; weights, optimizer
                and schedule are unchanged.
            torch.OutOfMemoryError: when one response does not fit into memory, on every rank; or when a micro-batch
                does not and the step cannot be made again, on its rank.
        """
        self.moved_policy = False
        rows = rows[trained_rows(rollouts, self.args)[rows]]
        shared = step_denominators(rollouts, rows, self.args)
        shared |= {} if value_taus is None else {"value_taus": value_taus}
        before = random_states() if self.engine.can_repeat else None
        while True:
            stats, failures = self._add_gradients(
                rollouts,
                rows,
                compute_loss,
                shared,
                policy_unchanged=policy_unchanged,
                part=part,
                poll=poll,
            )
            if not failures:
                break
            message(self.budget.lower(failures))
            clear_device_cache()
            # A `compute_loss` that draws random numbers begins again, too.
            assert before is not None, "without can_repeat there are no failures to return"
            set_random_states(before)
        prompt_ids = rollouts["prompt_ids"][rows]
        self._check_losses(prompt_ids)
        if policy_unchanged and part != "critic" and check_first is not None and len(rows):
            check_first(self.merge_over_ranks(stats).compute(1))
        limit = None if part == "critic" or not len(rows) else target_kl_stop
        stepped = limit is None or self._approx_kl(stats, limit) <= limit
        if stepped:
            norms = self._apply_gradients(prompt_ids, part)
            of_parts = {} if part == "critic" else {"policy/grad_norm": norms.policy}
            if part != "policy" and norms.critic is not None:
                of_parts["val/grad_norm"] = norms.critic
            stats.add({name: torch.tensor(n, dtype=torch.float64) for name, n in of_parts.items()}, tokens=1)
        return stats, stepped

    def _add_gradients(
        self,
        rollouts: Rollouts,
        rows: Tensor,
        compute_loss: LossFunction,
        shared: Mapping[str, Tensor],
        *,
        policy_unchanged: bool,
        part: Part,
        poll: Callable[[], Any],
    ) -> tuple[StatsAccumulator, list[OutOfMemory]]:
        """Forward and backward passes of this rank's micro-batches: its statistics, and the micro-batches of all ranks
        that did not fit into memory. If there are any, the gradient is incomplete and must be dropped.
        """
        mask = rollouts["response_mask"][rows]
        lengths = row_lengths(rollouts["query_attn_masks"], rollouts["response_mask"])[rows].tolist()
        plan = self.budget.plan(lengths)[self.accelerator.process_index]
        stats, failure, self._faults = StatsAccumulator(), None, []
        # Gradients of an update that was skipped or interrupted, or did not fit into memory, must not reach this one.
        self.engine.begin()
        batches = self._micro_batches(rollouts, rows, plan, shared)
        for number, positions in enumerate(plan):
            # A rank that has failed still takes part in what the ranks agree on before each micro-batch.
            poll()
            if failure is not None:
                continue
            own = [lengths[i] for i in positions]
            try:
                batch = next(batches)
                with (
                    self.engine.micro_batch(last=number + 1 == len(plan)),
                    self._critic_adapter_active(part),
                ):
                    loss, micro_stats = self._loss(compute_loss, batch, part)
                    self.engine.backward(loss)
            except torch.OutOfMemoryError as error:
                cause = str(error).partition("\n")[0]
                rank = self.accelerator.process_index
                failure = OutOfMemory(rank, len(own), self.budget.cost(own), cause)
                if not self.engine.can_repeat:
                    raise self.budget.unrepeatable(failure) from error
                self._critic_weights = []
                batches.close()
                continue
            measured = _with_first_ratio_error(micro_stats, policy_unchanged=policy_unchanged)
            stats.add(measured, tokens=int(mask[positions].sum()))
            stats.add_padding(own, padded=not self.budget.padding_free)
            self._check_critic_weight()
        batches.close()
        failures = self._failures(failure)
        if not failures:
            self.engine.end_micro_batches()
        return stats, failures

    def _failures(self, failure: OutOfMemory | None) -> list[OutOfMemory]:
        """The failures of all ranks, on every rank."""
        if not self.engine.can_repeat or not any_rank(failure is not None, self.accelerator):
            return []
        return [other for other in gather_list(failure, self.accelerator) if other is not None]

    def _check_losses(self, prompt_ids: Tensor) -> None:
        """Raises NonFiniteUpdate on every rank if a loss of any rank is not finite."""
        if any_rank(bool(self._faults), self.accelerator):
            everywhere = [fault for part in gather_list(self._faults, self.accelerator) for fault in part]
            raise NonFiniteUpdate("; ".join(everywhere), prompt_ids.tolist())

    @contextmanager
    def _critic_adapter_active(self, part: Part) -> Iterator[None]:
        """Keeps the critic's adapter active during the block if only the critic is trained, so that gradient
        checkpointing recomputes the critic's activations.
        """
        if part != "critic":
            yield
            return
        with self.engine.actor_critic.critic_active():
            yield

    def _frozen(self, part: Part) -> list[torch.nn.Parameter]:
        """The parameters that a step which trains `part` leaves as they are."""
        if part == "both":
            return []
        actor_critic = self.engine.actor_critic
        return actor_critic.policy_parameters() if part == "critic" else actor_critic.critic_parameters()

    def _loss(self, compute_loss: LossFunction, batch: Rollouts, part: Part) -> Terms:
        self._inside_step, self.part = True, part
        try:
            loss, stats = compute_loss(batch)
        finally:
            self._inside_step, self.part = False, "both"
        check_loss(loss)
        if fault := non_finite(loss, stats):
            rank, prompts = self.accelerator.process_index, batch["prompt_ids"].tolist()
            self._faults.append(f"{fault} on rank {rank} (prompts {prompts})")
        if part != "both":
            loss = loss + self.engine.unused_parameter_loss(self._frozen(part))
        return loss, stats

    @property
    def separate_backward(self) -> bool:
        """Whether the critic's backward pass can run before the policy's forward pass, so that the two graphs are never
        in memory together. True only during `step`, and only if the critic has a pass of its own.
        """
        critic = self.engine.actor_critic.critic
        return self._inside_step and critic is not None and not critic.shares_states

    @contextmanager
    def critic_backward_first(self) -> Iterator[Callable[[Terms], Terms]]:
        """A block in which only the critic runs.

        Yields a function that runs the critic's backward pass and returns its terms with the loss detached.
        """
        actor_critic = self.engine.actor_critic

        def backward(terms: Terms) -> Terms:
            loss, stats = terms
            at_backward: list[Tensor] = []
            in_loss: list[Tensor] = []
            self._critic_weights.append((at_backward, in_loss))
            # The hook receives d(backpropagated loss)/d(critic's loss): 1, times the engine's scale.
            loss.register_hook(at_backward.append)
            self.engine.backward(loss)
            # The returned loss contains this detached copy. In its backward pass the hook receives the weight that
            # `compute_loss` gave to the copy, times the same scale. `_check_critic_weight` compares the two.
            detached = loss.detach().requires_grad_()
            detached.register_hook(in_loss.append)
            return detached + self.engine.unused_parameter_loss(actor_critic.critic_parameters()), stats

        with self.engine.no_sync(), actor_critic.critic_active():
            yield backward

    def _check_critic_weight(self) -> None:
        """Checks that `compute_loss` did not rescale the critic's loss, whose backward pass has already been run.

        Raises:
            ValueError: if `compute_loss` scaled or dropped it, so that the critic's gradient would not match the
                returned loss.
        """
        pairs, self._critic_weights = self._critic_weights, []
        if self._faults:
            return
        # The engine's scale cancels. Without an entry in `in_loss`, the term was dropped and its weight is 0.
        weights = [float(sum(in_loss)) / float(at_backward[0]) for at_backward, in_loss in pairs]
        # If a weight is not finite, neither is the gradient norm, and the update is skipped anyway.
        for weight in (weight for weight in weights if math.isfinite(weight) and weight != 1.0):
            raise ValueError(
                f"compute_loss() returned a loss in which the critic's part has the weight {weight:g}, but its "
                "backward pass has already been run with weight 1; set separate_critic_backward = False in your "
                "trainer class, so that policy and critic share one backward pass"
            )

    def merge_over_ranks(self, stats: StatsAccumulator) -> StatsAccumulator:
        """The statistics of the same optimizer steps, merged over all ranks."""
        whole = StatsAccumulator()
        for part in gather_list(stats, self.accelerator):
            whole.merge(part)
        return whole

    def _approx_kl(self, stats: StatsAccumulator, target_kl_stop: float) -> float:
        """KL(old || new) of one optimizer step's rows on all ranks, in nats per token (k3)."""
        measured = self.merge_over_ranks(stats).compute(1)
        if "policy/approx_kl_k3" not in measured:
            raise ValueError(
                f"target_kl_stop is {target_kl_stop}, but the policy loss measured no approx_kl_k3; add it to the "
                "statistics that the loss returns, or set target_kl_stop: null"
            )
        return measured["policy/approx_kl_k3"]

    def warn(self, train_stats: Mapping[str, float]) -> None:
        """Warns, once each, if the ratio is not 1 before the first update, and if returns lie outside the critic's
        support.
        """
        self._warn_of_ratio(train_stats)
        outside = train_stats.get("val/outside_support", 0.0)
        # Probability mass at the edges is no problem in itself: returns may be 0 or 1 with the support [0, 1].
        if outside > 0.01 and not self._edges_warned:
            self._edges_warned = True
            edge_mass = train_stats.get("val/edge_mass")
            edges = "" if edge_mass is None else f", and {edge_mass:.0%} of its probability mass is at the edges"
            warnings.warn(
                f"{outside:.1%} of the returns lie outside the critic's support{edges}, so the values are clipped. "
                "Widen value_support, or scale the reward down with reward_weights",
                stacklevel=3,
            )

    def _warn_of_ratio(self, train_stats: Mapping[str, float]) -> None:
        # bfloat16 has 8 significant bits; float32 passes in other batches differ by rounding alone.
        tolerance = 0.1 if in_half_precision(self.engine.actor_critic, self.accelerator) else 1e-3
        error = train_stats.get("policy/first_ratio_error_max", 0.0)
        if error > tolerance and not self._ratio_warned:
            self._ratio_warned = True
            warnings.warn(
                f"before any update the policy's probability ratio deviates from 1 by {error:.3g} (tolerance "
                f"{tolerance}): old and new log-probs disagree. Likely causes: dropout enabled in a custom model, a "
                "different dtype or padding in an overridden compute_loss, an adapter's state, or (old_policy: "
                "auto or rollout) a sampler that differs",
                stacklevel=3,
            )

    def _micro_batches(
        self, rollouts: Rollouts, rows: Tensor, plan: Sequence[list[int]], shared: Mapping[str, Tensor]
    ) -> Generator[Rollouts, None, None]:
        """This rank's micro-batches on the device: views of its rows, which are copied there once, before the first."""
        device, pack = self.accelerator.device, self.engine.actor_critic.pack
        common = {key: upload(value, device) for key, value in shared.items()}
        chosen = [rows[positions].tolist() for positions in plan]
        try:
            for batch in DeviceRows(_tensors(rollouts), chosen, device):
                # Once for the passes of critic and policy; on the CPU, so that no length is asked of the device.
                self._packed = pack(*row_tensors(batch.host).values(), device=device)
                self._packed_tensors = [(tensor, tensor._version) for tensor in row_tensors(batch.device).values()]
                micro: Any = {**batch.device, **common}
                yield micro
        finally:
            self._packed, self._packed_tensors = None, []

    def packed(self, batch: Mapping[str, Any]) -> tuple[PackedRows, PackedRows] | None:
        """What `ActorCritic.pack` returns for `batch`, if its rows are those of the current micro-batch; else None.

        A `compute_loss` may have replaced or changed them.
        """
        tensors, known = list(row_tensors(batch).values()), self._packed_tensors
        pairs = zip(tensors, known, strict=False)
        same = len(tensors) == len(known) and all(t is own and t._version == version for t, (own, version) in pairs)
        return self._packed if same else None

    def _apply_gradients(self, prompt_ids: Tensor, part: Part) -> GradNorms:
        before, now = self.learning_rates, self.engine.learning_rates
        self.learning_rates = LearningRates(
            before.policy if part == "critic" else now.policy, before.critic if part == "policy" else now.critic
        )
        norms = self.engine.step(frozen=self._frozen(part))
        if norms.non_finite is not None:
            cause = f"{norms.non_finite}, though the losses of all ranks are finite"
            raise NonFiniteUpdate(cause, prompt_ids.tolist())
        self.moved_policy = part != "critic" and norms.policy > 0 and now.policy > 0
        self.schedules.step(part)
        self.num_updates += 1
        return norms


def _with_first_ratio_error(stats: Mapping[str, Any], *, policy_unchanged: bool) -> dict[str, Any]:
    """If the policy is unchanged since the rollout, adds `policy/first_ratio_error_max`; else removes `mismatch/*`."""
    if not policy_unchanged:
        return {name: value for name, value in stats.items() if not name.startswith("mismatch/")}
    # A subclass's loss may have no ratio.
    if "policy/ratio_max" not in stats:
        return dict(stats)
    error = max(float(stats["policy/ratio_max"]) - 1, 1 - float(stats["policy/ratio_min"]))
    return {**stats, "policy/first_ratio_error_max": error}


def _tensors(rollouts: Any) -> dict[str, Tensor]:
    return dict(rollouts)


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
    if optimizer is not None:
        check_no_critic_settings(args)
    optimizer = optimizer or make_optimizer(actor_critic, args, accelerator.device)
    drop_frozen_parameters(optimizer)
    check_covers_trainable(optimizer, actor_critic)
    totals = planned_steps(schedule, args, pretraining_steps=args.critic_pretraining_steps)
    schedules = Schedules(optimizer, actor_critic, args, totals, own=scheduler)
    micro_batches = math.ceil(args.step_batch_size / (args.step_per_device_batch_size * accelerator.num_processes))
    actor_critic.train()
    engine = make_engine(accelerator, actor_critic, optimizer, args, micro_batches)
    budget = TokenBudget(args, padding_free=actor_critic.padding_free, num_ranks=accelerator.num_processes)
    return Updater(engine, schedules, budget=budget, args=args)


def planned_steps(schedule: PromptSchedule, args: PPOConfig, *, pretraining_steps: int) -> StepCounts:
    """The optimizer steps of a whole run whose first `pretraining_steps` steps train the critic only."""
    counts = [
        step_counts(
            schedule.num_prompts_at(step) * args.num_return_sequences, args, critic_only=step < pretraining_steps
        )
        for step in range(schedule.num_steps)
    ]
    return StepCounts(*map(sum, zip(*counts, strict=True)))
