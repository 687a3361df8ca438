"""The engine for FSDP2: torch's `fully_shard` shards weights, gradients and optimizer state over the processes.

Accelerate starts the processes and its FSDP plugin is left out: it prepares one model with its optimizer, and on a CPU
does nothing. As in verl and prime-rl, every decoder layer and the critic's backbone is gathered by itself, and what
is read directly (embeddings, norms, heads, tied pairs) by the root. A checkpoint holds whole tensors.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from transformers import PreTrainedModel

from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.distributed.engine import Engine
from alpaca_ppo.distributed.sampler import Sampler
from alpaca_ppo.models import Policy

# torch before 2.13 has the other name alone.
_gather: Any = getattr(torch.distributed, "all_gather_single", None) or torch.distributed.all_gather_into_tensor


class FSDPEngine(Engine):
    """Trains policy and critic with sharded parameters.

    Raises:
        ValueError: for trained parameters of several dtypes, and for a model that does not name its layers.
    """

    synced_forwards = True

    def _wrap(self, args: PPOConfig) -> Any:
        dtypes = {str(p.dtype).removeprefix("torch.") for p in self.actor_critic.parameters() if p.requires_grad}
        if len(dtypes) > 1:
            raise ValueError(
                f"trained parameters are {' and '.join(sorted(dtypes))}, which FSDP2 cannot shard together; train all "
                "of them in float32"
            )
        policy, critic = self.actor_critic.policy, self.actor_critic.critic
        self._mesh = init_device_mesh(self.accelerator.device.type, (self.accelerator.num_processes,))
        before = dict(self.actor_critic.named_parameters())
        # Autocast, and no more: `fully_shard` moves a group at a time to the device.
        model = self.accelerator.prepare_model(self.actor_critic, device_placement=False, evaluation_mode=True)
        if critic is not None and critic.backbone is not None:
            self._shard(critic.backbone, critic.backbone)
        self._samplers[policy] = Sampler(policy.model, self.accelerator.device)
        self._shard(model, policy.model)
        sharded = {id(before[name]): parameter for name, parameter in model.named_parameters()}
        for group in self.optimizer.param_groups:
            group["params"] = [sharded[id(parameter)] for parameter in group["params"]]
        self._stepping = self.accelerator.prepare_optimizer(self.optimizer)
        model.borrowed = lambda forward, *given, **keywords: forward(*given, **keywords)
        register_fsdp_forward_method(model, "borrowed")
        self._borrowed = model.borrowed
        # The root is what makes the first pass of all.
        self._borrowed(lambda: None)
        # As the reference, with another adapter.
        self._lend_root(policy)
        return model

    def _lend_root(self, module: Any) -> None:
        """Gathers what the root holds for the passes of `module`, which reads the policy's model from outside of it."""
        module.forward = partial(self._borrowed, module.forward)

    def _shard(self, root: nn.Module, model: Any) -> None:
        """Shards `root` in place: the layers of its language model or backbone, then the rest of it."""
        names = set(model._no_split_modules or ())
        layers = [module for module in model.modules() if type(module).__name__ in names]
        if not layers:
            raise ValueError(
                f"{type(model).__name__} names no layers (_no_split_modules) that FSDP2 could shard; use ZeRO 3 "
                "(--accelerate_config zero3)"
            )
        for module in [*reversed(layers), root]:
            fully_shard(module, mesh=self._mesh, reshard_after_forward=True)

    def begin(self) -> None:
        # After an exception, what was on its way is dropped; torch before 2.13 cannot do that.
        if hasattr(self.model, "reset_iter_state"):
            self.model.reset_iter_state()
        super().begin()

    def passing(self, *, last_batch: bool, last_pass: bool) -> AbstractContextManager[Any]:
        # A gradient is reduced in the pass that computes it.
        return nullcontext()

    def unused_parameter_loss(self, parameters: Sequence[nn.Parameter]) -> Tensor | float:
        return 0.0

    def _clip(self, parameters: Sequence[nn.Parameter], max_norm: float) -> float:
        shards = [_local(parameter).detach() for parameter in parameters if parameter.grad is not None]
        gradients = [_local(parameter.grad) for parameter in parameters if parameter.grad is not None]
        square = get_total_norm(gradients).square().to(self.accelerator.device)
        torch.distributed.all_reduce(square)
        norm = square.sqrt()
        if not float(max_norm / (norm + 1e-6)) >= 1:
            for shard, gradient in zip(shards, gradients, strict=True):
                shard.grad = gradient
            clip_grads_with_norm_(shards, max_norm, norm)
        return float(norm)

    def prepare_frozen_model(self, model: nn.Module, *, offload: bool = False) -> None:
        if isinstance(model, Policy):
            self._samplers[model] = Sampler(model.model, self.accelerator.device)
            self._shard(model, model.model)
        elif isinstance(model, PreTrainedModel):
            self._shard(model, model)
        else:
            # A classifier that is an adapter on the policy.
            self._lend_root(model)

    @contextmanager
    def _whole(self, *tensors: Tensor) -> Iterator[list[Tensor]]:
        try:
            whole = [_full(tensor) for tensor in tensors]
        except torch.OutOfMemoryError as error:
            size = sum(tensor.nbytes for tensor in tensors) / 2**30
            raise torch.OutOfMemoryError(
                f"process {self.accelerator.process_index} cannot hold all weights of the policy ({size:.3g} GiB), as "
                f"sampling needs; set generation_backend: vllm, or use a smaller model. {error}"
            ) from error
        yield whole

    @contextmanager
    def gathered_parameters(self, *modules: nn.Module) -> Iterator[None]:
        """In host memory."""
        places = [
            (part, name, parameter)
            for module in modules
            for part in module.modules()
            for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False)
        ]
        sharded = {id(parameter): parameter for _, _, parameter in places}
        whole = {key: nn.Parameter(_full(p).cpu(), p.requires_grad) for key, p in sharded.items()}
        for part, name, parameter in places:
            setattr(part, name, whole[id(parameter)])
        try:
            yield
        finally:
            for part, name, parameter in places:
                setattr(part, name, parameter)

    def _saved(self, tensor: Tensor) -> Tensor:
        return self._to_writer(_full(tensor))

    def _load(self, target: Tensor, tensor: Tensor) -> None:
        super()._load(_local(target), _local(self._sharded(tensor, target)))

    def load_optimizer_state(self, state: Mapping[str, Any]) -> None:
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        own = {
            number: {key: self._sharded(value, parameters[number]) for key, value in values.items()}
            for number, values in state["state"].items()
        }
        super().load_optimizer_state({**state, "state": own})

    def _sharded(self, value: Any, parameter: Tensor) -> Any:
        """A whole tensor sharded as the parameter is; another value as it is."""
        if not isinstance(parameter, DTensor) or not torch.is_tensor(value) or value.shape != parameter.shape:
            return value
        # Every rank has read it, so nothing need be sent.
        whole = value.to(self.accelerator.device)
        return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _full(tensor: Tensor) -> Tensor:
    """The whole tensor, on every rank.

    Not by `full_tensor`, which ends a process now and then on CPUs: both threads of gloo write the name of what they
    did last into one string, without a lock. That is safe for names of up to 15 letters, which need no memory of their
    own: ALLGATHER, and not the ALLGATHER_COALESCED of `full_tensor`.
    """
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    mesh, shard = tensor.device_mesh, tensor.to_local().detach()
    # The last ranks may have fewer rows, or none.
    rows = -(-len(tensor) // mesh.size())
    padded = shard if len(shard) == rows else torch.cat((shard, shard.new_zeros(rows - len(shard), *shard.shape[1:])))
    whole = shard.new_empty(rows * mesh.size(), *shard.shape[1:])
    _gather(whole, padded, mesh.get_group())
    # Detached last: as a view, it would keep what has been gathered when it is emptied.
    return whole[: len(tensor)].detach()
