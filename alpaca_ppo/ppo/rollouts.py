"""One rank's part of a rollout: sample responses, score their text, evaluate log-probabilities and values.

The three steps know neither the configuration object nor other ranks; `RolloutCollector` runs them in turn, for
training and for evaluation.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedModel

from alpaca_ppo.distributed.engine import Engine
from alpaca_ppo.distributed.preemption import PreemptionHandler
from alpaca_ppo.functional.shaping import sequence_scores
from alpaca_ppo.generation import generate
from alpaca_ppo.generation.sampling_params import SamplingParams
from alpaca_ppo.models import ActorCritic, CopiedReference, Policy, Reference
from alpaca_ppo.ppo.metrics import Timers
from alpaca_ppo.ppo.minibatches import chunks_by_length
from alpaca_ppo.rewards import ModelReward, RewardScorer
from alpaca_ppo.rewards.scoring import score_responses
from alpaca_ppo.types import PromptBatch


def merge_prompt_batches(batches: Sequence[PromptBatch]) -> PromptBatch:
    """One batch of all prompts of `batches` (at least one), padded on the left to the longest Q."""
    width = max(batch["queries"].size(1) for batch in batches)

    def widen(tensor: Tensor) -> Tensor:
        return torch.nn.functional.pad(tensor, (width - tensor.size(1), 0))

    return PromptBatch(
        queries=torch.cat([widen(batch["queries"]) for batch in batches]),
        query_attn_masks=torch.cat([widen(batch["query_attn_masks"]) for batch in batches]),
        prompt_ids=torch.cat([batch["prompt_ids"] for batch in batches]),
        rows=[row for batch in batches for row in batch["rows"]],
    )


def sample_responses(
    model: PreTrainedModel,
    prompts: PromptBatch,
    *,
    sampling: SamplingParams,
    seed: int,
    step: int,
    per_device_batch_size: int,
    on_chunk: Callable[[int], Any] = lambda rows: None,
    any_rank: Callable[[bool], bool] | None = None,
    before_token: Callable[[], Any] = lambda: None,
) -> dict[str, Tensor]:
    """Responses to P prompts, `num_return_sequences` (n) each, in the prompts' order; (P * n, ...) tensors on the CPU.

    Prompts of like length are sampled together, at most `per_device_batch_size` responses at once; a token does not
    depend on that choice. `on_chunk` is told the rows that each chunk finished; `any_rank` and `before_token` are those
    of `generate`. Keys: those of `types.Rollouts` from `queries` to `rollout_logprobs`.
    """
    n = sampling.num_return_sequences
    device = next(model.parameters()).device
    lengths = prompts["query_attn_masks"].sum(dim=1).tolist()
    count, width = len(lengths), sampling.max_new_tokens
    out = {
        "responses": torch.full((count, n, width), sampling.pad_token_id),
        "response_mask": torch.zeros(count, n, width, dtype=torch.bool),
        "logprobs": torch.zeros(count, n, width, dtype=torch.promote_types(model.dtype, torch.float32)),
        "stopped": torch.zeros(count, n, dtype=torch.bool),
    }
    how = {**vars(sampling), "seed": seed, "step": step, "any_rank": any_rank, "before_token": before_token}
    for chunk in chunks_by_length(lengths, max(1, per_device_batch_size // n)):
        longest = max(lengths[i] for i in chunk)
        generation = generate(
            model,
            prompts["queries"][chunk, -longest:].to(device),
            prompts["query_attn_masks"][chunk, -longest:].to(device),
            prompt_ids=prompts["prompt_ids"][chunk].to(device),
            **how,
        )
        for key, value in vars(generation).items():
            out[key][chunk] = value.cpu().unflatten(0, (-1, n)).to(out[key].dtype)
        on_chunk(len(chunk) * n)
    return _flat_rows(out, prompts, n)


def _flat_rows(out: dict[str, Tensor], prompts: PromptBatch, n: int) -> dict[str, Tensor]:
    """(P, n, ...) tensors as (P * n, ...) ones, with the prompt of each row."""
    flat = {key: value.flatten(0, 1) for key, value in out.items()}
    flat["rollout_logprobs"] = flat.pop("logprobs")
    for key in ("queries", "query_attn_masks", "prompt_ids"):
        flat[key] = prompts[key].repeat_interleave(n, dim=0)  # type: ignore[literal-required]
    flat["sample_ids"] = torch.arange(n).repeat(len(prompts["queries"]))
    return flat


@torch.no_grad()
def evaluate_responses(
    model: ActorCritic | Policy,
    samples: dict[str, Tensor],
    *,
    temperature: float,
    chunk_size: int,
    per_device_batch_size: int,
    device: torch.device,
    check: Callable[[], Any] = lambda: None,
    **parts: Any,
) -> dict[str, Tensor]:
    """`logprobs`, `entropies` and, of an `ActorCritic`, `values` and `value_means` (B, R) on the CPU: the trainer's own
    forward pass, without gradients. `check` is called before each chunk; `parts` may hold an `ActorCritic`'s
    `with_policy` and `with_critic`.
    """
    keys = ("queries", "query_attn_masks", "responses", "response_mask")
    lengths = (samples["query_attn_masks"].sum(dim=1) + samples["response_mask"].sum(dim=1)).tolist()
    out: dict[str, Tensor] = {}
    for chunk in chunks_by_length(lengths, per_device_batch_size):
        check()
        batch = [samples[key][chunk].to(device) for key in keys]
        outputs = model(*batch, temperature=temperature, chunk_size=chunk_size, **parts)
        for name, value in outputs._asdict().items():
            if value is None or name == "predictions":
                continue
            rows = out.setdefault(name, torch.zeros(samples["responses"].shape, dtype=value.dtype))
            rows[chunk] = value.cpu()
    return out


@dataclass(frozen=True)
class RolloutCollector:
    """Takes this rank's prompts to sampled, scored and evaluated rows.

    Args:
        reference: lends the reference policy; None where there is none.
        scorer: the reward sources.
        processing_class: the policy's tokenizer.
        penalty: score of a response that did not stop; None = its own.
        chunk_size: tokens whose logits are in memory at once.
        per_device_batch_size: responses sampled or evaluated at once.
        accelerator: for the device and the precision of forward passes.
    """

    reference: Reference | None
    scorer: RewardScorer
    processing_class: Any
    penalty: float | None
    chunk_size: int
    per_device_batch_size: int
    accelerator: Accelerator

    def prepare_frozen_models(self, prepare: Callable[..., None]) -> None:
        """Has `prepare` (`Engine.prepare_frozen_model`) treat the frozen models of reference and rewards."""
        if isinstance(self.reference, CopiedReference):
            prepare(self.reference.policy, offload=self.reference.offloaded)
        for source in self.scorer.sources:
            if isinstance(source, ModelReward) and isinstance(source.model, PreTrainedModel):
                prepare(source.model)

    def collect(
        self,
        engine: Engine,
        batches: Sequence[PromptBatch],
        sampling: SamplingParams,
        *,
        seed: int,
        step: int,
        timers: Timers,
        on_chunk: Callable[[int], Any],
        interruption: PreemptionHandler | None = None,
        with_policy: bool = True,
        with_critic: bool = True,
        greedy_baseline: bool = False,
    ) -> dict[str, Tensor]:
        """The rows of `types.Rollouts` up to `rewards`, on the CPU; empty when there is no prompt.

        Under `engine.synced_forwards` all ranks pass the same number of prompts. Seconds go to `timers` as rollout,
        score and logprobs; `on_chunk` is told how many responses each sampled chunk has. Without `with_policy` the
        sampler's log-probs stand for the policy's, and its pass is spared; without `with_critic` there are no values;
        `greedy_baseline` adds `baseline_scores`. `interruption` is asked often whether to end, by ranks in step
        together.
        """
        if not batches:
            return {}
        prompts = merge_prompt_batches(batches)
        check: Callable[[], Any] = _nothing
        if interruption is not None:
            check = interruption.poll_all_ranks if engine.synced_forwards else interruption.poll_local
        how: dict[str, Any] = {"seed": seed, "step": step, "timers": timers, "check": check}
        how["interruption"] = interruption
        local = self._generate_and_score(engine, prompts, sampling, **how, on_chunk=on_chunk)
        if greedy_baseline:
            greedy = replace(sampling, do_sample=False, num_return_sequences=1)
            rewards = self._generate_and_score(engine, prompts, greedy, **how, on_chunk=lambda rows: None)["rewards"]
            local["baseline_scores"] = sequence_scores(rewards).repeat_interleave(sampling.num_return_sequences)
        with timers.measure("logprobs"):
            parts = {"with_policy": with_policy, "with_critic": with_critic}
            return local | self._evaluate(engine.actor_critic, local, sampling.temperature, check, parts)

    def _evaluate(
        self,
        actor_critic: ActorCritic,
        samples: dict[str, Tensor],
        temperature: float,
        check: Callable[[], Any],
        parts: dict[str, Any],
    ) -> dict[str, Tensor]:
        """Log-probs, entropies and values of policy, critic and reference."""
        settings: dict[str, Any] = {
            "chunk_size": self.chunk_size,
            "per_device_batch_size": self.per_device_batch_size,
            "temperature": temperature,
            "device": self.accelerator.device,
            "check": check,
        }
        out: dict[str, Tensor] = {}
        if any(parts.values()):
            # One block for each model: autocast keeps the weights that it casts until its block ends.
            with self.accelerator.autocast():
                out = evaluate_responses(actor_critic, samples, **settings, **parts)
        if not parts["with_policy"]:
            out["logprobs"] = samples["rollout_logprobs"].clone()
        if self.reference is None:
            return out | {"ref_logprobs": out["logprobs"].clone()}
        with self.reference.on_device(self.accelerator.device) as reference, self.accelerator.autocast():
            said = evaluate_responses(reference, samples, **settings)
        return out | {f"ref_{name}": value for name, value in said.items()}

    def _generate_and_score(
        self,
        engine: Engine,
        prompts: PromptBatch,
        sampling: SamplingParams,
        *,
        seed: int,
        step: int,
        timers: Timers,
        on_chunk: Callable[[int], Any],
        check: Callable[[], Any],
        interruption: PreemptionHandler | None,
    ) -> dict[str, Tensor]:
        """Responses and their scores."""
        how: dict[str, Any] = {"sampling": sampling, "seed": seed, "step": step, "on_chunk": on_chunk}
        how["per_device_batch_size"] = self.per_device_batch_size
        alone: AbstractContextManager[Any] = nullcontext()
        with timers.measure("rollout"), self.accelerator.autocast(), engine.sampling() as (model, any_rank):
            if not engine.synced_forwards or (any_rank and sampling.backend == "decode"):
                how["before_token"] = check
            elif interruption is not None and any_rank is None:
                # The policy is whole on every rank, and each samples by itself for a while.
                alone, how["before_token"] = interruption.no_sync(), interruption.poll_local
            with alone:
                local = sample_responses(model, prompts, **how, any_rank=any_rank)
        check()
        with timers.measure("score"):
            rows = [row for row in prompts["rows"] for _ in range(sampling.num_return_sequences)]
            local |= score_responses(self.scorer, self.processing_class, local, rows, penalty=self.penalty)
        return local


def _nothing() -> None:
    """Where nobody asks whether to end."""
