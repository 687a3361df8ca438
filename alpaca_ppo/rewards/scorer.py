"""The weighted sum of reward sources, with every returned score checked.

Penalties are not here: see `scoring` for a missing stop token and `functional.shaping` for the KL.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from alpaca_ppo.config.modules import load_function
from alpaca_ppo.rewards.batch import RESERVED_COLUMNS, Prompt, RewardBatch, RewardError, RowFailure, make_reward_batch
from alpaca_ppo.rewards.logged_metrics import LoggedMetrics
from alpaca_ppo.rewards.reward_function import (
    OFFERED,
    FailurePolicy,
    FunctionReward,
    FunctionScores,
    call_functions,
)
from alpaca_ppo.rewards.reward_model import ModelReward, build_model_reward, model_name
from alpaca_ppo.rewards.score_checks import RowScore, check_row, check_total, score_list

RewardFunc = Callable[..., Any] | str | PreTrainedModel


class RewardResult(NamedTuple):
    """Scores of B responses, on the CPU."""

    rewards: Tensor
    """(B,) float32, the weighted sum of the sources. If a source scores tokens, (B, T) instead: entry k of a row
    belongs to `completion_ids[k]`, T is the length of the longest `completion_ids`, and entries after a row's last
    token are 0. A sequence's score is then on the row's last token."""
    by_source: dict[str, Tensor]
    """Each source's unweighted scores, (B,) float32: token scores summed over the row, NaN if it returned None."""
    failures: dict[int, RowFailure]
    """The error of each row without a reward, which is 0; empty unless the policy masks such rows."""


class RewardScorer:
    """Calls reward sources and adds up their weighted scores; `build_reward` makes one from user arguments.

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
        source.name = _free_name(source.name, self.names)
        self.sources.append(source)
        self.weights.append(weight)

    @property
    def names(self) -> list[str]:
        """The sources' names, which are unique."""
        return [source.name for source in self.sources]

    @property
    def weight_by_name(self) -> dict[str, float]:
        """The weight of each source, in the order of the sources."""
        return dict(zip(self.names, self.weights, strict=True))

    @property
    def functions(self) -> list[FunctionReward]:
        """The sources that are Python functions."""
        return [source for source in self.sources if isinstance(source, FunctionReward)]

    @property
    def logs_metrics(self) -> bool:
        """Whether a function may log metrics."""
        return any(source.logs_metrics for source in self.functions)

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
            returned = iter(call_functions(self.functions, batch, self.policy, self.on_source))
        results = []
        for source in self.sources:
            if isinstance(source, FunctionReward):
                results.append(next(returned))
            else:
                self.on_source(source.name)
                results.append(FunctionScores(source(batch), {}))
        scores, failures = self._checked(results, batch)
        self.failures += [failures[row] for row in sorted(failures)]
        by_source = {
            name: torch.tensor([math.nan if score is None else _total(score) for score in column], dtype=torch.float32)
            for name, column in zip(self.names, scores, strict=True)
        }
        return RewardResult(self._weighted_sum(scores, batch), by_source, failures)

    def _checked(
        self, results: Sequence[FunctionScores], batch: RewardBatch
    ) -> tuple[list[list[RowScore]], dict[int, RowFailure]]:
        """Returns the scores of each source, None in every row that failed, and the failures."""
        failures: dict[int, RowFailure] = {}
        for result in results:
            failures = result.failures | failures
        lists = [score_list(name, result.scores, batch) for name, result in zip(self.names, results, strict=True)]
        scores: list[list[RowScore]] = [[None] * len(batch) for _ in lists]
        everyone = ", ".join(self.names)
        for row in range(len(batch)):
            try:
                for column, name, returned in zip(scores, self.names, lists, strict=True):
                    column[row] = check_row(name, returned[row], batch, row)
                found = [column[row] for column in scores]
                if row not in failures and not self.measures and all(score is None for score in found):
                    problem = "returned None; a row needs a score from some source (or failed_rewards: mask)"
                    raise RowFailure(everyone, problem, batch, row)
                check_total(everyone, found, self.weights, batch, row)
            except RowFailure as failure:
                if not self.policy.mask:
                    raise
                failures.setdefault(row, failure)
        for row in failures:
            for column in scores:
                column[row] = None
        return scores, failures

    def _weighted_sum(self, scores: list[list[RowScore]], batch: RewardBatch) -> Tensor:
        lengths = [len(ids) for ids in batch.completion_ids]
        per_token = any(isinstance(score, list) for column in scores for score in column)
        total = torch.zeros(len(batch), max(lengths) if per_token else 1, dtype=torch.float64)
        for name, weight, column in zip(self.names, self.weights, scores, strict=True):
            for row, score in enumerate(column):
                if isinstance(score, list):
                    total[row, : len(score)] += weight * torch.tensor(score, dtype=torch.float64)
                elif score is not None:
                    if per_token and lengths[row] == 0:
                        problem = "scored a response without tokens, while another source scores tokens; return None"
                        raise RewardError(name, problem, batch, row)
                    total[row, lengths[row] - 1 if per_token else 0] += weight * score
        return (total if per_token else total[:, 0]).float()

    def to(self, device: torch.device | str) -> "RewardScorer":
        """Moves the reward models to `device`; returns itself."""
        for source in self.sources:
            if isinstance(source, ModelReward):
                source.to(device)
        return self


def build_reward(
    reward_funcs: RewardFunc | Sequence[RewardFunc],
    *,
    reward_weights: Sequence[float] | None = None,
    reward_processing_classes: PreTrainedTokenizerBase | Sequence[PreTrainedTokenizerBase | None] | None = None,
    batch_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    trust_remote_code: bool = False,
    policy: FailurePolicy | None = None,
    padding_free: bool = True,
) -> RewardScorer:
    """Returns a scorer of one or several reward sources.

    Args:
        reward_funcs: a source, or a list of them. A source is a Python function (see `FunctionReward`), the name of one
            ("module:function" or "file.py:function"), or a sequence classifier with one label: a model in memory, a
            folder or a hub id (see `ModelReward`).
        reward_weights: one weight per source; 1 each by default.
        reward_processing_classes: one tokenizer (or None) per source, or a single one for every model. By default, a
            model's tokenizer is loaded from the folder or hub id that the model came from.
        batch_size: sequences of the longest's length whose tokens one forward pass of a reward model may have.
        dtype: of the weights of models loaded here; a model in memory keeps its own.
        device: where reward models go; by default they stay where they are.
        trust_remote_code: run code that comes with a reward model.
        policy: what happens if a function raises; by default, the error ends the run.
        padding_free: whether reward models that can do so read rows without padding; as of `ModelReward`.

    Raises:
        ValueError: if the list is empty, the number of weights or tokenizers differs from the number of sources, a
            weight is not finite, an entry is not a reward source, or a model lacks a single label, a trained head or a
            tokenizer. Whatever can be checked without a model is checked before one is loaded.
    """
    given = _resolved(reward_funcs)
    if not given:
        raise ValueError("reward_funcs is empty; give at least one reward function or model")
    weights = [1.0] * len(given) if reward_weights is None else [float(weight) for weight in reward_weights]
    if not all(map(math.isfinite, weights)):
        raise ValueError(f"reward_weights is {weights}; every weight must be a finite number")
    classes: Any = reward_processing_classes
    tokenizers = list(classes) if isinstance(classes, (list, tuple)) else [classes] * len(given)
    for name, values in (("reward_weights", weights), ("reward_processing_classes", tokenizers)):
        if len(values) != len(given):
            raise ValueError(f"{name} has {len(values)} entries for {len(given)} reward sources; give one per source")
    if batch_size < 1:
        raise ValueError(f"the reward batch_size is {batch_size}; it must be at least 1")
    loading: dict[str, Any] = {"batch_size": batch_size, "dtype": dtype, "trust_remote_code": trust_remote_code}
    sources = [
        source
        if isinstance(source, FunctionReward)
        else build_model_reward(source, tokenizer, padding_free=padding_free, **loading)
        for source, tokenizer in zip(given, tokenizers, strict=True)
    ]
    scorer = RewardScorer(sources, weights, policy=policy)
    return scorer if device is None else scorer.to(device)


def source_names(reward_funcs: RewardFunc | Sequence[RewardFunc] | None) -> list[str]:
    """The names that the sources will have in a scorer. Functions are imported for them, but no model is loaded.

    Raises:
        ValueError: for an entry that is no reward source, and a function that cannot be imported.
    """
    names: list[str] = []
    for source in _resolved(reward_funcs):
        names.append(_free_name(source.name if isinstance(source, FunctionReward) else model_name(source), names))
    return names


def check_columns(reward_funcs: RewardFunc | Sequence[RewardFunc] | None, dataset: str, columns: Sequence[str]) -> None:
    """Checks that a dataset has what the functions require, so that this is known before any response is sampled.

    Args:
        reward_funcs: the sources.
        dataset: what it is called in a message.
        columns: of the dataset.

    Raises:
        ValueError: naming the function, the arguments that are missing, and what there is.
    """
    available = [*RESERVED_COLUMNS, *(name for name in columns if name not in ("prompt", *RESERVED_COLUMNS))]
    for source in _resolved(reward_funcs):
        if isinstance(source, FunctionReward) and (missing := source.missing([*available, *OFFERED])):
            raise ValueError(
                f"reward source {source.name!r} requires the arguments {missing}, but only {available} are available "
                f"from the {dataset}; rename the argument, add the column to the dataset, or give it a default"
            )


def _resolved(reward_funcs: Any) -> list[FunctionReward | PreTrainedModel | str]:
    given = reward_funcs if isinstance(reward_funcs, (list, tuple)) else [] if reward_funcs is None else [reward_funcs]
    return [_resolve_function(source) for source in given]


def _free_name(base: str, taken: Sequence[str]) -> str:
    names = (base if number == 1 else f"{base}_{number}" for number in itertools.count(1))
    return next(name for name in names if name not in taken)


def _resolve_function(source: Any) -> FunctionReward | PreTrainedModel | str:
    """Returns functions as `FunctionReward`, and a model, or the path or hub id of one, as it is."""
    if isinstance(source, str):
        _, colon, name = source.rpartition(":")
        is_function = colon and name.isidentifier() and not Path(source).is_dir()
        return FunctionReward(load_function(source, what="reward function")) if is_function else source
    if isinstance(source, torch.nn.Module):
        if getattr(source, "config", None) is None:
            raise ValueError(
                f"reward_funcs contains a {type(source).__name__}, a module without a transformers configuration; use "
                "a transformers sequence classifier, or wrap it in a function f(prompts, completions, **columns)"
            )
        return cast(PreTrainedModel, source)
    if callable(source):
        return FunctionReward(source)
    raise ValueError(
        f"reward_funcs contains {source!r}, a {type(source).__name__}; use a function, a model, or the name of either"
    )


def _total(score: float | list[float]) -> float:
    return math.fsum(score) if isinstance(score, list) else score
