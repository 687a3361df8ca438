"""Combinations of options of evaluation that `PPOConfig` refuses."""

from typing import Any


def check_evaluation(config: Any) -> None:
    """Checks that the options of evaluation in a `PPOConfig` do not contradict each other.

    Raises:
        ValueError: naming the options, their values and the remedy.
    """
    _check_correctness(config)
    _check_judge(config)


def _check_correctness(config: Any) -> None:
    if config.eval_success_above is None and config.eval_success_by != "scores":
        raise ValueError(
            f"eval_success_by is {config.eval_success_by!r}, but eval_success_above is null, so nothing counts as "
            "correct; set eval_success_above, such as 0.5, or leave eval_success_by out"
        )


def _check_judge(config: Any) -> None:
    if config.eval_opponent == "reference" and config.reference == "none":
        raise ValueError(
            "eval_opponent is 'reference', but reference is 'none'; keep a reference, or compare with a file"
        )
