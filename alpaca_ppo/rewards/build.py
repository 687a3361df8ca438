"""Every kind of reward source: from what a user passes (`build_reward`) or names in options (`reward_sources`) to a
`RewardScorer`.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from alpaca_ppo.config.modules import load_function
from alpaca_ppo.config.script_arguments import ScriptArguments
from alpaca_ppo.rewards.batch import RESERVED_COLUMNS
from alpaca_ppo.rewards.remote import RemoteReward
from alpaca_ppo.rewards.reward_function import OFFERED, FailureHandling, FunctionReward
from alpaca_ppo.rewards.reward_model import build_model_reward, model_name
from alpaca_ppo.rewards.scorer import RewardScorer, free_name

RewardFunc: TypeAlias = Callable[..., Any] | str | PreTrainedModel


def reward_sources(script_args: ScriptArguments) -> list[RewardFunc]:
    """Returns the reward sources in the options, ordered as their weights: models, functions, servers."""
    named: list[RewardFunc] = [*(script_args.reward_model_name_or_path or ()), *(script_args.reward_funcs or ())]
    if script_args.reward_url:
        named.append(RemoteReward(script_args.reward_url, timeout=script_args.reward_url_timeout, name="reward_url"))
    return named


def build_reward(
    reward_funcs: RewardFunc | Sequence[RewardFunc],
    *,
    reward_weights: Sequence[float] | None = None,
    reward_processing_classes: PreTrainedTokenizerBase | Sequence[PreTrainedTokenizerBase | None] | None = None,
    failure_handling: FailureHandling | None = None,
    measures: bool = False,
    **model_options: Any,
) -> RewardScorer:
    """Returns a scorer of one or several reward sources.

    Args:
        reward_funcs: one or a list of: a Python function (see `FunctionReward`) or its name ("module:function" or
            "file.py:function"); a `RemoteReward`; a sequence classifier with one label, in memory or by its folder or
            hub id.
        reward_weights: one per source; 1 each by default.
        reward_processing_classes: one tokenizer (or None) per source, or one for every model. By default, a model's
            tokenizer is loaded from where the model came from.
        failure_handling: what happens if a function raises; by default, the error ends the run.
        measures: see `RewardScorer`.
        model_options: see `build_model_reward`.

    Raises:
        ValueError: for a wrong number of weights or tokenizers, an entry that is not a reward source, or an unusable
            model. Whatever needs no model is checked before one is loaded.
    """
    given = _resolve_sources(reward_funcs)
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
    return RewardScorer(sources, weights, failure_handling=failure_handling, measures=measures)


def source_names(reward_funcs: RewardFunc | Sequence[RewardFunc] | None) -> list[str]:
    """Returns the names of the sources in a scorer. Functions are imported, but no model is loaded."""
    names: list[str] = []
    for source in _resolve_sources(reward_funcs):
        names.append(free_name(source.name if isinstance(source, FunctionReward) else model_name(source), names))
    return names


def check_columns(reward_funcs: RewardFunc | Sequence[RewardFunc] | None, dataset: str, columns: Sequence[str]) -> None:
    """Checks that the `columns` of a dataset include those that the functions require; errors call it `dataset`.

    Raises:
        ValueError: naming the function, the missing arguments, and those that are available.
    """
    available = [*RESERVED_COLUMNS, *(name for name in columns if name not in ("prompt", *RESERVED_COLUMNS))]
    functions = [source for source in _resolve_sources(reward_funcs) if isinstance(source, FunctionReward)]
    for function in functions:
        if missing := [name for name in function.parameters.required if name not in (*available, *OFFERED)]:
            problem = f"reward source {function.name!r} requires {missing}, but the {dataset} has {available}"
            raise ValueError(f"{problem}; rename either")


def _resolve_sources(reward_funcs: Any) -> list[FunctionReward | PreTrainedModel | str]:
    if reward_funcs is None:
        return []
    given = reward_funcs if isinstance(reward_funcs, list | tuple) else [reward_funcs]
    return [_resolve_source(source) for source in given]


def _resolve_source(source: Any) -> FunctionReward | PreTrainedModel | str:
    """Returns a function, its name or a `RemoteReward` as `FunctionReward`; a model, its path or hub id unchanged."""
    if isinstance(source, str):
        _, colon, name = source.rpartition(":")
        if colon and name.isidentifier() and not Path(source).is_dir():
            return FunctionReward(load_function(source, what="reward function"))
        return source
    if isinstance(source, torch.nn.Module) and hasattr(source, "config"):
        return cast(PreTrainedModel, source)
    if isinstance(source, torch.nn.Module) or not callable(source):
        raise ValueError(f"reward_funcs or metric_funcs has {source!r}; use a function, a classifier, or either's name")
    return FunctionReward(source)
