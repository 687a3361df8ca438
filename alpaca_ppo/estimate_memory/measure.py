"""Runs the passes of a PPO step over fake tensors and measures each one's peak memory, for any architecture.

With one and two decoder layers, without gradients with three too, if memory is linear in their number, else with all.
Responses are assumed to have full length. Models whose passes depend on the values of tensors are not supported.
"""

import inspect
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer

from alpaca_ppo.adapters.adapter_set import REWARD
from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.estimate_memory.fake_models import (
    FakeRun,
    Measurements,
    Models,
    build,
    extrapolate_peaks,
    grouped_mm_of_any_dtype,
    layers_are_alike,
    make_fake,
    measure_weights,
    one_sequence_per_row,
    size_of,
)
from alpaca_ppo.estimate_memory.live_bytes import LiveBytes
from alpaca_ppo.functional.packing import PackedRows, position_ids
from alpaca_ppo.generation.slot_cache import SlotCache
from alpaca_ppo.generation.slot_passes import NewTokens, extend
from alpaca_ppo.generation.slots import BUCKETED, EXACT
from alpaca_ppo.generation.token_sampling import choose_tokens
from alpaca_ppo.models import ActorCritic, AdapterReference, Policy
from alpaca_ppo.models.packed_attention import install_attention, is_installed, uninstall_attention
from alpaca_ppo.models.policy import response_states

# The result of the operation by which a model tests a batch for padding: always "has padding", so that it keeps its
# attention mask.
_ANSWERS = {torch.ops.aten._local_scalar_dense.default: 0}


@dataclass(frozen=True)
class Sizes:
    """Batch sizes and lengths of one process's passes."""

    prompts: int
    """Prompts sampled at once."""
    samples: int
    """Responses per prompt."""
    rows: int
    """Responses scored or evaluated at once."""
    micro_rows: int
    """Responses in the largest micro-batch."""
    micro_tokens: int
    """Its tokens, in the pass that reads the most."""
    query: int
    """Tokens per prompt."""
    response: int
    """Tokens per response."""
    replies: bool = False
    """Whether something may answer the policy in the middle of a response."""

    @property
    def longest_row(self) -> int:
        """Tokens of a prompt and its response."""
        return self.query + self.response


def measure(models: Models, args: PPOConfig, sizes: Sizes, *, zero: bool = False) -> Measurements:
    """Bytes of weights, gradients and passes at the models' full depth.

    Each pass has three values: `backbone`, the peak while the decoder runs; `saved`, what is alive between decoder and
    head; `head`, the peak while the head runs. A backward pass also has `tail`, the peak at its end.

    Args:
        models: their configurations.
        args: of the run.
        sizes: of one process's passes.
        zero: run under DeepSpeed ZeRO, whose bf16 casts trained models and reference instead of using autocast.

    Raises:
        ValueError: when a model cannot run on fake tensors, or models contradict each other.
    """
    with warnings.catch_warnings(), _named_errors(models):
        # Deprecation warnings of transformers, which the run itself will show.
        warnings.simplefilter("ignore")
        one, found = _at_full_depth(models, args, sizes, half=zero and args.bf16)
    found |= _cache_sizes(models.policy, args, sizes, found["policy/kv_column"])
    return found | {name: one[name] for name in one if name.endswith(".tail")}


def _at_full_depth(models: Models, args: PPOConfig, sizes: Sizes, *, half: bool) -> tuple[Measurements, Measurements]:
    """Measurements with one decoder layer (with all, if an adapter selects layers by number), and with all layers."""
    if not models.names_layers and layers_are_alike(models, args):
        one, two = (_measure(models, args, sizes, layers, half=half) for layers in (1, 2))
        depths = models.depths(args)
        three = _measure(models, args, sizes, 3, half=half, trains=False) if max(depths.values()) > 2 else {}
        found = extrapolate_peaks(one, two, three, depths)
        layer = two["policy/weights"] - one["policy/weights"]
        return one, found | {"policy/layer": layer, "policy/outside": one["policy/weights"] - layer}
    found = _measure(models, args, sizes, None, half=half)
    # Layers differ, and a single one may be most of the weights.
    full = found | {"policy/layer": 0.0, "policy/outside": found["policy/weights"]}
    return found if models.names_layers else _measure(models, args, sizes, 1, half=half), full


def _measure(
    models: Models, args: PPOConfig, sizes: Sizes, layers: int | None, *, half: bool, trains: bool = True
) -> Measurements:
    run = build(models, args, layers=layers, half=half)
    args, mode = replace(args, bf16=args.bf16 and not half), FakeTensorMode(allow_non_fake_inputs=True)
    found = measure_weights(run, args)
    make_fake(run, mode)
    with grouped_mm_of_any_dtype(), mode, LiveBytes(_ANSWERS) as live:
        passes = _Passes(live, args, sizes)
        return found | passes.of(run, with_reward_adapter=models.reward_lora is not None, trains=trains)


@contextmanager
def _named_errors(models: Models) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, NotImplementedError, TypeError, AttributeError, LookupError) as error:
        name = type(models.policy).__name__.removesuffix("Config")
        raise ValueError(
            f"model_name_or_path: {name} cannot run without weights ({str(error)[:200]}), so its memory cannot be "
            "estimated; start a short run and read memory/peak_gib in its metrics.jsonl"
        ) from error


def _cache_sizes(config: Any, args: PPOConfig, sizes: Sizes, column: float) -> Measurements:
    """Bytes of the sampler's cache after a full response, and what a layer that grows takes besides.

    Args:
        config: of the policy.
        args: of the run.
        sizes: of the passes.
        column: bytes of one column of one layer, for the prompts that are sampled at once.
    """
    if args.generation_backend != "generate":
        # Two slots more: what all prompts begin with, and a prompt whose other samples wait.
        slots = sizes.rows + 1 + (sizes.samples > 1)
        shapes = EXACT if args.use_cpu else BUCKETED
        layer = column / (sizes.prompts * sizes.samples) * slots * shapes.columns(sizes.query + sizes.response)
        layers = config.get_text_config().num_hidden_layers
        # An accelerator's cache has its full size from the start.
        return {"policy/kv_cache": layers * layer, "policy/kv_layer": layer if args.use_cpu else 0.0}
    full, layers = sizes.query + sizes.response - 1, DynamicCache(config=config).layers
    columns = [min(full, a.sliding_window) if isinstance(a, DynamicSlidingWindowLayer) else full for a in layers]
    # While a layer grows, first its keys and then its values are held twice.
    return {"policy/kv_cache": column * sum(columns), "policy/kv_layer": column * max(columns) / 2}


def _next_logits(model: Any, cache: DynamicCache, rows: int, new: int, width: int) -> Tensor:
    """The logits (rows, V) after `new` more tokens, when each row has `width` tokens in all."""
    mask = torch.ones(rows, width, dtype=torch.long)
    optional = {"position_ids": position_ids(mask)[:, -new:], "logits_to_keep": 1}
    accepted = inspect.signature(type(model).forward).parameters
    optional = {name: value for name, value in optional.items() if name in accepted}
    ids = torch.zeros(rows, new, dtype=torch.long)
    output = model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True, **optional)
    logits: Tensor = output.logits[:, -1]
    return logits


class _Passes:
    def __init__(self, live: LiveBytes, args: PPOConfig, sizes: Sizes) -> None:
        self._live, self._args, self._sizes = live, args, sizes
        self._base = 0

    def of(self, run: FakeRun, *, with_reward_adapter: bool, trains: bool) -> Measurements:
        """Bytes above the weights, by pass and cause; unless `trains`, without the passes of the update."""
        modules = [run.actor_critic, *run.rewards, *([] if run.reference is None else [run.reference.policy])]
        self._live.track([[*module.parameters(), *module.buffers()] for module in modules])
        found = self._rollout(run.actor_critic.policy.model)
        for i, reward in enumerate(run.rewards):
            found[f"reward{i}/score"] = self._score(reward)
        found["policy/score"] = self._score_with_adapter(run.actor_critic.policy) if with_reward_adapter else 0.0
        with one_sequence_per_row():
            found |= self._evaluate(run)
            return found | (self._train(run.actor_critic) if trains else {})

    def _begin(self) -> None:
        self._live.reset_peak()
        self._base = self._live.live

    def _peak(self) -> float:
        """Peak bytes above those at `_begin`, since the last call."""
        peak = float(self._live.peak - self._base)
        self._live.reset_peak()
        return peak

    def _autocast(self) -> Any:
        return torch.autocast("cpu", torch.bfloat16, enabled=self._args.bf16)

    @torch.no_grad()
    def _rollout(self, model: PreTrainedModel) -> Measurements:
        sizes, plain = self._sizes, self._args.generation_backend == "generate"
        rows = sizes.prompts * sizes.samples
        model.eval()
        self._begin()
        with self._autocast():
            cache = DynamicCache(config=model.config)
            # `generate` computes the prompt again for every sample.
            _next_logits(model, cache, rows if plain else sizes.prompts, sizes.query, sizes.query)
            found = {"policy/prefill": self._peak()}
            layers: Any = cache.layers
            # Autocast keeps its casts of trained weights until its block ends.
            cached = size_of(states for layer in layers for states in (layer.keys, layer.values))
            found["policy/prompt_cache"] = cached
            found["policy/sampling_cast"] = max(0.0, self._live.live - self._base - cached)
            cache.batch_repeat_interleave(1 if plain else sizes.samples)
            for layer in layers:
                states = (layer.keys, layer.values)
                layer.update(*(s.new_empty(*s.shape[:2], sizes.response, s.size(-1)) for s in states))
            states = (layers[0].keys, layers[0].values)
            found["policy/kv_column"] = float(sum(s[:, :, 0].numel() * s.element_size() for s in states))
            del states, layer
            found["policy/replies"] = self._read_replies(model) if sizes.replies else 0.0
            self._begin()
            logits = _next_logits(model, cache, rows, 1, sizes.query + sizes.response + 1)
            found["policy/decode"] = self._peak()
            # `generate` returns a copy of the logits in float32.
            final_logits = logits.to(torch.float32, copy=True) if plain else logits
            choose_tokens(final_logits, torch.zeros(rows, dtype=torch.float64), temperature=1.0)
            found["policy/choose"] = self._peak()
        model.train()
        return found

    def _read_replies(self, model: PreTrainedModel) -> float:
        """Peak above the sampler's cache while all rows read a reply, each as long as a response allows: after a turn
        of one token, with room for another. 0 if the model cannot be sampled over several turns.
        """
        sizes, had_it = self._sizes, is_installed(model)
        if not install_attention(model):
            return 0.0
        cache, tokens = SlotCache(sizes.rows, sizes.query + sizes.response), [0] * (sizes.response - 1)
        self._begin()
        extend(model, cache, [NewTokens(slot, sizes.query, tokens) for slot in range(sizes.rows)])
        if not had_it:
            uninstall_attention(model)
        # What is left is the cache.
        return self._peak() - float(self._live.live - self._base)

    @torch.no_grad()
    def _score(self, model: Any) -> float:
        tokens = torch.zeros(self._sizes.rows, self._sizes.query + self._sizes.response, dtype=torch.long)
        self._begin()
        model.eval()
        model(input_ids=tokens, attention_mask=tokens + 1, use_cache=False)
        model.train()
        return self._peak()

    def _score_with_adapter(self, policy: Policy) -> float:
        assert policy.adapters is not None
        with policy.adapters.active(REWARD):
            return self._score(policy.model.base_model)

    def _evaluate(self, run: FakeRun) -> Measurements:
        critic, sizes = run.actor_critic.critic, self._sizes
        packed, critics = self._packed_rows(sizes.rows, sizes.rows * sizes.longest_row)
        with torch.no_grad(), self._autocast():
            found = self._pass("policy/eval", *self._policy_pass(run.actor_critic, packed))
            found["policy/cast"] = max(0.0, float(self._live.live - self._base))
            if critic is not None and not critic.shares_states:
                found |= self._pass("critic/eval", *self._critic_pass(run.actor_critic, critics))
                found["critic/cast"] = max(0.0, float(self._live.live - self._base))
        if run.reference is None:
            return found
        frozen = run.reference.policy
        other = run.reference.adapters.active(None) if isinstance(run.reference, AdapterReference) else nullcontext()
        with torch.no_grad(), self._autocast(), other:
            found |= self._pass("reference/eval", lambda: frozen.states(packed), self._scores(frozen, packed))
        return found

    def _train(self, actor_critic: ActorCritic) -> Measurements:
        critic = actor_critic.critic
        for parameter in actor_critic.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter)
        packed, critics = self._packed_rows(self._sizes.micro_rows, self._sizes.micro_tokens)
        found: Measurements = {}
        if critic is not None and not critic.shares_states:
            with actor_critic.critic_active():
                found = self._pass("critic/train", *self._critic_pass(actor_critic, critics))
        return found | self._pass("policy/train", *self._policy_pass(actor_critic, packed))

    def _policy_pass(
        self, actor_critic: ActorCritic, packed: PackedRows
    ) -> tuple[Callable[[], Tensor], Callable[[Tensor], Tensor]]:
        """The policy's decoder, and what reads its states: the language-model head, and a critic without a pass."""
        policy, critic = actor_critic.policy, actor_critic.critic
        score = self._scores(policy, packed)
        if critic is None or not critic.shares_states:
            return lambda: policy.states(packed), score
        value = self._critic_pass(actor_critic, packed)[1]
        return lambda: policy.states(packed), lambda states: score(states) + value(states)

    def _critic_pass(
        self, actor_critic: ActorCritic, packed: PackedRows
    ) -> tuple[Callable[[], Tensor], Callable[[Tensor], Tensor]]:
        critic: Any = actor_critic.critic
        taus = critic.head.sample_taus(torch.Generator())

        def states() -> Tensor:
            if critic.backbone is not None:
                return response_states(critic.backbone, packed)
            with actor_critic.critic_active():
                return actor_critic.policy.states(packed)

        return states, lambda hidden: critic.head(hidden, taus)[2].float().sum()

    def _scores(self, policy: Policy, packed: PackedRows) -> Callable[[Tensor], Tensor]:
        responses = torch.zeros(packed.input_ids.size(0), self._sizes.response, dtype=torch.long)

        def score(states: Tensor) -> Tensor:
            scored = policy.outputs_from_states(
                states,
                packed,
                responses,
                temperature=self._args.temperature,
                chunk_size=self._args.logprob_chunk_size,
            )
            return scored.logprobs.sum()

        return score

    def _packed_rows(self, rows: int, tokens: int) -> tuple[PackedRows, PackedRows]:
        """Rows of equal length with `tokens` tokens in all, as policy and critic read them; in prompts and responses
        as of maximal length.

        Without padding they would lie end to end; as rows of their own they take as much.
        """
        sizes, length = self._sizes, math.ceil(tokens / rows)
        picked = torch.zeros(rows * math.ceil(sizes.response * length / sizes.longest_row), dtype=torch.long)
        packed = PackedRows(torch.zeros(rows, length - 1, dtype=torch.long), picked, picked, picked)
        return packed, packed

    def _pass(self, name: str, states_of: Callable[[], Tensor], head_of: Callable[[Tensor], Tensor]) -> Measurements:
        """Measures one pass, with its backward pass if gradients are enabled."""
        self._begin()
        head: list[float] = []
        with self._autocast():
            states = states_of()
            backbone, saved = self._peak(), float(self._live.live - self._base)
            loss = head_of(states)
        if not loss.requires_grad:
            return {f"{name}.backbone": backbone, f"{name}.saved": saved, f"{name}.head": self._peak()}
        states.register_hook(lambda _: head.append(self._peak()))
        del states
        loss.backward()
        tail = self._peak()
        return {
            f"{name}.backbone": max(backbone, tail),
            f"{name}.saved": saved,
            f"{name}.head": head[0],
            f"{name}.tail": tail,
        }
