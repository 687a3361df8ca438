"""How gradients are made and applied: on one process or under DDP, Accelerate's way. DeepSpeed's is in `zero`.

An engine wraps policy and critic, and knows where their weights and the optimizer's state lie. What an optimizer step
consists of is in `updates`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedModel

from alpaca_ppo.models import ActorCritic


class WholeState:
    """A model and its optimizer, both whole: what a checkpoint reads and restores.

    Args:
        module: the model.
        optimizer: over its parameters.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.module, self.optimizer = module, optimizer

    def weights(self) -> dict[str, Tensor]:
        """What a checkpoint holds of the model, by name, on every rank: parameters and persistent buffers, those that
        share one object once, under their first name.

        Of a model whose base is frozen, only what trains: the base lies where it was loaded from.
        """
        names = saved_names(self.module)
        return {name: tensor for name, tensor in self.module.state_dict().items() if name in names}

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Puts back what `weights` gave."""
        targets = self.module.state_dict()
        with torch.no_grad():
            for name, tensor in weights.items():
                targets[name].copy_(tensor)

    def optimizer_state(self) -> dict[str, Any]:
        """The state dictionary of the optimizer over whole parameters, on every rank."""
        state = self.optimizer.state_dict()
        # In the order of the parameters, not of their first steps: checkpoints of every setting look the same.
        return {**state, "state": dict(sorted(state["state"].items()))}

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        """Puts back what `optimizer_state` gave."""
        self.optimizer.load_state_dict(state)


class Engine(WholeState):
    """Policy and critic on one process or under DDP: every rank holds them whole.

    Args:
        accelerator: of the run.
        actor_critic: what trains; `model` is its wrapped form.
        optimizer: over its parameters.
        max_grad_norm: the gradient's norm is clipped to this.
    """

    synced_forwards = False
    """Whether ranks must make the same passes also where nothing trains: parameters lie in parts on all of them."""

    def __init__(
        self,
        accelerator: Accelerator,
        actor_critic: ActorCritic,
        optimizer: torch.optim.Optimizer,
        *,
        max_grad_norm: float,
    ) -> None:
        super().__init__(actor_critic, optimizer)
        self.accelerator, self.actor_critic, self.max_grad_norm = accelerator, actor_critic, max_grad_norm
        self.model: Any = self._wrap()

    def _wrap(self) -> Any:
        model, self._stepping = self.accelerator.prepare(self.actor_critic, self.optimizer)
        return model

    def begin(self) -> None:
        """Drops gradients that an update left behind which was refused or interrupted."""
        self.optimizer.zero_grad()
        self.model.zero_grad()

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """Around forward and backward pass of a micro-batch; ranks exchange gradients in the `last` one."""
        with nullcontext() if last else self.accelerator.no_sync(self.model):
            yield

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Around a pass whose gradients are not exchanged yet, since another pass of the micro-batch follows."""
        with self.accelerator.no_sync(self.model):
            yield

    def backward(self, loss: Tensor) -> None:
        """Adds the gradient of `loss`, a part of the optimizer step's loss: parts of all ranks and passes add up."""
        # DDP averages over ranks and Accelerate divides by its accumulation steps.
        parts = self.accelerator.num_processes * self.accelerator.gradient_accumulation_steps
        self.accelerator.backward(loss * parts)

    def unused_parameter_loss(self, parameters: Sequence[nn.Parameter]) -> Tensor | float:
        """Zero, to be added to the last loss of an optimizer step: DDP waits there for every parameter."""
        if self.accelerator.num_processes == 1:
            return 0.0
        return sum((p.flatten()[0] * 0.0 for p in parameters), torch.zeros(()))

    def step(self, *, frozen: Sequence[nn.Parameter] = ()) -> Tensor:
        """Clips the gradient and steps the optimizer, unless the gradient is not finite; returns its norm before.

        Args:
            frozen: parameters that stay, with their optimizer state, as they are.
        """
        for parameter in frozen:
            # None, not zero: AdamW would decay the weights and count a step.
            parameter.grad = None
        norm = torch.as_tensor(self.accelerator.clip_grad_norm_(self.model.parameters(), self.max_grad_norm))
        if bool(torch.isfinite(norm)):
            self._stepping.step()
        self._stepping.zero_grad()
        return norm

    def prepare_frozen_model(self, model: nn.Module, *, offload: bool = False) -> None:
        """Spreads a frozen model over the ranks in place, and gives a reference the policy's precision, where the
        engine does so with what trains.
        """

    @contextmanager
    def sampling(self) -> Iterator[tuple[PreTrainedModel, Callable[[bool], bool] | None]]:
        """Inside, the policy as `generation.generate` wants it, and that function's `any_rank`."""
        yield self.actor_critic.policy.model, None

    @contextmanager
    def gathered_parameters(self, *modules: nn.Module) -> Iterator[None]:
        """Inside, the parameters of `modules` are whole on every rank; every rank must come here."""
        yield


def saved_names(model: nn.Module) -> set[str]:
    """Names of the tensors that a checkpoint holds of `model`."""
    parameters = dict(model.named_parameters())
    if all(parameter.requires_grad for parameter in parameters.values()):
        return parameters.keys() | {name for name, _ in model.named_buffers()}
    return {name for name, parameter in parameters.items() if parameter.requires_grad}
