"""The weighted sum of reward sources, checked row by row."""

import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from alpaca_ppo.rewards.batch import Prompt, RewardBatch, RewardError, reward_batch
from alpaca_ppo.rewards.reward_function import FunctionReward, call_functions, load_reward_function
from alpaca_ppo.rewards.reward_model import ModelReward, build_model_reward

RewardFunc = Callable[..., Any] | str | PreTrainedModel
RowScore = float | list[float] | None

_LARGEST = torch.finfo(torch.float32).max


class RewardResult(NamedTuple):
    """Scores of B responses, on the CPU."""

    rewards: Tensor
    """(B,) float32, the weighted sum of the sources; (B, R) where a source scores tokens: R is the longest response of
    the batch, zero after the end of a row, a sequence's score on the row's last token."""
    by_source: dict[str, Tensor]
    """Each source's own unweighted scores, (B,) float32: token scores summed over the row, NaN where it had no
    opinion."""


class RewardScorer:
    """Calls reward sources and adds up their scores. `build_reward` makes one from what a user gives."""

    def __init__(self, sources: Sequence[FunctionReward | ModelReward], weights: Sequence[float]) -> None:
        self.around_functions: Callable[[], AbstractContextManager[Any]] = nullcontext
        """Makes a context for the calls of python functions, which may take long and talk to the world."""
        self.sources: list[FunctionReward | ModelReward] = []
        self.weights: list[float] = []
        for source, weight in zip(sources, weights, strict=True):
            self.add(source, weight)

    def add(self, source: FunctionReward | ModelReward, weight: float) -> None:
        """Adds a source; one of a name that is there already is called <name>_2."""
        given = source.name
        names = (given if number == 1 else f"{given}_{number}" for number in itertools.count(1))
        source.name = next(name for name in names if name not in self.names)
        self.sources.append(source)
        self.weights.append(weight)

    @property
    def names(self) -> list[str]:
        """What the sources are called, each once."""
        return [source.name for source in self.sources]

    def __call__(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[Prompt],
        completion_ids: Sequence[Sequence[int]],
        rows: Sequence[dict[str, Any]],
    ) -> RewardResult:
        """Scores of B responses.

        Args:
            prompts: text or messages.
            completions: text (it becomes an assistant message where the prompt is messages), or messages.
            completion_ids: the response's token ids, stop token included, padding not.
            rows: the dataset rows; every column but `prompt` reaches the functions under its name.

        Raises:
            RewardError: naming source, row and text, where a source raises, returns another number of scores,
                something that is no number, or one that is not finite in float32; or where no source scored a row.
        """
        if not rows:
            # A rank may have no prompt of a ragged last batch, and a function need not cope with empty lists.
            return RewardResult(torch.zeros(0), {name: torch.zeros(0) for name in self.names})
        batch = reward_batch(prompts, completions, completion_ids, rows)
        functions = [source for source in self.sources if isinstance(source, FunctionReward)]
        with self.around_functions():
            returned = iter(call_functions(functions, batch))
        results = [next(returned) if isinstance(source, FunctionReward) else source(batch) for source in self.sources]
        scores = [_checked(name, result, batch) for name, result in zip(self.names, results, strict=True)]
        for row in range(len(batch)):
            if all(source_scores[row] is None for source_scores in scores):
                raise RewardError(
                    ", ".join(self.names), "returned None: a row needs a score from at least one source", batch, row
                )
        by_source = {name: _row_totals(source_scores) for name, source_scores in zip(self.names, scores, strict=True)}
        return RewardResult(self._weighted_sum(scores, batch), by_source)

    def to(self, device: torch.device | str) -> "RewardScorer":
        """Moves the reward models to `device`; returns itself."""
        for source in self.sources:
            if isinstance(source, ModelReward):
                source.to(device)
        return self

    def _weighted_sum(self, scores: list[list[RowScore]], batch: RewardBatch) -> Tensor:
        lengths = [len(ids) for ids in batch.completion_ids]
        per_token = any(isinstance(score, list) for source_scores in scores for score in source_scores)
        total = torch.zeros(len(batch), max(lengths) if per_token else 1, dtype=torch.float64)
        for name, weight, source_scores in zip(self.names, self.weights, scores, strict=True):
            for row, score in enumerate(source_scores):
                if isinstance(score, list):
                    total[row, : len(score)] += weight * torch.tensor(score, dtype=torch.float64)
                elif score is not None:
                    if per_token and lengths[row] == 0:
                        raise RewardError(
                            name, "scored a response without tokens, where other sources score tokens", batch, row
                        )
                    total[row, lengths[row] - 1 if per_token else 0] += weight * score
        return (total if per_token else total[:, 0]).float()


def build_reward(
    reward_funcs: RewardFunc | Sequence[RewardFunc],
    *,
    reward_weights: Sequence[float] | None = None,
    reward_processing_classes: PreTrainedTokenizerBase | Sequence[PreTrainedTokenizerBase | None] | None = None,
    batch_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    trust_remote_code: bool = False,
) -> RewardScorer:
    """A scorer of one or several sources.

    Args:
        reward_funcs: one or a list of: a python function (see `FunctionReward`); its name, "module:function" or
            "file.py:function"; a sequence classifier with one label, as a model, folder or hub id (see `ModelReward`).
        reward_weights: one number a source; 1 each by default.
        reward_processing_classes: a tokenizer (or None) for each source, or one for every model. By default a model's
            tokenizer is loaded from where the model came from.
        batch_size: sequences in one forward pass of a reward model.
        dtype: the weights of models loaded here; models given in memory keep theirs.
        device: where reward models go; by default they stay where they are.
        trust_remote_code: run code that comes with a reward model.

    Raises:
        ValueError: for an empty list, a number of weights or tokenizers that differs from the sources', a weight that
            is not finite, something that is no source, or a model without one label, a trained head or a tokenizer.
            Everything that needs no model is checked before one is loaded.
    """
    given = list(reward_funcs) if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
    if not given:
        raise ValueError("reward_funcs is empty; give at least one reward function or model")
    weights = _checked_weights(reward_weights, len(given))
    tokenizers = _tokenizer_of_each(reward_processing_classes, len(given))
    if batch_size < 1:
        raise ValueError(f"the reward batch_size is {batch_size}; it must be at least 1")
    resolved = [_without_model(source) for source in given]
    sources: list[FunctionReward | ModelReward] = []
    for source, tokenizer in zip(resolved, tokenizers, strict=True):
        if isinstance(source, FunctionReward):
            sources.append(source)
        else:
            model = build_model_reward(
                source, tokenizer, batch_size=batch_size, dtype=dtype, trust_remote_code=trust_remote_code
            )
            sources.append(model)
    scorer = RewardScorer(sources, weights)
    return scorer if device is None else scorer.to(device)


def _without_model(source: Any) -> FunctionReward | PreTrainedModel | str:
    """Functions by name resolved; paths and ids of models left for later."""
    if isinstance(source, str):
        _, colon, name = source.rpartition(":")
        is_function = colon and name.isidentifier() and not Path(source).is_dir()
        return FunctionReward(load_reward_function(source)) if is_function else source
    if isinstance(source, torch.nn.Module):
        if getattr(source, "config", None) is None:
            raise ValueError(
                f"reward_funcs has a {type(source).__name__}, a module without a configuration; give a transformers "
                "sequence classifier, or wrap the module in a function f(prompts, completions, **columns)"
            )
        return cast(PreTrainedModel, source)
    if callable(source):
        return FunctionReward(source)
    raise ValueError(
        f"reward_funcs has {source!r}, a {type(source).__name__}; give a function, a model, or the name of either"
    )


def _checked_weights(weights: Sequence[float] | None, count: int) -> list[float]:
    if weights is None:
        return [1.0] * count
    if len(weights) != count:
        raise ValueError(f"reward_weights has {len(weights)} numbers for {count} reward sources; give one each")
    if not all(math.isfinite(weight) for weight in weights):
        raise ValueError(f"reward_weights is {list(weights)}; every weight must be a finite number")
    return [float(weight) for weight in weights]


def _tokenizer_of_each(tokenizers: Any, count: int) -> list[PreTrainedTokenizerBase | None]:
    if not isinstance(tokenizers, (list, tuple)):
        return [tokenizers] * count
    if len(tokenizers) != count:
        raise ValueError(
            f"reward_processing_classes has {len(tokenizers)} entries for {count} reward sources; "
            "give one each, None for a function"
        )
    return list(tokenizers)


def _checked(name: str, result: Any, batch: RewardBatch) -> list[RowScore]:
    if isinstance(result, (Tensor, np.ndarray)):
        result = result.tolist()
    if not isinstance(result, (list, tuple)):
        raise RewardError(
            name, f"returned a {type(result).__name__} instead of a list of {len(batch)} numbers", batch, None
        )
    if len(result) != len(batch):
        raise RewardError(name, f"returned {len(result)} scores for {len(batch)} responses", batch, None)
    return [_checked_row(name, score, batch, row) for row, score in enumerate(result)]


def _checked_row(name: str, score: Any, batch: RewardBatch, row: int) -> RowScore:
    if score is None:
        return None
    if isinstance(score, (Tensor, np.ndarray, np.generic)):
        score = score.tolist()
    numbers = score if isinstance(score, (list, tuple)) else [score]
    for number in numbers:
        if not isinstance(number, Real):
            raise RewardError(name, f"returned {number!r}, a {type(number).__name__} and not a number", batch, row)
        # False for NaN too, and for what overflows float32.
        if not -_LARGEST <= cast(float, number) <= _LARGEST:
            raise RewardError(name, f"returned {number!r}, which is not finite in float32", batch, row)
    if numbers is not score:
        return float(score)
    tokens = len(batch.completion_ids[row])
    if len(numbers) != tokens:
        raise RewardError(name, f"returned {len(numbers)} token scores for {tokens} response tokens", batch, row)
    return [float(number) for number in numbers]


def _row_totals(scores: list[RowScore]) -> Tensor:
    totals = [math.nan if score is None else math.fsum(score) if isinstance(score, list) else score for score in scores]
    return torch.tensor(totals, dtype=torch.float32)
