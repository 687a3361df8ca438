"""Runs the trainer's passes over fake tensors and measures each one's peak memory, for any architecture.

One prefill of the prompts, one choice of tokens, one score, one pass for log-probs and values, and one micro-batch
forward and backward; responses have full length. Models whose passes depend on the values of tensors cannot be run.
"""

import math
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import DynamicCache

from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.distributed.engine import Engine, LearningRates
from alpaca_ppo.estimate_memory.fake_models import (
    FakeRun,
    LiveBytes,
    Models,
    build,
    grouped_mm_of_any_dtype,
    make_fake,
    one_sequence_per_row,
    size_of,
)
from alpaca_ppo.generation.slots import BUCKETED, EXACT
from alpaca_ppo.generation.token_sampling import choose_tokens
from alpaca_ppo.models import ActorCritic
from alpaca_ppo.models.policy import eval_mode
from alpaca_ppo.ppo.minibatches import ROW_KEYS, UpdateStep, row_tensors
from alpaca_ppo.ppo.rollouts import EvaluatedRows, evaluate_responses
from alpaca_ppo.ppo.updates import MicroBatch, Updater

_ANSWERS = {torch.ops.aten._local_scalar_dense.default: 0}
"""The result of the operation by which a model tests a batch for padding: always "has padding", so that it keeps its
attention mask."""
_FOUR_BIT = 0.5 + 4 / 64
"""Bytes per weight: half a byte, and a float32 scale for each 64 weights (bitsandbytes' NF4)."""
_CPU = torch.device("cpu")


@dataclass
class Measured:
    """Bytes of a run's models and passes on one device, whole; engines divide them."""

    weights: dict[str, float]
    """By model: policy, critic, reference and reward0, reward1 and so on."""
    gradients: float
    elements: float
    """The number of trained weights."""
    hidden: int
    """The policy's hidden size."""
    layer: float
    """Of one decoder layer and of what lies outside of the layers."""
    prefill: float = 0.0
    """Without the cache, as all passes."""
    sampling: float = 0.0
    kv_cache: float = 0.0
    score: float = 0.0
    logprobs: float = 0.0
    backward: float = 0.0
    """Without the gradients."""


def largest_micro_batch(args: PPOConfig, processes: int) -> tuple[int, int]:
    """Rows and tokens of the largest micro-batch of a process, if every row has full length."""
    own = math.ceil(args.step_batch_size / processes)
    tokens = min(args.micro_batch_tokens, own * args.longest_row)
    return math.ceil(tokens / args.longest_row), tokens


def measure(
    models: Models, args: PPOConfig, *, processes: int = 1, half: bool = False, replies: bool = False
) -> Measured:
    """Measures the passes of one process of a run.

    Args:
        models: their configurations.
        args: of the run.
        processes: of the run.
        half: cast the trained models and the reference to bfloat16, as DeepSpeed does, instead of using autocast.
        replies: something may answer the policy in the middle of a response, with as many tokens as that has room for.

    Raises:
        ValueError: when a model cannot run on fake tensors, or models contradict each other.
    """
    try:
        with warnings.catch_warnings():
            # Deprecation warnings of transformers, which the run itself will show.
            warnings.simplefilter("ignore")
            run = build(models, args, half=half)
            passes = _Passes(run, replace(args, bf16=args.bf16 and not half), processes)
            make_fake(run, mode := FakeTensorMode(allow_non_fake_inputs=True))
            with grouped_mm_of_any_dtype(), one_sequence_per_row(), mode, passes.live:
                return passes.measure(replies=replies)
    except (RuntimeError, NotImplementedError, TypeError, AttributeError, LookupError) as error:
        raise ValueError(
            f"model_name_or_path {models.policy!r} cannot run without weights ({str(error)[:200]}); start a short run "
            "and read memory/peak_gib in its metrics.jsonl"
        ) from error


class _Engine(Engine):
    """Makes the trainer's backward pass; what an engine holds beside it is arithmetic (`engines`)."""

    learning_rates = LearningRates(0.0, None)

    def __init__(self, actor_critic: ActorCritic, args: PPOConfig) -> None:
        self.actor_critic, self._bf16 = actor_critic, args.bf16
        accelerator: Any = SimpleNamespace(process_index=0, num_processes=1, device=_CPU)
        self.accelerator = accelerator

    def model(self, *rows: Tensor, **how: Any) -> Any:
        with self.autocast():
            return self.actor_critic(*rows, **how)

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", torch.bfloat16, enabled=self._bf16)

    def passing(self, *, last_batch: bool, last_pass: bool) -> AbstractContextManager[Any]:
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        loss.backward()


class _Passes:
    """The passes of a step. Their rows are made before the tensors are fake, because lengths are read from values."""

    def __init__(self, run: FakeRun, args: PPOConfig, processes: int) -> None:
        self.live, self._run, self._args = LiveBytes(_ANSWERS), run, args
        self._engine = _Engine(run.actor_critic, args)
        prompts, n = math.ceil(args.rollout_batch_size / processes), args.num_return_sequences
        self._rows = min(prompts * n, args.rollout_per_device_batch_size)
        """Responses sampled, scored or evaluated at once."""
        self._evaluated = EvaluatedRows(
            self._full_rows(self._rows, args.longest_row), _CPU, per_device_batch_size=self._rows
        )
        readers: list[Any] = [run.actor_critic, *([] if run.reference is None else [run.reference.policy])]
        for model in readers:
            # They are kept for the passes over fake tensors.
            list(self._evaluated.passes(model))
        count, tokens = largest_micro_batch(args, processes)
        batch: Any = self._full_rows(count, math.ceil(tokens / count)) | {"prompt_ids": torch.zeros(0)}
        packed = run.actor_critic.pack(*row_tensors(batch).values())
        self._micro_batch = MicroBatch(UpdateStep("both", torch.arange(count), 0, ()), batch, packed, [], 0, last=True)

    def _full_rows(self, rows: int, length: int) -> dict[str, Tensor]:
        """Rows of `length` tokens in all; their share of response tokens is that of the longest row."""
        response = math.ceil(self._args.response_len * length / self._args.longest_row)
        queries = torch.zeros(rows, length - response, dtype=torch.long)
        responses = torch.zeros(rows, response, dtype=torch.long)
        mask = torch.ones_like(responses, dtype=torch.bool)
        return dict(zip(ROW_KEYS, (queries, queries + 1, responses, mask), strict=True))

    def measure(self, *, replies: bool) -> Measured:
        """The bytes of models and passes; with `replies` a turn goes on after tokens of an environment."""
        run, args = self._run, self._args
        policy = run.actor_critic.policy
        tensors = {name: [*module.parameters(), *module.buffers()] for name, module in run.modules.items()}
        self.live.track(tensors)
        trained = [parameter for parameter in run.actor_critic.parameters() if parameter.requires_grad]
        config: Any = policy.model.config.get_text_config()
        weights = {name: size_of(found) for name, found in tensors.items()}
        outside = size_of([policy.model.get_input_embeddings().weight, policy.head.weight])
        layer = outside + (weights["policy"] - outside) / config.num_hidden_layers
        elements = float(sum(parameter.numel() for parameter in trained))
        measured = Measured(weights, size_of(trained), elements, config.hidden_size, layer)
        # A response of one column has no room for a reply.
        self._rollout(measured, replies=replies and args.response_len > 1 and args.generation_backend != "generate")
        rewards = [module for name, module in run.modules.items() if name.startswith("reward")]
        base = [] if args.reward_adapter is None else [policy.model.base_model]
        measured.score = max((self._score(model) for model in (*rewards, *base)), default=0.0)
        measured.logprobs = self._log_probs()
        measured.backward = max(0.0, self._backward(trained) - measured.gradients)
        if args.load_in_4bit:
            layers = [m for key, m in policy.named_modules() if isinstance(m, nn.Linear) and "lora_" not in key]
            packed = [layer.weight for layer in layers if layer is not policy.head]
            # The one layer that is dequantized at a time is left out.
            measured.weights["policy"] -= sum(w.numel() * (w.element_size() - _FOUR_BIT) for w in packed)
        return measured

    @torch.no_grad()
    def _rollout(self, measured: Measured, *, replies: bool) -> None:
        args, live, slots = self._args, self.live, self._args.generation_backend != "generate"
        model: Any = self._run.actor_critic.policy.model
        # `generate` computes the prompt again for every sample.
        rows = max(1, self._rows // args.num_return_sequences) if slots else self._rows
        live.reset_peak()
        start = live.live
        with eval_mode(model), self._engine.autocast():
            cache = DynamicCache(config=model.config)
            ids = torch.zeros(rows, args.query_len, dtype=torch.long)
            logits = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
            layers: Any = cache.layers
            prompts = size_of(states for layer in layers for states in (layer.keys, layer.values))
            measured.prefill = live.risen - prompts
            # Autocast keeps its casts of trained weights until its block ends.
            kept = float(live.live - start) - prompts - size_of([logits])
            columns, places = args.longest_row, self._rows
            if slots:
                # Two slots more: what all prompts begin with, and a prompt whose other samples wait.
                places += 1 + (args.num_return_sequences > 1)
                columns = (EXACT if args.use_cpu else BUCKETED).columns(columns)
            measured.kv_cache = prompts / (rows * args.query_len) * columns * places
            del cache, layers
            chosen = logits.new_empty(self._rows, logits.size(-1), dtype=logits.dtype if slots else torch.float32)
            live.reset_peak()
            choose_tokens(chosen, torch.zeros(self._rows, dtype=torch.float64), temperature=1.0)
            measured.sampling = live.risen + size_of([chosen]) + kept
            if replies:
                live.reset_peak()
                ids = torch.zeros(self._rows, args.response_len - 1, dtype=torch.long)
                model.base_model(input_ids=ids, past_key_values=DynamicCache(config=model.config), use_cache=True)
                measured.sampling = max(measured.sampling, live.risen + kept)

    @torch.no_grad()
    def _score(self, model: Any) -> float:
        tokens = torch.zeros(self._rows, self._args.longest_row, dtype=torch.long)
        self.live.reset_peak()
        with eval_mode(model):
            model(input_ids=tokens, attention_mask=tokens + 1, use_cache=False)
        return self.live.risen

    def _log_probs(self) -> float:
        args, actor_critic, reference = self._args, self._run.actor_critic, self._run.reference
        # Steps that are logged compute entropies.
        how: Any = {"temperature": args.temperature, "chunk_size": args.logprob_chunk_size, "with_entropies": True}
        self.live.reset_peak()
        with self._engine.autocast():
            evaluate_responses(actor_critic, self._evaluated, with_critic=actor_critic.critic is not None, **how)
        if reference is not None:
            with reference.on_device(_CPU) as policy, self._engine.autocast():
                evaluate_responses(policy, self._evaluated, **how)
        return self.live.risen

    def _backward(self, trained: Sequence[nn.Parameter]) -> float:
        def loss_of(part: str) -> Any:
            return lambda rows, outputs: (getattr(outputs, part).float().sum(), {})

        self.live.reset_peak()
        for parameter in trained:
            # Of the micro-batches before.
            parameter.grad = torch.empty_like(parameter)
        schedules: Any = None
        Updater(self._engine, schedules, self._args).backward(
            self._micro_batch, loss_of("logprobs"), loss_of("predictions")
        )
        return self.live.risen
