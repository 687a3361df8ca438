"""Rules about the reward: whether it differs between responses, rises, and means what it is taken for."""

import math
from statistics import fmean

from alpaca_ppo.doctor.advice import either, smaller_updates, stronger_kl, weaker_kl
from alpaca_ppo.doctor.finding import Finding, Severity
from alpaca_ppo.doctor.history import History
from alpaca_ppo.doctor.limits import count, limit

_SPREAD = "objective/scores_std"


def constant_reward(history: History) -> Finding | None:
    """All responses score the same, so there is nothing to learn from."""
    if (history.config.get("rollout_batch_size") or 2) * (history.config.get("num_return_sequences") or 1) < 2:
        return None
    at_first = history.first(_SPREAD, 1)
    began_without = bool(at_first) and _is_constant(history, at_first[0])
    steps = count("constant_reward_steps" if began_without else "vanished_spread_steps")
    recent = history.last(_SPREAD, steps)
    if not recent or not all(_is_constant(history, value) for value in recent):
        return None
    score = history.last("objective/scores", 1)[0]
    if began_without and history.count(_SPREAD) == steps:
        return Finding(
            history.step,
            "constant_reward",
            "error",
            "every response gets the same reward",
            f"objective/scores_std is {max(recent):.3g} in the first {steps} steps; objective/scores is {score:.4g}",
            "a reward function that returns a constant (an answer that its pattern never finds, an exception turned "
            "into 0), a task that the model never or always solves, or a saturated reward model",
            "read rollouts/ with their scores and call the reward function on a good and a bad response by hand; for a "
            "task that is too hard, start from a better model, easier prompts or a reward with intermediate steps",
        )
    return Finding(
        history.step,
        "constant_reward",
        "warning",
        "the rewards no longer differ",
        f"objective/scores_std is {max(recent):.3g} in the last {steps} steps; objective/scores is {score:.4g}",
        "the task is solved, or the policy has collapsed to one answer; the score says which",
        "if it is solved, stop here or train on harder prompts; else start again from an earlier checkpoint, and "
        f"{either(stronger_kl(history), 'raise entropy_coef')}",
    )


def _is_constant(history: History, spread: float) -> bool:
    scores = history.last("objective/scores", 1)
    return spread <= limit("constant_reward_spread") * max(1.0, abs(scores[0]) if scores else 1.0)


def reward_falling(history: History) -> Finding | None:
    """The reward that is trained falls, on prompts whose difficulty does not change."""
    if history.config.get("dynamic_sampling"):
        return None
    window = count("window")
    if history.count("ppo/policy/clipfrac") < count("trend_steps"):
        return None
    start, now = history.first("objective/scores", window), history.last("objective/scores", window)
    spread = history.first(_SPREAD, window)
    if not (start and now and spread) or fmean(start) - fmean(now) <= limit("reward_fall_stds") * fmean(spread):
        return None
    critic, weaker = history.count("ppo/val/explained_variance") > 0, weaker_kl(history)
    return Finding(
        history.step,
        "reward_falling",
        "warning",
        "the reward falls",
        f"objective/scores fell from {fmean(start):.4g} (first {window} steps) to {fmean(now):.4g} (last {window}); "
        f"within a step, the scores have a standard deviation of {fmean(spread):.3g}",
        either(
            "updates that are too large",
            "a critic that is wrong" if critic else "",
            "a KL penalty above the reward" if weaker else "",
            "a reward with the wrong sign",
        ),
        f"{smaller_updates(history)}, or set target_kl_stop: 0.02"
        + ("; look at ppo/val/explained_variance" if critic else "")
        + weaker
        + ("; check the signs in reward_weights" if history.config.get("reward_weights") else ""),
    )


def eval_falling(history: History) -> Finding | None:
    """A held-out score is worse than before training, whatever the reward that is trained does."""
    for name in _evaluated(history):
        fall = _fall_since_start(history, name)
        if fall is None:
            continue
        severity, evidence = fall
        return Finding(
            history.step,
            "eval_falling",
            severity,
            f"{name} is worse than before training",
            evidence,
            either(
                "a reward function whose scores belong to other responses (an order or a cache mixed up) or have the "
                "wrong sign",
                "updates that are too large",
                "a policy that exploits what the reward gets wrong",
            ),
            "call the reward function on logged answers of eval/: one by one, all together, and in another order each "
            "answer must get the same score, and a good answer a higher one than a bad one; read the answers; in the "
            f"next run, {smaller_updates(history)}, or {stronger_kl(history)}",
        )
    return None


def _fall_since_start(history: History, name: str) -> tuple[Severity, str] | None:
    readings, spread = history.series(name), history.first(_SPREAD, 1)
    if len(readings) < 2 or readings[0][0] != 0:
        return None
    (_, start), (step, now) = readings[0], readings[-1]
    std = history.value_at(f"{name}_std", step) or (spread[0] if spread else None)
    errors = [value for _, value in history.series(f"{name}_se")]
    fall, certain, shown = start - now, 0.0, ""
    if len(errors) == len(readings):
        error = math.hypot(errors[0], errors[-1])
        certain = limit("eval_fall_errors") * error
        shown = f", {fall / error:.1f} standard errors of the difference" if error else ""
    elif len(readings) < count("eval_fall_evaluations"):
        return None
    if not std or fall <= max(limit("eval_fall_stds") * std, certain):
        return None
    return ("error" if fall > limit("eval_fall_stds_error") * std else "warning"), (
        f"{name} was {start:.4g} before training and is {now:.4g} at step {step}: lower by {fall / std:.2f} standard "
        f"deviations of a response's score{shown}"
    )


def overoptimization(history: History) -> Finding | None:
    """The trained reward rises while what nobody trains, an evaluation or a source of weight 0, falls (Gao et al.,
    2022).
    """
    for name in _heldout(history):
        falls = _fall_of_evaluation if name.startswith("eval/") else _fall_of_source
        fall = falls(history, name)
        if fall is None:
            continue
        severity, evidence = fall
        return Finding(
            history.step,
            "overoptimization",
            severity,
            f"the reward rises while {name} falls",
            evidence,
            "the policy exploits what the reward gets wrong (a reward model far from the responses that it was "
            "trained on, a loophole of a function), or it memorizes the training prompts",
            "take the checkpoint from before the fall (metric_for_best_model with load_best_model_at_end); in the next "
            f"run, {either(stronger_kl(history), 'set max_kl_to_ref', 'train for fewer steps')}, with more prompts or "
            "a better reward",
        )
    return None


def _heldout(history: History) -> list[str]:
    weights = history.source_weights
    names = [f"objective/scores/{source}" for source, weight in weights.items() if weight == 0]
    return names + _evaluated(history)


def _evaluated(history: History) -> list[str]:
    """The scores of each eval set."""
    return [name for name in history.names if name.startswith("eval/") and name.endswith("/scores")]


def _fall_of_source(history: History, name: str) -> tuple[Severity, str] | None:
    window = count("window")
    if history.count(name) < count("trend_steps"):
        return None
    spread = history.source_std(name.removeprefix("objective/scores/"), window, at_start=True)
    scores_spread = history.first(_SPREAD, window)
    if not scores_spread:
        return None
    unit = fmean(scores_spread) if spread is None else spread
    best_step, best = history.best_mean(name, window)
    start, now = fmean(history.first(name, window)), fmean(history.last(name, window))
    then, trained = history.mean_until("objective/scores", best_step, window), history.last("objective/scores", window)
    if best - now <= limit("heldout_fall_stds") * unit:
        return None
    if fmean(trained) - then <= limit("reward_rise_stds") * fmean(scores_spread):
        return None
    below_start = start - now > limit("heldout_fall_stds") * unit
    return ("error" if below_start or best - now > unit else "warning"), (
        f"{name} was {best:.4g} around step {best_step} and is {now:.4g} (mean of {window} steps, {start:.4g} at the "
        f"start), while objective/scores rose from {then:.4g} to {fmean(trained):.4g}"
    )


def _fall_of_evaluation(history: History, name: str) -> tuple[Severity, str] | None:
    readings, window = history.series(name), count("window")
    trained, spread = history.last("objective/scores", window), history.first(_SPREAD, window)
    if len(readings) < count("heldout_evaluations") or not (trained and spread):
        return None
    best_step, best = max(readings, key=lambda reading: reading[1])
    (_, start), (last_step, now) = readings[0], readings[-1]
    std, error = history.value_at(f"{name}_std", last_step), history.value_at(f"{name}_se", last_step)
    needed = limit("heldout_fall_stds") * (fmean(spread) if std is None else std)
    needed = needed if error is None else max(needed, limit("heldout_fall_errors") * error)
    if best - now <= needed:
        return None
    then = history.mean_until("objective/scores", max(best_step, 1), window)
    if fmean(trained) - then <= limit("reward_rise_stds") * fmean(spread):
        return None
    return ("error" if start - now > needed else "warning"), (
        f"{name} was {best:.4g} at step {best_step} and is {now:.4g} at step {last_step} ({start:.4g} at the start), "
        f"while objective/scores rose from {then:.4g} to {fmean(trained):.4g}"
    )


def source_drowned(history: History) -> Finding | None:
    """One reward source varies so much more than another that the other one hardly decides which response is better."""
    window = count("window")
    if history.config.get("adv_estimator") == "gdpo" or history.count(_SPREAD) > count("source_drowned_steps"):
        return None
    spreads = {}
    for source, weight in history.source_weights.items():
        spread = history.source_std(source, window, at_start=False)
        if weight != 0 and spread is not None:
            spreads[source] = abs(weight) * spread
    if len(spreads) < 2:
        return None
    loudest, quietest = max(spreads, key=spreads.__getitem__), min(spreads, key=spreads.__getitem__)
    if not 0 < spreads[quietest] < limit("source_drowned") * spreads[loudest]:
        return None
    return Finding(
        history.step,
        "source_drowned",
        "warning",
        f"the reward source {loudest} drowns {quietest}",
        f"within a step, the weighted scores of {loudest} have a standard deviation of {spreads[loudest]:.3g}, those "
        f"of {quietest} one of {spreads[quietest]:.3g}",
        "sources on different scales",
        "set reward_weights so that weight times standard deviation is of the size in which each source should count, "
        "or use adv_estimator: gdpo, which normalizes each source",
    )


def reward_model_out_of_range(history: History) -> Finding | None:
    """A reward model gives scores far from those of the responses with which the run began."""
    window = count("window")
    for source in history.facts.model_sources:
        name = f"objective/scores/{source}"
        spread = history.source_std(source, window, at_start=True)
        if not spread or history.count(name) < count("trend_steps"):
            continue
        start, now = fmean(history.first(name, window)), fmean(history.last(name, window))
        distance = abs(now - start) / spread
        if distance > limit("model_range_stds"):
            return Finding(
                history.step,
                "reward_model_out_of_range",
                "error" if distance > limit("model_range_stds_error") else "warning",
                f"the reward model {source} scores far outside what it was trained on",
                f"its mean score is {now:.4g}, {distance:.1f} standard deviations ({spread:.3g}) from the {start:.4g} "
                "of the first steps",
                "a reward model is trained on responses like those of the starting policy; so far away, its scores are "
                "an extrapolation, which the policy learns to exploit",
                "read the best-scored responses in rollouts/; take an earlier checkpoint; in the next run, "
                f"{stronger_kl(history)}, set max_kl_to_ref, or train the reward model on responses like these",
            )
    return None


def uniform_groups(history: History) -> Finding | None:
    """Most prompts give no gradient, because their responses all score the same, though not those of all prompts."""
    recent = history.last("objective/uniform_groups", count("window"))
    if not recent or fmean(recent) <= limit("uniform_groups") or constant_reward(history) is not None:
        return None
    return Finding(
        history.step,
        "uniform_groups",
        "warning",
        "most prompts give no gradient",
        f"the responses to {fmean(recent):.0%} of the prompts all have the same score (objective/uniform_groups)",
        "prompts that are too easy or too hard for the policy, with a reward of few values",
        "set dynamic_sampling: true, take more responses (num_return_sequences), or prompts of medium difficulty",
    )


def identical_responses(history: History) -> Finding | None:
    """The samples of a prompt are the same text: a warning at most while the reward has risen, as on a task that is
    solved and whose answers are short.
    """
    recent = history.last("objective/identical_responses", count("window"))
    if not recent or fmean(recent) <= limit("identical_responses"):
        return None
    first, last = (take("objective/scores", count("window")) for take in (history.first, history.last))
    learned = bool(first) and fmean(last) > fmean(first)
    return Finding(
        history.step,
        "identical_responses",
        "error" if fmean(recent) > limit("identical_responses_error") and not learned else "warning",
        "the responses to a prompt are identical",
        f"{fmean(recent):.0%} of the responses equal another one to the same prompt (objective/identical_responses)",
        "a policy that is almost deterministic: its entropy has collapsed, the temperature is low, or the prompts "
        "leave no choice",
        "raise temperature towards 1 or set entropy_coef; use an earlier checkpoint if the entropy has fallen in the "
        "run (objective/entropies)",
    )


def duplicate_prompts(history: History) -> Finding | None:
    """The dataset holds the same prompt many times."""
    total, distinct = history.facts.num_prompts, history.facts.num_distinct_prompts
    if total is None or distinct is None or total < count("duplicate_prompts_least"):
        return None
    # Environments make different tasks of equal prompts.
    if history.last("objective/turns", 1):
        return None
    share = 1 - distinct / total
    if share <= limit("duplicate_prompts"):
        return None
    return Finding(
        history.step,
        "duplicate_prompts",
        "warning",
        "the dataset repeats prompts",
        f"only {distinct} of {total} prompts are distinct",
        "rows of a dataset with several answers to each prompt, or files that were read twice",
        "keep one row of each prompt (num_return_sequences samples several responses to it); if they are meant as "
        "weights, ignore this",
    )
