"""The engine for DeepSpeed ZeRO. Stage 1 shards the optimizer state, stage 2 also gradients, stage 3 also parameters.

The code follows DeepSpeed 0.19.8. Without DeepSpeed, which is optional, this module cannot be imported.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.utils import combine_grad_norm_groups
from torch import Tensor, nn
from transformers import PreTrainedModel

from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.distributed.deepspeed_config import resolve_auto
from alpaca_ppo.distributed.engine import Engine, GradNorms
from alpaca_ppo.distributed.optimizer import Part
from alpaca_ppo.distributed.sampler import Sampler
from alpaca_ppo.models import Policy


class DeepSpeedEngine(Engine):
    """Shards by ZeRO. Raises a ValueError for an optimizer group with parameters of both policy and critic, and for a
    DeepSpeed configuration that contradicts the run.
    """

    def _wrap(self, args: PPOConfig) -> Any:
        if "both" in self._parts:
            # DeepSpeed flattens each group into one tensor.
            group = f"group {self._parts.index('both')} of the optimizer"
            raise ValueError(f"{group} has parameters of policy and critic; for DeepSpeed make a group for each")
        plugin: Any = self.accelerator.deepspeed_plugin
        self.stage: int = plugin.zero_stage
        self.synced_forwards = self.stage == 3
        # Completed in place.
        self.config: dict[str, Any] = plugin.deepspeed_config
        policy, processes = self.actor_critic.policy, self.accelerator.num_processes
        hidden_size = policy.model.config.get_text_config().hidden_size
        self.config.update(resolve_auto(self.config, args, processes=processes, hidden_size=hidden_size))
        self.accelerator.gradient_accumulation_steps = self.config["gradient_accumulation_steps"]
        # DeepSpeed replaces the parameters of each group by flat partitions.
        self._groups = [list(group["params"]) for group in self.optimizer.param_groups]
        self._frozen_optimizers: list[Any] = []
        if self.stage == 3:
            self._samplers[policy] = Sampler(policy.model, self.accelerator.device)
        engine, _ = self.accelerator.prepare(self.actor_critic, self.optimizer)
        if self.stage == 3:
            _register_head_use(self.actor_critic, policy)
            _register_head_use(policy, policy)
        self._zero = engine.optimizer
        limits: dict[Part, float] = {"policy": self.max_grad_norm, "critic": self.critic_max_grad_norm}
        self._clipping = _Clipping(self._zero, self._parts, limits, stage=self.stage)
        # DeepSpeed cannot leave a group out of a step, and with a gradient and a learning rate of 0 AdamW would still
        # decay the moments and count the step. Delete `_step_group` once it can.
        self._step_any_group = self._zero._optimizer_step
        self._zero._optimizer_step = self._step_group
        self._frozen_groups: set[int] = set()
        return engine

    def begin(self, part: Part) -> None:
        self._step_part = part
        self._zero.zero_grad()
        if self.stage == 3:
            # The first pass overwrites only the gradients it computes; others would remain from the last step.
            for gradient in self._zero._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition.values():
                gradient.zero_()
        else:
            self._zero.averaged_gradients, self._zero.all_grad_tensors = {}, {}
            # With an offloaded optimizer, gradients are added to the last step's.
            for buffer in getattr(self._zero, "accumulated_grads_in_cpu", {}).values():
                buffer.zero_()

    def gradient_sync(self, *, last_batch: bool, last_pass: bool) -> AbstractContextManager[Any]:
        # Stage 3 reduces a gradient in the pass that computes it, the others all of them in the last pass.
        self.model.set_gradient_accumulation_boundary(last_batch and (last_pass or self.stage == 3))
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        # DeepSpeed averages over ranks, but with this flag does not divide by its accumulation steps.
        self.model.backward(loss * self.accelerator.num_processes, scale_wrt_gas=False)

    def unused_parameter_loss(self, parameters: Sequence[nn.Parameter]) -> Tensor | float:
        return 0.0 if self.stage == 3 else super().unused_parameter_loss(parameters)

    def step(self, *, frozen: Sequence[nn.Parameter] = ()) -> GradNorms:
        ids = {id(parameter) for parameter in frozen}
        self._frozen_groups = {i for i, group in enumerate(self._groups) if ids.intersection(map(id, group))}
        self._clipping.begin_step()
        self.model.step()
        self.weights_version += 1
        policy, critic = self._clipping.norm("policy"), self._clipping.norm("critic")
        return GradNorms(policy, critic if self.actor_critic.critic is not None else None)

    def _step_group(self, number: int) -> None:
        """Updates a group of the optimizer, or a sub-group of one under stage 3, unless the step freezes it."""
        group = self._zero.sub_group_to_group_id[number] if self.stage == 3 else number
        if group not in self._frozen_groups:
            self._step_any_group(number)

    def prepare_frozen_model(self, model: nn.Module, *, offload: bool = False) -> None:
        if isinstance(model, Policy) and self.config["bf16"]["enabled"]:
            # As DeepSpeed casts the policy's parameters, but not its buffers. With a reference in float32, the KL of
            # the first step would not be 0.
            for parameter in model.parameters():
                if parameter.is_floating_point():
                    parameter.data = parameter.data.to(torch.bfloat16)
        if self.stage != 3 or not isinstance(model, Policy | PreTrainedModel):
            return
        if isinstance(model, Policy):
            self._samplers[model] = Sampler(model.model, self.accelerator.device)
        zero = {key: value for key, value in self.config["zero_optimization"].items() if key != "offload_optimizer"}
        if offload:
            zero["offload_param"] = {"device": "cpu"}
        # In a run without bf16, float32 adapters on a bfloat16 base are not rounded, as those of the policy are not.
        bf16 = all(parameter.dtype == torch.bfloat16 for parameter in model.parameters())
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "bf16": {"enabled": bf16}}
        engine, *_ = deepspeed.initialize(model=model, config=config)
        self._frozen_optimizers.append(engine.optimizer)
        if isinstance(model, Policy):
            _register_head_use(model, model)

    @contextmanager
    def _unsharded(self, *tensors: Tensor) -> Iterator[list[Tensor]]:
        if self.stage == 3:
            self._drop_prefetched()
        parameters = [tensor for tensor in tensors if isinstance(tensor, nn.Parameter)]
        with deepspeed.zero.GatheredParameters(parameters, enabled=self.stage == 3):
            yield [tensor.detach() for tensor in tensors]

    def _drop_prefetched(self) -> None:
        """Releases parameters that stage 3 has prefetched for a pass that did not run, such as the critic's. Gathering
        would skip them and leave them empty.
        """
        for optimizer in (self._zero, *self._frozen_optimizers):
            optimizer.empty_partition_cache()

    def _to_save(self, tensor: Tensor) -> Tensor:
        """A parameter as its float32 master copy; a buffer as it is."""
        if not isinstance(tensor, nn.Parameter):
            return tensor
        return self._on_writer(deepspeed.utils.safe_get_full_fp32_param(tensor))

    def _load_tensor(self, target: Tensor, tensor: Tensor) -> None:
        value = tensor.to(self.accelerator.device)
        if not isinstance(target, nn.Parameter):
            target.copy_(value)
            return
        if self.stage == 3:
            self._drop_prefetched()
        deepspeed.utils.safe_set_full_fp32_param(target, value)
        with deepspeed.zero.GatheredParameters(target, modifier_rank=0, enabled=self.stage == 3):
            target.data.copy_(value)

    def optimizer_state(self) -> dict[str, Any]:
        self._link_optimizer_state()
        state: dict[int, dict[str, Any]] = {}
        groups: list[dict[str, Any]] = []
        first = 0
        for i, parameters in enumerate(self._groups):
            numbers = range(first, first + len(parameters))
            # The optimizer steps flat partitions of a group, all of which have the same keys and the same step.
            flat = self._flat_partitions(i)[0]
            for number, parameter in zip(numbers, parameters, strict=True):
                if parameter_state := self._state_of(parameter, flat):
                    state[number] = parameter_state
            settings = {key: value for key, value in self.optimizer.param_groups[i].items() if key != "params"}
            groups.append({**settings, "params": list(numbers)})
            first += len(parameters)
        return {"state": state, "param_groups": groups}

    def _state_of(self, parameter: nn.Parameter, flat: Tensor) -> dict[str, Any]:
        """The unsharded optimizer state of `parameter`; `flat` is a partition of its group."""
        state = {}
        for key, value in self.optimizer.state.get(flat, {}).items():
            if torch.is_tensor(value) and value.shape == flat.shape:
                state[key] = self._on_writer(deepspeed.utils.safe_get_full_optimizer_state(parameter, key))
            else:
                # The step count, copied: a plain optimizer would increment a shared tensor once for each parameter.
                state[key] = copy.deepcopy(value)
        return state

    def load_optimizer_state(self, state: Mapping[str, Any]) -> None:
        for i, (parameters, saved) in enumerate(zip(self._groups, state["param_groups"], strict=True)):
            self.optimizer.param_groups[i].update({key: value for key, value in saved.items() if key != "params"})
            states = [state["state"].get(number, {}) for number in saved["params"]]
            self._allocate_optimizer_state(i, parameters[0], states[0])
            for parameter, values in zip(parameters, states, strict=True):
                for key, value in values.items():
                    if torch.is_tensor(value) and value.shape == self._full_shape(parameter):
                        deepspeed.utils.safe_set_full_optimizer_state(parameter, value.to(self.accelerator.device), key)

    def _allocate_optimizer_state(self, group: int, parameter: nn.Parameter, saved: Mapping[str, Any]) -> None:
        """Allocates the state of a group's flat partitions, as the optimizer itself would in its first step."""
        fused = self.optimizer.param_groups[group].get("fused")
        for flat in self._flat_partitions(group):
            self.optimizer.state.pop(flat, None)
            for key, value in saved.items():
                is_moment = torch.is_tensor(value) and value.shape == self._full_shape(parameter)
                allocated = torch.zeros_like(flat.data) if is_moment else copy.deepcopy(value)
                if fused and torch.is_tensor(allocated):
                    # A fused kernel reads the number of steps from its device.
                    allocated = allocated.to(flat.device)
                self.optimizer.state[flat][key] = allocated
        self._link_optimizer_state()

    def _link_optimizer_state(self) -> None:
        """Links parameters to their optimizer state. Stages 1 and 2 did so when only the first group had one."""
        if self.stage != 3:
            self._zero._hp_optimizer_states_linked = False
            self._zero._lazy_init_hp_params_optimizer_state()

    def _flat_partitions(self, group: int) -> list[Tensor]:
        """This rank's float32 partitions of an optimizer group: the keys of the optimizer's state."""
        if self.stage != 3:
            return [self._zero.single_partition_of_fp32_groups[group]]
        owners = self._zero.sub_group_to_group_id
        return [flat for i, flat in enumerate(self._zero.fp32_partitioned_groups_flat) if owners[i] == group]

    def _full_shape(self, parameter: Any) -> torch.Size:
        return torch.Size(parameter.ds_shape if self.stage == 3 else parameter.shape)


def _register_head_use(module: nn.Module, policy: Policy) -> None:
    """Makes DeepSpeed gather the head's parameters for the forward pass of `module`, which does not call the head."""
    for parameter in policy.head.parameters():
        deepspeed.zero.register_external_parameter(module, parameter)


class _Clipping:
    """Clips the gradients of policy and critic each by its own norm, to its entry in `limits`. DeepSpeed's common norm
    would let a large value loss shrink the policy's step.

    A ZeRO optimizer's `step` computes the norm of each group, combines them into one that decides whether the step is
    skipped, and passes that to `unscale_and_clip_grads` for each group, in the same order (https://github.com/
    deepspeedai/DeepSpeed/blob/v0.19.8/deepspeed/runtime/zero/stage_1_and_2.py and stage3.py). The methods that compute
    norms and clip are replaced; delete this class once DeepSpeed can clip groups separately.
    """

    def __init__(self, zero: Any, parts: Sequence[Part], limits: Mapping[Part, float], *, stage: int) -> None:
        self._zero, self._limits = zero, limits
        self._parts = parts
        if stage == 3:
            # Stage 3 divides an optimizer group into sub-groups.
            self._parts = [parts[zero.sub_group_to_group_id[i]] for i in range(len(zero.fp16_groups))]
        # The second takes the place of the first if the optimizer is offloaded.
        for name in ("get_grad_norm_direct", "complete_grad_norm_calculation_for_cpu_offload"):
            setattr(zero, name, partial(self._record_norm, getattr(zero, name)))
        self._clip = zero.unscale_and_clip_grads
        zero.unscale_and_clip_grads = self._clip_next_group
        if stage != 3:
            # In bfloat16 these stages look for inf and NaN before they compute norms, and would end the step without
            # telling whose gradient it was. The norm, which is not finite then, ends the step too.
            zero.check_overflow = lambda partition_gradients: None

    def begin_step(self) -> None:
        """To be called before the ZeRO optimizer's step."""
        self._group_norms: list[Tensor] = []
        self._clipped_groups = 0

    def norm(self, part: Part) -> float:
        """The norm of the policy's or critic's gradient in the last step, before clipping; inf if it is not finite."""
        assert self._clipped_groups == (0 if self._zero.overflow else len(self._parts))
        return float(self._scaled_norm(part)) / float(self._zero.loss_scale)

    def _scaled_norm(self, part: Part) -> Tensor | float:
        norms = [norm for norm, group_part in zip(self._group_norms, self._parts, strict=True) if group_part == part]
        combined: Tensor | float = combine_grad_norm_groups(norms) if norms else 0.0
        return combined

    def _record_norm(self, compute_norm: Callable[..., Tensor], *arguments: Any) -> Tensor:
        self._group_norms.append(compute_norm(*arguments))
        return self._group_norms[-1]

    def _clip_next_group(self, gradients: Any, total_norm: Tensor) -> None:
        """Clips one group, given its gradients or, under stage 3, its number."""
        part = self._parts[self._clipped_groups]
        self._clipped_groups += 1
        self._zero.clip_grad = self._limits[part]
        self._clip(gradients, self._scaled_norm(part))
