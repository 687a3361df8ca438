"""Subclasses of the trainer that override the hooks which the README promises, and callbacks that end a run."""

import os
import signal
from typing import Any

from torch import Tensor
from transformers import TrainerCallback

from alpaca_ppo import PPOTrainer

STOP_STEP = 2
_STOP_CALL = 14
"""The micro-batch in which `Signalled` gets its signal: the fourth of the second step, a step having ten."""


class OwnHooks(PPOTrainer):
    """Halves the shaped rewards, and shifts the advantages."""

    def _shape_reward(self, **tensors: Any) -> dict[str, Tensor]:
        shaped = super()._shape_reward(**tensors)
        return {**shaped, "shaped_rewards": 0.5 * shaped["shaped_rewards"]}

    def _estimate_advantage(self, **tensors: Any) -> dict[str, Tensor]:
        estimated = super()._estimate_advantage(**tensors)
        return {**estimated, "advantages": (estimated["advantages"] + 0.1) * tensors["response_mask"]}


class OwnLoss(PPOTrainer):
    """Weighs the losses by half. Earlier commits have one hook, `compute_loss`, for both losses."""

    separate_critic_backward = False
    calls = 0

    def compute_loss(self, rollouts_batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        self.begin_batch()
        loss, stats = super().compute_loss(rollouts_batch)  # type: ignore[misc]
        return self.changed(loss), {**stats, "loss/total": 0.5 * stats["loss/total"]}

    def compute_policy_loss(self, batch: Any, outputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
        self.begin_batch()
        loss, stats = super().compute_policy_loss(batch, outputs)
        return self.changed(loss), stats

    def compute_value_loss(self, batch: Any, outputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
        loss, stats = super().compute_value_loss(batch, outputs)
        return 0.5 * loss, stats

    def begin_batch(self) -> None:
        type(self).calls += 1

    def changed(self, loss: Tensor) -> Tensor:
        return 0.5 * loss


class SometimesNaN(OwnLoss):
    """Has a loss that is not finite in two micro-batches."""

    def changed(self, loss: Tensor) -> Tensor:
        return super().changed(loss) * (float("nan") if self.calls in (3, 16) else 1.0)


class Signalled(OwnLoss):
    """Gets a SIGTERM within the update of its second step."""

    def changed(self, loss: Tensor) -> Tensor:
        if self.calls == _STOP_CALL:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().changed(loss)


class StopAfterStep(TrainerCallback):
    """Ends training after STOP_STEP steps, as a person would who interrupts the run."""

    def on_step_end(self, args: Any, state: Any, control: Any, **context: Any) -> Any:
        control.should_training_stop = state.global_step >= STOP_STEP
        return control
