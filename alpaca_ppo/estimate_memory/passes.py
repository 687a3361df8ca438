"""Runs the trainer's passes over fake tensors and measures each one's peak memory, for any architecture.

There is one prefill of the prompts, one score, one pass for log-probs and values, and one micro-batch forward and
backward, all with responses of full length. Models whose passes depend on the values of tensors cannot be run.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import DynamicCache

from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.distributed.held_memory import Measured
from alpaca_ppo.estimate_memory.fake_models import LiveBytes, Models, build, fake_runs, make_fake, size_of
from alpaca_ppo.generation.slots import BUCKETED, EXACT
from alpaca_ppo.models import ActorCritic
from alpaca_ppo.models.packed_attention import cache_argument
from alpaca_ppo.models.policy import eval_mode
from alpaca_ppo.ppo.device_rows import ROW_KEYS, row_tensors
from alpaca_ppo.ppo.rollouts import ForwardRows, forward_responses
from alpaca_ppo.ppo.update_plan import UpdateStep
from alpaca_ppo.ppo.updates import MicroBatch, Updater
from alpaca_ppo.registry import GENERATION_BACKENDS

# Bytes per weight: half a byte, and a float32 scale for each 64 weights (bitsandbytes' NF4).
_FOUR_BIT = 0.5 + 4 / 64


def largest_micro_batch(args: PPOConfig, processes: int) -> tuple[int, int]:
    """Rows and tokens of the largest micro-batch of a process, if every row has full length."""
    rows = math.ceil(args.step_batch_size / processes)
    tokens = min(args.micro_batch_tokens, rows * args.longest_row)
    return math.ceil(tokens / args.longest_row), tokens


def measure(
    models: Models, args: PPOConfig, *, processes: int = 1, cast_to_bf16: bool = False, replies: bool = False
) -> Measured:
    """Measures the passes that one process makes in a run on `processes` processes.

    Args:
        cast_to_bf16: cast the trained models and the reference, as DeepSpeed does, instead of using autocast.
        replies: environments or tools may answer in the middle of a response, up to its full length.

    Raises:
        ValueError: when a model cannot run on fake tensors, or models contradict each other.
    """
    with fake_runs(models.policy):
        actor_critic, modules = build(models, args, cast_to_bf16=cast_to_bf16)
        others = [module for name, module in modules.items() if name in ("reference", "teacher")]
        args = replace(args, bf16=args.bf16 and not cast_to_bf16)
        passes = _Passes(actor_critic, others, args, processes)
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        make_fake(modules.values(), mode)
        with mode, passes.live:
            return passes.measure(modules, replies=replies)


def bytes_saved_by_four_bit(model: nn.Module, head: nn.Module | None) -> float:
    """What 4 bits save of the linear layers of a base, whose `head` keeps its type. The copy of the one layer that is
    dequantized at a time is not counted.
    """
    layers = [part for name, part in model.named_modules() if isinstance(part, nn.Linear) and "lora_" not in name]
    weights = [layer.weight for layer in layers if layer is not head]
    return sum(weight.numel() * (weight.element_size() - _FOUR_BIT) for weight in weights)


class _Passes:
    """The passes of a step. Create it before tensors are fake, because the constructor reads the masks of its rows."""

    def __init__(self, actor_critic: ActorCritic, others: Sequence[Any], args: PPOConfig, processes: int) -> None:
        self.live = LiveBytes()
        self._actor_critic, self._args = actor_critic, args
        # All that give log-probs of a rollout: `others` are reference and teacher.
        self._readers: Sequence[Any] = [actor_critic, *others]
        self._autocast = torch.autocast("cpu", torch.bfloat16, enabled=args.bf16)
        prompts = math.ceil(args.rollout_batch_size / processes)
        # Responses sampled, scored or evaluated at once.
        self._responses = prompts * args.num_return_sequences
        self._rows_at_once = min(self._responses, args.rollout_per_device_batch_size)
        full_rows = self._full_rows(self._rows_at_once, args.longest_row)
        self._forward_rows = ForwardRows(full_rows, torch.device("cpu"), per_device_batch_size=self._rows_at_once)
        # Packs the batches, which `ForwardRows` then keeps for `_log_probs`, where tensors are fake.
        for reader in self._readers:
            list(self._forward_rows.batches(reader))
        count, tokens = largest_micro_batch(args, processes)
        batch: Any = self._full_rows(count, math.ceil(tokens / count)) | {"prompt_ids": torch.zeros(0)}
        packed = actor_critic.pack(*row_tensors(batch).values())
        update = UpdateStep(part="both", rows=torch.arange(count), step=0, key=())
        self._micro_batch = MicroBatch(update, batch, packed, lengths=[], tokens=0, last=True, policy_states=None)

    def _full_rows(self, rows: int, length: int) -> dict[str, Tensor]:
        """Rows of `length` tokens, with prompt and response in proportion to `query_len` and `response_len`."""
        response = math.ceil(self._args.response_len * length / self._args.longest_row)
        queries = torch.zeros(rows, length - response, dtype=torch.long)
        responses = torch.zeros(rows, response, dtype=torch.long)
        mask = torch.ones_like(responses, dtype=torch.bool)
        return dict(zip(ROW_KEYS, (queries, queries + 1, responses, mask), strict=True))

    def measure(self, modules: Mapping[str, nn.Module], *, replies: bool) -> Measured:
        """The bytes of models and passes; for `replies` see the function `measure`."""
        args = self._args
        trained = [parameter for parameter in self._actor_critic.parameters() if parameter.requires_grad]
        measured = self._measure_models(modules, trained)
        if GENERATION_BACKENDS.trait(args.generation_backend, "in_process"):
            self._rollout(measured, replies=replies)
        rewards = [module for name, module in modules.items() if name.startswith("reward")]
        if args.reward_adapter is not None:
            rewards.append(self._actor_critic.policy.model.base_model)
        measured.score = max((self._peak(partial(self._score, model)) for model in rewards), default=0.0)
        measured.logprobs = max(self._peak(partial(self._log_probs, reader)) for reader in self._readers)
        measured.backward = self._peak(partial(self._backward, trained)) - measured.gradients
        return measured

    def _measure_models(self, modules: Mapping[str, nn.Module], trained: Sequence[nn.Parameter]) -> Measured:
        """The bytes of the models, which count as alive from then on."""
        policy = self._actor_critic.policy
        tensors = {name: [*module.parameters(), *module.buffers()] for name, module in modules.items()}
        self.live.track(tensors)
        self._model_bytes = self.live.live
        weights = {name: size_of(module_tensors) for name, module_tensors in tensors.items()}
        # The weights outside the decoder layers.
        outside = size_of([policy.model.get_input_embeddings().weight, policy.head.weight])
        layer = outside + (weights["policy"] - outside) / policy.model.config.get_text_config().num_hidden_layers
        if self._args.load_in_4bit:
            weights["policy"] -= bytes_saved_by_four_bit(policy, policy.head)
        if self._args.teacher_dtype == "4bit" and "teacher" in modules:
            teacher: Any = modules["teacher"]
            weights["teacher"] -= bytes_saved_by_four_bit(teacher, teacher.head)
        elements = float(sum(parameter.numel() for parameter in trained))
        measured = Measured(weights=weights, gradients=size_of(trained), elements=elements, layer=layer)
        critic = self._actor_critic.critic
        if critic is not None and critic.reader is not None:
            of_token = math.prod(critic.reader.state_shape) * policy.model.get_input_embeddings().weight.element_size()
            measured.kept_states = float(self._responses * self._args.response_len * of_token)
        return measured

    def _peak(self, work: Callable[[], Any]) -> float:
        """The most bytes alive during `work`, without those of the models."""
        self.live.reset_peak()
        work()
        return float(self.live.peak - self._model_bytes)

    @torch.no_grad()
    def _rollout(self, measured: Measured, *, replies: bool) -> None:
        """Sets `prefill`, `sampling` and `kv_cache`, from one pass over as many prompt tokens as are read at once."""
        args = self._args
        slots = GENERATION_BACKENDS.trait(args.generation_backend, "in_slots")
        model: Any = self._actor_critic.policy.model
        rows, columns = self._rows_at_once, args.query_len
        if slots:
            # Slots compute a prompt once for all its samples.
            rows = max(1, rows // args.num_return_sequences)
            # All rows may read replies in the same pass, each as long as the response allows.
            if replies and self._rows_at_once * (args.response_len - 1) > rows * columns:
                rows, columns = self._rows_at_once, args.response_len - 1
        cache: Any = DynamicCache(config=model.config)
        with eval_mode(model), self._autocast:
            ids = torch.zeros(rows, columns, dtype=torch.long)
            read = partial(model, input_ids=ids, use_cache=True, logits_to_keep=1, **{cache_argument(model): cache})
            measured.prefill = self._peak(read)
            cache_bytes = size_of(states for layer in cache.layers for states in (layer.keys, layer.values))
            del read, cache
            # Still alive are autocast's casts of trained weights. Decoding, one token a row at a time, adds little.
            measured.sampling = float(self.live.live - self._model_bytes)
        cached_tokens = self._rows_at_once * args.longest_row
        if slots:
            # One more for the beginning that all prompts share, and one for a prompt whose other samples wait.
            num_slots = self._rows_at_once + (2 if args.num_return_sequences > 1 else 1)
            cached_tokens = num_slots * (EXACT if args.use_cpu else BUCKETED).columns(args.longest_row)
        measured.kv_cache = cache_bytes / (rows * columns) * cached_tokens

    @torch.no_grad()
    def _score(self, model: Any) -> None:
        tokens = torch.zeros(self._rows_at_once, self._args.longest_row, dtype=torch.long)
        with eval_mode(model):
            model(input_ids=tokens, use_cache=False)

    def _log_probs(self, reader: Any) -> None:
        # Entropies are computed in steps that are logged.
        args = self._args
        options: Any = {"temperature": args.temperature, "chunk_size": args.logprob_chunk_size, "with_entropies": True}
        if reader is self._actor_critic:
            options["with_critic"] = reader.critic is not None
        with self._autocast:
            forward_responses(reader, self._forward_rows, **options)

    def _backward(self, trained: Sequence[nn.Parameter]) -> None:
        """Runs forward and backward of the largest micro-batch, before which each of `trained` has a gradient, as after
        an earlier micro-batch.
        """

        def sum_of(part: str) -> Any:
            return lambda rows, outputs: (getattr(outputs, part).float().sum(), {})

        for parameter in trained:
            parameter.grad = torch.empty_like(parameter)
        # A stand-in: the memory that a real engine holds is calculated in `distributed.held_memory`.
        engine: Any = SimpleNamespace(
            actor_critic=self._actor_critic,
            forward=self._autocast(self._actor_critic.forward),
            accelerator=SimpleNamespace(process_index=0, num_processes=1),
            learning_rates=None,
            gradient_sync=lambda **last: nullcontext(),
            unused_parameter_loss=lambda parameters: 0.0,
            backward=Tensor.backward,
        )
        updater = Updater(engine, schedules=cast(Any, None), args=self._args)
        updater.backward(self._micro_batch, sum_of("logprobs"), sum_of("predictions"))
