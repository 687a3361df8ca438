"""Reads weights and optimizer state out of DeepSpeed ZeRO as unsharded tensors, and writes them back.

So a checkpoint depends neither on the ZeRO stage nor on the number of ranks. The code follows DeepSpeed 0.19.8.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from alpaca_ppo.distributed.engine import saved_names


class DeepSpeedState:
    """The weights and optimizer state of a model in a DeepSpeed engine; every method must be called on all ranks.

    Args:
        module: the model inside the engine.
        optimizer: torch's optimizer inside the engine.
        zero_optimizer: DeepSpeed's ZeRO optimizer, which wraps `optimizer`.
        groups: the parameters of each group of `optimizer`, as they were before DeepSpeed flattened them.
        stage: of ZeRO, 1 to 3.
        device: of this rank.
        is_main_process: whether this rank writes checkpoints.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        zero_optimizer: Any,
        groups: Sequence[Sequence[nn.Parameter]],
        *,
        stage: int,
        device: torch.device,
        is_main_process: bool,
    ) -> None:
        self._module, self._optimizer, self._zero = module, optimizer, zero_optimizer
        self._groups, self._stage = groups, stage
        self._device, self._is_main_process = device, is_main_process

    def weights(self) -> dict[str, Tensor]:
        """As `TrainState.weights`; trained weights are float32. Ranks that write no checkpoints get meta tensors."""
        from deepspeed.utils import safe_get_full_fp32_param

        names = saved_names(self._module)
        parameters = dict(self._module.named_parameters())
        buffers = dict(self._module.named_buffers())
        # One tensor at a time, which bounds the memory; the ranks gather each one together.
        return {
            name: self._to_writer(safe_get_full_fp32_param(parameters[name])) if name in parameters else buffers[name]
            for name in self._module.state_dict()
            if name in names
        }

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Restores what `weights` returned."""
        import deepspeed
        from deepspeed.utils import safe_set_full_fp32_param

        parameters = dict(self._module.named_parameters())
        buffers = dict(self._module.named_buffers())
        if self._stage == 3:
            self.drop_prefetched()
        for name, tensor in weights.items():
            if name in buffers:
                buffers[name].copy_(tensor)
                continue
            parameter = parameters[name]
            value = tensor.to(self._device)
            safe_set_full_fp32_param(parameter, value)
            with deepspeed.zero.GatheredParameters(parameter, modifier_rank=0, enabled=self._stage == 3):
                parameter.data.copy_(value)

    def optimizer_state(self) -> dict[str, Any]:
        """As `TrainState.optimizer_state`; ranks that do not write checkpoints get meta tensors."""
        from deepspeed.utils import safe_get_full_optimizer_state

        self._link_optimizer_state()
        state, groups, count = {}, [], 0
        for i, parameters in enumerate(self._groups):
            flat = self.flat_partitions(i)[0]
            flat_state = self._optimizer.state.get(flat, {})
            for parameter in parameters:
                if flat_state:
                    state[count] = {
                        key: self._to_writer(safe_get_full_optimizer_state(parameter, key))
                        if _is_elementwise(value, flat)
                        else value
                        for key, value in flat_state.items()
                    }
                count += 1
            settings = {key: value for key, value in self._optimizer.param_groups[i].items() if key != "params"}
            groups.append({**settings, "params": list(range(count - len(parameters), count))})
        return {"state": state, "param_groups": groups}

    def load_optimizer_state(self, state: Mapping[str, Any]) -> None:
        """Restores what `optimizer_state` returned."""
        from deepspeed.utils import safe_set_full_optimizer_state

        first = 0
        for i, (parameters, saved) in enumerate(zip(self._groups, state["param_groups"], strict=True)):
            self._optimizer.param_groups[i].update({key: value for key, value in saved.items() if key != "params"})
            values = [state["state"].get(first + j, {}) for j in range(len(parameters))]
            self._allocate_optimizer_state(i, parameters[0], values[0])
            for parameter, value in zip(parameters, values, strict=True):
                for key, tensor in value.items():
                    if torch.is_tensor(tensor) and tensor.shape == self._full_shape(parameter):
                        safe_set_full_optimizer_state(parameter, tensor.to(self._device), key)
            first += len(parameters)

    def flat_partitions(self, group: int) -> list[Tensor]:
        """This rank's flat float32 partitions of an optimizer group: the keys of the optimizer's state."""
        if self._stage != 3:
            return [self._zero.single_partition_of_fp32_groups[group]]
        owners = self._zero.sub_group_to_group_id
        return [flat for i, flat in enumerate(self._zero.fp32_partitioned_groups_flat) if owners[i] == group]

    def drop_prefetched(self) -> None:
        """Releases parameters that stage 3 has prefetched; to be called before gathering.

        A pass that DeepSpeed expected may not have run, for example if the critic was skipped or in an evaluation.
        Gathering skips parameters that are still being prefetched and would leave them empty.
        """
        self._zero.empty_partition_cache()

    def _to_writer(self, tensor: Tensor) -> Tensor:
        """`tensor` in host memory on the rank that writes checkpoints; only its shape and dtype on the others."""
        return tensor.to("cpu" if self._is_main_process else "meta")

    def _allocate_optimizer_state(self, group: int, parameter: nn.Parameter, saved: Mapping[str, Any]) -> None:
        """Allocates the state of a group's flat partitions, as the optimizer itself would in its first step."""
        fused = self._optimizer.param_groups[group].get("fused")
        for flat in self.flat_partitions(group):
            self._optimizer.state[flat] = {
                key: torch.zeros_like(flat.data)
                if torch.is_tensor(value) and value.shape == self._full_shape(parameter)
                else _scalar_state(value, flat.device if fused else None)
                for key, value in saved.items()
            }
            if not saved:
                del self._optimizer.state[flat]
        self._link_optimizer_state()

    def _link_optimizer_state(self) -> None:
        """Links every parameter to its part of the optimizer state.

        Stages 1 and 2 do so after the first group's first step, when the other groups have no state yet
        (`_optimizer_step` of DeepSpeed 0.19.8).
        """
        if self._stage != 3:
            self._zero._hp_optimizer_states_linked = False
            self._zero._lazy_init_hp_params_optimizer_state()

    def _full_shape(self, parameter: Any) -> torch.Size:
        return torch.Size(parameter.ds_shape if self._stage == 3 else parameter.shape)


def _scalar_state(value: Any, device: torch.device | None) -> Any:
    """A copy of `value`; of a tensor on `device`, where a fused kernel reads the number of steps."""
    own = copy.deepcopy(value)
    return own.to(device) if device is not None and torch.is_tensor(own) else own


def _is_elementwise(value: Any, flat: Tensor) -> bool:
    return torch.is_tensor(value) and value.shape == flat.shape
