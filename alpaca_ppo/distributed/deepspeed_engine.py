"""The engine for DeepSpeed ZeRO: stage 1 spreads the optimizer's state over the ranks, 2 the gradients too, 3 the
parameters too.

It reads and writes weights and optimizer state as those of whole parameters, so that a checkpoint does not depend on
the stage or the number of ranks.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedModel

from alpaca_ppo.distributed.collectives import any_rank
from alpaca_ppo.distributed.deepspeed_config import filled
from alpaca_ppo.distributed.engine import Engine, saved_names
from alpaca_ppo.distributed.sharding import empty_shell, uses_head
from alpaca_ppo.models import ActorCritic, Policy


class DeepSpeedEngine(Engine):
    """Policy and critic in one DeepSpeed engine.

    Args:
        accelerator: of the run, with a DeepSpeed plugin.
        actor_critic: what trains.
        optimizer: over its parameters, of torch.
        max_grad_norm: the gradient's norm is clipped to this.
        micro_batches: backward passes of an optimizer step, for DeepSpeed's own account.
        step_per_device_batch_size: responses of a micro-batch, likewise.
        gather_for_generation: under stage 3, hold the whole policy on every rank while it samples.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        actor_critic: ActorCritic,
        optimizer: torch.optim.Optimizer,
        *,
        max_grad_norm: float,
        micro_batches: int,
        step_per_device_batch_size: int,
        gather_for_generation: bool,
    ) -> None:
        plugin = accelerator.deepspeed_plugin
        assert plugin is not None
        plugin.deepspeed_config.update(
            filled(
                plugin.deepspeed_config,
                hidden_size=actor_critic.policy.model.config.get_text_config().hidden_size,
                bf16=accelerator.mixed_precision == "bf16",
                max_grad_norm=max_grad_norm,
                micro_batches=micro_batches,
                step_per_device_batch_size=step_per_device_batch_size,
                world=accelerator.num_processes,
            )
        )
        accelerator.gradient_accumulation_steps = micro_batches
        self.config: dict[str, Any] = plugin.deepspeed_config
        self.stage: int = plugin.zero_stage
        self.synced_forwards = self.stage == 3
        if actor_critic.policy.adapters is not None:
            actor_critic.policy.adapters.fingerprint()
        # In the order of the optimizer's own state dictionary; DeepSpeed puts flat parts in their place.
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        gathered = self.synced_forwards and gather_for_generation
        self._shell = empty_shell(actor_critic.policy.model, accelerator.device) if gathered else None
        super().__init__(accelerator, actor_critic, optimizer, max_grad_norm=max_grad_norm)

    def _wrap(self) -> Any:
        engine, _ = self.accelerator.prepare(self.actor_critic, self.optimizer)
        self._zero = engine.optimizer
        if self.synced_forwards:
            uses_head(self.actor_critic, self.actor_critic.policy)
            uses_head(self.actor_critic.policy, self.actor_critic.policy)
        return engine

    def begin(self) -> None:
        self._zero.zero_grad()
        if self.stage == 3:
            # The first pass overwrites the gradients of what it touches; of the rest, those of the last step stay.
            for part in self._zero._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition.values():
                part.zero_()
        else:
            self._zero.averaged_gradients, self._zero.all_grad_tensors = {}, {}
            # Of an offloaded optimizer: likewise, it adds to what the last step left.
            for buffer in getattr(self._zero, "accumulated_grads_in_cpu", {}).values():
                buffer.zero_()

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        self.model.set_gradient_accumulation_boundary(last)
        yield

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        boundary = self.model.is_gradient_accumulation_boundary()
        # Stage 3 is done with a gradient after the pass that makes it; the others take it in the last one
        # (`unused_parameter_loss`).
        self.model.set_gradient_accumulation_boundary(boundary and self.stage == 3)
        yield
        self.model.set_gradient_accumulation_boundary(boundary)

    def backward(self, loss: Tensor) -> None:
        # DeepSpeed averages over ranks, and here does not divide by its accumulation steps.
        self.model.backward(loss * self.accelerator.num_processes, scale_wrt_gas=False)

    def unused_parameter_loss(self, parameters: Sequence[nn.Parameter]) -> Tensor | float:
        # Stage 3 reduces a gradient in the pass that makes it.
        return 0.0 if self.stage == 3 else super().unused_parameter_loss(parameters)

    def step(self, *, frozen: Sequence[nn.Parameter] = ()) -> Tensor:
        still = {id(parameter) for parameter in frozen}
        groups = [i for i, group in enumerate(self._groups) if still.intersection(map(id, group))]
        rates = {i: self.optimizer.param_groups[i]["lr"] for i in groups}
        for i in groups:
            self.optimizer.param_groups[i]["lr"] = 0.0
        self.model.step()
        for i, rate in rates.items():
            self.optimizer.param_groups[i]["lr"] = rate
            # Without gradient and rate only the count of steps has moved; it decides the size of later ones.
            for flat in self._flat_parts(i):
                for value in self.optimizer.state[flat].values():
                    if torch.is_tensor(value) and value.dim() == 0:
                        value.zero_()
        return torch.as_tensor(float(self.model.get_global_grad_norm()))

    def prepare_frozen_model(self, model: nn.Module, *, offload: bool = False) -> None:
        if isinstance(model, Policy) and self.config["bf16"]["enabled"]:
            # As DeepSpeed casts the policy: parameters, not buffers. Of another precision, KL would not start at 0.
            for parameter in model.parameters():
                parameter.data = parameter.data.to(torch.bfloat16) if parameter.is_floating_point() else parameter.data
        if self.stage != 3:
            return
        import deepspeed

        zero = {key: value for key, value in self.config["zero_optimization"].items() if key != "offload_optimizer"}
        if offload:
            zero["offload_param"] = {"device": "cpu"}
        # Switched on, it would round the float32 adapters on a bfloat16 base, which the policy's are not.
        half = {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "bf16": {"enabled": half}}
        deepspeed.initialize(model=model, config=config)
        if isinstance(model, Policy):
            uses_head(model, model)

    @contextmanager
    def sampling(self) -> Iterator[tuple[PreTrainedModel, Callable[[bool], bool] | None]]:
        policy = self.actor_critic.policy.model
        if self._shell is None:
            yield policy, partial(any_rank, accelerator=self.accelerator) if self.synced_forwards else None
            return
        pairs = list(zip(self._shell.parameters(), policy.parameters(), strict=True))
        with self.gathered_parameters(policy):
            for lent, own in pairs:
                lent.data = own.data
            try:
                yield self._shell, None
            finally:
                for lent, _ in pairs:
                    lent.data = lent.data.new_empty(0)

    @contextmanager
    def gathered_parameters(self, *modules: nn.Module) -> Iterator[None]:
        import deepspeed

        if self.stage != 3:
            yield
            return
        self._call_off_fetching()
        with deepspeed.zero.GatheredParameters([p for module in modules for p in module.parameters()]):
            yield

    def _call_off_fetching(self) -> None:
        """Ends what stage 3 fetches ahead, for a pass that did not come (a pass without the critic, an evaluation):
        gathering leaves out what is under way already, and it would lie there empty.
        """
        self._zero.empty_partition_cache()

    def weights(self) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_fp32_param

        names = saved_names(self.actor_critic)
        parameters = dict(self.actor_critic.named_parameters())
        buffers = dict(self.actor_critic.named_buffers())
        # One after the other: the ranks gather each together.
        return {
            name: self._kept(safe_get_full_fp32_param(parameters[name])) if name in parameters else buffers[name]
            for name in self.actor_critic.state_dict()
            if name in names
        }

    def _kept(self, whole: Tensor) -> Tensor:
        """On the main process in host memory; of the others' copies, nothing but shape and dtype."""
        return whole.to("cpu" if self.accelerator.is_main_process else "meta")

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        import deepspeed
        from deepspeed.utils import safe_set_full_fp32_param

        parameters = dict(self.actor_critic.named_parameters())
        buffers = dict(self.actor_critic.named_buffers())
        if self.stage == 3:
            self._call_off_fetching()
        for name, tensor in weights.items():
            if name in buffers:
                buffers[name].copy_(tensor)
                continue
            parameter = parameters[name]
            value = tensor.to(self.accelerator.device)
            safe_set_full_fp32_param(parameter, value)
            with deepspeed.zero.GatheredParameters(parameter, modifier_rank=0, enabled=self.stage == 3):
                parameter.data.copy_(value)

    def optimizer_state(self) -> dict[str, Any]:
        from deepspeed.utils import safe_get_full_optimizer_state

        self._link_state()
        state, groups, count = {}, [], 0
        for i, parameters in enumerate(self._groups):
            flat = self._flat_parts(i)[0]
            kept = self.optimizer.state.get(flat, {})
            for parameter in parameters:
                if kept:
                    state[count] = {
                        key: self._kept(safe_get_full_optimizer_state(parameter, key))
                        if _elementwise(value, flat)
                        else value
                        for key, value in kept.items()
                    }
                count += 1
            settings = {key: value for key, value in self.optimizer.param_groups[i].items() if key != "params"}
            groups.append({**settings, "params": list(range(count - len(parameters), count))})
        return {"state": state, "param_groups": groups}

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state

        first = 0
        for i, (parameters, saved) in enumerate(zip(self._groups, state["param_groups"], strict=True)):
            self.optimizer.param_groups[i].update({key: value for key, value in saved.items() if key != "params"})
            values = [state["state"].get(first + j, {}) for j in range(len(parameters))]
            self._make_state(i, parameters[0], values[0])
            for parameter, value in zip(parameters, values, strict=True):
                for key, tensor in value.items():
                    if torch.is_tensor(tensor) and tensor.shape == self._shape(parameter):
                        safe_set_full_optimizer_state(parameter, tensor.to(self.accelerator.device), key)
            first += len(parameters)

    def _make_state(self, group: int, parameter: nn.Parameter, saved: Mapping[str, Any]) -> None:
        """Room for the state of a group's flat parts, as the optimizer itself would make at its first step."""
        for flat in self._flat_parts(group):
            self.optimizer.state[flat] = {
                key: torch.zeros_like(flat.data)
                if torch.is_tensor(value) and value.shape == self._shape(parameter)
                else copy.deepcopy(value)
                for key, value in saved.items()
            }
            if not saved:
                del self.optimizer.state[flat]
        self._link_state()

    def _link_state(self) -> None:
        """Tells parameters where their state lies: stages 1 and 2 do so after the first group's first step, when the
        others have none yet (DeepSpeed 0.19.8, `_optimizer_step`).
        """
        if self.stage != 3:
            self._zero._hp_optimizer_states_linked = False
            self._zero._lazy_init_hp_params_optimizer_state()

    def _shape(self, parameter: Any) -> torch.Size:
        return torch.Size(parameter.ds_shape if self.stage == 3 else parameter.shape)

    def _flat_parts(self, group: int) -> list[Tensor]:
        """This rank's flat pieces of the parameters of an optimizer group; what the optimizer's state hangs on."""
        if self.stage != 3:
            return [self._zero.single_partition_of_fp32_groups[group]]
        owners = self._zero.sub_group_to_group_id
        return [flat for i, flat in enumerate(self._zero.fp32_partitioned_groups_flat) if owners[i] == group]


def _elementwise(value: Any, flat: Tensor) -> bool:
    return torch.is_tensor(value) and value.shape == flat.shape
