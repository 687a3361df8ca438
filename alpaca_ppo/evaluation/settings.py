"""`EvaluationSettings`: what an evaluation computes, checked against its reward sources and metrics."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from alpaca_ppo.config.modules import load_function
from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.evaluation.comparisons import FunctionJudge

# The weighted sum of the reward sources.
TOTAL = "scores"
# Metrics of every evaluation and columns of its tables, of answers.jsonl and of the report, whose names no metric
# function may have.
RESERVED = (
    "scores scores_std rewards kl_sum_seq response_length truncated_fraction empty_fraction turns environment_tokens "
    "masked_rows tool_calls tool_failure_rate correct win_rate unjudged length_difference prompt_id sample_id prompt "
    "question response score stopped length kl columns tokens opponent win set run table step more dropped_prompts"
).split()


class EvaluationSettings(NamedTuple):
    """What is computed from the values of each response.

    Attributes:
        names: the values of each response: scores, rewards, scores/<source>, and the metric functions.
        ks: each k of pass@k.
        success_above: a response is correct if its value `success_by` is above this; None = correctness is not
            computed.
        compares: whether responses are compared with an opponent's.
        judged_by: the one of `names` whose higher value wins; None if `judge` decides.
    """

    names: tuple[str, ...]
    num_samples: int = 1
    ks: tuple[int, ...] = (1,)
    success_above: float | None = None
    success_by: str = TOTAL
    compares: bool = False
    judged_by: str | None = None
    judge: FunctionJudge | None = None


def make_settings(args: PPOConfig, *, sources: Sequence[str], metrics: Sequence[str]) -> EvaluationSettings:
    """Returns the settings of a run from its `PPOConfig` and the names of its reward sources and metric functions.

    Raises:
        ValueError: if a source or a metric function has the name of another metric, or an option names a value or a
            function that does not exist.
    """
    names = (TOTAL, "rewards", *(f"scores/{source}" for source in sources), *metrics)
    taken = {*RESERVED, *(f"{name}_{end}" for name in (*RESERVED, *names) for end in ("se", "missing"))}
    for name in names[2:]:
        if name in taken or (name in metrics and re.match(r"(pass_at|avg_at|scores)[_/]", name)):
            field, short = "metric_funcs" if name in metrics else "reward_funcs", name.removeprefix("scores/")
            raise ValueError(f"{field} has a function named {short!r}, a name that evaluations have already; rename it")
    success_by = _full_name(args.eval_success_by, names)
    if success_by is None:
        raise ValueError(f"eval_success_by is {args.eval_success_by!r}; choose one of {', '.join(names)}")
    judge = args.eval_judge
    scores = [name for name in names if name != "rewards"]
    judged_by = _full_name(judge, scores)
    if judged_by is None and ":" not in judge:
        raise ValueError(f"eval_judge is {judge!r}; use {', '.join(scores)}, module:function or file.py:function")
    samples = args.eval_num_samples
    powers = {2**i for i in range(samples.bit_length())}
    return EvaluationSettings(
        names=names,
        num_samples=samples,
        ks=tuple(sorted({*powers, samples})),
        success_above=args.eval_success_above,
        success_by=success_by,
        compares=args.eval_opponent is not None,
        judged_by=judged_by,
        judge=None if judged_by else FunctionJudge(load_function(judge, what="eval_judge"), name=judge),
    )


def _full_name(value: str | None, names: Sequence[str]) -> str | None:
    """Returns the one of `names` that is `value` or the score of the reward source `value`, or else None."""
    return next((name for name in (value, f"scores/{value}") if name in names), None)


def check_set_names(names: Mapping[str, Any]) -> None:
    """Raises `ValueError` if there are no eval sets, or a name cannot be part of metrics and folders."""
    if not names:
        raise ValueError("eval_dataset is an empty mapping; give it an entry for each eval set, or pass None")
    for name in names:
        if not isinstance(name, str) or not re.fullmatch(r"\w[\w.-]{0,99}", name, re.ASCII):
            raise ValueError(f"eval_dataset has a set {name!r}; use 1 to 100 letters, digits, dashes, dots or _")
