"""`Engine`: how models are distributed over processes, and how gradients and optimizer steps are computed there.

The base class is the engine for one process and for DDP; those that shard are its subclasses, of which
`accelerator.make_engine` chooses. What an optimizer step consists of is in `ppo.updates`.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, cast

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from transformers import PreTrainedModel

from alpaca_ppo.adapters.adapter_set import POLICY
from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.distributed.optimizer import Part, group_parts
from alpaca_ppo.distributed.sampler import Sampler
from alpaca_ppo.models import ActorCritic, ActorCriticOutputs, Policy


class GradNorms(NamedTuple):
    """The gradient norms of a step before clipping: 0 where it freezes the parameters, None without a critic."""

    policy: float
    critic: float | None

    @property
    def non_finite(self) -> str | None:
        """Whose norm is not finite, in words; None if all are finite."""
        norms = {"policy": self.policy, "critic": 0.0 if self.critic is None else self.critic}
        found = [f"the {name}'s gradient norm is {norm}" for name, norm in norms.items() if not math.isfinite(norm)]
        return " and ".join(found) or None


class LearningRates(NamedTuple):
    """The learning rates of an optimizer step; the critic's is None without a critic."""

    policy: float
    critic: float | None

    def stats(self) -> dict[str, float]:
        """As metrics."""
        rates = {"objective/lr": self.policy, "objective/critic_lr": self.critic}
        return {name: rate for name, rate in rates.items() if rate is not None}


class Engine:
    """Trains policy and critic on one process or under DDP. Subclasses shard; no code outside this folder depends on
    which one a run has. All ranks must call the methods at the same points.

    An optimizer step, over any number of micro-batches with one or several passes each:

        engine.begin(part)
        with engine.gradient_sync(last_batch=..., last_pass=...):      # for each pass
            loss = ... engine.forward(...) ...
            loss += engine.unused_parameter_loss(...)                  # in the last pass of a micro-batch
            engine.backward(loss)
        norms = engine.step()

    Args:
        actor_critic: the models to train; `model` is their wrapped form.
        optimizer: over their parameters, in any groups.
    """

    # Whether all ranks must make the same forward passes, also without gradients, because these gather parameters.
    synced_forwards = False
    weights_version = 0  # how often the weights have changed
    _step_part: Part = "both"  # what the optimizer step in progress trains

    def __init__(
        self, accelerator: Accelerator, actor_critic: ActorCritic, optimizer: torch.optim.Optimizer, args: PPOConfig
    ) -> None:
        self.accelerator, self.actor_critic, self.optimizer = accelerator, actor_critic, optimizer
        self.max_grad_norm = self.critic_max_grad_norm = args.max_grad_norm
        if args.critic_max_grad_norm is not None:
            self.critic_max_grad_norm = args.critic_max_grad_norm
        # Before `_wrap`, because sharding replaces the parameters.
        self._parts = group_parts(optimizer, actor_critic)
        # Of policies whose parameters are sharded.
        self._samplers: dict[Policy, Sampler] = {}
        self.model: Any = self._wrap(args)

    def _wrap(self, args: PPOConfig) -> Any:
        """Prepares models and optimizer; returns `model`."""
        # Under torchrun with one process, Accelerate would add DDP, though there is nothing to reduce.
        alone = self.accelerator.num_processes == 1
        model = self.accelerator.prepare_model(self.actor_critic, evaluation_mode=alone)
        self._prepared_optimizer = self.accelerator.prepare_optimizer(self.optimizer)
        return model

    @property
    def learning_rates(self) -> LearningRates:
        """The rates of the next optimizer step: the largest of the groups with parameters of the policy, and of those
        with parameters of the critic.
        """
        rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        groups = list(zip(rates, self._parts, strict=True))
        policy = max((rate for rate, part in groups if part != "critic"), default=0.0)
        critic = max((rate for rate, part in groups if part != "policy"), default=0.0)
        return LearningRates(policy, None if self.actor_critic.critic is None else critic)

    def begin(self, part: Part) -> None:
        """Starts an optimizer step of `part`: drops gradients left by one that was skipped or interrupted."""
        self._step_part = part
        self.model.zero_grad()

    @property
    def _reduces_critic(self) -> bool:
        """Whether `step` reduces the critic's gradients. In its own steps, DDP would reduce zeros for the policy."""
        return self._step_part == "critic" and isinstance(self.model, DistributedDataParallel)

    def gradient_sync(self, *, last_batch: bool, last_pass: bool) -> AbstractContextManager[Any]:
        """Wraps one forward and backward pass. Gradients are reduced over the ranks in the last pass of the last batch,
        or in every pass by engines that shard them; those of a critic alone under DDP in `step`.
        """
        reduces = last_batch and last_pass and not self._reduces_critic
        return nullcontext() if reduces else self.accelerator.no_sync(self.model)

    def forward(self, *args: Any, **options: Any) -> ActorCriticOutputs:
        """A forward pass; see `ActorCritic.forward`."""
        outputs: ActorCriticOutputs = self.model(*args, **options)
        return outputs

    def backward(self, loss: Tensor) -> None:
        """Adds the gradient of `loss`: the optimizer step's loss is the sum over all ranks and passes."""
        # DDP averages over ranks and Accelerate divides by its accumulation steps; undo both to get a sum.
        divisor = self.accelerator.num_processes * self.accelerator.gradient_accumulation_steps
        self.accelerator.backward(loss * divisor)

    def unused_parameter_loss(self, parameters: Sequence[nn.Parameter]) -> Tensor | float:
        """Zero, with a gradient of zero for `parameters`, which the pass does not use: DDP waits for all gradients, but
        in a step of the critic alone.
        """
        if self.accelerator.num_processes == 1 or self._step_part == "critic":
            return 0.0
        return sum((p.flatten()[0] * 0.0 for p in parameters), torch.zeros(()))

    def step(self, *, frozen: Sequence[nn.Parameter] = ()) -> GradNorms:
        """Clips the gradients of policy and critic, each by its own norm, and steps the optimizer if both are finite;
        returns the norms before clipping. Parameters in `frozen` keep their values and optimizer state.
        """
        for parameter in frozen:
            # None, not zero: with a zero gradient AdamW would still decay the weights and count a step.
            parameter.grad = None
        if self._reduces_critic:
            self._average_gradients(self.actor_critic.critic_parameters())
        policy = self._clip(self.actor_critic.policy_parameters(), self.max_grad_norm)
        has_critic = self.actor_critic.critic is not None
        critic = self._clip(self.actor_critic.critic_parameters(), self.critic_max_grad_norm) if has_critic else None
        norms = GradNorms(policy, critic)
        if norms.non_finite is None:
            self._prepared_optimizer.step()
            self.weights_version += 1
        self._prepared_optimizer.zero_grad()
        return norms

    def _average_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Averages the gradients over the ranks, as DDP does. A parameter that no rank has used keeps none."""
        used = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.int32)
        used = used.to(self.accelerator.device)
        torch.distributed.all_reduce(used)
        for parameter in itertools.compress(parameters, used.tolist()):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            torch.distributed.all_reduce(parameter.grad)
            parameter.grad /= self.accelerator.num_processes

    def _clip(self, parameters: Sequence[nn.Parameter], max_norm: float) -> float:
        """Clips the gradients of `parameters` by their common norm, and returns it."""
        norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
        clip_above(parameters, max_norm, norm)
        return float(norm)

    def prepare_frozen_model(self, model: nn.Module, *, offload: bool = False) -> None:
        """Shards a frozen model in place, and casts a reference to the policy's precision, if this engine does so with
        trained models. With `offload`, the shards stay in host memory.
        """

    def autocast(self) -> AbstractContextManager[None]:
        """Wraps passes without gradients in the run's precision: one block per model, because autocast keeps its casts
        of the weights until the block ends.
        """
        return cast(AbstractContextManager[None], self.accelerator.autocast())

    @contextmanager
    def sampling(self, policy: Policy | None = None) -> Iterator[PreTrainedModel]:
        """Yields the language model of `policy`, by default the one in training, with all parameters on this rank, so
        that in the block each rank may make other passes.
        """
        policy = self.actor_critic.policy if policy is None else policy
        if (sampler := self._samplers.get(policy)) is None:
            yield policy.model
            return
        with self._unsharded(*policy.model.parameters()) as weights, sampler.holding(weights) as model:
            yield model

    @contextmanager
    def _unsharded(self, *tensors: Tensor) -> Iterator[list[Tensor]]:
        """Yields parameters and buffers whole, in the precision of the passes."""
        yield [tensor.detach() for tensor in tensors]

    @contextmanager
    def gathered_parameters(self, module: nn.Module) -> Iterator[None]:
        """A block in which every rank holds all parameters of `module`."""
        with self._unsharded(*module.parameters()):
            yield

    def policy_weights(self, *, base: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Names and whole tensors of the policy's language model, in the precision of the passes, tied weights once;
        with adapters, only the policy's adapter, or with `base` everything but adapters. Every rank must iterate to the
        end. A tensor is emptied when the next one is asked for, to save memory.
        """
        policy = self.actor_critic.policy
        adapter = None if policy.adapters is None else {id(p) for p in policy.adapters.parameters_of(POLICY)}
        yielded: set[int] = set()
        for name, tensor in policy.model.state_dict(keep_vars=True).items():
            wanted = adapter is None or (".lora_" not in name if base else id(tensor) in adapter)
            if wanted and id(tensor) not in yielded:
                yielded.add(id(tensor))
                with self._unsharded(tensor) as (whole,):
                    yield name, whole
                    whole.data = whole.new_empty(0)

    def weights(self) -> dict[str, Tensor]:
        """The whole tensors that a checkpoint saves, by name: parameters and persistent buffers, tied weights under
        their first name; if any parameter is frozen, only the trainable ones. Ranks other than the main one may get
        tensors without memory.
        """
        parameters = dict(self.actor_critic.named_parameters())
        names = {name for name, parameter in parameters.items() if parameter.requires_grad}
        if names == parameters.keys():
            names |= {name for name, _ in self.actor_critic.named_buffers()}
        state = self.actor_critic.state_dict(keep_vars=True)
        return {name: self._to_save(tensor) for name, tensor in state.items() if name in names}

    def _to_save(self, tensor: Tensor) -> Tensor:
        """A parameter or buffer as `weights` returns it."""
        return tensor.detach()

    def _on_writer(self, tensor: Tensor) -> Tensor:
        """In host memory on the rank that writes checkpoints, without memory on the others."""
        return tensor.to("cpu" if self.accelerator.is_main_process else "meta")

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Restores what `weights` returned."""
        targets = self.actor_critic.state_dict(keep_vars=True)
        for name, tensor in weights.items():
            self._load_tensor(targets[name], tensor)
        self.weights_version += 1

    def _load_tensor(self, target: Tensor, tensor: Tensor) -> None:
        """Restores a parameter or buffer from its whole tensor."""
        target.detach().copy_(tensor)

    def optimizer_state(self) -> dict[str, Any]:
        """The optimizer's state dictionary with whole tensors; see `weights`."""
        state = self.optimizer.state_dict()
        # In the order of the parameters, not of their first updates, so that all settings write the same checkpoint.
        saved = {
            number: {key: self._to_save(value) if torch.is_tensor(value) else value for key, value in values.items()}
            for number, values in sorted(state["state"].items())
        }
        return {**state, "state": saved}

    def load_optimizer_state(self, state: Mapping[str, Any]) -> None:
        """Restores what `optimizer_state` returned."""
        self.optimizer.load_state_dict(dict(state))


def clip_above(parameters: Sequence[Tensor], max_norm: float, norm: Tensor) -> None:
    """Scales gradients whose total norm is `norm` to `max_norm`, if they exceed it or are not finite."""
    # torch multiplies even by 1, to spare a GPU the synchronization. Here the host reads the norm anyway.
    if not float(max_norm / (norm + 1e-6)) >= 1:
        clip_grads_with_norm_(parameters, max_norm, norm)
