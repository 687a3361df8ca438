"""The engine for DeepSpeed ZeRO. Stage 1 shards the optimizer state, stage 2 also gradients, stage 3 also parameters.

How weights and optimizer state are read out of the shards, for checkpoints, is in `deepspeed_state`.
"""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedModel

from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.distributed.deepspeed_clipping import DeepSpeedClipping
from alpaca_ppo.distributed.deepspeed_config import resolve_auto
from alpaca_ppo.distributed.deepspeed_state import DeepSpeedState
from alpaca_ppo.distributed.engine import Engine, GradNorms
from alpaca_ppo.models import ActorCritic, Policy

_ACTIVE_ADAPTER = ("_active_adapter", "_disable_adapters")
"""What PEFT's layers remember of the active adapter."""


class DeepSpeedEngine(Engine):
    """Trains policy and critic in one DeepSpeed engine.

    Args:
        accelerator: of the run, with a DeepSpeed plugin.
        actor_critic: the models to train.
        optimizer: torch's, over their parameters; each group holds parameters of the policy or of the critic.
        args: of the run.

    Raises:
        ValueError: for a group with parameters of both, and for a configuration that contradicts the run.
    """

    def __init__(
        self, accelerator: Accelerator, actor_critic: ActorCritic, optimizer: torch.optim.Optimizer, args: PPOConfig
    ) -> None:
        _check_groups(optimizer, actor_critic)
        plugin, rows = accelerator.deepspeed_plugin, args.step_per_device_batch_size
        assert plugin is not None
        # For DeepSpeed's configuration; the number of a step may differ.
        micro_batches = math.ceil(args.step_batch_size / (rows * accelerator.num_processes))
        plugin.deepspeed_config.update(
            resolve_auto(
                plugin.deepspeed_config,
                hidden_size=actor_critic.policy.model.config.get_text_config().hidden_size,
                bf16=accelerator.mixed_precision == "bf16",
                max_grad_norm=args.max_grad_norm,
                micro_batches=micro_batches,
                step_per_device_batch_size=rows,
                world=accelerator.num_processes,
            )
        )
        accelerator.gradient_accumulation_steps = micro_batches
        self.config: dict[str, Any] = plugin.deepspeed_config
        self.stage: int = plugin.zero_stage
        self.synced_forwards = self.stage == 3
        self._frozen_optimizers: list[Any] = []
        # Of stage 3, for each model that samples: a copy without weights and without DeepSpeed's hooks.
        self._samplers: dict[int, PreTrainedModel] = {}
        if self.stage == 3:
            self._add_sampler(actor_critic.policy, accelerator.device)
        super().__init__(accelerator, actor_critic, optimizer, args)

    def _wrap(self) -> Any:
        engine, _ = self.accelerator.prepare(self.actor_critic, self.optimizer)
        self._zero = engine.optimizer
        # DeepSpeed has no option to leave a group out of a step, and with a gradient and a learning rate of 0 AdamW
        # would still decay the moments and count the step. Delete `_step_group` once it has one.
        self._step_any_group = self._zero._optimizer_step
        self._zero._optimizer_step = self._step_group
        self._frozen_groups: set[int] = set()
        self._state = DeepSpeedState(
            self.actor_critic,
            self.optimizer,
            self._zero,
            self._groups,
            stage=self.stage,
            device=self.accelerator.device,
            is_main_process=self.accelerator.is_main_process,
        )
        critic = {id(parameter) for parameter in self.actor_critic.critic_parameters()}
        self._clipping = DeepSpeedClipping(
            self._zero,
            ["critic" if id(group[0]) in critic else "policy" for group in self._groups],
            {"policy": self.max_grad_norm, "critic": self.critic_max_grad_norm},
            stage=self.stage,
        )
        if self.synced_forwards:
            _register_head_use(self.actor_critic, self.actor_critic.policy)
            _register_head_use(self.actor_critic.policy, self.actor_critic.policy)
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

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        self.model.set_gradient_accumulation_boundary(last)
        yield

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        boundary = self.model.is_gradient_accumulation_boundary()
        # Stage 3 reduces a gradient in the pass that computes it; the other stages in the last pass, where
        # `unused_parameter_loss` brings in the parameters of earlier ones.
        self.model.set_gradient_accumulation_boundary(boundary and self.stage == 3)
        yield
        self.model.set_gradient_accumulation_boundary(boundary)

    def backward(self, loss: Tensor) -> None:
        # DeepSpeed averages over ranks, and with this flag does not divide by its accumulation steps.
        self.model.backward(loss * self.accelerator.num_processes, scale_wrt_gas=False)

    def unused_parameter_loss(self, parameters: Sequence[nn.Parameter]) -> Tensor | float:
        # Stage 3 reduces a gradient in the pass that computes it.
        return 0.0 if self.stage == 3 else super().unused_parameter_loss(parameters)

    def step(self, *, frozen: Sequence[nn.Parameter] = ()) -> GradNorms:
        ids = {id(parameter) for parameter in frozen}
        self._frozen_groups = {i for i, group in enumerate(self._groups) if ids.intersection(map(id, group))}
        with self._clipping.of_one_step() as norms:
            self.model.step()
        self.weights_version += 1
        return GradNorms(norms["policy"], norms["critic"] if self.actor_critic.critic is not None else None)

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
        if self.stage != 3:
            return
        import deepspeed

        if isinstance(model, Policy):
            self._add_sampler(model, self.accelerator.device)
        zero = {key: value for key, value in self.config["zero_optimization"].items() if key != "offload_optimizer"}
        if offload:
            zero["offload_param"] = {"device": "cpu"}
        # bf16 would round the float32 adapters on a bfloat16 base, unlike the policy's.
        half = {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "bf16": {"enabled": half}}
        self._frozen_optimizers.append(deepspeed.initialize(model=model, config=config)[0].optimizer)
        if isinstance(model, Policy):
            _register_head_use(model, model)

    def _add_sampler(self, policy: Policy, device: torch.device) -> None:
        self._samplers[id(policy)] = _copy_without_weights(policy.model, device)

    @contextmanager
    def sampling(self, policy: Policy | None = None) -> Iterator[PreTrainedModel]:
        policy = self.actor_critic.policy if policy is None else policy
        if self.stage != 3:
            yield policy.model
            return
        sampler = self._samplers[id(policy)]
        for borrower, owner in zip(sampler.modules(), policy.model.modules(), strict=True):
            # The adapter that is active in PEFT's layers.
            vars(borrower).update({name: vars(owner)[name] for name in _ACTIVE_ADAPTER if name in vars(owner)})
        pairs = list(zip(sampler.parameters(), policy.model.parameters(), strict=True))
        with self.gathered_parameters(policy.model):
            for borrowed, own in pairs:
                borrowed.data = own.data
            try:
                yield sampler
            finally:
                for borrowed, _ in pairs:
                    borrowed.data = borrowed.data.new_empty(0)

    @contextmanager
    def gathered_parameters(self, *modules: nn.Module) -> Iterator[None]:
        import deepspeed

        if self.stage != 3:
            yield
            return
        # Gathering skips parameters that are still being prefetched and would leave them empty.
        for optimizer in (self._zero, *self._frozen_optimizers):
            optimizer.empty_partition_cache()
        with deepspeed.zero.GatheredParameters([p for module in modules for p in module.parameters()]):
            yield

    def weights(self) -> dict[str, Tensor]:
        return self._state.weights()

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        self._state.load_weights(weights)
        self.weights_version += 1

    def optimizer_state(self) -> dict[str, Any]:
        return self._state.optimizer_state()

    def load_optimizer_state(self, state: Mapping[str, Any]) -> None:
        self._state.load_optimizer_state(state)


def _copy_without_weights(policy: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """A copy of `policy` with empty parameters and no DeepSpeed hooks, so that sampling does not trigger them."""
    memo: dict[int, Any] = {}
    for parameter in policy.parameters():
        empty = torch.empty(0, dtype=parameter.dtype, device=device)
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=False)
    copied = copy.deepcopy(policy, memo)
    torch.nn.Module.to(copied, device)
    return copied


def _register_head_use(module: nn.Module, policy: Policy) -> None:
    """Makes DeepSpeed gather the head's parameters in the forward pass of `module`, which reads them directly."""
    import deepspeed

    for parameter in policy.head.parameters():
        deepspeed.zero.register_external_parameter(module, parameter)


def _check_groups(optimizer: torch.optim.Optimizer, actor_critic: ActorCritic) -> None:
    """DeepSpeed flattens a group into one tensor, so it clips whole groups, and leaves whole groups out of a step."""
    policy = {id(parameter) for parameter in actor_critic.policy_parameters()}
    for number, group in enumerate(optimizer.param_groups):
        if len({id(parameter) in policy for parameter in group["params"]}) > 1:
            raise ValueError(
                f"group {number} of the optimizer has parameters of policy and critic, which DeepSpeed cannot clip or "
                "freeze apart; make one group of policy_parameters() and one of critic_parameters()"
            )
