"""One rank's part of a rollout: sample responses, evaluate log-probabilities and values, gather the rows of all ranks.

`RolloutTrainer.rollout` decides the order of the parts and how responses are scored; of the configuration this module
reads the sizes of passes alone.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedModel

from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.distributed.collectives import any_rank, gather_rows, max_int_over_ranks, pad_to_longest_rank
from alpaca_ppo.distributed.engine import Engine
from alpaca_ppo.distributed.preemption import PreemptionHandler
from alpaca_ppo.environments.episodes import Episodes
from alpaca_ppo.functional.packing import PackedRows, RowLayout, pack_rows, row_lengths
from alpaca_ppo.generation import Backend, Generation, SamplingHooks, SamplingParams, Turns, generate
from alpaca_ppo.models import ActorCritic, CopiedReference, Policy, Reference
from alpaca_ppo.ppo.minibatches import (
    DeviceBatch,
    DeviceRows,
    chunks_by_length,
    chunks_by_tokens,
    row_tensors,
    shape_as_on_others,
)
from alpaca_ppo.rewards import ModelReward, RewardScorer
from alpaca_ppo.types import PromptBatch, Rollouts


@dataclass(frozen=True)
class RolloutPasses:
    """Which passes a rollout makes besides sampling and scoring, and what happens if rewards fail."""

    with_policy: bool = True
    """The policy's own log-probs; without them the sampler's log-probs are used, which saves a forward pass."""
    with_critic: bool = True
    """The critic's values."""
    with_reference: bool = True
    """The reference's log-probs; without them a copy of the policy's takes their place, as without a reference."""
    with_entropies: bool = False
    """The entropies of policy and reference."""
    greedy_baseline: bool = False
    """The score of each prompt's greedy response, as `baseline_scores`."""
    compares_group: bool = False
    """Whether the estimator compares responses to a prompt."""
    may_fail: bool = False
    """Whether all rewards may fail; otherwise that is an error."""


POLICY_ALONE = RolloutPasses(with_critic=False, with_reference=False)
"""A forward pass of the policy and nothing else."""


def sample_responses(
    model: PreTrainedModel,
    prompts: PromptBatch,
    params: SamplingParams,
    *,
    backend: str | Backend = "auto",
    per_device_batch_size: int,
    turns: Turns | None = None,
    hooks: SamplingHooks | None = None,
) -> dict[str, Tensor]:
    """Responses to P prompts, `num_return_sequences` (n) each, in the prompts' order; (P * n, ...) tensors on the CPU.

    Returns the keys of `types.Rollouts` from `queries` to `rollout_logprobs`; R = max_new_tokens.

    Args:
        model: the policy, not wrapped.
        prompts: of this rank.
        params: how to sample, and the seed and step of the random numbers.
        backend: what samples.
        per_device_batch_size: responses sampled at once, on which no token depends.
        turns: as for `generate`.
        hooks: as for `generate`.
    """
    generation = generate(
        model, prompts, params, backend=backend, rows_at_once=per_device_batch_size, turns=turns, hooks=hooks
    )
    n = params.num_return_sequences
    return {
        "queries": prompts["queries"].repeat_interleave(n, dim=0),
        "query_attn_masks": prompts["query_attn_masks"].repeat_interleave(n, dim=0),
        "prompt_ids": prompts["prompt_ids"].repeat_interleave(n),
        "sample_ids": torch.arange(n).repeat(len(prompts["queries"])),
        "responses": generation.responses.cpu(),
        "response_mask": generation.response_mask.cpu(),
        "stopped": generation.stopped.cpu(),
        "rollout_logprobs": generation.logprobs.cpu(),
    }


class EvaluatedRows:
    """The rows that some models evaluate: divided into passes, copied to the device and packed once for all models that
    read them alike.

    Args:
        samples: rows with the ROW_KEYS, on the CPU.
        device: where the models are.
        per_device_batch_size: rows of one forward pass with padding.
        max_tokens: tokens of one forward pass without padding; None = `per_device_batch_size` rows, as with padding.
        most_passes: from this rank's number of passes the number that all ranks make, where they have to make equally
            many.
    """

    def __init__(
        self,
        samples: Mapping[str, Tensor],
        device: torch.device,
        *,
        per_device_batch_size: int,
        max_tokens: int | None = None,
        most_passes: Callable[[int], int] = int,
    ) -> None:
        self.shape = samples["responses"].shape
        self._rows, self._device = row_tensors(samples), device
        self._group = int(samples["sample_ids"].max()) + 1 if "sample_ids" in samples else 1
        self._batch_size, self._max_tokens, self._most_passes = per_device_batch_size, max_tokens, most_passes
        self._batches: dict[bool, list[tuple[list[int], DeviceBatch]]] = {}
        self._packed: dict[tuple[bool, int, RowLayout], PackedRows] = {}

    def passes(self, model: ActorCritic | Policy) -> Iterator[tuple[list[int], list[Tensor], Any]]:
        """The rows of each pass of `model`, their tensors on the device, and what `model.pack` returns for them."""
        free = model.padding_free
        if free not in self._batches:
            lengths = row_lengths(self._rows["query_attn_masks"], self._rows["response_mask"]).tolist()
            if free and self._max_tokens is not None:
                chunks = chunks_by_tokens(lengths, self._max_tokens, group=self._group)
            else:
                chunks = chunks_by_length(lengths, self._batch_size)
            chunks += [[] for _ in range(self._most_passes(len(chunks)) - len(chunks))]
            self._batches[free] = list(zip(chunks, DeviceRows(self._rows, chunks, self._device), strict=True))
        for number, (rows, batch) in enumerate(self._batches[free]):
            tensors = list(batch.device.values())
            if isinstance(model, Policy):
                yield rows, tensors, self._pack(batch, (free, number, model.layout))
            else:
                yield rows, tensors, tuple(self._pack(batch, (free, number, layout)) for layout in model.layouts)

    def _pack(self, batch: DeviceBatch, key: tuple[bool, int, RowLayout]) -> PackedRows:
        if key not in self._packed:
            # On the CPU: the device need not be asked for lengths.
            self._packed[key] = pack_rows(*batch.host.values(), layout=key[2], device=self._device)
        return self._packed[key]


@torch.no_grad()
def evaluate_responses(
    model: ActorCritic | Policy,
    rows: EvaluatedRows,
    *,
    temperature: float,
    chunk_size: int,
    with_entropies: bool = False,
    poll: Callable[[], Any] = lambda: None,
    **parts: bool,
) -> dict[str, Tensor]:
    """`logprobs`, `entropies` (if asked for) and, of an `ActorCritic`, `values` and `value_means` (B, R) on the CPU,
    from a forward pass of the trainer without gradients.

    Args:
        model: what to run.
        rows: the prompts and responses.
        temperature: divides the logits.
        chunk_size: tokens whose logits are in memory at once.
        with_entropies: whether entropies are computed.
        poll: called before each pass; an exception in it ends the evaluation.
        parts: `with_policy` and `with_critic` of an `ActorCritic`.
    """
    out: dict[str, Tensor] = {}
    for numbers, tensors, packed in rows.passes(model):
        poll()
        outputs = model(
            *tensors,
            temperature=temperature,
            chunk_size=chunk_size,
            with_entropies=with_entropies,
            packed=packed,
            **parts,
        )
        for name, value in outputs._asdict().items():
            if value is None or name == "predictions":
                continue
            result = out.setdefault(name, torch.zeros(rows.shape, dtype=value.dtype))
            result[numbers] = value[: len(numbers)].cpu()
    return out


@dataclass(frozen=True)
class RolloutCollector:
    """What a rollout needs besides the trained models.

    Args:
        engine: of the trained models.
        args: the sizes of passes.
        reference: provides the reference policy; None without one.
        scorer: the reward sources.
        metric_scorer: what only measures the responses of an evaluation.
        backend: samples the responses.
        preemption: ends the sampling after a signal.
    """

    engine: Engine
    args: PPOConfig
    reference: Reference | None
    scorer: RewardScorer
    metric_scorer: RewardScorer
    backend: Backend
    preemption: PreemptionHandler

    @property
    def accelerator(self) -> Accelerator:
        """Of the run."""
        return self.engine.accelerator

    def prepare_frozen_models(self) -> None:
        """Lets the engine prepare the frozen models of reference and rewards, as it prepares the trained ones."""
        engine = self.engine
        if isinstance(self.reference, CopiedReference):
            engine.prepare_frozen_model(self.reference.policy, offload=self.reference.offloaded)
        for source in [*self.scorer.sources, *self.metric_scorer.sources]:
            if isinstance(source, ModelReward):
                source.prepare(
                    equal_passes=engine.synced_forwards,
                    packs_everywhere=lambda packs: not any_rank(not packs, self.accelerator),
                )
                engine.prepare_frozen_model(source.model)

    def local_prompts(
        self, batches: Sequence[PromptBatch], dummy_prompts: Callable[[int], PromptBatch]
    ) -> PromptBatch | None:
        """This rank's prompts as one batch; None if it has none.

        If forward passes need every rank (`engine.synced_forwards`), a rank with fewer prompts than others gets dummies
        after its own, so that all ranks make the same passes.

        Args:
            batches: this rank's prompts.
            dummy_prompts: returns the given number of dummy prompts.
        """
        if self.engine.synced_forwards:
            count = sum(len(batch["rows"]) for batch in batches)
            batches = pad_to_longest_rank(batches, count, dummy_prompts, self.accelerator)
        if not batches:
            return None
        return PromptBatch(
            queries=torch.cat([batch["queries"] for batch in batches]),
            query_attn_masks=torch.cat([batch["query_attn_masks"] for batch in batches]),
            prompt_ids=torch.cat([batch["prompt_ids"] for batch in batches]),
            rows=[row for batch in batches for row in batch["rows"]],
        )

    def gather(self, rows: dict[str, Tensor] | None, *, samples_per_prompt: int) -> Rollouts:
        """The rows of all ranks, on the CPU, in the prompts' order.

        Args:
            rows: this rank's, without those of dummies; None if a signal stopped its part of the rollout: then all
                ranks raise here.
            samples_per_prompt: rows of each prompt.
        """
        if self.scorer.failure_handling.mask_rows:
            rows = shape_as_on_others(rows, self.accelerator)
        gathered: Any = gather_rows(rows, self.accelerator, samples_per_prompt=samples_per_prompt)
        if gathered is None:
            self.preemption.poll_all_ranks()
        rollouts: Rollouts = gathered
        return rollouts

    def sync(self) -> None:
        """Gives a backend with weights of its own those of the engine's policy, if they have changed. Every rank must
        call it before any of them samples.
        """
        engine, backend = self.engine, self.backend
        if backend.has_own_weights and backend.version != engine.weights_version:
            backend.sync(engine.actor_critic.policy, engine.policy_weights)
            backend.version = engine.weights_version

    def sample(
        self,
        prompts: PromptBatch,
        sampling_params: SamplingParams,
        episodes: Episodes | None = None,
        on_rows: Callable[[int], Any] = lambda rows: None,
    ) -> dict[str, Tensor]:
        """`sample_responses` of the engine's policy, in the run's precision; `on_rows` is called with numbers of
        responses that are finished.
        """
        engine, backend = self.engine, self.backend

        def poll_and_listen() -> None:
            self.preemption.poll()
            if episodes is not None:
                episodes.listen()

        def finish(rows: list[int], finished: Generation) -> None:
            on_rows(len(rows))
            if episodes is not None:
                episodes.finish(rows, finished)

        backend.wake()
        whole = nullcontext(engine.actor_critic.policy.model) if backend.has_own_weights else engine.sampling()
        with engine.autocast(), whole as model, self.preemption.part():
            samples = sample_responses(
                model,
                prompts,
                sampling_params,
                backend=backend,
                per_device_batch_size=self.args.rollout_per_device_batch_size,
                turns=None if episodes is None else episodes.turns,
                hooks=SamplingHooks(poll_and_listen, finish),
            )
        backend.sleep()
        if episodes is None:
            return samples
        episodes.wait()
        return samples | episodes.statistics(samples)

    def evaluate(
        self, samples: Mapping[str, Tensor], passes: RolloutPasses, *, temperature: float
    ) -> dict[str, Tensor]:
        """Log-probs, entropies and values (B, R) of policy, critic and reference (`ref_*`), and `recomputed` (B,).

        Without `passes.with_policy` the sampler's log-probs take the place of the policy's, and `recomputed` is left
        out; without a reference, `ref_logprobs` is a copy of the policy's log-probs. Every rank must call it, with
        equally many rows if forward passes need every rank (`engine.synced_forwards`).
        """
        engine, device, batch_size = self.engine, self.accelerator.device, self.args.rollout_per_device_batch_size
        rows = EvaluatedRows(
            samples,
            device,
            per_device_batch_size=batch_size,
            # Without padding, as many tokens at once as so many of the longest rows have.
            max_tokens=batch_size * self.args.longest_row,
            most_passes=partial(max_int_over_ranks, accelerator=self.accelerator) if engine.synced_forwards else int,
        )
        run = partial(
            evaluate_responses,
            rows=rows,
            temperature=temperature,
            chunk_size=self.args.logprob_chunk_size,
            with_entropies=passes.with_entropies,
            poll=self.preemption.poll,
        )
        out: dict[str, Tensor] = {}
        if passes.with_policy or passes.with_critic:
            with engine.autocast():
                out = run(engine.actor_critic, with_policy=passes.with_policy, with_critic=passes.with_critic)
        if passes.with_policy:
            out["recomputed"] = torch.ones(len(samples["responses"]), dtype=torch.bool)
        else:
            out["logprobs"] = samples["rollout_logprobs"].clone()
        if self.reference is None or not passes.with_reference:
            return out | {"ref_logprobs": out["logprobs"].clone()}
        with self.reference.on_device(device) as reference, engine.autocast():
            return out | {f"ref_{name}": value for name, value in run(reference).items()}
