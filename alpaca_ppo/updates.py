"""Optimizer steps on global rollouts: which rows this rank trains, in which micro-batches, and how their losses add
up.

A micro-batch's loss is its part of the whole optimizer step's loss, so the update does not depend on the size of
micro-batches or the number of ranks. A non-finite gradient never reaches the weights.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from alpaca_ppo.batching import plan_micro_batches
from alpaca_ppo.contracts import check_loss
from alpaca_ppo.distributed import gather_list
from alpaca_ppo.losses import Terms
from alpaca_ppo.metrics import StatsAccumulator
from alpaca_ppo.models import ActorCritic
from alpaca_ppo.types import Rollouts

LossFunction = Callable[[Rollouts], Terms]


class Updater:
    """Wrapped model, optimizer and schedule, and the optimizer step that uses them.

    Args:
        accelerator: of the run; its accumulation steps are set here.
        actor_critic: what trains; `model` is its wrapped form.
        optimizer: over the parameters of `actor_critic`.
        scheduler: of the learning rate, stepped once an optimizer step.
        step_batch_size: responses of a full optimizer step, over all ranks.
        step_per_device_batch_size: responses of a micro-batch, at most.
        loss_agg_mode: decides whether tokens or sequences are the denominator.
        max_grad_norm: the gradient's norm is clipped to this.

    Raises:
        ValueError: when the optimizer does not hold every parameter that trains.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        actor_critic: ActorCritic,
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        *,
        step_batch_size: int,
        step_per_device_batch_size: int,
        loss_agg_mode: str,
        max_grad_norm: float,
    ) -> None:
        covered = {id(p) for group in optimizer.param_groups for p in group["params"]}
        missing = [n for n, p in actor_critic.named_parameters() if p.requires_grad and id(p) not in covered]
        if missing:
            raise ValueError(
                f"the optimizer leaves out {len(missing)} parameters that train, {missing[0]} first; build it over "
                "build_actor_critic(...).parameters() and pass that ActorCritic as the model"
            )
        self.accelerator, self.scheduler = accelerator, scheduler
        self.loss_agg_mode, self.max_grad_norm = loss_agg_mode, max_grad_norm
        # Constant, also for a ragged batch: Accelerate and DeepSpeed count micro-batches to find the optimizer step.
        self.micro_batches = math.ceil(step_batch_size / (step_per_device_batch_size * accelerator.num_processes))
        accelerator.gradient_accumulation_steps = self.micro_batches
        actor_critic.train()
        self.model, self.optimizer = accelerator.prepare(actor_critic, optimizer)
        self.learning_rate = float(optimizer.param_groups[0]["lr"])
        """In force at the last optimizer step."""
        self.taken = 0
        """Optimizer steps since this was built."""
        self._in_step = False
        self._ratio_warned = self._edges_warned = False

    def step(
        self,
        rollouts: Rollouts,
        rows: Tensor,
        compute_loss: LossFunction,
        *,
        first: bool,
        freeze_policy: bool = False,
        value_taus: Tensor | None = None,
        target_kl_stop: float | None = None,
        check: Callable[[], Any] = lambda: None,
    ) -> tuple[StatsAccumulator, bool]:
        """One optimizer step on the global rows `rows`, of which this rank trains its share; returns its statistics,
        and whether the step was taken.

        Args:
            rollouts: the global rollouts.
            rows: (step batch,) int64, the rows of this optimizer step, the same on every rank.
            compute_loss: the trainer's hook.
            first: True where the policy has not moved since the rollout: the ratio's distance from 1, and with it
                the mismatch of sampler and trainer, are recorded.
            freeze_policy: leave the policy's parameters, and the optimizer's state of them, as they are.
            value_taus: (K,) quantile levels of this step for an iqn critic.
            target_kl_stop: the step is not taken where the approximate KL of its rows passes this.
            check: called before each micro-batch; what it raises drops the optimizer step's gradient.

        Raises:
            FloatingPointError: when the gradient is not finite; the weights stay as they were.
        """
        mask = rollouts["response_mask"][rows]
        lengths = (rollouts["query_attn_masks"][rows].sum(dim=1) + mask.sum(dim=1)).tolist()
        world, rank = self.accelerator.num_processes, self.accelerator.process_index
        plan = plan_micro_batches(lengths, num_ranks=world, num_micro_batches=self.micro_batches)[rank]
        shared = {"denominator": mask.sum() if self.loss_agg_mode == "token-mean" else mask.any(dim=1).sum()}
        shared |= {} if value_taus is None else {"value_taus": value_taus}
        stats, stepped = StatsAccumulator(), True
        # What an update that was refused or interrupted left behind must not reach this one.
        self.optimizer.zero_grad()
        self.model.zero_grad()
        self.accelerator.step = 0
        for positions in plan:
            check()
            batch = self._micro_batch(rollouts, rows[positions], shared)
            with self.accelerator.accumulate(self.model), self._learner(freeze_policy):
                loss, micro_stats = self._loss(compute_loss, batch)
                stats.add(_at_first(micro_stats, first=first), tokens=int(batch["response_mask"].sum()))
                stats.add_padding([lengths[i] for i in positions])
                if freeze_policy and world > 1:
                    loss = loss + _touched(self.accelerator.unwrap_model(self.model).policy_parameters())
                # DDP averages over ranks and Accelerate divides by the accumulation steps; parts must add up instead.
                self.accelerator.backward(loss * world * self.micro_batches)
                if self.accelerator.sync_gradients:
                    stepped = target_kl_stop is None or self._approx_kl(stats) <= target_kl_stop
                    if stepped:
                        norm = self._apply_gradients(rollouts["prompt_ids"][rows], freeze_policy=freeze_policy)
                        stats.add({"policy/grad_norm": norm}, tokens=1)
        return stats, stepped

    @contextmanager
    def _learner(self, freeze_policy: bool) -> Iterator[None]:
        """Inside, the base is the critic's where the critic alone learns: recomputed activations must be its own."""
        if not freeze_policy:
            yield
            return
        with self.accelerator.unwrap_model(self.model).critic_active():
            yield

    def _loss(self, compute_loss: LossFunction, batch: Rollouts) -> tuple[Tensor, dict[str, Tensor]]:
        self._in_step = True
        try:
            loss, stats = compute_loss(batch)
        finally:
            self._in_step = False
        check_loss(loss)
        return loss, stats

    @property
    def keeps_graphs_apart(self) -> bool:
        """Whether the critic's backward pass can be made before the policy's forward pass: inside `step`, where the
        two share no activations. Then the two graphs are never in memory together.
        """
        critic = self.accelerator.unwrap_model(self.model).critic
        return self._in_step and critic is not None and not critic.shares_states

    @contextmanager
    def apart(self) -> Iterator[Callable[[Terms], Terms]]:
        """Inside, the critic runs alone; yields what makes its backward pass and returns its terms as numbers."""
        actor_critic = self.accelerator.unwrap_model(self.model)

        def backward(terms: Terms) -> Terms:
            loss, stats = terms
            self.accelerator.backward(loss * self.accelerator.num_processes * self.micro_batches)
            number = loss.detach()
            # DDP waits for the critic's parameters in the pass that synchronises.
            if self.accelerator.num_processes > 1:
                number = number + _touched(actor_critic.critic_parameters())
            return number, stats

        with self.accelerator.no_sync(self.model), actor_critic.critic_active():
            yield backward

    def over_ranks(self, stats: StatsAccumulator) -> StatsAccumulator:
        """What all ranks accumulated over their shares of the same optimizer steps."""
        whole = StatsAccumulator()
        for part in gather_list(stats, self.accelerator):
            whole.merge(part)
        return whole

    def _approx_kl(self, stats: StatsAccumulator) -> float:
        """KL(old || new) of one optimizer step's rows on all ranks, in nats a token (k3); 0 where none was measured."""
        return self.over_ranks(stats).compute(1).get("policy/approx_kl_k3", 0.0)

    def warn(self, train_stats: Mapping[str, float]) -> None:
        """Warns, of each once, of a ratio off 1 before any update and of returns beyond a c51 critic's support."""
        self._warn_of_ratio(train_stats)
        outside = train_stats.get("val/outside_support", 0.0)
        # Probability at the edges alone is no fault: returns may be 0 or 1 and the support just that.
        if outside > 0.01 and not self._edges_warned:
            self._edges_warned = True
            warnings.warn(
                f"{outside:.1%} of the returns lie beyond the c51 critic's support, and "
                f"{train_stats['val/edge_mass']:.0%} of its probability at the edges: values there are cut off. Widen "
                "c51_v_min and c51_v_max, or scale the reward down with reward_weights",
                stacklevel=3,
            )

    def _warn_of_ratio(self, train_stats: Mapping[str, float]) -> None:
        # bfloat16 keeps 8 bits; float32 passes in other batches differ by rounding only.
        tolerance = 0.1 if self.accelerator.mixed_precision == "bf16" else 1e-3
        error = train_stats.get("policy/first_ratio_error_max", 0.0)
        if error > tolerance and not self._ratio_warned:
            self._ratio_warned = True
            warnings.warn(
                f"before any update the policy's ratio is off 1 by {error:.3g} (tolerance {tolerance}): old and new "
                "log-probs disagree. Likely causes: dropout on in a custom model, another dtype or padding in an "
                "overridden compute_loss, an adapter's state, or (old_policy: rollout) a sampler that differs",
                stacklevel=3,
            )

    def _micro_batch(self, rollouts: Rollouts, rows: Tensor, shared: Mapping[str, Tensor]) -> Rollouts:
        """The rows on the device; without rows, one row with an empty mask, because ranks must run the same passes."""
        dummy = len(rows) == 0
        chosen = torch.zeros(1, dtype=torch.long) if dummy else rows
        batch: Any = {key: value[chosen].to(self.accelerator.device) for key, value in _tensors(rollouts).items()}
        if dummy:
            batch["response_mask"] = torch.zeros_like(batch["response_mask"])
        batch |= {key: value.to(self.accelerator.device) for key, value in shared.items()}
        micro: Rollouts = batch
        return micro

    def _apply_gradients(self, prompt_ids: Tensor, *, freeze_policy: bool) -> Tensor:
        if freeze_policy:
            # None, not zero: AdamW would decay the weights and count a step.
            for parameter in self.accelerator.unwrap_model(self.model).policy_parameters():
                parameter.grad = None
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
        norm = torch.as_tensor(norm)
        if not bool(torch.isfinite(norm)):
            raise FloatingPointError(
                f"the gradient norm is {float(norm)}: the update was refused and the weights are as before it. "
                f"Prompts of the batch: {prompt_ids.tolist()}. Look for a learning_rate that is too high, or for "
                "non-finite values in a custom hook"
            )
        self.learning_rate = float(self.optimizer.param_groups[0]["lr"])
        self.optimizer.step()
        self.scheduler.step()
        self.taken += 1
        self.optimizer.zero_grad()
        return norm


def _touched(parameters: Sequence[torch.nn.Parameter]) -> Tensor:
    """Zero, with a path to each of the parameters: DDP waits for all of them in a backward pass."""
    return sum((p.flatten()[0] * 0.0 for p in parameters), torch.zeros(()))


def _at_first(stats: Mapping[str, Any], *, first: bool) -> dict[str, Any]:
    """`stats` with what can be said only before the policy has moved, or without it."""
    if not first:
        return {name: value for name, value in stats.items() if not name.startswith("mismatch/")}
    # A subclass's loss may have no ratio.
    if "policy/ratio_max" not in stats:
        return dict(stats)
    error = max(float(stats["policy/ratio_max"]) - 1, 1 - float(stats["policy/ratio_min"]))
    return {**stats, "policy/first_ratio_error_max": error}


def _tensors(rollouts: Any) -> dict[str, Tensor]:
    return dict(rollouts)
