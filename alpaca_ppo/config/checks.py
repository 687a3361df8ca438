"""Combinations of options that `PPOConfig` refuses. The range of a single value is declared with its field.

What the configuration must know of an estimator, a loss or a critic comes from `registry`, so that the checks hold for
those that a user registers too.
"""

from typing import Any

from alpaca_ppo.config.keyword_checks import check_keywords
from alpaca_ppo.config.learning_options import ADAPTIVE
from alpaca_ppo.config.risk_level import RiskLevel
from alpaca_ppo.registry import (
    ADV_ESTIMATORS,
    DOCTOR_RULES,
    DOCTOR_SEVERITIES,
    KL_ESTIMATORS,
    POLICY_LOSSES,
)

REFERENCES = ("auto", "adapter_off", "copy", "copy_offloaded", "none")
"""Values of `reference` that are not a path or hub id."""

LENGTHS = ("total_epochs", "total_episodes", "max_steps")
"""Options of which at most one may be set. On the command line, one of them replaces another of an earlier file."""

CHANGES = ("data", "model", "reward")
"""What `ignore_changes` may name."""

ENTROPIES = ("objective/entropies", "objective/ref_entropies", "ppo/policy/entropy")
"""Metrics that only every `entropy_logging_steps`-th step has; the last one every step where it is in the loss."""


def check_combinations(config: Any) -> None:
    """Checks that the options of a `PPOConfig` do not contradict each other.

    Raises:
        ValueError: naming the options, their values and the remedy.
    """
    _check_estimator(config)
    _check_policy_loss(config)
    _check_critic(config)
    _check_warmup(config)
    _check_four_bit(config)
    _check_kl(config)
    _check_sizes(config)
    _check_best_metric(config)
    _check_sampling(config)
    _check_evaluation(config)
    _check_overlong(config)
    check_keywords(config)
    _check_stop_on(config)
    if unknown := set(config.ignore_changes or ()) - set(CHANGES):
        raise ValueError(f"ignore_changes has {sorted(unknown)[0]!r}; choose of {', '.join(CHANGES)}")


def _check_stop_on(config: Any) -> None:
    for name in config.stop_on or ():
        if name not in (*DOCTOR_SEVERITIES, *DOCTOR_RULES):
            raise ValueError(
                f"stop_on names {name!r}, which is neither a severity ({', '.join(DOCTOR_SEVERITIES)}) nor a rule of "
                f"the doctor; the rules are {', '.join(DOCTOR_RULES)}"
            )


def _check_estimator(config: Any) -> None:
    name = config.adv_estimator
    if ADV_ESTIMATORS.trait(name, "needs_group") and config.num_return_sequences == 1:
        raise ValueError(
            f"adv_estimator is {name!r}, which compares the responses to one prompt, but num_return_sequences is 1; "
            f"set it to 2 or more, or choose one of {', '.join(ADV_ESTIMATORS.names_with(needs_group=False))}"
        )
    if isinstance(config.lam_policy, str) and config.lam_policy != ADAPTIVE:
        raise ValueError(f"lam_policy is {config.lam_policy!r}; it must be {ADAPTIVE}, a number from 0 to 1, or null")


def _check_policy_loss(config: Any) -> None:
    name = config.policy_loss
    mode = POLICY_LOSSES.trait(name, "loss_agg_mode")
    if mode is not None and config.loss_agg_mode != mode:
        raise ValueError(
            f"loss_agg_mode is {config.loss_agg_mode!r}, but policy_loss {name!r} is defined for {mode!r} only; set "
            f"loss_agg_mode: {mode}"
        )


def _check_warmup(config: Any) -> None:
    for name in ("warmup_steps", "critic_lr_warmup_steps"):
        given = getattr(config, name)
        if given is not None and given > 1 and given != int(given):
            raise ValueError(
                f"{name} is {given}; it must be a whole number of optimizer steps, or a share of them below 1"
            )


def _check_critic(config: Any) -> None:
    if config.critic_layout == "shared" and config.separate_critic_steps:
        raise ValueError(
            f"critic_epochs is {config.critic_epochs} and critic_step_batch_size is {config.critic_step_batch_size}, "
            "but with critic_layout 'shared' the value loss trains the policy's hidden states, so the critic cannot "
            "take steps of its own; set both to null, or choose critic_layout: separate or adapter"
        )
    RiskLevel.parse(config.risk_level)
    if len(config.value_support) != 2 or config.value_support[0] >= config.value_support[1]:
        raise ValueError(
            f"value_support is {config.value_support}; it must be the lowest and the highest return, such as [-10, 10]"
        )


def _check_four_bit(config: Any) -> None:
    if not config.load_in_4bit:
        return
    copies_policy = config.reference in ("copy", "copy_offloaded")
    if copies_policy or (config.uses_critic and config.critic_layout == "separate"):
        raise ValueError(
            f"load_in_4bit is True, but critic_layout is {config.critic_layout!r} with reference {config.reference!r}, "
            "which copies the base, and a 4-bit base cannot be copied; use critic_layout: adapter or shared, and "
            "reference: auto"
        )


def _check_kl(config: Any) -> None:
    if config.reference == "none" and (config.kl_loss_coef or config.kl_coef):
        raise ValueError(
            f"reference is 'none', but kl_coef is {config.kl_coef} and kl_loss_coef is {config.kl_loss_coef}; set "
            "both to 0, or keep a reference"
        )
    if config.kl_loss_coef and KL_ESTIMATORS.trait(config.kl_loss_type, "kink_at_zero"):
        # A tolerance around 0 would have to know the rounding of the model's dtype and kernels.
        raise ValueError(
            f"kl_loss_type is {config.kl_loss_type!r}, whose gradient jumps where the policy equals the reference, so "
            "that rounding decides the first update; set kl_loss_type to one of "
            f"{', '.join(KL_ESTIMATORS.names_with(kink_at_zero=False))}"
        )
    if config.kl_controller == "horizon" and config.responses_per_step >= 5 * config.kl_horizon:
        raise ValueError(
            f"kl_horizon is {config.kl_horizon}, so one step of {config.responses_per_step} responses could make "
            f"kl_coef negative; set it to {config.responses_per_step // 5 + 1} or more"
        )


def _check_sizes(config: Any) -> None:
    given = [f"{name} ({value})" for name in LENGTHS if (value := getattr(config, name)) is not None]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} are both set; set one of them to null")
    for name in ("step_batch_size", "critic_step_batch_size"):
        size = getattr(config, name)
        if size is not None and size > config.responses_per_step:
            raise ValueError(
                f"{name} ({size}) is larger than the responses of a step, rollout_batch_size * num_return_sequences = "
                f"{config.responses_per_step}; set it to {config.responses_per_step} or less"
            )
    longest, budget = config.longest_row, config.max_tokens_per_micro_batch
    if budget is not None and budget < longest:
        raise ValueError(
            f"max_tokens_per_micro_batch ({budget}) is less than query_len + response_len ({longest}), so a response "
            f"of full length would not fit into any micro-batch; set it to {longest} or more, or to null"
        )
    if config.reward_weights == []:
        raise ValueError("reward_weights is []; give one number for each reward source, or null")


def _check_best_metric(config: Any) -> None:
    metric = config.metric_for_best_model
    if metric is None:
        return
    if metric.startswith("eval/") and config.eval_steps == 0:
        raise ValueError(
            f"metric_for_best_model is {metric!r}, but eval_steps is 0, so only the last step would be evaluated; set "
            "eval_steps, or choose a metric of the steps such as objective/scores"
        )
    remedies, in_loss = [], metric == "ppo/policy/entropy" and config.entropy_coef > 0
    if metric in ENTROPIES and config.entropy_logging_steps > 1 and not in_loss:
        remedies.append("entropy_logging_steps: 1")
    if metric == "objective/entropies" and config.old_policy in ("auto", "rollout"):
        remedies.append("old_policy: recompute")
    if remedies:
        raise ValueError(
            f"metric_for_best_model is {metric!r}, but entropy_logging_steps is {config.entropy_logging_steps} and "
            f"old_policy is {config.old_policy!r}, with which not every step has that metric; set "
            f"{' and '.join(remedies)}, or choose another metric"
        )


def _check_overlong(config: Any) -> None:
    length = config.overlong_buffer_len
    if length is not None and length > config.response_len:
        raise ValueError(
            f"overlong_buffer_len ({length}) is larger than response_len ({config.response_len}), so the penalty would "
            f"begin before the first token; set it to {config.response_len} or less, or to null"
        )


def _check_sampling(config: Any) -> None:
    if "" in (config.stop_strings or ()):
        raise ValueError(
            f"stop_strings is {config.stop_strings}, with an empty text, which every response contains; remove it"
        )


def _check_evaluation(config: Any) -> None:
    if config.eval_success_above is None and config.eval_success_by != "scores":
        raise ValueError(
            f"eval_success_by is {config.eval_success_by!r}, but eval_success_above is null, so nothing counts as "
            "correct; set eval_success_above, such as 0.5, or leave eval_success_by out"
        )
    if config.eval_opponent == "reference" and config.reference == "none":
        raise ValueError(
            "eval_opponent is 'reference', but reference is 'none'; keep a reference, or compare with a file"
        )
