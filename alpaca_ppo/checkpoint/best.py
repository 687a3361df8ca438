"""The best checkpoint of a run by `metric_for_best_model`; kept in `TrainerState` under transformers' names.

Only checkpoints compete: a metric that was measured where none was written is not compared. Which folders stay is
decided in `checkpoint_folders`.
"""

import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerState

from alpaca_ppo.config.ppo_config import PPOConfig


def require_metric(args: PPOConfig, stats: Mapping[str, float], *, evaluation: bool) -> None:
    """Checks that `stats`, of an evaluation (empty where there is no eval dataset) or of a step, hold the metric if it
    is one of those.

    Raises:
        ValueError: when they do not; names those that there are.
    """
    metric = args.metric_for_best_model
    if metric is None or metric in stats or metric.startswith("eval/") != evaluation:
        return
    if not stats:
        raise ValueError(f"metric_for_best_model is {metric!r}, but eval_dataset is None; pass one, or null the metric")
    what, others = ("an evaluation", "") if evaluation else ("a step", ", one of an evaluation such as eval/scores,")
    raise ValueError(
        f"metric_for_best_model is {metric!r}, which {what} does not measure; choose one of {', '.join(sorted(stats))}"
        f"{others} or null"
    )


def compare_with_best(state: TrainerState, stats: Mapping[str, float], folder: Path, args: PPOConfig) -> None:
    """Makes `folder`, the checkpoint of `state.global_step`, the best where its metric beats the best so far."""
    value = stats.get(args.metric_for_best_model or "", math.nan)
    best = state.best_metric
    if not math.isfinite(value):
        return
    if best is None or (value > best if args.greater_is_better else value < best):
        state.best_metric, state.best_global_step, state.best_model_checkpoint = value, state.global_step, str(folder)


def best_of(state: TrainerState, args: PPOConfig) -> dict[str, Any]:
    """What a checkpoint holds of the best one."""
    about = {"metric": args.metric_for_best_model, "greater_is_better": args.greater_is_better}
    return about | {"value": state.best_metric, "step": state.best_global_step}


def restore_best(state: TrainerState, saved: Mapping[str, Any], folder: Path, args: PPOConfig) -> None:
    """Takes the best from `saved`, what `best_of` gave; `folder` is where the checkpoints of its run are.

    A value of another metric, or one whose checkpoint is gone, is nothing to compare with: the best is sought anew.
    """
    asked = best_of(state, args)
    if saved["step"] is None or any(saved[name] != asked[name] for name in ("metric", "greater_is_better")):
        return
    best = folder / f"checkpoint-{saved['step']}"
    if not best.is_dir():
        warnings.warn(
            f"{best}, the best checkpoint so far ({saved['metric']} = {saved['value']}), is gone; the best is sought "
            "anew among those to come",
            stacklevel=5,
        )
        return
    state.best_metric, state.best_global_step, state.best_model_checkpoint = saved["value"], saved["step"], str(best)
