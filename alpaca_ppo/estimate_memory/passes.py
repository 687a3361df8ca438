"""Runs the trainer's passes over fake tensors and measures each one's peak memory, for any architecture.

One prefill of the prompts, one choice of tokens, one score, one pass for log-probs and values, and one micro-batch
forward and backward; responses have full length. Models whose passes depend on the values of tensors cannot be run.
"""

import math
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import DynamicCache

from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.estimate_memory.fake_models import (
    FakeRun,
    Models,
    build,
    grouped_mm_of_any_dtype,
    make_fake,
    one_sequence_per_row,
    size_of,
)
from alpaca_ppo.estimate_memory.live_bytes import LiveBytes
from alpaca_ppo.functional.packing import PackedRows
from alpaca_ppo.generation.slots import BUCKETED, EXACT
from alpaca_ppo.generation.token_sampling import choose_tokens
from alpaca_ppo.models import AdapterReference, CopiedReference

_ANSWERS = {torch.ops.aten._local_scalar_dense.default: 0}
"""The result of the operation by which a model tests a batch for padding: always "has padding", so that it keeps its
attention mask."""
_FOUR_BIT = 0.5 + 4 / 64
"""Bytes per weight: half a byte, and a float32 scale for each 64 weights (bitsandbytes' NF4)."""


@dataclass(frozen=True)
class Sizes:
    """Batch sizes and lengths of one process's passes."""

    prompts: int
    """Prompts sampled at once."""
    rows: int
    """Responses sampled, scored or evaluated at once."""
    micro_rows: int
    """Responses in the largest micro-batch."""
    micro_tokens: int
    """Its tokens."""
    single: bool
    """Whether it is the only one of its optimizer step."""
    replies: bool
    """Whether something may answer the policy in the middle of a response, with as many tokens as that has room for."""


def sizes_of(args: PPOConfig, processes: int, *, replies: bool = False) -> Sizes:
    """The sizes of a run on so many `processes`, if every row has full length and none has padding."""
    prompts, own = math.ceil(args.rollout_batch_size / processes), math.ceil(args.step_batch_size / processes)
    tokens = min(args.micro_batch_tokens, own * args.longest_row)
    if args.padding_free is False and args.max_tokens_per_micro_batch is None and processes == 1:
        # Padded rows are as many in each micro-batch.
        tokens = math.ceil(own / math.ceil(own / args.step_per_device_batch_size)) * args.longest_row
    return Sizes(
        prompts=min(prompts, max(1, args.rollout_per_device_batch_size // args.num_return_sequences)),
        rows=min(prompts * args.num_return_sequences, args.rollout_per_device_batch_size),
        micro_rows=math.ceil(tokens / args.longest_row),
        micro_tokens=tokens,
        single=tokens >= own * args.longest_row,
        # A response of one column has no room for a reply.
        replies=replies and args.response_len > 1 and args.generation_backend != "generate",
    )


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


def measure(models: Models, args: PPOConfig, sizes: Sizes, *, zero: bool = False) -> Measured:
    """Measures the passes of a run.

    Args:
        models: their configurations.
        args: of the run.
        sizes: of one process's passes.
        zero: run under DeepSpeed ZeRO, whose bf16 casts trained models and reference instead of using autocast.

    Raises:
        ValueError: when a model cannot run on fake tensors, or models contradict each other.
    """
    half = zero and args.bf16
    try:
        with warnings.catch_warnings():
            # Deprecation warnings of transformers, which the run itself will show.
            warnings.simplefilter("ignore")
            run = build(models, args, half=half)
            make_fake(run, mode := FakeTensorMode(allow_non_fake_inputs=True))
            with grouped_mm_of_any_dtype(), one_sequence_per_row(), mode, LiveBytes(_ANSWERS) as live:
                passes = _Passes(live, run, replace(args, bf16=args.bf16 and not half), sizes)
                return passes.measure()
    except (RuntimeError, NotImplementedError, TypeError, AttributeError, LookupError) as error:
        raise ValueError(
            f"model_name_or_path {models.policy!r} cannot run without weights ({str(error)[:200]}); start a short run "
            "and read memory/peak_gib in its metrics.jsonl"
        ) from error


class _Passes:
    def __init__(self, live: LiveBytes, run: FakeRun, args: PPOConfig, sizes: Sizes) -> None:
        self._live, self._run, self._args, self._sizes = live, run, args, sizes
        copied = [run.reference.policy] if isinstance(run.reference, CopiedReference) else []
        live.track([[*m.parameters(), *m.buffers()] for m in (run.actor_critic, *run.rewards, *copied)])
        self._base = 0

    def measure(self) -> Measured:
        """All passes of a step."""
        measured, run = self._weights(), self._run
        unpacked = self._four_bits(measured) if self._args.load_in_4bit else 0.0
        self._rollout(measured, run.actor_critic.policy.model)
        scores = [self._score(reward) for reward in run.rewards]
        if self._args.reward_adapter is not None:
            scores.append(self._score(run.actor_critic.policy.model.base_model))
        measured.score = max(scores, default=0.0)
        measured.logprobs = self._log_probs()
        measured.backward = self._backward()
        for name in ("prefill", "sampling", "logprobs", "backward"):
            setattr(measured, name, getattr(measured, name) + unpacked)
        return measured

    def _weights(self) -> Measured:
        actor_critic, reference = self._run.actor_critic, self._run.reference
        trained = [parameter for parameter in actor_critic.parameters() if parameter.requires_grad]
        modules: dict[str, nn.Module] = {"policy": actor_critic.policy}
        if actor_critic.critic is not None:
            modules["critic"] = actor_critic.critic
        if isinstance(reference, CopiedReference):
            modules["reference"] = reference.policy
        modules |= {f"reward{i}": model for i, model in enumerate(self._run.rewards)}
        weights = {name: size_of([*module.parameters(), *module.buffers()]) for name, module in modules.items()}
        model = actor_critic.policy.model
        config: Any = model.config.get_text_config()
        ends = {id(m.weight): m.weight for m in (model.get_input_embeddings(), model.get_output_embeddings())}
        outside = size_of(ends.values())
        return Measured(
            weights=weights,
            gradients=size_of(trained),
            elements=float(sum(parameter.numel() for parameter in trained)),
            hidden=config.hidden_size,
            layer=outside + (weights["policy"] - outside) / config.num_hidden_layers,
        )

    def _four_bits(self, measured: Measured) -> float:
        """Counts the base's linear layers in 4 bits; returns the bytes of one that is dequantized, to bfloat16."""
        policy = self._run.actor_critic.policy
        layers = [m for key, m in policy.named_modules() if isinstance(m, nn.Linear) and "lora_" not in key]
        packed = [layer.weight for layer in layers if layer is not policy.head]
        measured.weights["policy"] -= sum(w.numel() * (w.element_size() - _FOUR_BIT) for w in packed)
        return max(2.0 * weight.numel() for weight in packed)

    def _begin(self) -> None:
        self._live.reset_peak()
        self._base = self._live.live

    def _peak(self) -> float:
        """Peak bytes above those at `_begin`."""
        return float(self._live.peak - self._base)

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", torch.bfloat16, enabled=self._args.bf16)

    @torch.no_grad()
    def _rollout(self, measured: Measured, model: Any) -> None:
        args, sizes, slots = self._args, self._sizes, self._args.generation_backend != "generate"
        model.eval()
        self._begin()
        with self._autocast():
            cache = DynamicCache(config=model.config)
            # `generate` computes the prompt again for every sample.
            rows = sizes.prompts if slots else sizes.rows
            ids = torch.zeros(rows, args.query_len, dtype=torch.long)
            logits = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
            measured.prefill = self._peak()
            layers: Any = cache.layers
            prompts = size_of(states for layer in layers for states in (layer.keys, layer.values))
            # Autocast keeps its casts of trained weights until its block ends.
            kept = float(self._live.live - self._base) - prompts - size_of([logits])
            token, columns = prompts / (rows * args.query_len), args.longest_row
            if slots:
                # Two slots more: what all prompts begin with, and a prompt whose other samples wait.
                places = sizes.rows + 1 + (args.num_return_sequences > 1)
                columns = (EXACT if args.use_cpu else BUCKETED).columns(columns)
            measured.kv_cache = token * columns * (places if slots else sizes.rows)
            # A layer's keys and values are held twice while it grows; an accelerator's cache has its full size at once.
            grown = measured.kv_cache / len(layers) if args.use_cpu or not slots else 0.0
            if slots and not args.use_cpu:
                measured.prefill -= prompts
            del cache, layers
            chosen = logits.new_empty(sizes.rows, logits.size(-1), dtype=logits.dtype if slots else torch.float32)
            self._begin()
            choose_tokens(chosen, torch.zeros(sizes.rows, dtype=torch.float64), temperature=1.0)
            measured.sampling = max(self._peak() + size_of([chosen]), grown) + kept
            if sizes.replies:
                self._begin()
                cache = DynamicCache(config=model.config)
                ids = torch.zeros(sizes.rows, args.response_len - 1, dtype=torch.long)
                model.base_model(input_ids=ids, past_key_values=cache, use_cache=True)
                measured.sampling = max(measured.sampling, self._peak() + kept)
        model.train()

    @torch.no_grad()
    def _score(self, model: Any) -> float:
        tokens = torch.zeros(self._sizes.rows, self._args.longest_row, dtype=torch.long)
        self._begin()
        model.eval()
        model(input_ids=tokens, attention_mask=tokens + 1, use_cache=False)
        model.train()
        return self._peak()

    @torch.no_grad()
    def _log_probs(self) -> float:
        run, sizes, critic = self._run, self._sizes, self._run.actor_critic.critic
        rows = self._rows(sizes.rows, sizes.rows * self._args.longest_row)
        self._begin()
        with self._autocast():
            run.actor_critic(**rows, with_critic=critic is not None and critic.shares_states)
            if critic is not None and not critic.shares_states:
                run.actor_critic(**rows, with_policy=False)
        if run.reference is not None:
            other: Any = nullcontext()
            if isinstance(run.reference, AdapterReference):
                other = run.reference.adapters.active(run.reference.adapter)
            with self._autocast(), other:
                run.reference.policy(**{**rows, "packed": rows["packed"][0]})
        return self._peak()

    def _backward(self) -> float:
        actor_critic, critic = self._run.actor_critic, self._run.actor_critic.critic
        own_pass = critic is not None and not critic.shares_states
        rows = self._rows(self._sizes.micro_rows, self._sizes.micro_tokens)
        self._begin()
        if not self._sizes.single:
            for parameter in actor_critic.parameters():
                parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
        if own_pass:
            with actor_critic.critic_active():
                with self._autocast():
                    predictions = actor_critic(**rows, with_policy=False).predictions.float().sum()
                predictions.backward()
        with self._autocast():
            outputs = actor_critic(**rows, with_critic=not own_pass)
            parts = [outputs.logprobs, *([] if outputs.predictions is None else [outputs.predictions])]
            loss = sum(part.float().sum() for part in parts)
        del outputs, parts
        loss.backward()
        return self._peak()

    def _rows(self, rows: int, tokens: int) -> dict[str, Any]:
        """What a pass gets for `rows` of equal length with `tokens` in all; without padding they take as much."""
        args, length = self._args, math.ceil(tokens / rows)
        picked = torch.zeros(rows * math.ceil(args.response_len * length / args.longest_row), dtype=torch.long)
        packed = PackedRows(torch.zeros(rows, length - 1, dtype=torch.long), picked, picked, picked)
        responses: Tensor = torch.zeros(rows, args.response_len, dtype=torch.long)
        return {
            "queries": torch.zeros(rows, args.query_len, dtype=torch.long),
            "query_attn_masks": torch.ones(rows, args.query_len, dtype=torch.long),
            "responses": responses,
            "response_mask": responses == 0,
            "temperature": args.temperature,
            "chunk_size": args.logprob_chunk_size,
            "packed": (packed, packed),
        }
