"""From what a user names as rewards to a `RewardScorer`: functions, models, and the names of either."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from alpaca_ppo.config.modules import load_function
from alpaca_ppo.rewards.batch import RESERVED_COLUMNS
from alpaca_ppo.rewards.reward_function import OFFERED, FailurePolicy, FunctionReward
from alpaca_ppo.rewards.reward_model import build_model_reward, model_name
from alpaca_ppo.rewards.scorer import RewardScorer, free_name

RewardFunc: TypeAlias = Callable[..., Any] | str | PreTrainedModel


def build_reward(
    reward_funcs: RewardFunc | Sequence[RewardFunc],
    *,
    reward_weights: Sequence[float] | None = None,
    reward_processing_classes: PreTrainedTokenizerBase | Sequence[PreTrainedTokenizerBase | None] | None = None,
    policy: FailurePolicy | None = None,
    measures: bool = False,
    **model_options: Any,
) -> RewardScorer:
    """Returns a scorer of one or several reward sources.

    Args:
        reward_funcs: a source, or a list of them. A source is a Python function (see `FunctionReward`), the name of one
            ("module:function" or "file.py:function"), or a sequence classifier with one label: a model in memory, a
            folder or a hub id (see `ModelReward`).
        reward_weights: one weight per source; 1 each by default.
        reward_processing_classes: one tokenizer (or None) per source, or a single one for every model. By default, a
            model's tokenizer is loaded from the folder or hub id that the model came from.
        policy: what happens if a function raises; by default, the error ends the run.
        measures: as of `RewardScorer`.
        model_options: how models are loaded and read, as of `build_model_reward`.

    Raises:
        ValueError: if the number of weights or tokenizers differs from the number of sources, an entry is not a reward
            source, or a model lacks a single label, a trained head or a
            tokenizer. Whatever can be checked without a model is checked before one is loaded.
    """
    given = _resolved(reward_funcs)
    weights = [1.0] * len(given) if reward_weights is None else [float(weight) for weight in reward_weights]
    classes: Any = reward_processing_classes
    tokenizers = list(classes) if isinstance(classes, (list, tuple)) else [classes] * len(given)
    kind = "metric" if measures else "reward"
    for name, values in (("reward_weights", weights), (f"{kind}_processing_classes", tokenizers)):
        if len(values) != len(given):
            raise ValueError(f"{name} has {len(values)} entries for {len(given)} {kind}_funcs; give one for each")
    sources = [
        source if isinstance(source, FunctionReward) else build_model_reward(source, tokenizer, **model_options)
        for source, tokenizer in zip(given, tokenizers, strict=True)
    ]
    return RewardScorer(sources, weights, policy=policy, measures=measures)


def source_names(reward_funcs: RewardFunc | Sequence[RewardFunc] | None) -> list[str]:
    """The names that the sources will have in a scorer. Functions are imported for them, but no model is loaded.

    Raises:
        ValueError: for an entry that is no reward source, and a function that cannot be imported.
    """
    names: list[str] = []
    for source in _resolved(reward_funcs):
        names.append(free_name(source.name if isinstance(source, FunctionReward) else model_name(source), names))
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
        if not isinstance(source, FunctionReward):
            continue
        if missing := [name for name in source.parameters.required if name not in (*available, *OFFERED)]:
            raise ValueError(
                f"reward source {source.name!r} requires the arguments {missing}, but only {available} are available "
                f"from the {dataset}; rename the argument, add the column to the dataset, or give it a default"
            )


def _resolved(reward_funcs: Any) -> list[FunctionReward | PreTrainedModel | str]:
    given = reward_funcs if isinstance(reward_funcs, (list, tuple)) else [] if reward_funcs is None else [reward_funcs]
    return [_resolve_function(source) for source in given]


def _resolve_function(source: Any) -> FunctionReward | PreTrainedModel | str:
    """Returns functions as `FunctionReward`, and a model, or the path or hub id of one, as it is."""
    if isinstance(source, str):
        _, colon, name = source.rpartition(":")
        is_function = colon and name.isidentifier() and not Path(source).is_dir()
        return FunctionReward(load_function(source, what="reward function")) if is_function else source
    if isinstance(source, torch.nn.Module) and hasattr(source, "config"):
        return cast(PreTrainedModel, source)
    if isinstance(source, torch.nn.Module) or not callable(source):
        raise ValueError(
            f"reward_funcs or metric_funcs has {source!r}, a {type(source).__name__}; use a function, a transformers "
            "sequence classifier, or the name of either"
        )
    return FunctionReward(source)
