"""The engine for one process and for DDP: backward passes, gradient synchronization and optimizer steps by Accelerate.

An engine wraps policy and critic and knows where their weights and the optimizer state are. It is chosen in
`accelerator`; DeepSpeed's is in `deepspeed_engine`. What an optimizer step consists of is in `ppo.updates`.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from transformers import PreTrainedModel

from alpaca_ppo.adapters.adapter_set import POLICY
from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.distributed.optimizer import Part, group_parts
from alpaca_ppo.distributed.sampler import Sampler
from alpaca_ppo.models import ActorCritic, Policy


class GradNorms(NamedTuple):
    """The norms of the gradients of an optimizer step, before clipping."""

    policy: float
    """Of `ActorCritic.policy_parameters`; 0 where the step freezes them."""
    critic: float | None
    """Of `ActorCritic.critic_parameters`; 0 where the step freezes them, None without a critic."""

    @property
    def non_finite(self) -> str | None:
        """Whose gradient is not finite, and its norm, in words; None if all are finite."""
        norms = {"policy": self.policy, "critic": 0.0 if self.critic is None else self.critic}
        return " and ".join(f"the {k}'s gradient norm is {n}" for k, n in norms.items() if not math.isfinite(n)) or None


class LearningRates(NamedTuple):
    """The learning rates of an optimizer step."""

    policy: float
    critic: float | None
    """None without a critic."""

    def stats(self) -> dict[str, float]:
        """As metrics: `objective/lr`, and with a critic `objective/critic_lr`."""
        rates = {"objective/lr": self.policy, "objective/critic_lr": self.critic}
        return {name: rate for name, rate in rates.items() if rate is not None}


class Engine:
    """Trains policy and critic on one process or under DDP, where every rank holds all parameters. Another way to
    distribute is a subclass; nothing outside this folder knows it.

    Args:
        accelerator: of the run.
        actor_critic: the models to train; `model` is their wrapped form.
        optimizer: over its parameters, in any groups.
        args: of the run; the gradients of policy and critic are clipped each on its own.
    """

    synced_forwards = False
    """Whether all ranks must make the same forward passes, also without gradients, because parameters are sharded."""
    weights_version = 0
    """How often the weights have changed."""

    def __init__(
        self, accelerator: Accelerator, actor_critic: ActorCritic, optimizer: torch.optim.Optimizer, args: PPOConfig
    ) -> None:
        self.accelerator, self.actor_critic, self.optimizer = accelerator, actor_critic, optimizer
        own = args.critic_max_grad_norm
        self.max_grad_norm, self.critic_max_grad_norm = args.max_grad_norm, args.max_grad_norm if own is None else own
        # Sharding replaces the parameters.
        self._parts = group_parts(optimizer, actor_critic)
        # Of policies whose parameters are sharded.
        self._samplers: dict[Policy, Sampler] = {}
        self.model: Any = self._wrap(args)

    def _wrap(self, args: PPOConfig) -> Any:
        """Prepares models and optimizer; returns what a step calls."""
        # torchrun with one process would get DDP around the model, though there is nothing to reduce.
        alone = self.accelerator.num_processes == 1
        model = self.accelerator.prepare_model(self.actor_critic, evaluation_mode=alone)
        self._stepping = self.accelerator.prepare_optimizer(self.optimizer)
        return model

    @property
    def learning_rates(self) -> LearningRates:
        """Of the next optimizer step: the largest of the groups that hold parameters of the policy, or the critic."""
        rates: dict[Part, float] = {"policy": 0.0, "critic": 0.0}
        for group, part in zip(self.optimizer.param_groups, self._parts, strict=True):
            for of in rates if part == "both" else [part]:
                rates[of] = max(rates[of], float(group["lr"]))
        return LearningRates(rates["policy"], None if self.actor_critic.critic is None else rates["critic"])

    def begin(self) -> None:
        """Starts an optimizer step: drops gradients left by an update that was skipped or interrupted."""
        self.model.zero_grad()

    def passing(self, *, last_batch: bool, last_pass: bool) -> AbstractContextManager[Any]:
        """Wraps a forward and backward pass, of which a micro-batch may have several; gradients are synchronized in the
        last one of the last micro-batch.
        """
        return nullcontext() if last_batch and last_pass else self.accelerator.no_sync(self.model)

    def backward(self, loss: Tensor) -> None:
        """Adds the gradient of `loss`, one summand of the optimizer step's loss over all ranks and micro-batches."""
        # DDP averages over ranks and Accelerate divides by its accumulation steps; undo both to get a sum.
        parts = self.accelerator.num_processes * self.accelerator.gradient_accumulation_steps
        self.accelerator.backward(loss * parts)

    def unused_parameter_loss(self, parameters: Sequence[nn.Parameter]) -> Tensor | float:
        """Zero, with a gradient of zero for `parameters`; to be added to the last loss of an optimizer step.

        DDP waits in that backward pass for the gradients of all parameters.
        """
        if self.accelerator.num_processes == 1:
            return 0.0
        return sum((p.flatten()[0] * 0.0 for p in parameters), torch.zeros(()))

    def step(self, *, frozen: Sequence[nn.Parameter] = ()) -> GradNorms:
        """Clips the gradients of policy and critic, each by its own norm, and steps the optimizer if both are finite;
        returns the norms before clipping.

        Args:
            frozen: parameters that keep their values and optimizer state in this step.
        """
        for parameter in frozen:
            # None, not zero: with a zero gradient AdamW would still decay the weights and count a step.
            parameter.grad = None
        policy = self._clip(self.actor_critic.policy_parameters(), self.max_grad_norm)
        has_critic = self.actor_critic.critic is not None
        critic = self._clip(self.actor_critic.critic_parameters(), self.critic_max_grad_norm) if has_critic else None
        norms = GradNorms(policy, critic)
        if norms.non_finite is None:
            self._stepping.step()
            self.weights_version += 1
        self._stepping.zero_grad()
        return norms

    def _clip(self, parameters: Sequence[nn.Parameter], max_norm: float) -> float:
        self.accelerator.unscale_gradients()
        norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
        # torch multiplies by min(1, max_norm / (norm + 1e-6)) even where that is 1, to spare a GPU the synchronization.
        # Here the host reads the norm anyway, so a gradient within the limit need not be written again.
        if not float(max_norm / (norm + 1e-6)) >= 1:
            clip_grads_with_norm_(parameters, max_norm, norm)
        return float(norm)

    def prepare_frozen_model(self, model: nn.Module, *, offload: bool = False) -> None:
        """Shards a frozen model in place, and casts a reference to the policy's precision, if this engine shards and
        casts the trained models. With `offload`, the shards stay in host memory.
        """

    def autocast(self) -> AbstractContextManager[None]:
        """Wraps passes without gradients in the run's precision: one block for the sampling of a rollout, and one for
        each model that evaluates it. Autocast keeps its casts of trained weights until the block ends.
        """
        block: AbstractContextManager[None] = self.accelerator.autocast()
        return block

    @contextmanager
    def sampling(self, policy: Policy | None = None) -> Iterator[PreTrainedModel]:
        """Yields the language model of `policy`, by default the one in training, with all parameters on this rank. All
        ranks must enter the block; in it each of them samples as it likes.
        """
        policy = self.actor_critic.policy if policy is None else policy
        if (sampler := self._samplers.get(policy)) is None:
            yield policy.model
            return
        with self._whole(*policy.model.parameters()) as weights, sampler.holding(weights) as model:
            yield model

    @contextmanager
    def _whole(self, *tensors: Tensor) -> Iterator[list[Tensor]]:
        """Yields parameters and buffers whole, as passes compute with them. All ranks must enter the block."""
        yield [tensor.detach() for tensor in tensors]

    @contextmanager
    def gathered_parameters(self, *modules: nn.Module) -> Iterator[None]:
        """A block in which every rank holds all parameters of `modules`. All ranks must enter it."""
        with self._whole(*(parameter for module in modules for parameter in module.parameters())):
            yield

    def policy_weights(self, *, base: bool = False) -> Iterator[tuple[str, Tensor]]:
        """The name and the whole tensor, as the policy computes with it, of everything in the state dictionary of its
        language model, tied weights once; with adapters, of the policy's adapter alone, or with `base` of all but
        adapters. All ranks must take all of them. A tensor is empty once the next one is asked for, so that a rank
        holds only one beside its shards.
        """
        policy = self.actor_critic.policy
        own = None if policy.adapters is None else {id(p) for p in policy.adapters.parameters_of(POLICY)}
        given: set[int] = set()
        for name, tensor in policy.model.state_dict(keep_vars=True).items():
            wanted = own is None or (".lora_" not in name if base else id(tensor) in own)
            if wanted and id(tensor) not in given:
                given.add(id(tensor))
                with self._whole(tensor) as (whole,):
                    yield name, whole
                    whole.data = whole.new_empty(0)

    def weights(self) -> dict[str, Tensor]:
        """The tensors of policy and critic that a checkpoint saves, by name, unsharded: parameters and persistent
        buffers. All ranks must call this; ranks that write no checkpoints may get tensors without memory.

        A tensor with several names (tied weights) appears once, under the first. Of a model with a frozen base only
        the trainable parameters are saved: the base can be loaded again from its original path.
        """
        parameters = dict(self.actor_critic.named_parameters())
        names = {name for name, parameter in parameters.items() if parameter.requires_grad}
        if names == parameters.keys():
            names |= {name for name, _ in self.actor_critic.named_buffers()}
        state = self.actor_critic.state_dict(keep_vars=True)
        return {name: self._saved(tensor) for name, tensor in state.items() if name in names}

    def _saved(self, tensor: Tensor) -> Tensor:
        """A parameter or buffer as `weights` returns it."""
        return tensor.detach()

    def _to_writer(self, tensor: Tensor) -> Tensor:
        """`tensor` in host memory on the rank that writes checkpoints; only its shape and dtype on the others."""
        return tensor.to("cpu" if self.accelerator.is_main_process else "meta")

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Restores what `weights` returned."""
        targets = self.actor_critic.state_dict(keep_vars=True)
        for name, tensor in weights.items():
            self._load(targets[name], tensor)
        self.weights_version += 1

    def _load(self, target: Tensor, tensor: Tensor) -> None:
        """Restores a parameter or buffer from what `weights` returned for it."""
        target.detach().copy_(tensor)

    def optimizer_state(self) -> dict[str, Any]:
        """The optimizer's state dictionary over unsharded parameters; see `weights`."""
        state = self.optimizer.state_dict()
        # In the order of the parameters, not of their first updates, so that all settings write the same checkpoint.
        saved = {
            number: {key: self._saved(value) if torch.is_tensor(value) else value for key, value in values.items()}
            for number, values in sorted(state["state"].items())
        }
        return {**state, "state": saved}

    def load_optimizer_state(self, state: Mapping[str, Any]) -> None:
        """Restores what `optimizer_state` returned."""
        self.optimizer.load_state_dict(dict(state))
