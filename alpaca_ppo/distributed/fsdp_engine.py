"""The engine for FSDP2: torch's `fully_shard` shards weights, gradients and optimizer state over the processes.

Accelerate's FSDP plugin is not used: it prepares one model with its optimizer, and does nothing on a CPU. As in verl
and prime-rl, every decoder layer and the critic's backbone is gathered by itself; the rest (embeddings, norms, heads,
tied pairs) belongs to the root. Every rank holds a cached critic, which is small, unless a group of the user's
optimizer has parameters of both.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from accelerate.utils import parse_flag_from_env
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils import get_total_norm
from transformers import PreTrainedModel

from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.distributed.engine import Engine, clip_above
from alpaca_ppo.distributed.optimizer import Part
from alpaca_ppo.distributed.sampler import Sampler
from alpaca_ppo.models import ActorCriticOutputs, Policy

# torch before 2.13 has only the second name.
all_gather: Any = getattr(torch.distributed, "all_gather_single", None) or torch.distributed.all_gather_into_tensor


class FSDPEngine(Engine):
    """Shards by FSDP2. Raises a ValueError for trained parameters of several dtypes and models without layer names."""

    synced_forwards = True

    def _wrap(self, args: PPOConfig) -> Any:
        policy, critic = self.actor_critic.policy, self.actor_critic.critic
        # What every rank holds.
        self._whole = set[nn.Parameter]()
        # An optimizer cannot step sharded and whole parameters of one group together.
        if critic is not None and critic.reader is not None and "both" not in self._parts:
            self._whole = {*critic.to(self.accelerator.device).parameters()}
            # As DDP does: a critic of the user's may have begun otherwise on each rank.
            for tensor in (*critic.parameters(), *critic.buffers()):
                torch.distributed.broadcast(tensor.detach(), 0)
        trained = [p for p in self.actor_critic.parameters() if p.requires_grad and p not in self._whole]
        dtypes = {str(p.dtype).removeprefix("torch.") for p in trained}
        if len(dtypes) > 1:
            kinds = " and ".join(sorted(dtypes))
            raise ValueError(f"trained parameters are {kinds}, which FSDP2 cannot shard together; train all in float32")
        self._mesh = init_device_mesh(self.accelerator.device.type, (self.accelerator.num_processes,))
        unsharded = dict(self.actor_critic.named_parameters())
        # Only for autocast: `fully_shard` moves the parameters to the device, one group at a time.
        model = self.accelerator.prepare_model(self.actor_critic, device_placement=False, evaluation_mode=True)
        if critic is not None and critic.backbone is not None:
            self._shard(critic.backbone, critic.backbone)
        self._samplers[policy] = Sampler(policy.model, self.accelerator.device)
        self._shard(model, policy.model)
        sharded = {id(unsharded[name]): parameter for name, parameter in model.named_parameters()}
        for group in self.optimizer.param_groups:
            group["params"] = [sharded[id(parameter)] for parameter in group["params"]]
        self._prepared_optimizer = self.accelerator.prepare_optimizer(self.optimizer)
        # FSDP2 gathers a root's parameters in its forward pass, and in methods that are registered as such.
        model.with_root_gathered = lambda forward, *args, **kwargs: forward(*args, **kwargs)
        register_fsdp_forward_method(model, "with_root_gathered")
        self._with_root_gathered = model.with_root_gathered
        # The root is the module that makes the first forward pass.
        self._with_root_gathered(lambda: None)
        # A reference that is another adapter calls the policy from outside the root.
        self._gather_root_for(policy)
        return model

    def _gather_root_for(self, module: Any) -> None:
        """Gathers the root's parameters in the forward passes of `module`, which is called from outside the root."""
        module.forward = partial(self._with_root_gathered, module.forward)

    def _shard(self, root: nn.Module, model: Any) -> None:
        """Shards `root` in place: the layers of its language model or backbone `model`, then the rest."""
        names = set(model._no_split_modules or ())
        layers = [module for module in model.modules() if type(module).__name__ in names]
        if not layers:
            raise ValueError(f"{type(model).__name__} names no layers (_no_split_modules) to shard; use ZeRO 3")
        # From the inside out, as `fully_shard` must be applied: `modules()` lists a module before those within it.
        for module in [*reversed(layers), root]:
            fully_shard(module, mesh=self._mesh, reshard_after_forward=True, ignored_params=self._whole)

    def begin(self, part: Part) -> None:
        # Drops collectives that an exception has left pending; torch before 2.13 cannot.
        if hasattr(self.model, "reset_iter_state"):
            self.model.reset_iter_state()
        super().begin(part)

    @contextmanager
    def gradient_sync(self, *, last_batch: bool, last_pass: bool) -> Iterator[None]:
        # FSDP2 reduces a gradient in the pass that computes it. Passes without gradients reshard in any case.
        self.model.set_reshard_after_forward(parse_flag_from_env("FSDP_RESHARD_AFTER_FORWARD", True))
        try:
            yield
        finally:
            self.model.set_reshard_after_forward(True)

    @property
    def _reduces_critic(self) -> bool:
        return bool(self._whole) and self._step_part != "policy"

    def forward(self, *args: Any, **options: Any) -> ActorCriticOutputs:
        reads_kept_states = not options.get("with_policy", True) and options.get("policy_states") is not None
        # Without the hooks of `__call__`, which would gather the root.
        model = self.model.forward if self._whole and reads_kept_states else self.model
        outputs: ActorCriticOutputs = model(*args, **options)
        return outputs

    def unused_parameter_loss(self, parameters: Sequence[nn.Parameter]) -> Tensor | float:
        return 0.0

    def _clip(self, parameters: Sequence[nn.Parameter], max_norm: float) -> float:
        if self._whole.issuperset(parameters):
            # Every rank has the whole gradients, and so their norm.
            return super()._clip(parameters, max_norm)
        gradients = [_local(parameter.grad) for parameter in parameters if parameter.grad is not None]
        shards = [_local(parameter).detach() for parameter in parameters if parameter.grad is not None]
        # For `clip_above`.
        for shard, gradient in zip(shards, gradients, strict=True):
            shard.grad = gradient
        square = get_total_norm(gradients).square().to(self.accelerator.device)
        torch.distributed.all_reduce(square)
        norm = square.sqrt()
        clip_above(shards, max_norm, norm)
        return float(norm)

    def prepare_frozen_model(self, model: nn.Module, *, offload: bool = False) -> None:
        if isinstance(model, Policy):
            self._samplers[model] = Sampler(model.model, self.accelerator.device)
            self._shard(model, model.model)
        elif isinstance(model, PreTrainedModel):
            self._shard(model, model)
        else:
            # A classifier that is an adapter on the policy.
            self._gather_root_for(model)

    @contextmanager
    def _unsharded(self, *tensors: Tensor) -> Iterator[list[Tensor]]:
        try:
            whole = [_full(tensor) for tensor in tensors]
        except torch.OutOfMemoryError as error:
            size = sum(tensor.nbytes for tensor in tensors) / 2**30
            problem = f"process {self.accelerator.process_index} cannot hold all weights of the policy ({size:.3g} GiB)"
            remedy = "as sampling needs; set generation_backend: vllm, or use a smaller model"
            raise torch.OutOfMemoryError(f"{problem}, {remedy}. {error}") from error
        yield whole

    @contextmanager
    def gathered_parameters(self, module: nn.Module) -> Iterator[None]:
        """Puts whole copies of sharded parameters in host memory into `module`; the shards are put back at the end, so
        changes to the copies are lost.
        """
        # A tied parameter has several places.
        places = [
            (part, name, parameter)
            for part in module.modules()
            for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False)
            if isinstance(parameter, DTensor)
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

    def _to_save(self, tensor: Tensor) -> Tensor:
        return self._on_writer(_full(tensor))

    def _load_tensor(self, target: Tensor, tensor: Tensor) -> None:
        super()._load_tensor(_local(target), _local(self._sharded(tensor, target)))

    def load_optimizer_state(self, state: Mapping[str, Any]) -> None:
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        sharded = {
            number: {key: self._sharded(value, parameters[number]) for key, value in values.items()}
            for number, values in state["state"].items()
        }
        super().load_optimizer_state({**state, "state": sharded})

    def _sharded(self, value: Any, parameter: Tensor) -> Any:
        """A whole tensor sharded like the parameter; any other value unchanged."""
        if not isinstance(parameter, DTensor) or not torch.is_tensor(value) or value.shape != parameter.shape:
            return value
        # Every rank has the whole tensor, so none is sent.
        whole = value.to(self.accelerator.device)
        return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _full(tensor: Tensor) -> Tensor:
    """The whole tensor, on every rank.

    Not by `full_tensor`, which crashes now and then on CPUs: gloo's two threads write the name of their last operation
    into one string without a lock. Only names of up to 15 letters, which are stored in place, are safe: ALLGATHER is,
    ALLGATHER_COALESCED of `full_tensor` is not.
    """
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    mesh, shard = tensor.device_mesh, tensor.to_local().detach()
    # The last ranks may have fewer rows, or none; all_gather needs as many on each.
    rows = math.ceil(len(tensor) / mesh.size())
    padded = shard if len(shard) == rows else torch.cat((shard, shard.new_zeros(rows - len(shard), *shard.shape[1:])))
    whole = shard.new_empty(rows * mesh.size(), *shard.shape[1:])
    all_gather(whole, padded, mesh.get_group())
    # Detached after the slice: emptying a view would not free the gathered tensor.
    return whole[: len(tensor)].detach()
