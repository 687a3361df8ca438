"""From sampled responses to rewards: decoding, calls of the reward sources, their checked and weighted sum, and
penalties for a missing stop and for length. The KL penalty is added later, when rewards are shaped.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.functional.shaping import overlong_penalty, per_token, sequence_scores
from alpaca_ppo.rewards.batch import Prompt, RewardBatch, RowFailure, make_reward_batch
from alpaca_ppo.rewards.reward_function import (
    FailureHandling,
    FunctionReward,
    LoggedMetrics,
    RowScore,
    call_functions,
    check_row,
    score_list,
)
from alpaca_ppo.rewards.reward_model import ModelReward


class RewardResult(NamedTuple):
    """Scores of B responses, on the CPU.

    Attributes:
        rewards: (B,) float32, the weighted sum of the sources. If a source scores tokens, (B, T): entry k of a row
            belongs to `completion_ids[k]`, T is the length of the longest row, and other entries are 0. The score of a
            whole sequence is then on the row's last token, or in entry 0 of a row without tokens.
        by_source: each source's unweighted scores, (B,) float32: token scores summed, NaN for None and in failed rows.
        failures: with `FailureHandling.mask_rows`, the error of each row that failed, whose reward is 0.
    """

    rewards: Tensor
    by_source: dict[str, Tensor]
    failures: dict[int, RowFailure]


class RewardScorer:
    """Calls reward sources, checks their scores and adds them up; `build_reward` makes one from user arguments.

    Args:
        failure_handling: what happens if a function raises. Its `mask_rows` also masks rows with a score that is not
            finite and rows without any score, for which no function is called again.
        measures: True = metrics, not rewards (`metric_funcs`): a row needs no score.

    Attributes:
        failures: the errors of masked rows since the last `pop_failures`, in order.
        interruptible_call: returns a context manager for the calls of functions; the trainer's lets a signal interrupt
            one that blocks.
    """

    def __init__(
        self,
        sources: Sequence[FunctionReward | ModelReward],
        weights: Sequence[float],
        *,
        failure_handling: FailureHandling | None = None,
        measures: bool = False,
    ) -> None:
        self.failure_handling, self.measures = failure_handling or FailureHandling(), measures
        self.failures: list[RowFailure] = []
        self.logged = LoggedMetrics()
        self.interruptible_call: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.sources: list[FunctionReward | ModelReward] = []
        self.weights: list[float] = []
        for source, weight in zip(sources, weights, strict=True):
            self.add(source, weight)

    def add(self, source: FunctionReward | ModelReward, weight: float) -> None:
        """Adds a source, renamed to <name>_2, <name>_3 and so on if its name is taken."""
        source.name = free_name(source.name, self.names)
        self.sources.append(source)
        self.weights.append(weight)

    @property
    def names(self) -> list[str]:
        """The sources' unique names."""
        return [source.name for source in self.sources]

    @property
    def functions(self) -> list[FunctionReward]:
        """The sources that are functions."""
        return [source for source in self.sources if isinstance(source, FunctionReward)]

    def offer(self, trainer_state: Any) -> None:
        """Gives `trainer_state` and `log_metric` to the functions that name them."""
        for source in self.functions:
            source.context = {"trainer_state": trainer_state, "log_metric": self.logged.log}

    def pop_failures(self) -> list[RowFailure]:
        """Returns and clears `failures`."""
        failures, self.failures = self.failures, []
        return failures

    def __call__(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[Prompt],
        completion_ids: Sequence[Sequence[int]],
        rows: Sequence[dict[str, Any]],
    ) -> RewardResult:
        """Returns the scores of B responses.

        Args:
            prompts, completions, completion_ids: as in `RewardBatch`; a completion may be text though its prompt is
                messages.
            rows: the dataset rows; every column except `prompt` is passed to the functions under its name.

        Raises:
            RewardError: with the source, the row and the text, if a source raises or returns unusable scores, or no
                source scores a row. With `mask_rows`, not for calls that raise or scores that are None or not finite.
        """
        if not rows:
            # On a rank without prompts in a ragged last batch; functions do not have to handle empty lists.
            return RewardResult(torch.zeros(0), dict.fromkeys(self.names, torch.zeros(0)), {})
        batch = make_reward_batch(prompts, completions, completion_ids, rows)
        scores, failures = self._check(self._call_sources(batch), batch)
        self.failures += failures.values()
        by_source = {
            name: torch.tensor([_sequence_score(row_scores[i]) for row_scores in scores], dtype=torch.float32)
            for i, name in enumerate(self.names)
        }
        return RewardResult(self._weighted_sum(scores, [len(ids) for ids in batch.completion_ids]), by_source, failures)

    def _call_sources(self, batch: RewardBatch) -> list[list[Any]]:
        """Returns the B entries of each source, unchecked."""
        # One block for all attempts: where ranks run in lockstep, each must enter it the same number of times.
        with self.interruptible_call():
            of_functions = iter(call_functions(self.functions, batch, self.failure_handling))
        raw = []
        for source in self.sources:
            if isinstance(source, FunctionReward):
                raw.append(score_list(source.name, next(of_functions), batch))
            else:
                raw.append(source(batch))
        return raw

    def _check(self, raw: list[list[Any]], batch: RewardBatch) -> tuple[list[list[RowScore]], dict[int, RowFailure]]:
        """Returns the scores by row and source, None in failed rows, and the failures by row. Without `mask_rows`, it
        raises the first failure.
        """
        scores: list[list[RowScore]] = []
        failures: dict[int, RowFailure] = {}
        by_source = list(zip(self.names, raw, strict=True))
        for row in range(len(batch)):
            try:
                row_scores = [check_row(name, entries[row], batch, row) for name, entries in by_source]
                if not self.measures and all(score is None for score in row_scores):
                    advice = "" if self.failure_handling.mask_rows else " (or failed_rewards: mask)"
                    problem = f"returned None; a row needs a score from some source{advice}"
                    raise RowFailure(", ".join(self.names), problem, batch, row)
            except RowFailure as failure:
                if not self.failure_handling.mask_rows:
                    raise
                failures[row] = failure
                row_scores = [None] * len(raw)
            scores.append(row_scores)
        return scores, failures

    def _weighted_sum(self, scores: list[list[RowScore]], lengths: list[int]) -> Tensor:
        """Returns `RewardResult.rewards` from the scores by row and source, and each row's number of tokens."""
        any_per_token = any(isinstance(score, list) for row_scores in scores for score in row_scores)
        total = torch.zeros(len(lengths), max([1, *lengths]) if any_per_token else 1, dtype=torch.float64)
        for row, row_scores in enumerate(scores):
            for weight, score in zip(self.weights, row_scores, strict=True):
                if isinstance(score, list):
                    total[row, : len(score)] += weight * torch.tensor(score, dtype=torch.float64)
                elif score is not None:
                    last = max(lengths[row] - 1, 0) if any_per_token else 0
                    total[row, last] += weight * score
        return (total if any_per_token else total[:, 0]).float()

    def to(self, device: torch.device | str) -> "RewardScorer":
        """Moves the reward models to `device`; returns itself."""
        for source in self.sources:
            if isinstance(source, ModelReward):
                source.to(device)
        return self


def score_responses(
    scorer: RewardScorer, processing_class: Any, samples: dict[str, Tensor], rows: list[dict[str, Any]], args: PPOConfig
) -> dict[str, Tensor]:
    """Returns `scores`, `rewards`, `scores_by_source` and, where they apply, `overlong_penalties` and `trained_rows` of
    B sampled responses, on the CPU, as `types.Rollouts` describes them.

    Sources see the tokens under `response_mask` only, which may have holes: a token's reward goes to its column.

    `args.penalty_reward_value` replaces the reward of a response that did not stop; of a reward per token, that of the
    last chosen token, and the others become zero. Over the last `args.overlong_buffer_len` tokens before R, the longest
    response, a penalty for the number of chosen tokens grows from 0 to 1. It is subtracted from the reward (of the last
    chosen token), also from `penalty_reward_value`.

    Args:
        processing_class: the policy's tokenizer.
        samples: `responses`, `response_mask` and `stopped`, on the CPU.
        rows: the dataset row of each response, with its `prompt`.
        args: of the run.
    """
    mask = samples["response_mask"]
    result = scorer(**scorer_arguments(processing_class, samples, rows))
    rewards = result.rewards if result.rewards.dim() == 1 else _to_columns(result.rewards, mask)
    scores = sequence_scores(rewards)
    if args.penalty_reward_value is not None:
        penalized = _in_shape_of_rewards(torch.full_like(scores, args.penalty_reward_value), rewards, mask)
        stopped = samples["stopped"] if rewards.dim() == 1 else samples["stopped"].unsqueeze(1)
        rewards = torch.where(stopped, rewards, penalized)
    by_source = torch.stack(list(result.by_source.values()), dim=1)
    scored = {"scores": scores, "rewards": rewards, "scores_by_source": by_source}
    if (buffer_len := args.overlong_buffer_len) is not None:
        scored["overlong_penalties"] = overlong_penalty(mask.sum(dim=1), max_len=mask.size(1), buffer_len=buffer_len)
        scored["rewards"] = rewards + _in_shape_of_rewards(scored["overlong_penalties"], rewards, mask)
    if scorer.failure_handling.mask_rows:
        scored["trained_rows"] = torch.tensor([row not in result.failures for row in range(len(rows))])
    return scored


def response_texts(processing_class: Any, samples: Mapping[str, Any]) -> tuple[list[list[int]], list[str]]:
    """Returns the ids of each response's chosen tokens, and their text without special tokens."""
    ids = [row[keep].tolist() for row, keep in zip(samples["responses"], samples["response_mask"], strict=True)]
    # transformers 5 takes an empty list for one text without tokens.
    if not ids:
        return [], []
    return ids, processing_class.batch_decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def scorer_arguments(processing_class: Any, samples: Mapping[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the arguments of a `RewardScorer`'s call."""
    ids, texts = response_texts(processing_class, samples)
    return {"prompts": [row["prompt"] for row in rows], "completions": texts, "completion_ids": ids, "rows": rows}


def _to_columns(token_rewards: Tensor, mask: Tensor) -> Tensor:
    """Returns (B, R): entry k of each row of `token_rewards` (B, T) in the column of the row's k-th True in `mask`."""
    is_token = torch.arange(token_rewards.size(1)) < mask.sum(dim=1, keepdim=True)
    rewards = token_rewards.new_zeros(mask.shape)
    rewards[mask] = token_rewards[is_token]
    return rewards


def _in_shape_of_rewards(values: Tensor, rewards: Tensor, mask: Tensor) -> Tensor:
    """Returns `values` (B,); or, if `rewards` are per token, (B, R) with each value on the last chosen token."""
    return values if rewards.dim() == 1 else per_token(values, mask)


def free_name(base: str, taken: Sequence[str]) -> str:
    """Returns `base`, or, if it is taken, the first of <base>_2, <base>_3 and so on that is not."""
    names = (base if number == 1 else f"{base}_{number}" for number in itertools.count(1))
    return next(name for name in names if name not in taken)


def _sequence_score(score: RowScore) -> float:
    if score is None:
        return math.nan
    return math.fsum(score) if isinstance(score, list) else score
