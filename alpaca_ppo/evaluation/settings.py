"""`EvaluationSettings`: what an evaluation computes, checked against what there is to compute it from."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from alpaca_ppo.config.modules import load_function
from alpaca_ppo.evaluation.comparisons import FunctionJudge

TOTAL = "scores"
"""The weighted sum of the reward sources."""
RESERVED = (
    "scores scores_std rewards kl_sum_seq response_length truncated_fraction empty_fraction masked_rows correct "
    "win_rate unjudged length_difference prompt response set"
).split()
"""Names of metrics of every evaluation, and of columns of answers.jsonl, which no metric function may have."""


@dataclass(frozen=True)
class EvaluationSettings:
    """What is computed from the values of each response."""

    names: tuple[str, ...]
    """Of the values that each response has: scores, rewards, scores/<source>, and the metric functions."""
    num_samples: int = 1
    """n: responses to each prompt."""
    ks: tuple[int, ...] = (1,)
    """Of pass@k."""
    success_above: float | None = None
    """A response whose value of `success_by` is above this is correct; None = nothing is."""
    success_by: str = TOTAL
    """One of `names`."""
    compares: bool = False
    """Whether the responses are compared with another's."""
    judged_by: str | None = None
    """One of `names`, if the higher value wins; None if `judge` decides."""
    judge: FunctionJudge | None = None


def make_settings(args: Any, *, sources: Sequence[str], metrics: Sequence[str]) -> EvaluationSettings:
    """Returns the settings of a run.

    Args:
        args: its `PPOConfig`.
        sources: names of the reward sources.
        metrics: names of the metric functions.

    Raises:
        ValueError: if a metric function has the name of another metric, or an option names a value or a function that
            there is not.
    """
    taken = {*RESERVED, *(f"{name}_se" for name in RESERVED)}
    for name in metrics:
        if name in taken or re.match(r"(pass_at|avg_at|scores)[_/]", name):
            raise ValueError(
                f"metric_funcs has a function named {name!r}, a name that evaluations have already; rename it"
            )
    names = (TOTAL, "rewards", *(f"scores/{source}" for source in sources), *metrics)
    if _full_name(args.eval_success_by, names) is None:
        raise ValueError(f"eval_success_by is {args.eval_success_by!r}; choose one of {', '.join(names)}")
    judge, scores = args.eval_judge, [name for name in names if name != "rewards"]
    judged_by = _full_name(judge, scores)
    if judged_by is None and ":" not in judge:
        raise ValueError(
            f"eval_judge is {judge!r}; use one of {', '.join(scores)}, module:function or file.py:function"
        )
    samples = args.eval_num_samples
    powers = {2**i for i in range(samples.bit_length())}
    return EvaluationSettings(
        names=names,
        num_samples=samples,
        ks=tuple(sorted({*powers, samples})),
        success_above=args.eval_success_above,
        success_by=str(_full_name(args.eval_success_by, names)),
        compares=args.eval_opponent is not None,
        judged_by=judged_by,
        judge=None if judged_by else FunctionJudge(load_function(judge, what="eval_judge"), name=judge),
    )


def _full_name(value: str | None, names: Sequence[str]) -> str | None:
    """The one of `names` that `value` means: itself, or the score of the reward source of that name."""
    return next((name for name in (value, f"scores/{value}") if name in names), None)


def check_set_names(names: Mapping[str, Any]) -> None:
    """Checks the names of eval sets, which become names of metrics and of folders.

    Raises:
        ValueError: for a mapping without entries, and a name that is not of at most 100 letters, digits, dashes, dots
            and underscores.
    """
    if not names:
        raise ValueError("eval_dataset is an empty mapping; give it an entry for each eval set, or pass None")
    for name in names:
        if not isinstance(name, str) or not re.fullmatch(r"\w[\w.-]{0,99}", name, re.ASCII):
            raise ValueError(
                f"eval_dataset has a set named {name!r}; use at most 100 letters, digits, dashes, dots and "
                "underscores: the name is part of metrics (eval/<set>/scores) and of folders"
            )
