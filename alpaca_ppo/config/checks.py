"""Combinations of options that `PPOConfig` refuses, beyond the `needs` of single options (`fields`).

What they must know of an estimator, a loss or a critic comes from `registry`, so that they hold for those that users
register too.
"""

import json
import operator
import re
from collections.abc import Mapping
from contextlib import suppress
from math import isfinite
from typing import Any

from alpaca_ppo.config.fields import shown
from alpaca_ppo.config.foreign_names import check_keywords
from alpaca_ppo.config.learning_options import RiskLevel
from alpaca_ppo.config.names import check_url, is_server
from alpaca_ppo.registry import ADV_ESTIMATORS, KL_ESTIMATORS, POLICY_LOSSES

REFERENCES = ("auto", "adapter_off", "copy", "copy_offloaded", "none")
"""Values of `reference` that are not a path or hub id."""

LENGTHS = ("total_epochs", "total_episodes", "max_steps")
"""The length of a run: at most one may be set; on the command line, a later one replaces an earlier one."""
COMPARISONS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}


def template_options(row: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of the chat template that the columns `chat_template_kwargs` and `tools` of a dataset row hold, as
    values or as JSON text. Raises ValueError for a column that holds something else.
    """
    keywords, tools = (_parsed(row.get(name)) or {} for name in ("chat_template_kwargs", "tools"))
    if not isinstance(keywords, Mapping):
        raise ValueError(f"column 'chat_template_kwargs' is {shown(keywords)}; make it a mapping, or rename it")
    check_keywords("chat_template_kwargs", keywords)
    if tools and not (isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)):
        raise ValueError(f"column 'tools' is {shown(tools)}; make it a list of JSON schemas of functions, or rename it")
    return {**keywords, "tools": tools} if tools else {**keywords}


def _parsed(value: Any) -> Any:
    with suppress(ValueError):
        return json.loads(value) if isinstance(value, str) else value
    return value


def without_nulls(value: Any, *, deep: bool = True) -> Any:
    """`value` without None in its mappings: Arrow gives a mapping the keys of those in all rows. Not `deep` = in the
    outermost mappings only.
    """
    if isinstance(value, Mapping):
        return {k: without_nulls(entry) if deep else entry for k, entry in value.items() if entry is not None}
    return [without_nulls(entry, deep=deep) for entry in value] if isinstance(value, list) else value


def stop_condition(option: str, condition: str) -> tuple[str, str, float]:
    """Metric, comparison and number of a condition. Raises a ValueError that begins with `option` if it is none."""
    found = re.fullmatch(rf"\s*(\S(?:.*[^\s<>=])?)\s*({'|'.join(COMPARISONS)})\s*(\S+)\s*", condition)
    with suppress(ValueError):
        if found is not None and isfinite(bound := float(found[3])):
            return found[1], found[2], bound
    raise ValueError(f"{option}; write a metric, one of {' '.join(COMPARISONS)} and a number, as in eval/scores >= 0.8")


def check_combinations(config: Any) -> None:
    """Raises ValueError for options of a `PPOConfig` that exclude each other."""
    check_keywords("chat_template_kwargs", config.chat_template_kwargs)
    check_keywords("model_init_kwargs", config.model_init_kwargs)
    _check_learning(config)
    _check_sizes(config)
    if config.metric_for_best_model is not None and not config.metric_for_best_model.startswith("eval/"):
        # Those of a step are measured before its update, so they are not of the weights in its checkpoint.
        raise ValueError(f"metric_for_best_model is {shown(config.metric_for_best_model)}; set one such as eval/scores")
    teacher = config.teacher_model_name_or_path
    if teacher is not None and config.dynamic_sampling:
        problem = f"dynamic_sampling is {config.dynamic_sampling}, but judges prompts by scores, without the teacher"
        raise ValueError(f"{problem}; set it to 0, or teacher_model_name_or_path to null")
    if is_server(teacher):
        check_url("teacher_model_name_or_path", teacher)
        if config.temperature != 1:
            problem = "but a teacher behind a server gives log-probs of temperature 1"
            remedy = "set temperature: 1, or name the teacher's folder"
            raise ValueError(f"temperature is {config.temperature}, {problem}; {remedy}")
        for name, default in {"teacher_dtype": "float32", "teacher_offloaded": False}.items():
            if (value := getattr(config, name)) != default:
                problem = "but the teacher is behind a server, which keeps its weights"
                raise ValueError(f"{name} is {value}, {problem}; leave it out")
    if config.load_in_4bit and config.generation_backend == "vllm":
        raise ValueError("load_in_4bit is True, but generation_backend vllm gets whole weights; set it to auto")
    if config.stop_at is not None:
        metric, *_ = stop_condition(f"stop_at is {shown(config.stop_at)}", config.stop_at)
        if metric.startswith("eval/") and not config.eval_steps:
            raise ValueError(f"stop_at is {shown(config.stop_at)}, but eval_steps is {config.eval_steps}; set it to 10")
    if config.eval_opponent == "reference" and config.reference == "none":
        raise ValueError("eval_opponent is 'reference', but reference is 'none'; set reference, or compare with a file")


def _check_learning(config: Any) -> None:
    if ADV_ESTIMATORS.trait(config.adv_estimator, "needs_group") and config.num_return_sequences == 1:
        problem = f"adv_estimator is {config.adv_estimator!r}, but num_return_sequences is 1"
        others = ", ".join(ADV_ESTIMATORS.names_with(needs_group=False))
        raise ValueError(f"{problem}; set it to 2 or more, or choose one of {others}")
    mode = POLICY_LOSSES.trait(config.policy_loss, "loss_agg_mode")
    if mode is not None and config.loss_agg_mode != mode:
        raise ValueError(f"policy_loss {config.policy_loss!r} needs loss_agg_mode {mode}, not {config.loss_agg_mode}")
    if config.kl_loss_coef and KL_ESTIMATORS.trait(config.kl_loss_type, "kink_at_zero"):
        # A tolerance around 0 would have to know the rounding of the model's dtype and kernels.
        smooth = " or ".join(KL_ESTIMATORS.names_with(kink_at_zero=False))
        raise ValueError(f"kl_loss_type is {config.kl_loss_type!r}, whose gradient jumps at 0; set it to {smooth}")
    least_horizon = config.responses_per_step // 5 + 1
    if config.kl_controller == "horizon" and config.kl_horizon < least_horizon:
        raise ValueError(f"kl_horizon is {config.kl_horizon}; below {least_horizon}, kl_coef may be negative")
    if config.reference == "none" and (config.kl_loss_coef or config.kl_coef):
        both = f"kl_coef is {config.kl_coef} and kl_loss_coef is {config.kl_loss_coef}"
        raise ValueError(f"reference is 'none', but {both}; set both to 0, or keep a reference")
    # Raises a ValueError for any other text.
    RiskLevel.parse(str(config.risk_level))
    if config.value_support[0] >= config.value_support[1]:
        raise ValueError(f"value_support is {config.value_support}; give the lowest return first, such as [-10, 10]")
    copies_base = config.reference in ("copy", "copy_offloaded")
    if config.load_in_4bit and (copies_base or (config.uses_critic and config.critic_layout == "separate")):
        copied = f"critic_layout {config.critic_layout!r} or reference {config.reference!r} copies the base"
        raise ValueError(f"load_in_4bit is True, but {copied}; set critic_layout: auto, reference: auto")


def _check_sizes(config: Any) -> None:
    lengths = [f"{name} ({value})" for name in LENGTHS if (value := getattr(config, name)) is not None]
    if len(lengths) > 1:
        raise ValueError(f"{' and '.join(lengths)} are both set; set one of them to null")
    responses = ("rollout_batch_size * num_return_sequences", config.responses_per_step)
    response = ("response_len", config.response_len)
    limits = {"step_batch_size": responses, "critic_step_batch_size": responses, "overlong_buffer_len": response}
    for name, (limit_name, limit) in limits.items():
        if (value := getattr(config, name) or 0) > limit:
            raise ValueError(f"{name} ({shown(value)}) is larger than {limit_name} ({limit}); set it to that or less")
    for name in ("learning_rate", "critic_learning_rate"):
        rate = getattr(config, name)
        if config.lr_scheduler_type == "polynomial" and rate is not None and rate <= 1e-7:
            raise ValueError(f"{name} is {rate}, but lr_scheduler_type 'polynomial' ends at 1e-07; set a larger rate")
    budget = config.max_tokens_per_micro_batch
    if budget is not None and budget < config.longest_row:
        least = f"query_len + response_len ({config.longest_row})"
        raise ValueError(f"max_tokens_per_micro_batch is {budget}; set it to {least} or more, or to null")
