"""The doctor's rules, and `History`, the metrics that they read.

A rule's condition returns what it has found, or None, also where a metric is missing. It is called after every step, so
it reads the last few values of a few metrics. Limits come from healthy and spoilt runs (tests/doctor/measured.json.gz);
docs/doctor.md explains each.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from alpaca_ppo.config.learning_options import chosen_rate
from alpaca_ppo.registry import DOCTOR_RULES, DoctorSeverity

WINDOW = 5
"""Steps that are averaged, so that one unusual batch decides nothing."""
_KL, _SCORES, _SPREAD = "objective/kl_avg_seq", "objective/scores", "objective/scores_std"
# Their clip fraction means something else than PPO's, or their range is hundreds of times narrower.
_LOSSES_WITH_OTHER_CLIPPING = ("sapo", "cispo", "dppo", "dppo_kl", "gspo")


class History:
    """The metrics of a run in the order of the steps, and its options as plain values; `config` may lack some.

    `step` is the last one that was added.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.step = 0
        self._series: dict[str, list[tuple[int, float]]] = {}

    def add(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Adds the metrics of `step` (0 = before training), except None and numbers that are not finite. They replace
        earlier ones of the same step.
        """
        self.step = step
        for name, value in metrics.items():
            if name == "step" or value is None or not math.isfinite(float(value)):
                continue
            series = self._series.setdefault(name, [])
            if series and series[-1][0] == step:
                series.pop()
            series.append((step, float(value)))

    @property
    def names(self) -> list[str]:
        """The names of all metrics so far."""
        return list(self._series)

    def series(self, name: str) -> Sequence[tuple[int, float]]:
        """The metric as (step, value) pairs; empty for an unknown one."""
        return self._series.get(name, [])

    def last(self, name: str, count: int = 1) -> list[float]:
        """The last `count` values; empty if there are fewer."""
        series = self.series(name)
        return [value for _, value in series[-count:]] if len(series) >= count else []

    def mean(self, name: str, count: int = WINDOW) -> float | None:
        """The mean of the last `count` values; None if there are fewer."""
        return fmean(values) if (values := self.last(name, count)) else None

    def start(self, name: str, count: int = WINDOW) -> float | None:
        """The mean of the first `count` values; None if there are fewer."""
        series = self.series(name)
        return fmean(value for _, value in series[:count]) if len(series) >= count else None

    def at(self, name: str, steps: Sequence[int]) -> list[float]:
        """The values at `steps`, which are among the newest; 0 where there is none."""
        values = dict(self.series(name)[-64:])
        return [values.get(step, 0.0) for step in steps]

    @property
    def has_adapter(self) -> bool:
        """Whether an adapter is trained, as far as the options say."""
        objects = (self.config.get("provenance") or {}).get("in_memory") or {}
        return bool(self.config.get("use_peft")) or "peft_config" in objects

    @property
    def learning_rate(self) -> float:
        """The option or its default; 0 for a run whose options are not known."""
        if "learning_rate" not in self.config:
            return 0.0
        return chosen_rate(self.config.get("learning_rate"), has_adapter=self.has_adapter)

    def steps_at_full_rate(self, count: int) -> list[int]:
        """The last `count` steps that trained the policy at half of the largest learning rate or more, which is that of
        the first steps or, with a warm-up, at least the option's; empty if there are fewer.
        """
        peak = max((rate for _, rate in self.series("objective/lr")[: 4 * count]), default=0.0)
        if self.config.get("warmup_steps"):
            peak = max(peak, self.learning_rate)
        rates = dict(self.series("objective/lr")[-4 * count :])
        trained = [step for step, _ in self.series("ppo/policy/clipfrac")[-4 * count :]]
        steps = [step for step in trained if peak > 0 and rates.get(step, 0.0) >= peak / 2]
        return steps[-count:] if len(steps) >= count else []


@dataclasses.dataclass(frozen=True)
class Found:
    """What a condition returns: the severity, and the numbers in the rule's sentence and remedy."""

    severity: DoctorSeverity
    numbers: Mapping[str, float | str]


Condition = Callable[[History], Found | None]


@dataclasses.dataclass(frozen=True)
class Rule:
    """A condition, and what is said where it holds: format strings for `Found.numbers`."""

    sentence: str
    remedy: str
    condition: Condition


RULES: dict[str, Rule] = {}


def _rule(sentence: str, remedy: str) -> Callable[[Condition], Condition]:
    """Decorates a condition: adds a rule of its name to `RULES`."""

    def add(condition: Condition) -> Condition:
        RULES[condition.__name__] = Rule(sentence, remedy, condition)
        return condition

    return add


def _error_if(is_error: bool, **numbers: float | str) -> Found:
    return Found("error" if is_error else "warning", numbers)


@_rule(
    "responses are empty before training: {name} is {share:.0%}",
    "compare the first prompt that the run prints with the model's own template, down to a newline at its end; "
    "see docs/troubleshooting.md#responses-are-empty-or-end-early",
)
def empty_answers(history: History) -> Found | None:
    """Before any training, many responses hold nothing but the token that ends them."""
    share, name = _at_start(history, "/empty_fraction", last_step=1)
    return _error_if(share > 0.5, name=name, share=share) if share > 0.1 else None


@_rule(
    "every response gets the same reward: objective/scores is {score:.4g} without any spread in {steps} steps",
    "read rollouts/ and call the reward function on a good and a bad response; take easier prompts or a better model; "
    "if the task is solved, stop here; see docs/troubleshooting.md#my-reward-does-not-rise",
)
def constant_reward(history: History) -> Found | None:
    """All responses of several steps score the same."""
    responses = (history.config.get("rollout_batch_size") or 2) * (history.config.get("num_return_sequences") or 1)
    scores = history.last(_SCORES)
    # A single response has no spread.
    if _learns_from_teacher(history) or responses < 2 or not scores:
        return None
    spreads = [value for _, value in history.series(_SPREAD)]
    # Relative to the score: float32 rounds the mean of equal scores below this.
    limit = 1e-6 * max(1.0, abs(scores[0]))
    constant_throughout = bool(spreads) and max(spreads) <= limit
    # A pass-or-fail reward may be all 0 in one small step.
    steps = 3 if constant_throughout else 5
    if len(spreads) < steps or max(spreads[-steps:]) > limit:
        return None
    return _error_if(constant_throughout, steps=steps, score=scores[0])


@_rule(
    "the reward falls: objective/scores was {start:.4g} in the first steps and is {now:.4g}, with a standard "
    "deviation of {spread:.3g} within a step",
    "lower learning_rate or ppo_epochs, or set target_kl_stop: 0.02; look at ppo/val/explained_variance, and at the "
    "sign of the reward; see docs/troubleshooting.md#my-reward-does-not-rise",
)
def reward_falling(history: History) -> Found | None:
    """The trained reward falls, on prompts whose difficulty does not change."""
    if history.config.get("dynamic_sampling") or len(history.series("ppo/policy/clipfrac")) < 3 * WINDOW:
        return None
    start, now, spread = history.start(_SCORES), history.mean(_SCORES), history.start(_SPREAD)
    # Five steps of 32 responses vary by 0.08.
    if start is None or now is None or spread is None or start - now <= 0.5 * spread:
        return None
    return Found("warning", {"start": start, "now": now, "spread": spread})


@_rule(
    "{name} is worse than before training: {now:.4g} after {start:.4g}, {stds:.2f} standard deviations lower",
    "score the logged answers of eval/ one by one and in another order: each must get the same score, and a good "
    "one a higher score than a bad one; in the next run, lower learning_rate or raise kl_coef; "
    "see docs/troubleshooting.md#the-reward-rises-and-the-text-gets-worse",
)
def eval_falling(history: History) -> Found | None:
    """A held-out score is worse than before training, by more than its standard errors explain."""
    for name in _evaluated(history):
        readings, spread = history.series(name), history.start(_SPREAD, 1)
        errors = [value for _, value in history.series(f"{name}_se")]
        has_errors = len(errors) == len(readings)
        (first_step, start), (step, now) = readings[0], readings[-1]
        # Without standard errors, two evaluations cannot tell a fall from noise.
        if first_step != 0 or len(readings) < (2 if has_errors else 3):
            continue
        std = history.at(f"{name}_std", [step])[0] or spread
        noise = 3 * math.hypot(errors[0], errors[-1]) if has_errors else 0.0
        if std and start - now > max(0.3 * std, noise):
            return _error_if(start - now > 0.5 * std, name=name, start=start, now=now, stds=(start - now) / std)
    return None


@_rule(
    "the reward rises while {name} falls: it was {best:.4g} at step {best_step:g} and is {now:.4g}",
    "take the checkpoint from before the fall; in the next run, raise kl_coef, set max_kl_to_ref, or use more prompts "
    "or a better reward; see docs/troubleshooting.md#the-reward-rises-and-the-text-gets-worse",
)
def overoptimization(history: History) -> Found | None:
    """The trained reward rises while an evaluation, or one of its sources, falls (Gao et al., 2022)."""
    rewards, spread = history.mean(_SCORES), history.start(_SPREAD)
    if rewards is None or spread is None:
        return None
    sources = [name for name in history.names if name.startswith(f"{_SCORES}/")]
    # A source with a negative weight is meant to fall.
    if len(sources) < 2 or min(history.config.get("reward_weights") or [0]) < 0:
        sources = []
    for name in [*sources, *_evaluated(history)]:
        # Measured healthy runs stay within 0.15 standard deviations of their best; over-optimized ones pass 1.
        if name in sources:
            readings = _window_means(history.series(name))
            limit = 0.3 * (history.start(_SPREAD + name.removeprefix(_SCORES)) or spread)
        else:
            readings = history.series(name)
            step = readings[-1][0]
            std = history.at(f"{name}_std", [step])[0] or spread
            limit = max(0.3 * std, 3 * history.at(f"{name}_se", [step])[0])
        if len(readings) < 3:
            continue
        best_step, best = max(readings, key=lambda reading: reading[1])
        (_, start), (_, now) = readings[0], readings[-1]
        earlier = [value for step, value in history.series(_SCORES) if step <= max(best_step, 1)]
        before = fmean(earlier[-WINDOW:] or [rewards])
        if best - now > limit and rewards - before > 0.25 * spread:
            return _error_if(start - now > limit, name=name, best=best, best_step=best_step, now=now)
    return None


def _window_means(series: Sequence[tuple[int, float]]) -> Sequence[tuple[int, float]]:
    """The last step and the mean of each window in the last 1000 steps; empty unless a window has just ended."""
    trained = [(step, value) for step, value in series if step > 0]
    if len(trained) % WINDOW:
        return []
    windows = [trained[i : i + WINDOW] for i in range(0, len(trained), WINDOW)][-(1000 // WINDOW) :]
    return [(window[-1][0], sum(value for _, value in window) / WINDOW) for window in windows]


@_rule(
    "most prompts give no gradient: the responses to {share:.0%} of them all have the same score",
    "set dynamic_sampling: 3, or raise num_return_sequences; see docs/troubleshooting.md#my-reward-does-not-rise",
)
def uniform_groups(history: History) -> Found | None:
    """Most prompts give no gradient: their responses all score the same, though not those of all prompts."""
    share = history.mean("objective/uniform_groups")
    if share is None or share <= 0.9 or _learns_from_teacher(history) or constant_reward(history):
        return None
    return Found("warning", {"share": share})


def _learns_from_teacher(history: History) -> bool:
    """Whether responses with the same score may have different rewards."""
    return history.config.get("teacher_model_name_or_path") is not None


@_rule(
    "the policy does not move: in ten steps, updates of at most {update:.2g} and a KL to the reference of at most "
    "{kl:.2g} nats per token, with a gradient norm of {norm:.2g} and a learning rate of {rate:.2g}",
    "{remedy} (docs/getting-started.md#learning-rates has the usual ones), or lower the weight of the KL penalty; "
    "with a gradient of 0, look at the reward; see docs/troubleshooting.md#my-reward-does-not-rise",
)
def policy_does_not_move(history: History) -> Found | None:
    """After ten steps at the full learning rate, the policy has hardly changed."""
    steps = history.steps_at_full_rate(10)
    # Updates are measured before the optimizer step; with a single one, only the KL to the reference shows a change.
    several_updates = (history.last("ppo/policy/optimizer_steps") or [1.0])[0] > 1
    with_reference = history.config.get("reference") != "none" and bool(history.series(_KL))
    if not steps or not (several_updates or with_reference) or constant_reward(history):
        return None
    update = max(history.at("ppo/policy/approx_kl_k3", steps))
    kl = max(map(abs, history.at(_KL, steps))) if with_reference else 0.0
    # Nats per token. Healthy runs: updates of 1e-3 and a KL of 0.02 by then.
    if update > 1e-5 or kl > 1e-3:
        return None
    # Rounding in float32 gives updates of 1e-13; k1 has a noise of 1e-5 beside them.
    frozen = update <= 1e-8 and kl <= (1e-4 if several_updates else 1e-5)
    norm, rate = max(history.at("ppo/policy/grad_norm", steps)), max(history.at("objective/lr", steps))
    remedy = "raise learning_rate tenfold"
    if history.has_adapter and 0 < history.learning_rate < 1e-5:
        remedy = "set learning_rate: 1e-5 or more, because adapters take ten times the rate of all weights"
    return _error_if(frozen, update=update, kl=kl, norm=norm, rate=rate, remedy=remedy)


@_rule(
    "the KL runs away: objective/kl_avg_seq is {now:.3g} nats per token",
    "read the responses; raise kl_coef, let it follow the KL (kl_controller: horizon with target_kl), lower "
    "learning_rate, or end the run at max_kl_to_ref; see docs/troubleshooting.md#the-kl-runs-away",
)
def kl_runaway(history: History) -> Found | None:
    """The policy leaves the reference far behind."""
    now, earlier = history.mean(_KL), history.last(_KL, 20 + WINDOW)[:WINDOW]
    if now is None or history.config.get("reference") == "none":
        return None
    # Nats per token; below 0.25, every KL grows from 0 by large factors.
    grew = bool(earlier) and now > max(0.25, 5 * sum(earlier) / WINDOW)
    is_penalized = bool(history.config.get("kl_coef") or history.config.get("kl_loss_coef"))
    return _error_if(now > 1 and is_penalized, now=now) if now > 0.5 or grew else None


@_rule(
    "the policy collapses: its entropy fell from {start:.3g} to {now:.3g} nats per token",
    "set entropy_coef: 0.001 or cliprange_high: 0.28; see docs/troubleshooting.md#the-policy-collapses",
)
def entropy_collapse(history: History) -> Found | None:
    """The policy has become almost deterministic."""
    name = "objective/entropies" if len(history.series("objective/entropies")) > 1 else "ppo/policy/entropy"
    start, recent = history.start(name, 1), history.last(name, 2)
    # A start below 0.01 nats has no entropy to lose; healthy runs keep 0.6 to 0.9 of it.
    if start is None or not recent or start < 0.01 or max(recent) >= 0.2 * start:
        return None
    first, now, spread = history.start(_SCORES), history.mean(_SCORES), history.start(_SPREAD)
    gained = first is None or now is None or spread is None or now - first > 0.25 * spread
    return _error_if(max(recent) < 0.02 * start and not gained, start=start, now=recent[-1])


@_rule(
    "responses shrink: from {start:.4g} to {now:.4g} tokens",
    "score short responses by hand; lower kl_coef if objective/non_score_rewards outweighs objective/scores, and "
    "overlong_buffer_len if it is set; see docs/troubleshooting.md#responses-shrink-or-grow",
)
def length_collapse(history: History) -> Found | None:
    """Responses shrink to a fraction of what they were."""
    start, now = history.start("objective/response_length"), history.mean("objective/response_length")
    if start is None or now is None or now >= 0.25 * start:
        return None
    # The stop token and at most one more.
    return _error_if(now < 2 and start >= 8, start=start, now=now)


@_rule(
    "responses never stop: {what}",
    "raise response_len; check the form of the prompts, and that the tokenizer's eos_token ends a turn; set "
    "penalty_reward_value, so that stopping pays; see docs/troubleshooting.md#responses-never-stop",
)
def all_truncated(history: History) -> Found | None:
    """Hardly any response ends by itself, in an evaluation before training or in the last steps."""
    is_masked = bool(history.config.get("mask_truncated"))
    share, name = _at_start(history, "/truncated_fraction", last_step=0)
    if share >= 0.9:
        # A single response that stops shows that model and run agree on what ends one.
        return _error_if(is_masked or share == 1, what=f"{name} is {share:.0%} before training")
    name = "objective/truncated_fraction"
    now, start = min(history.last(name, WINDOW), default=0.0), history.start(name, 1) or 0.0
    what = f"at least {now:.0%} are cut off in each of the last steps, {start:.0%} in the first"
    # Above a half at the start, the task or the model may need long responses.
    return _error_if(is_masked or start < 0.5, what=what) if now >= 0.9 else None


@_rule(
    "updates are too large: {update:.3g} nats per token in each step, with {clipped:.0%} of the tokens clipped",
    "try learning_rate: {rate}, fewer ppo_epochs or target_kl_stop: 0.02; see docs/troubleshooting.md#the-kl-runs-away",
)
def update_too_large(history: History) -> Found | None:
    """One step moves the policy so far that its rollouts no longer describe it."""
    update = history.mean("ppo/policy/approx_kl_k3") or 0.0
    has_ppo_clipping = (history.config.get("policy_loss") or "clip") not in _LOSSES_WITH_OTHER_CLIPPING
    clipped = (history.mean("ppo/policy/clipfrac") or 0.0) if has_ppo_clipping else 0.0
    # The largest update of healthy runs is 0.035 nats per token; 0.01 to 0.1 of the tokens are clipped.
    if update <= 0.1 and clipped <= 0.3:
        return None
    (rate,) = history.last("objective/lr") or [history.learning_rate]
    # An update grows with the square of the rate, and 0.01 nats are usual; clipped tokens hide a part of it.
    rate *= min(1 / 3, math.sqrt(0.01 / max(update, 0.01)))
    return _error_if(clipped > 0.6, update=update, clipped=clipped, rate=f"{rate:.1g}" if rate else "a third")


@_rule(
    "a loss or gradient is not finite: {count:g} updates of this step were skipped",
    "read skipped_updates.jsonl, and lower learning_rate; see docs/troubleshooting.md#a-loss-or-gradient-is-not-finite",
)
def skipped_updates(history: History) -> Found | None:
    """Optimizer steps had to be skipped, because a loss or a gradient was not finite."""
    recent = history.last("ppo/policy/skipped_updates")
    return Found("warning", {"count": recent[0]}) if recent and recent[0] > 0 else None


@_rule(
    "log-probs of the same tokens disagree before any update: {what}",
    "set old_policy: recompute, or correct where the sampler cannot be mended; try generation_backend: generate; "
    "look at dropout and hooks in custom code; see docs/troubleshooting.md#sampler-and-trainer-disagree",
)
def logprobs_disagree(history: History) -> Found | None:
    """Sampler and trainer, or old and new policy before any optimizer step, give tokens other probabilities."""
    dtypes = {history.config.get(name) or "float32" for name in ("dtype", "vllm_dtype")}
    is_bf16 = bool(history.config.get("bf16")) or dtypes != {"float32"}
    disagreements: list[Found] = []
    temperature = min(history.config.get("temperature") or 1.0, 1.0)
    # What rounding explains, in nats per token.
    limit = min(0.09 / temperature, 0.1) if is_bf16 else 1e-3
    (mismatch,) = history.last("mismatch/logprob_abs_mean") or [0.0]
    if mismatch > limit:
        is_error = mismatch > 0.1 and history.config.get("old_policy") != "correct"
        what = f"sampler and trainer by {mismatch:.3g} nats per token, of which rounding explains {limit:g}"
        disagreements.append(_error_if(is_error, what=what))
    (ratio_error,) = history.last("ppo/policy/first_ratio_error_max") or [0.0]
    # bfloat16 may double the ratio of a single unlikely token; float32 rounds by 1e-5.
    if ratio_error > (3.0 if is_bf16 else 1e-3):
        what = f"the policy's first ratio is off 1 by {ratio_error:.3g}"
        disagreements.append(_error_if(ratio_error > 0.1 and not is_bf16, what=what))
    # "error" comes before "warning".
    return min(disagreements, key=lambda disagreement: disagreement.severity, default=None)


@_rule(
    "the critic does not learn: its explained variance is {mean:.3g} on average in twenty steps",
    "raise critic_epochs, set critic_learning_rate: {rate} or critic_pretraining_steps: 10 to 50, or use no critic ("
    "adv_estimator: grpo, num_return_sequences: 8); see docs/troubleshooting.md#the-critic-does-not-learn",
)
def critic_useless(history: History) -> Found | None:
    """For twenty steps, the critic predicts the returns worse than a constant."""
    recent = history.last("ppo/val/explained_variance", 20)
    if not recent or max(recent) >= 0:
        return None
    rate = max((rate for _, rate in history.series("objective/critic_lr")), default=0.0)
    return _error_if(fmean(recent) < -1, mean=fmean(recent), rate=f"{3 * rate:.1g}" if rate else "three times its rate")


def _at_start(history: History, ending: str, *, last_step: int) -> tuple[float, str]:
    """The largest first value, by `last_step`, of a metric whose name has this `ending`, and the name; 0 without one.
    Step 0 is an evaluation before training.
    """
    names = [name for name in history.names if name.endswith(ending)]
    first_values = [(value, name) for name in names for step, value in history.series(name)[:1] if step <= last_step]
    return max(first_values, default=(0.0, ""))


def _evaluated(history: History) -> list[str]:
    return [name for name in history.names if name.startswith("eval/") and name.endswith("/scores")]


assert tuple(RULES) == DOCTOR_RULES, "the names that stop_on may take are those of the rules"
