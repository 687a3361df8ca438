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
    samples, best_of = config.eval_num_samples, config.eval_best_of_by
    if best_of is not None and samples == 1:
        raise ValueError(
            f"eval_best_of_by is {best_of!r}, but eval_num_samples is 1, of which there is no best; set "
            "eval_num_samples to 2 or more, or eval_best_of_by: null"
        )
    if config.eval_success_above is None and config.eval_success_by != "scores":
        raise ValueError(
            f"eval_success_by is {config.eval_success_by!r}, but eval_success_above is null, so nothing counts as "
            "correct; set eval_success_above, such as 0.5, or leave eval_success_by out"
        )
    if config.eval_answer_func is not None and (config.eval_success_above is None or samples == 1):
        raise ValueError(
            f"eval_answer_func is {config.eval_answer_func!r}, but a majority vote needs eval_success_above "
            f"({config.eval_success_above}) and several responses to a prompt (eval_num_samples is {samples}); set "
            "both, or eval_answer_func: null"
        )


def _check_judge(config: Any) -> None:
    if config.eval_opponent == "reference" and config.reference == "none":
        raise ValueError(
            "eval_opponent is 'reference', but reference is 'none'; keep a reference, or compare with a file"
        )
