"""Runs the trainer's passes over fake tensors and measures each one's peak memory, for any architecture.

One prefill of the prompts, one choice of tokens, one score, one pass for log-probs and values, and one micro-batch
forward and backward; responses have full length. Models whose passes depend on the values of tensors cannot be run.
"""

import math
import warnings
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
from alpaca_ppo.models import ActorCritic, CopiedReference
from alpaca_ppo.ppo.minibatches import UpdateStep, row_tensors
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
    sampling: float = 0.0
    kv_cache: float = 0.0
    score: float = 0.0
    logprobs: float = 0.0
    backward: float = 0.0
    """With the gradients that exist at the peak."""


def largest_micro_batch(args: PPOConfig, processes: int) -> tuple[int, int, bool]:
    """Rows and tokens of the largest micro-batch of a process, if every row has full length and none has padding; and
    whether it is the only one of its optimizer step.
    """
    own = math.ceil(args.step_batch_size / processes)
    tokens = min(args.micro_batch_tokens, own * args.longest_row)
    if args.padding_free is False and args.max_tokens_per_micro_batch is None and processes == 1:
        # Padded rows are as many in each micro-batch.
        tokens = math.ceil(own / math.ceil(own / args.step_per_device_batch_size)) * args.longest_row
    return math.ceil(tokens / args.longest_row), tokens, tokens >= own * args.longest_row


def measure(
    models: Models, args: PPOConfig, *, processes: int = 1, zero: bool = False, replies: bool = False
) -> Measured:
    """Measures the passes of one process of a run.

    Args:
        models: their configurations.
        args: of the run.
        processes: of the run.
        zero: run under DeepSpeed ZeRO, whose bf16 casts trained models and reference instead of using autocast.
        replies: something may answer the policy in the middle of a response, with as many tokens as that has room for.

    Raises:
        ValueError: when a model cannot run on fake tensors, or models contradict each other.
    """
    half = zero and args.bf16
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
        self._copied = [run.reference.policy] if isinstance(run.reference, CopiedReference) else []
        readers: list[Any] = [run.actor_critic, *([] if run.reference is None else [run.reference.policy])]
        prompts, n = math.ceil(args.rollout_batch_size / processes), args.num_return_sequences
        self._prompts = min(prompts, max(1, args.rollout_per_device_batch_size // n))
        """Sampled at once."""
        self._rows = min(prompts * n, args.rollout_per_device_batch_size)
        """Responses sampled, scored or evaluated at once."""
        rows = self._full_rows(self._rows, args.longest_row)
        self._evaluated = EvaluatedRows(rows, _CPU, per_device_batch_size=self._rows)
        for model in readers:
            # They are kept for the passes over fake tensors.
            list(self._evaluated.passes(model))
        count, tokens, self._single = largest_micro_batch(args, processes)
        batch: Any = self._full_rows(count, math.ceil(tokens / count)) | {"prompt_ids": torch.zeros(0)}
        packed = run.actor_critic.pack(*row_tensors(batch).values())
        self._micro_batch = MicroBatch(UpdateStep("both", torch.arange(count), 0, ()), batch, packed, [], 0, last=True)

    def _full_rows(self, rows: int, length: int) -> dict[str, Tensor]:
        """Rows of `length` tokens in all; their share of response tokens is that of the longest row."""
        response = math.ceil(self._args.response_len * length / self._args.longest_row)
        queries = torch.zeros(rows, length - response, dtype=torch.long)
        responses = torch.zeros(rows, response, dtype=torch.long)
        return {
            "queries": queries,
            "query_attn_masks": queries + 1,
            "responses": responses,
            "response_mask": responses == 0,
        }

    def measure(self, *, replies: bool) -> Measured:
        run, args = self._run, self._args
        self.live.track([[*m.parameters(), *m.buffers()] for m in (run.actor_critic, *run.rewards, *self._copied)])
        measured = self._weights()
        # A response of one column has no room for a reply.
        self._rollout(measured, replies=replies and args.response_len > 1 and args.generation_backend != "generate")
        base = [] if args.reward_adapter is None else [run.actor_critic.policy.model.base_model]
        measured.score = max((self._score(model) for model in (*run.rewards, *base)), default=0.0)
        measured.logprobs = self._log_probs()
        measured.backward = self._backward()
        if args.load_in_4bit:
            policy = run.actor_critic.policy
            layers = [m for key, m in policy.named_modules() if isinstance(m, nn.Linear) and "lora_" not in key]
            packed = [layer.weight for layer in layers if layer is not policy.head]
            measured.weights["policy"] -= sum(w.numel() * (w.element_size() - _FOUR_BIT) for w in packed)
            # One layer at a time is dequantized, to bfloat16.
            for name in ("prefill", "sampling", "logprobs", "backward"):
                setattr(measured, name, getattr(measured, name) + max(2.0 * weight.numel() for weight in packed))
        return measured

    def _weights(self) -> Measured:
        actor_critic = self._run.actor_critic
        trained = [parameter for parameter in actor_critic.parameters() if parameter.requires_grad]
        modules: dict[str, nn.Module] = {"policy": actor_critic.policy}
        if actor_critic.critic is not None:
            modules["critic"] = actor_critic.critic
        modules |= dict(zip(["reference"], self._copied, strict=False))
        modules |= {f"reward{i}": model for i, model in enumerate(self._run.rewards)}
        weights = {name: size_of([*module.parameters(), *module.buffers()]) for name, module in modules.items()}
        model = actor_critic.policy.model
        config: Any = model.config.get_text_config()
        outside = size_of([model.get_input_embeddings().weight, model.get_output_embeddings().weight])
        return Measured(
            weights=weights,
            gradients=size_of(trained),
            elements=float(sum(parameter.numel() for parameter in trained)),
            hidden=config.hidden_size,
            layer=outside + (weights["policy"] - outside) / config.num_hidden_layers,
        )

    @torch.no_grad()
    def _rollout(self, measured: Measured, *, replies: bool) -> None:
        args, live, slots = self._args, self.live, self._args.generation_backend != "generate"
        model: Any = self._run.actor_critic.policy.model.eval()
        live.reset_peak()
        start = live.live
        with self._engine.autocast():
            cache = DynamicCache(config=model.config)
            # `generate` computes the prompt again for every sample.
            rows = self._prompts if slots else self._rows
            ids = torch.zeros(rows, args.query_len, dtype=torch.long)
            logits = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
            measured.prefill = live.risen
            layers: Any = cache.layers
            prompts = size_of(states for layer in layers for states in (layer.keys, layer.values))
            # Autocast keeps its casts of trained weights until its block ends.
            kept = float(live.live - start) - prompts - size_of([logits])
            token, columns, places = prompts / (rows * args.query_len), args.longest_row, self._rows
            if slots:
                # Two slots more: what all prompts begin with, and a prompt whose other samples wait.
                places = self._rows + 1 + (args.num_return_sequences > 1)
                columns = (EXACT if args.use_cpu else BUCKETED).columns(columns)
            measured.kv_cache = token * columns * places
            # A layer's keys and values are held twice while it grows; an accelerator's cache has its full size at once.
            grown = measured.kv_cache / len(layers) if args.use_cpu or not slots else 0.0
            if slots and not args.use_cpu:
                measured.prefill -= prompts
            del cache, layers
            chosen = logits.new_empty(self._rows, logits.size(-1), dtype=logits.dtype if slots else torch.float32)
            live.reset_peak()
            choose_tokens(chosen, torch.zeros(self._rows, dtype=torch.float64), temperature=1.0)
            measured.sampling = max(live.risen + size_of([chosen]), grown) + kept
            if replies:
                live.reset_peak()
                ids = torch.zeros(self._rows, args.response_len - 1, dtype=torch.long)
                model.base_model(input_ids=ids, past_key_values=DynamicCache(config=model.config), use_cache=True)
                measured.sampling = max(measured.sampling, live.risen + kept)
        model.train()

    @torch.no_grad()
    def _score(self, model: Any) -> float:
        tokens = torch.zeros(self._rows, self._args.longest_row, dtype=torch.long)
        self.live.reset_peak()
        model.eval()
        model(input_ids=tokens, attention_mask=tokens + 1, use_cache=False)
        model.train()
        return self.live.risen

    def _log_probs(self) -> float:
        args, actor_critic, reference = self._args, self._run.actor_critic, self._run.reference
        # Steps that are logged compute entropies.
        how: Any = {
            "temperature": args.temperature,
            "chunk_size": args.logprob_chunk_size,
            "with_entropies": True,
        }
        self.live.reset_peak()
        with self._engine.autocast():
            evaluate_responses(actor_critic, self._evaluated, with_critic=actor_critic.critic is not None, **how)
        if reference is not None:
            with reference.on_device(_CPU) as policy, self._engine.autocast():
                evaluate_responses(policy, self._evaluated, **how)
        return self.live.risen

    def _backward(self) -> float:
        def loss_of(part: str) -> Any:
            return lambda rows, outputs: (getattr(outputs, part).float().sum(), {})

        self.live.reset_peak()
        if not self._single:
            for parameter in self._run.actor_critic.parameters():
                parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
        schedules: Any = None
        updater = Updater(self._engine, schedules, self._args)
        updater.backward(self._micro_batch, loss_of("logprobs"), loss_of("predictions"))
        return self.live.risen
