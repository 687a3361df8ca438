"""From sampled responses to rewards: decode the text, call the reward sources, check and add up their scores, apply the
penalties for a missing stop and for length.

The KL penalty is not here; it is added when rewards are shaped.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from alpaca_ppo.functional.shaping import overlong_penalty, per_token, sequence_scores
from alpaca_ppo.rewards.batch import Prompt, RewardBatch, RowFailure, make_reward_batch
from alpaca_ppo.rewards.reward_function import (
    OFFERED,
    FailurePolicy,
    FunctionReward,
    LoggedMetrics,
    RowScore,
    call_functions,
    check_row,
    score_list,
)
from alpaca_ppo.rewards.reward_model import ModelReward


class RewardResult(NamedTuple):
    """Scores of B responses, on the CPU."""

    rewards: Tensor
    """(B,) float32, the weighted sum of the sources. If a source scores tokens, (B, T) instead: entry k of a row
    belongs to `completion_ids[k]`, T is the length of the longest `completion_ids`, and entries after a row's last
    token are 0. A sequence's score is then on the row's last token; that of a row without tokens is entry 0."""
    by_source: dict[str, Tensor]
    """Each source's unweighted scores, (B,) float32: token scores summed over the row, NaN if it returned None."""
    failures: dict[int, RowFailure]
    """The error of each row without a reward, which is 0; empty unless the policy masks such rows."""


class RewardScorer:
    """Calls reward sources, checks their scores and adds them up; `build_reward` makes one from user arguments.

    Every function gets copies of its own, which it may change.

    Args:
        sources: functions and models.
        weights: one per source.
        policy: what happens if a function raises. A score that is not finite, and a row that no source scores, are not
            asked for again; if `policy` masks failed rows, these are masked too.
        measures: whether the sources only measure (`metric_funcs`): a row may then be without any score.
    """

    def __init__(
        self,
        sources: Sequence[FunctionReward | ModelReward],
        weights: Sequence[float],
        *,
        policy: FailurePolicy | None = None,
        measures: bool = False,
    ) -> None:
        self.policy, self.measures = policy or FailurePolicy(), measures
        self.failures: list[RowFailure] = []
        """The errors of failed rows since `pop_failures`, in the order in which they were scored."""
        self.logged = LoggedMetrics()
        """What functions have logged (`log_metric`)."""
        self.interruptible_call: Callable[[], AbstractContextManager[Any]] = nullcontext
        """Returns a context manager for the calls of Python functions. They may block for long (a request to a judge,
        say), so the trainer sets this to let a signal interrupt them."""
        self.on_source: Callable[[str], Any] = lambda name: None
        """Called with a source's name before the source is."""
        self.sources: list[FunctionReward | ModelReward] = []
        self.weights: list[float] = []
        for source, weight in zip(sources, weights, strict=True):
            self.add(source, weight)

    def add(self, source: FunctionReward | ModelReward, weight: float) -> None:
        """Adds a source. If its name is taken, it is renamed to <name>_2, <name>_3 and so on."""
        source.name = free_name(source.name, self.names)
        self.sources.append(source)
        self.weights.append(weight)

    @property
    def names(self) -> list[str]:
        """The sources' names, which are unique."""
        return [source.name for source in self.sources]

    @property
    def functions(self) -> list[FunctionReward]:
        """The sources that are Python functions."""
        return [source for source in self.sources if isinstance(source, FunctionReward)]

    def offer(self, trainer_state: Any) -> None:
        """Offers `trainer_state`, and `log_metric` to log metrics with, to the functions that name them."""
        for source in self.functions:
            source.context = dict(zip(OFFERED, (trainer_state, self.logged.log), strict=True))

    def pop_failures(self) -> list[RowFailure]:
        """Returns `failures`, which is empty afterwards."""
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
            prompts: text or messages.
            completions: text (which becomes an assistant message if the prompt is messages), or messages.
            completion_ids: the token ids that the policy chose, including the stop token, without padding.
            rows: the dataset rows; every column except `prompt` is passed to the functions under its name.

        Raises:
            RewardError: with the source, the row and the text, if a source raises, returns the wrong number of scores,
                a value that is not a number, or a number that is not finite in float32; or if no source scores a row.
                If the policy masks rows, only for faults that are not of a single row.
        """
        if not rows:
            # On a rank without prompts in a ragged last batch; functions do not have to handle empty lists.
            return RewardResult(torch.zeros(0), {name: torch.zeros(0) for name in self.names}, {})
        batch = make_reward_batch(prompts, completions, completion_ids, rows)
        # One block for all attempts: where ranks run in lockstep, each must enter it the same number of times.
        with self.interruptible_call():
            of_functions = iter(call_functions(self.functions, batch, self.policy, self.on_source))
        scores = []
        for source in self.sources:
            if isinstance(source, FunctionReward):
                scores.append(score_list(source.name, next(of_functions), batch))
            else:
                self.on_source(source.name)
                scores.append(source(batch))
        failures = self._check(scores, batch)
        self.failures += failures.values()
        by_source = {
            name: torch.tensor([math.nan if score is None else _total(score) for score in column], dtype=torch.float32)
            for name, column in zip(self.names, scores, strict=True)
        }
        lengths = [len(ids) for ids in batch.completion_ids]
        return RewardResult(self._weighted_sum(scores, lengths), by_source, failures)

    def _check(self, scores: list[list[Any]], batch: RewardBatch) -> dict[int, RowFailure]:
        """Turns what each source returned for each row into a `RowScore`, None in every row that failed; returns the
        failures.
        """
        failures: dict[int, RowFailure] = {}
        for row in range(len(batch)):
            try:
                found = [
                    check_row(name, column[row], batch, row) for name, column in zip(self.names, scores, strict=True)
                ]
                if not self.measures and all(score is None for score in found):
                    problem = "returned None; a row needs a score from some source (or failed_rewards: mask)"
                    raise RowFailure(", ".join(self.names), problem, batch, row)
            except RowFailure as failure:
                if not self.policy.mask:
                    raise
                failures[row], found = failure, [None] * len(scores)
            for column, score in zip(scores, found, strict=True):
                column[row] = score
        return failures

    def _weighted_sum(self, scores: list[list[RowScore]], lengths: list[int]) -> Tensor:
        per_token = any(isinstance(score, list) for column in scores for score in column)
        total = torch.zeros(len(lengths), max([1, *lengths]) if per_token else 1, dtype=torch.float64)
        for weight, column in zip(self.weights, scores, strict=True):
            for row, score in enumerate(column):
                if isinstance(score, list):
                    total[row, : len(score)] += weight * torch.tensor(score, dtype=torch.float64)
                elif score is not None:
                    total[row, max(lengths[row] - 1, 0) if per_token else 0] += weight * score
        return (total if per_token else total[:, 0]).float()

    def to(self, device: torch.device | str) -> "RewardScorer":
        """Moves the reward models to `device`; returns itself."""
        for source in self.sources:
            if isinstance(source, ModelReward):
                source.to(device)
        return self


@dataclass(frozen=True)
class Penalties:
    """What is taken from scores for how a response ends."""

    missing_stop: float | None = None
    """Replaces the reward of a response that did not stop: a per-token reward becomes zero everywhere except at the
    last chosen token, which gets the penalty. None keeps the reward."""
    overlong_buffer_len: int | None = None
    """Tokens before the longest response over which a penalty grows to 1, which is taken from the reward (of the last
    chosen token), also from a `missing_stop`. The length of a response is the number of chosen tokens. None takes
    nothing."""


def score_responses(
    scorer: RewardScorer,
    processing_class: Any,
    samples: dict[str, Tensor],
    rows: list[dict[str, Any]],
    *,
    penalties: Penalties,
) -> dict[str, Tensor]:
    """Returns `scores`, `rewards` and `scores_by_source` of B sampled responses, on the CPU.

    Sources see the chosen tokens only, those under `response_mask`. A per-token reward goes to the column of its token,
    so `response_mask` may have holes (tokens that the policy did not choose, such as the output of a tool).

    Args:
        scorer: the reward sources.
        processing_class: the policy's tokenizer. The sources get text without special tokens.
        samples: `responses` (B, R) int64, `response_mask` (B, R) bool (True = chosen by the policy) and `stopped` (B,)
            bool, on the CPU; other keys are ignored.
        rows: the dataset row of each of the B responses, with its `prompt`.
        penalties: for a missing stop token and for length.

    Returns:
        scores (B,) float32, summed over the sources, before the penalties; rewards (B,) float32, or (B, R) if a source
        scores tokens, zero outside `response_mask`; scores_by_source (B, sources) float32, NaN if a source returned
        None. With a penalty for length also overlong_penalties (B,) float32, at most 0, which the rewards include. If
        the scorer's policy masks rows, also trained_rows (B,) bool, False = the reward failed and is 0.

    Raises:
        RewardError: as `RewardScorer`.
    """
    mask = samples["response_mask"]
    result = scorer(**scorer_arguments(processing_class, samples, rows))
    rewards = result.rewards if result.rewards.dim() == 1 else _to_columns(result.rewards, mask)
    scores = sequence_scores(rewards)
    if penalties.missing_stop is not None:
        penalized = _on_responses(torch.full_like(scores, penalties.missing_stop), rewards, mask)
        stopped = samples["stopped"] if rewards.dim() == 1 else samples["stopped"].unsqueeze(1)
        rewards = torch.where(stopped, rewards, penalized)
    by_source = torch.stack(list(result.by_source.values()), dim=1)
    scored = {"scores": scores, "rewards": rewards, "scores_by_source": by_source}
    if (buffer_len := penalties.overlong_buffer_len) is not None:
        scored["overlong_penalties"] = overlong_penalty(mask.sum(dim=1), max_len=mask.size(1), buffer_len=buffer_len)
        scored["rewards"] = rewards + _on_responses(scored["overlong_penalties"], rewards, mask)
    if scorer.policy.mask:
        scored["trained_rows"] = torch.tensor([row not in result.failures for row in range(len(rows))])
    return scored


def response_texts(processing_class: Any, samples: Mapping[str, Any]) -> tuple[list[list[int]], list[str]]:
    """Returns the chosen tokens of each response, and their text without special tokens."""
    ids = [row[keep].tolist() for row, keep in zip(samples["responses"], samples["response_mask"], strict=True)]
    # transformers 5 takes an empty list for one text without tokens.
    if not ids:
        return [], []
    return ids, processing_class.batch_decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def scorer_arguments(processing_class: Any, samples: Mapping[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The arguments of `RewardScorer`."""
    ids, texts = response_texts(processing_class, samples)
    return {"prompts": [row["prompt"] for row in rows], "completions": texts, "completion_ids": ids, "rows": rows}


def _to_columns(token_rewards: Tensor, mask: Tensor) -> Tensor:
    """Returns (B, R): entry k of a row of `token_rewards` (B, T), in the column of that row's k-th True in `mask`."""
    is_token = torch.arange(token_rewards.size(1)) < mask.sum(dim=1, keepdim=True)
    rewards = token_rewards.new_zeros(mask.shape)
    rewards[mask] = token_rewards[is_token]
    return rewards


def _on_responses(values: Tensor, rewards: Tensor, mask: Tensor) -> Tensor:
    """`values` (B,) in the shape of `rewards`: on the last chosen token of each response, if these are per token."""
    return values if rewards.dim() == 1 else per_token(values, mask)


def free_name(base: str, taken: Sequence[str]) -> str:
    """Returns `base`, or, if it is taken, the first of <base>_2, <base>_3 and so on that is not."""
    names = (base if number == 1 else f"{base}_{number}" for number in itertools.count(1))
    return next(name for name in names if name not in taken)


def _total(score: float | list[float]) -> float:
    return math.fsum(score) if isinstance(score, list) else score
