"""One rank's prompts, samples, log-probs and values, and the gathering of all ranks' rows.

`PPOTrainer.rollout` decides their order and how responses are scored.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedModel

from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.data import PromptDataset, collate_prompts
from alpaca_ppo.distributed import collectives
from alpaca_ppo.distributed.engine import Engine
from alpaca_ppo.distributed.preemption import PreemptionHandler
from alpaca_ppo.environments.episodes import Episodes
from alpaca_ppo.functional.packing import PackedRows, RowLayout, pack_rows
from alpaca_ppo.generation import Backend, Generation, SamplingHooks, SamplingParams, Turns, generate
from alpaca_ppo.models import ActorCritic, CopiedReference, Policy, Reference
from alpaca_ppo.ppo.batch_packing import chunks_by_length, chunks_by_tokens, row_lengths
from alpaca_ppo.ppo.device_rows import DeviceBatch, device_batches, row_tensors
from alpaca_ppo.ppo.failed_rewards import rewards_shaped_alike
from alpaca_ppo.ppo.state_cache import StateCache
from alpaca_ppo.ppo.teacher import Teacher, TeacherServer
from alpaca_ppo.rewards import ModelReward, RewardScorer
from alpaca_ppo.types import PromptBatch, Rollouts


@dataclass(frozen=True)
class RolloutOptions:
    """What a rollout computes besides samples and scores, and what happens if rewards fail.

    Attributes:
        with_policy: the policy's log-probs by the trainer, instead of the sampler's.
        with_critic: the critic's values.
        with_reference: the log-probs of reference and teacher; without it, `ref_logprobs` are a copy of the policy's.
        with_entropies: the entropies of policy and reference.
        greedy_baseline: the score of each prompt's greedy response, as `baseline_scores`.
        compares_group: whether the estimator compares responses to a prompt.
        may_fail: whether all rewards may fail; otherwise that is an error.
    """

    with_policy: bool = True
    with_critic: bool = True
    with_reference: bool = True
    with_entropies: bool = False
    greedy_baseline: bool = False
    compares_group: bool = False
    may_fail: bool = False


POLICY_ALONE = RolloutOptions(with_critic=False, with_reference=False)


def sample_responses(
    model: PreTrainedModel,
    prompts: PromptBatch,
    params: SamplingParams,
    *,
    backend: str | Backend = "auto",
    per_device_batch_size: int,
    turns: Turns | None = None,
    hooks: SamplingHooks | None = None,
    cache: StateCache | None = None,
) -> dict[str, Tensor]:
    """Responses to P prompts, `num_return_sequences` (n) each, in the prompts' order; (P * n, ...) tensors on the CPU.

    Returns the keys of `types.Rollouts` from `queries` to `rollout_logprobs`, with R = max_new_tokens.
    `per_device_batch_size` responses are sampled at once, which changes no token. `generate` documents the rest.
    With `params.state_layers` also `state_keys` (P * n, 2), if the backend has the states, which the `cache` keeps.
    """
    n = params.num_return_sequences
    generation = generate(
        model, prompts, params, backend=backend, rows_at_once=per_device_batch_size, turns=turns, hooks=hooks
    )
    samples = {
        "queries": prompts["queries"].repeat_interleave(n, dim=0),
        "query_attn_masks": prompts["query_attn_masks"].repeat_interleave(n, dim=0),
        "prompt_ids": prompts["prompt_ids"].repeat_interleave(n),
        "sample_ids": torch.arange(n).repeat(len(prompts["queries"])),
        "responses": generation.responses.cpu(),
        "response_mask": generation.response_mask.cpu(),
        "stopped": generation.stopped.cpu(),
        "rollout_logprobs": generation.logprobs.cpu(),
    }
    if generation.states is not None and cache is not None:
        samples["state_keys"] = cache.add(generation.states[generation.response_mask], samples["response_mask"])
    return samples


class ForwardBatch(NamedTuple):
    """The rows of a forward pass of a model."""

    rows: list[int]
    tensors: list[Tensor]  # those of ROW_KEYS, on the device
    packed: PackedRows | tuple[PackedRows, ...]  # as `model.pack` returns them


class ForwardRows:
    """Rows for forward passes of several models: batched and copied to the device once, packed once for each layout.

    Args:
        samples: rows with the ROW_KEYS, on the CPU.
        device: that of the models.
        per_device_batch_size: rows of one forward pass with padding.
        max_tokens: tokens of one forward pass without padding; None = `per_device_batch_size` rows, as with padding.
        count_of_all_ranks: maps this rank's number of batches to the number that every rank makes; the identity (`int`)
            where ranks may differ.
    """

    def __init__(
        self,
        samples: Mapping[str, Tensor],
        device: torch.device,
        *,
        per_device_batch_size: int,
        max_tokens: int | None = None,
        count_of_all_ranks: Callable[[int], int] = int,
    ) -> None:
        self.shape = samples["responses"].shape
        self._rows, self._device = row_tensors(samples), device
        self._rows_per_prompt = int(samples["sample_ids"].max()) + 1 if "sample_ids" in samples else 1
        self._batch_size, self._max_tokens = per_device_batch_size, max_tokens
        self._count_of_all_ranks = count_of_all_ranks
        self._batches: dict[bool, list[tuple[list[int], DeviceBatch]]] = {}
        self._packed: dict[tuple[bool, int, RowLayout], PackedRows] = {}

    def batches(self, model: ActorCritic | Policy) -> Iterator[ForwardBatch]:
        """The rows of each forward pass of `model`."""
        padding_free = model.padding_free
        if padding_free not in self._batches:
            self._batches[padding_free] = self._divide(padding_free)
        for number, (rows, batch) in enumerate(self._batches[padding_free]):
            pack = partial(self._pack, batch, padding_free, number)
            packed = pack(model.layout) if isinstance(model, Policy) else tuple(map(pack, model.layouts))
            yield ForwardBatch(rows, list(batch.device.values()), packed)

    def _divide(self, padding_free: bool) -> list[tuple[list[int], DeviceBatch]]:
        lengths = row_lengths(self._rows["query_attn_masks"], self._rows["response_mask"])
        if padding_free and self._max_tokens is not None:
            chunks = chunks_by_tokens(lengths, self._max_tokens, group=self._rows_per_prompt)
        else:
            chunks = chunks_by_length(lengths, self._batch_size)
        chunks += [[] for _ in range(self._count_of_all_ranks(len(chunks)) - len(chunks))]
        return list(zip(chunks, device_batches(self._rows, chunks, self._device), strict=True))

    def _pack(self, batch: DeviceBatch, padding_free: bool, number: int, layout: RowLayout) -> PackedRows:
        """The batch of this number in `layout`."""
        key = (padding_free, number, layout)
        if key not in self._packed:
            # From the tensors on the CPU, so that reading lengths does not wait for the device.
            self._packed[key] = pack_rows(*batch.host.values(), layout=layout, device=self._device)
        return self._packed[key]


@torch.no_grad()
def forward_responses(
    model: ActorCritic | Policy,
    rows: ForwardRows,
    *,
    with_entropies: bool = False,
    poll: Callable[[], Any] = lambda: None,
    cache: StateCache | None = None,
    state_keys: Tensor | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """`logprobs`; `entropies`, except of a teacher; of an `ActorCritic` also `values` and `value_means`, of a teacher
    `top_tokens`: (B, R), on the CPU, detached. Also `state_keys` (B, 2) of a critic that reads states of the policy,
    which the `cache` keeps, unless it has them.

    Args:
        with_entropies: as in `RolloutOptions`.
        poll: called before each forward pass; may raise.
        cache: keeps what a critic with a reader has read.
        state_keys: (B, 2), of states that the `cache` has.
        options: further arguments of the model: `temperature`, which divides the logits; `chunk_size`, the tokens whose
            logits are in memory at once; `with_policy` and `with_critic` of an `ActorCritic`.
    """
    out: dict[str, Tensor] = {}
    for numbers, tensors, packed in rows.batches(model):
        poll()
        if state_keys is not None and cache is not None:
            options["policy_states"] = cache.states(state_keys[numbers], tensors[0].device)
        found: dict[str, Any] = model(*tensors, packed=packed, with_entropies=with_entropies, **options)._asdict()
        states = found.pop("policy_states", None)
        if states is not None and cache is not None and state_keys is None:
            found["state_keys"] = cache.add(states, tensors[-1])
        for name, value in found.items():
            if value is None or name == "predictions":
                continue
            result = out.setdefault(name, value.new_zeros(rows.shape[0], *value.shape[1:], device="cpu"))
            # Without a dummy.
            result[numbers] = value[: len(numbers)].cpu()
    return out


@dataclass(frozen=True)
class RolloutCollector:
    """Samples, and computes log-probs and values.

    Args:
        engine: of the trained models.
        args: of the run.
        reference: provides the reference policy, if any.
        teacher: of a distillation, if any.
        scorer: the reward sources.
        metric_scorer: the sources that only measure evaluations.
        backend: samples the responses.
        preemption: ends the sampling after a signal.
        pad_token_id: pads prompts.
        cache: keeps the states of the policy that a critic reads.
    """

    engine: Engine
    args: PPOConfig
    reference: Reference | None
    teacher: Teacher | None
    scorer: RewardScorer
    metric_scorer: RewardScorer
    backend: Backend
    preemption: PreemptionHandler
    pad_token_id: int
    cache: StateCache

    @property
    def accelerator(self) -> Accelerator:
        return self.engine.accelerator

    @property
    def keeps_states(self) -> bool:
        """Whether sampling can keep the states that a cached critic reads. On an accelerator it cannot: those of all
        responses would fill its memory until the last one ends.
        """
        return self.accelerator.device.type == "cpu" and bool(vars(type(self.backend)).get("returns_states"))

    def prepare_frozen_models(self) -> None:
        """Lets the engine prepare the reference, the teacher and the reward models."""
        engine = self.engine
        for frozen in (self.reference, self.teacher):
            if isinstance(frozen, CopiedReference):
                engine.prepare_frozen_model(frozen.policy, offload=frozen.offloaded)
        for source in [*self.scorer.sources, *self.metric_scorer.sources]:
            if isinstance(source, ModelReward):
                source.prepare(
                    equal_passes=engine.synced_forwards,
                    packs_everywhere=lambda packs: not collectives.any_rank(not packs, self.accelerator),
                )
                engine.prepare_frozen_model(source.model)

    def collate(self, prompts: PromptDataset, indices: Sequence[int], *, sampling_round: int = 0) -> list[PromptBatch]:
        """This rank's share of `prompts[indices]`, as a list of one batch, which has no rows if there is nothing to
        share. `sampling_round` is 0, or the round of `dynamic_sampling` that drew the prompts.

        If forward passes need every rank (`engine.synced_forwards`), a rank with fewer prompts than others gets dummies
        at the end.
        """
        share = collectives.rank_share(indices, self.accelerator)
        largest_share = -(-len(indices) // self.accelerator.num_processes)
        num_dummies = largest_share - len(share) if self.engine.synced_forwards else 0
        share += [0] * num_dummies
        batch = self.prompt_batch([prompts[i] for i in share], share)
        return [{**batch, "num_dummies": num_dummies, "sampling_round": sampling_round}]

    def prompt_batch(self, items: Sequence[Any], prompt_ids: Sequence[int]) -> PromptBatch:
        """`items` of a `PromptDataset` as one batch, left-padded to `query_len`."""
        return collate_prompts(items, prompt_ids, pad_token_id=self.pad_token_id, query_len=self.args.query_len)

    def gather(self, rows: dict[str, Tensor] | None, *, samples_per_prompt: int) -> Rollouts:
        """The rows of all ranks, on the CPU, in the prompts' order.

        Args:
            rows: this rank's, without dummies; None if a signal stopped it. All ranks then raise here.
            samples_per_prompt: neighbouring rows.
        """
        if self.scorer.failure_handling.mask_rows:
            rows = rewards_shaped_alike(rows, self.accelerator)
        gathered = collectives.gather_rows(rows, self.accelerator, samples_per_prompt=samples_per_prompt)
        if gathered is None:
            # Raises, because a rank has been stopped.
            self.preemption.poll_all_ranks()
        return cast(Rollouts, gathered)

    def sync(self, *, can_stop: bool = True) -> None:
        """Copies the policy's weights, if they have changed, to a backend that has its own copy. Every rank must call
        it before any of them samples. With `can_stop`, a signal ends the run here too (`Interrupted`).
        """
        engine, backend = self.engine, self.backend
        if backend.has_own_weights and backend.version != engine.weights_version:
            backend.poll = self.preemption.poll
            with self.preemption.together(can_stop=can_stop):
                backend.sync(engine.actor_critic.policy, engine.policy_weights)
            backend.version = engine.weights_version

    def sample(
        self, prompts: PromptBatch, sampling_params: SamplingParams, on_rows: Callable[[int], Any] = lambda rows: None
    ) -> dict[str, Tensor]:
        """`sample_responses` of the engine's policy in the run's precision, with the `episodes` of the prompts, if any.

        `on_rows` is called with the number of responses that have just ended.
        """
        engine, backend = self.engine, self.backend
        episodes: Episodes | None = prompts.get("episodes")

        def poll() -> None:
            self.preemption.poll()
            if episodes is not None:
                episodes.listen()

        def finish(rows: list[int], finished: Generation) -> None:
            on_rows(len(rows))
            if episodes is not None:
                episodes.finish(rows, finished)

        policy = nullcontext(engine.actor_critic.policy.model) if backend.has_own_weights else engine.sampling()
        with engine.autocast(), policy as model, self.preemption.part():
            backend.wake()
            samples = sample_responses(
                model,
                prompts,
                sampling_params,
                backend=backend,
                per_device_batch_size=self.args.rollout_per_device_batch_size,
                turns=None if episodes is None else episodes.turns,
                hooks=SamplingHooks(poll, finish),
                cache=self.cache,
            )
            backend.sleep()
        if episodes is None:
            return samples
        episodes.wait()
        return samples | episodes.statistics(samples)

    def forward(
        self, samples: Mapping[str, Tensor], options: RolloutOptions, *, temperature: float
    ) -> dict[str, Tensor]:
        """Log-probs, entropies and values (B, R) of policy, critic, teacher (`teacher_*`) and reference (`ref_*`).

        With `with_policy` also `recomputed` (B,); without it, `logprobs` are the sampler's. Without a reference,
        `ref_logprobs` are the policy's. A teacher behind a server is asked only at temperature 1. Every rank must call
        it, with equally many rows if forward passes need every rank (`engine.synced_forwards`).
        """
        engine, device = self.engine, self.accelerator.device
        batch_size = self.args.rollout_per_device_batch_size
        equal_passes = partial(collectives.max_int_over_ranks, accelerator=self.accelerator)
        rows = ForwardRows(
            samples,
            device,
            per_device_batch_size=batch_size,
            # The tokens of a padded batch of the longest rows.
            max_tokens=batch_size * self.args.longest_row,
            count_of_all_ranks=equal_passes if engine.synced_forwards else int,
        )
        run = partial(
            forward_responses,
            rows=rows,
            temperature=temperature,
            chunk_size=self.args.logprob_chunk_size,
            with_entropies=options.with_entropies,
            poll=self.preemption.poll,
        )
        out: dict[str, Tensor] = {}
        parts: dict[str, Any] = {"with_policy": options.with_policy, "with_critic": options.with_critic}
        if any(parts.values()):
            with engine.autocast():
                known = None if options.with_policy else samples.get("state_keys")
                out = run(engine.actor_critic, cache=self.cache, state_keys=known, **parts)
        if options.with_policy:
            out["recomputed"] = torch.ones(len(samples["responses"]), dtype=torch.bool)
        else:
            out["logprobs"] = samples["rollout_logprobs"].clone()
        teacher = self.teacher if options.with_reference else None
        if isinstance(teacher, TeacherServer):
            # A server's log-probs are those of temperature 1; evaluations may have another.
            if temperature == 1:
                out |= teacher(samples, self.preemption.poll)
        elif teacher is not None:
            with teacher.on_device(device) as model, engine.autocast():
                out |= {f"teacher_{name}": value for name, value in run(model).items()}
        if self.reference is None or not options.with_reference:
            return out | {"ref_logprobs": out["logprobs"].clone()}
        with self.reference.on_device(device) as reference, engine.autocast():
            return out | {f"ref_{name}": value for name, value in run(reference).items()}
