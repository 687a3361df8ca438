"""The engine for DeepSpeed ZeRO. Stage 1 shards the optimizer state, stage 2 also gradients, stage 3 also parameters.

The code follows DeepSpeed 0.19.8. A checkpoint holds unsharded tensors, so it depends neither on the ZeRO stage nor on
the number of ranks.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.distributed.deepspeed_config import resolve_auto
from alpaca_ppo.distributed.engine import Engine, GradNorms
from alpaca_ppo.distributed.sampler import Sampler
from alpaca_ppo.models import Policy


class DeepSpeedEngine(Engine):
    """Trains policy and critic in one DeepSpeed engine. The accelerator has a DeepSpeed plugin, and each group of the
    optimizer holds parameters of the policy or of the critic.

    Raises:
        ValueError: for a group with parameters of both, and for a configuration that contradicts the run.
    """

    def _wrap(self, args: PPOConfig) -> Any:
        if "both" in self._parts:
            # It flattens a group into one tensor, so it clips whole groups, and leaves whole groups out of a step.
            raise ValueError(
                f"group {self._parts.index('both')} of the optimizer has parameters of policy and critic, which "
                "DeepSpeed cannot clip or freeze apart; make one group of each"
            )
        # DeepSpeed will replace the parameters of each group by flat partitions.
        self._groups = [list(group["params"]) for group in self.optimizer.param_groups]
        plugin, policy = self.accelerator.deepspeed_plugin, self.actor_critic.policy
        assert plugin is not None
        self.config: dict[str, Any] = plugin.deepspeed_config
        hidden = policy.model.config.get_text_config().hidden_size
        processes = self.accelerator.num_processes
        self.config.update(resolve_auto(self.config, args, processes=processes, hidden_size=hidden))
        self.accelerator.gradient_accumulation_steps = self.config["gradient_accumulation_steps"]
        self.stage: int = plugin.zero_stage
        self.synced_forwards = self.stage == 3
        self._frozen_optimizers: list[Any] = []
        if self.stage == 3:
            self._samplers[policy] = Sampler(policy.model, self.accelerator.device)
        engine, _ = self.accelerator.prepare(self.actor_critic, self.optimizer)
        self._zero = engine.optimizer
        # DeepSpeed has no option to leave a group out of a step, and with a gradient and a learning rate of 0 AdamW
        # would still decay the moments and count the step. Delete `_step_group` once it has one.
        self._step_any_group = self._zero._optimizer_step
        self._zero._optimizer_step = self._step_group
        self._frozen_groups: set[int] = set()
        limits = {False: self.max_grad_norm, True: self.critic_max_grad_norm}
        self._clipping = _Clipping(self._zero, [part == "critic" for part in self._parts], limits, stage=self.stage)
        if self.synced_forwards:
            _register_head_use(self.actor_critic, policy)
            _register_head_use(policy, policy)
        return engine

    def begin(self) -> None:
        self._zero.zero_grad()
        if self.stage == 3:
            # The first pass overwrites only the gradients it computes; the others would stay from the last step.
            for part in self._zero._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition.values():
                part.zero_()
        else:
            self._zero.averaged_gradients, self._zero.all_grad_tensors = {}, {}
            # With an offloaded optimizer, gradients are added to this buffer, which still holds the last step's.
            for buffer in getattr(self._zero, "accumulated_grads_in_cpu", {}).values():
                buffer.zero_()

    def passing(self, *, last_batch: bool, last_pass: bool) -> AbstractContextManager[Any]:
        # Stage 3 reduces a gradient in the pass that computes it; the other stages in the last pass, where
        # `unused_parameter_loss` brings in the parameters of earlier ones.
        self.model.set_gradient_accumulation_boundary(last_batch and (last_pass or self.stage == 3))
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        # DeepSpeed averages over ranks, and with this flag does not divide by its accumulation steps.
        self.model.backward(loss * self.accelerator.num_processes, scale_wrt_gas=False)

    def unused_parameter_loss(self, parameters: Sequence[nn.Parameter]) -> Tensor | float:
        # Stage 3 reduces a gradient in the pass that computes it.
        return 0.0 if self.stage == 3 else super().unused_parameter_loss(parameters)

    def step(self, *, frozen: Sequence[nn.Parameter] = ()) -> GradNorms:
        ids = {id(parameter) for parameter in frozen}
        self._frozen_groups = {i for i, group in enumerate(self._groups) if ids.intersection(map(id, group))}
        self._clipping.begin()
        self.model.step()
        self.weights_version += 1
        policy, critic = self._clipping.norms()
        return GradNorms(policy, critic if self.actor_critic.critic is not None else None)

    def _step_group(self, number: int) -> None:
        """Updates a group of the optimizer, or a sub-group of one under stage 3, unless the step freezes it."""
        group = self._zero.sub_group_to_group_id[number] if self.stage == 3 else number
        if group not in self._frozen_groups:
            self._step_any_group(number)

    def prepare_frozen_model(self, model: nn.Module, *, offload: bool = False) -> None:
        if isinstance(model, Policy) and self.config["bf16"]["enabled"]:
            # DeepSpeed casts the policy's parameters (not its buffers); the KL to an uncast reference would not be 0.
            for parameter in model.parameters():
                parameter.data = parameter.data.to(torch.bfloat16) if parameter.is_floating_point() else parameter.data
        if self.stage != 3 or not isinstance(model, Policy | PreTrainedModel):
            return
        import deepspeed

        if isinstance(model, Policy):
            self._samplers[model] = Sampler(model.model, self.accelerator.device)
        zero = {key: value for key, value in self.config["zero_optimization"].items() if key != "offload_optimizer"}
        if offload:
            zero["offload_param"] = {"device": "cpu"}
        # bf16 would round the float32 adapters on a bfloat16 base, unlike the policy's.
        half = {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "bf16": {"enabled": half}}
        self._frozen_optimizers.append(deepspeed.initialize(model=model, config=config)[0].optimizer)
        if isinstance(model, Policy):
            _register_head_use(model, model)

    @contextmanager
    def _whole(self, *tensors: Tensor) -> Iterator[list[Tensor]]:
        import deepspeed

        if self.stage == 3:
            self._drop_prefetched()
        parameters = [tensor for tensor in tensors if isinstance(tensor, nn.Parameter)]
        with deepspeed.zero.GatheredParameters(parameters, enabled=self.stage == 3), super()._whole(*tensors) as whole:
            yield whole

    def _drop_prefetched(self) -> None:
        """Releases parameters that stage 3 has prefetched for a pass that did not run, if the critic was skipped, say.
        Gathering skips these and would leave them empty.
        """
        for optimizer in (self._zero, *self._frozen_optimizers):
            optimizer.empty_partition_cache()

    def _saved(self, tensor: Tensor) -> Tensor:
        """Trained weights are the float32 masters. One tensor at a time is gathered, which bounds the memory."""
        from deepspeed.utils import safe_get_full_fp32_param

        return self._to_writer(safe_get_full_fp32_param(tensor)) if isinstance(tensor, nn.Parameter) else tensor

    def _load(self, target: Tensor, tensor: Tensor) -> None:
        import deepspeed
        from deepspeed.utils import safe_set_full_fp32_param

        value = tensor.to(self.accelerator.device)
        if not isinstance(target, nn.Parameter):
            target.copy_(value)
            return
        if self.stage == 3:
            self._drop_prefetched()
        safe_set_full_fp32_param(target, value)
        with deepspeed.zero.GatheredParameters(target, modifier_rank=0, enabled=self.stage == 3):
            target.data.copy_(value)

    def optimizer_state(self) -> dict[str, Any]:
        from deepspeed.utils import safe_get_full_optimizer_state

        self._link_optimizer_state()
        state, groups, count = {}, [], 0
        for i, parameters in enumerate(self._groups):
            flat = self._flat_partitions(i)[0]
            flat_state = self.optimizer.state.get(flat, {})
            for parameter in parameters:
                if flat_state:
                    # Copies: parameters that share a number of steps would each count it up where torch resumes them.
                    state[count] = {
                        key: self._to_writer(safe_get_full_optimizer_state(parameter, key))
                        if torch.is_tensor(value) and value.shape == flat.shape
                        else copy.deepcopy(value)
                        for key, value in flat_state.items()
                    }
                count += 1
            settings = {key: value for key, value in self.optimizer.param_groups[i].items() if key != "params"}
            groups.append({**settings, "params": list(range(count - len(parameters), count))})
        return {"state": state, "param_groups": groups}

    def load_optimizer_state(self, state: Mapping[str, Any]) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state

        first = 0
        for i, (parameters, saved) in enumerate(zip(self._groups, state["param_groups"], strict=True)):
            self.optimizer.param_groups[i].update({key: value for key, value in saved.items() if key != "params"})
            values = [state["state"].get(first + j, {}) for j in range(len(parameters))]
            self._allocate_optimizer_state(i, parameters[0], values[0])
            for parameter, value in zip(parameters, values, strict=True):
                for key, tensor in value.items():
                    if torch.is_tensor(tensor) and tensor.shape == self._full_shape(parameter):
                        safe_set_full_optimizer_state(parameter, tensor.to(self.accelerator.device), key)
            first += len(parameters)

    def _allocate_optimizer_state(self, group: int, parameter: nn.Parameter, saved: Mapping[str, Any]) -> None:
        """Allocates the state of a group's flat partitions, as the optimizer itself would in its first step."""
        fused = self.optimizer.param_groups[group].get("fused")
        for flat in self._flat_partitions(group):
            self.optimizer.state.pop(flat, None)
            for key, value in saved.items():
                if torch.is_tensor(value) and value.shape == self._full_shape(parameter):
                    own = torch.zeros_like(flat.data)
                else:
                    own = copy.deepcopy(value)
                    # A fused kernel reads the number of steps from its device.
                    own = own.to(flat.device) if fused and torch.is_tensor(own) else own
                self.optimizer.state[flat][key] = own
        self._link_optimizer_state()

    def _link_optimizer_state(self) -> None:
        """Links every parameter to its part of the optimizer state.

        Stages 1 and 2 do so after the first group's first step, when the other groups have no state yet.
        """
        if self.stage != 3:
            self._zero._hp_optimizer_states_linked = False
            self._zero._lazy_init_hp_params_optimizer_state()

    def _flat_partitions(self, group: int) -> list[Tensor]:
        """This rank's flat float32 partitions of an optimizer group: the keys of the optimizer's state."""
        if self.stage != 3:
            return [self._zero.single_partition_of_fp32_groups[group]]
        owners = self._zero.sub_group_to_group_id
        return [flat for i, flat in enumerate(self._zero.fp32_partitioned_groups_flat) if owners[i] == group]

    def _full_shape(self, parameter: Any) -> torch.Size:
        return torch.Size(parameter.ds_shape if self.stage == 3 else parameter.shape)


def _register_head_use(module: nn.Module, policy: Policy) -> None:
    """Makes DeepSpeed gather the head's parameters in the forward pass of `module`, which reads them directly."""
    import deepspeed

    for parameter in policy.head.parameters():
        deepspeed.zero.register_external_parameter(module, parameter)


class _Clipping:
    """The gradient norms and the clipping of a ZeRO optimizer, for policy and critic each on its own; by itself
    DeepSpeed clips all parameters by one norm, so that a large value loss would shrink the policy's step.

    A ZeRO optimizer's `step` computes the norm of each of its groups, in their order, combines them into one that tells
    whether the step is skipped, and then passes that to `unscale_and_clip_grads` for each group, in the same order.
    DeepSpeed has no option to clip groups on their own (https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/
    deepspeed/runtime/zero/stage_1_and_2.py and stage3.py), so these methods are wrapped; delete this class once it has.

    Args:
        zero: DeepSpeed's ZeRO optimizer; its methods are replaced on the instance.
        of_critic: whether a group of the torch optimizer inside has the critic's parameters.
        limits: the largest norm of the policy's (False) and the critic's (True) gradient.
        stage: of ZeRO, 1 to 3.
    """

    def __init__(self, zero: Any, of_critic: Sequence[bool], limits: Mapping[bool, float], *, stage: int) -> None:
        self._zero, self._limits = zero, limits
        # Stage 3 divides an optimizer group into sub-groups.
        owners = [zero.sub_group_to_group_id[i] for i in range(len(zero.fp16_groups))] if stage == 3 else None
        self._of_critic = of_critic if owners is None else [of_critic[owner] for owner in owners]
        # The second takes the place of the first if the optimizer is offloaded.
        for name in ("get_grad_norm_direct", "complete_grad_norm_calculation_for_cpu_offload"):
            setattr(zero, name, self._recorded(getattr(zero, name)))
        self._clip = zero.unscale_and_clip_grads
        zero.unscale_and_clip_grads = self._clip_next
        if stage != 3:
            # In bfloat16 these stages look for inf and NaN before the norm, which would end the step without telling
            # whose gradient it was. The norm of such a gradient is not finite and ends it too.
            zero.check_overflow = lambda partition_gradients: None

    def begin(self) -> None:
        """To be called before the ZeRO optimizer's step."""
        self._group_norms: list[Tensor] = []
        self._clipped = 0

    def norms(self) -> tuple[float, float]:
        """Of policy and critic in the step since `begin`, before clipping; inf if a gradient is not finite."""
        assert self._clipped == (0 if self._zero.overflow else len(self._of_critic))
        policy, critic = (float(self._norm(of_critic)) / self._zero.loss_scale for of_critic in (False, True))
        return policy, critic

    def _norm(self, of_critic: bool) -> Tensor | float:
        from deepspeed.runtime.utils import combine_grad_norm_groups

        own = [n for n, critics in zip(self._group_norms, self._of_critic, strict=True) if critics == of_critic]
        norm: Tensor | float = combine_grad_norm_groups(own) if own else 0.0
        return norm

    def _recorded(self, compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def recorded(*arguments: Any) -> Tensor:
            self._group_norms.append(compute(*arguments))
            return self._group_norms[-1]

        return recorded

    def _clip_next(self, gradients: Any, total_norm: Tensor) -> None:
        """Clips the group (its gradients, or its number under stage 3) whose turn it is, by the norm of its role."""
        of_critic = self._of_critic[self._clipped]
        self._clipped += 1
        self._zero.clip_grad = self._limits[of_critic]
        self._clip(gradients, self._norm(of_critic))
