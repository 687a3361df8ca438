"""Whether a run has what it is to measure: eval sets, columns that rewards require, scores that options name.

All of it is known before any model is loaded.
"""

from collections.abc import Mapping
from typing import Any

import torch
from datasets import Dataset

from alpaca_ppo.config.fields import check_needs
from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.evaluation.settings import make_settings
from alpaca_ppo.rewards.batch import OF_EPISODES
from alpaca_ppo.rewards.scorer import check_columns, source_names
from alpaca_ppo.trainer.environment_setup import NO_ENVIRONMENTS, GivenEnvironments

REWARD_ADAPTER = "reward_adapter"
"""The name of its reward source."""


def check_evaluation(
    args: PPOConfig, eval_dataset: Any, reward_funcs: Any, metric_funcs: Any, environments: GivenEnvironments
) -> None:
    """Checks, before any model is loaded, that there is what the run is to evaluate on and to measure.

    Raises:
        ValueError: see `check_needs` and `check_value_names`; also for an opponent in conversations.
    """
    given = reward_funcs if isinstance(reward_funcs, list | tuple) else [reward_funcs]
    functions = [source for source in given if callable(source) and not isinstance(source, torch.nn.Module)]
    check_needs(
        args,
        eval_set=eval_dataset is not None and eval_dataset != {},
        reward_functions=bool(functions or environments.kinds),
    )
    if args.eval_opponent is not None and environments.answer:
        raise ValueError(
            f"eval_opponent is {args.eval_opponent!r}, which compares answers of one turn, but the policy's "
            "conversations have several; leave it out, and compare the rewards of two evaluations"
        )
    check_value_names(args, reward_funcs, metric_funcs, environments)


def check_reward_columns(
    train_dataset: Any, eval_dataset: Any, reward_funcs: Any, metric_funcs: Any, environments: GivenEnvironments
) -> None:
    """Checks, before any model is loaded, that the datasets have the columns which reward and metric functions require.

    What is no `Dataset` is left to `prepare_prompts`, which refuses it.

    Raises:
        ValueError: see `rewards.scorer.check_columns`.
    """
    named = eval_dataset if isinstance(eval_dataset, Mapping) else {"": eval_dataset}
    sets = {f"eval set {name!r}" if name else "eval set": rows for name, rows in named.items()}
    for what, rows in {"train set": train_dataset, **sets}.items():
        if isinstance(rows, Dataset):
            columns = [*rows.column_names, *(OF_EPISODES if environments.kinds else ())]
            check_columns(reward_funcs, what, columns)
            if what != "train set":
                check_columns(metric_funcs, what, columns)


def check_value_names(
    args: PPOConfig, reward_funcs: Any, metric_funcs: Any, environments: GivenEnvironments = NO_ENVIRONMENTS
) -> None:
    """Checks, before any model is loaded, that the scores and metrics which options of evaluation name will be there.

    Raises:
        ValueError: as `make_settings`, and for an entry that is no source.
    """
    sources = source_names(reward_funcs)
    if args.reward_adapter is not None:
        sources.append(REWARD_ADAPTER)
    sources += environments.source_names
    try:
        metrics = source_names(metric_funcs)
    except ValueError as error:
        raise of_metrics(error) from error
    make_settings(args, sources=sources, metrics=metrics)


def of_metrics(error: ValueError) -> ValueError:
    """An error about reward sources, as one about `metric_funcs`."""
    problem = str(error).replace("reward_processing_classes", "metric_processing_classes")
    return ValueError(f"metric_funcs, which takes what reward_funcs does: {problem}")
