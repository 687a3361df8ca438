"""Rules about the policy: whether it moves, how far from the reference, what its responses become, and its updates."""

from statistics import fmean, median

from alpaca_ppo.doctor.advice import counted, either, kl_weights, smaller_updates, stronger_kl, weaker_kl
from alpaca_ppo.doctor.finding import Finding
from alpaca_ppo.doctor.history import History
from alpaca_ppo.doctor.limits import count, limit
from alpaca_ppo.doctor.reward_rules import constant_reward

_KL = "objective/kl_avg_seq"
_UNCLIPPED_LOSSES = ("sapo", "cispo", "dppo", "gspo")
"""Losses whose clip fraction means something else than PPO's, or whose range is hundreds of times narrower."""


def policy_does_not_move(history: History) -> Finding | None:
    """After ten steps, the policy is still what it was."""
    steps = history.steps_at_full_rate(count("policy_still_steps"))
    if not steps:
        return None
    # With one optimizer step, the old and the new policy are compared before it, so that only the reference can tell.
    several = (history.last("ppo/policy/optimizer_steps", 1) or [1.0])[0] > 1
    with_reference = history.config.get("reference") != "none" and history.count(_KL) > 0
    if not (several or with_reference):
        return None
    update = max((history.value_at("ppo/policy/approx_kl_k3", step) or 0.0 for step in steps), default=0.0)
    kl = max((abs(history.value_at(_KL, step) or 0.0) for step in steps), default=0.0)
    if update > limit("policy_still_update") or (with_reference and kl > limit("policy_still_kl")):
        return None
    norm = max((history.value_at("ppo/policy/grad_norm", step) or 0.0 for step in steps), default=0.0)
    rate = max(history.value_at("objective/lr", step) or 0.0 for step in steps)
    measured = [f"old and new policy differ by at most {update:.2g} nats per token"] if several else []
    measured += [f"policy and reference differ by at most {kl:.2g} nats per token"] if with_reference else []
    frozen_kl = limit("policy_frozen_kl" if several else "policy_frozen_kl_alone")
    frozen = update <= limit("policy_frozen_update") and (not with_reference or kl <= frozen_kl)
    if norm == 0.0 and constant_reward(history) is not None:
        return None
    if norm == 0.0:
        cause = "the gradient is exactly 0: all advantages are, as with a reward that is the same for every response"
        remedy = "look at objective/scores_std and at objective/uniform_groups, and mend the reward"
    else:
        held = kl_weights(history)
        cause = f"a learning_rate of {rate:.3g} is too small for this model"
        cause += f", or the KL penalty ({held}) holds the policy at the start" if held else ""
        remedy = (
            "raise learning_rate tenfold (full fine-tuning of small models: 1e-5 to 3e-4, of large ones: 1e-6 to 1e-5, "
            "LoRA ten times as much)"
        )
        if "kl_coef" in held:
            remedy += "; lower kl_coef if objective/non_score_rewards is as large as objective/scores_std"
    return Finding(
        history.step,
        "policy_does_not_move",
        "error" if frozen else "warning",
        "the policy does not move" if frozen else "the policy hardly moves",
        f"in {len(steps)} steps, {', and '.join(measured)}; ppo/policy/grad_norm is at most {norm:.2g}, objective/lr "
        f"{rate:.2g}",
        cause,
        remedy,
    )


def kl_runaway(history: History) -> Finding | None:
    """The policy leaves the reference far behind."""
    window, steps = count("window"), count("kl_growth_steps")
    recent = history.last(_KL, window)
    if not recent or history.config.get("reference") == "none":
        return None
    now = fmean(recent)
    earlier = history.last(_KL, steps + window)[:window]
    grew = bool(earlier) and now > limit("kl_growth") * max(fmean(earlier), 0.0) and now > limit("kl_growth_floor")
    if now <= limit("kl_per_token") and not grew:
        return None
    total = history.last("objective/kl_sum_seq", window)
    evidence = f"{_KL} is {now:.3g} nats per token (mean of {window} steps)"
    evidence += f", {fmean(total):.3g} per response" if total else ""
    evidence += f"; {steps} steps before, it was {fmean(earlier):.3g}" if earlier else ""
    if history.penalizes_kl or not history.config:
        cause = "a KL penalty that is too weak for the reward, or updates that are too large"
    else:
        cause = "nothing in this run holds the KL back: it has no KL penalty"
    adaptive = "kl_coef" in kl_weights(history) and history.config.get("kl_controller") in (None, "fixed")
    held = either(
        stronger_kl(history),
        "let it follow the KL (kl_controller: horizon with a target_kl)" if adaptive else "",
        "lower learning_rate",
        "end the run at max_kl_to_ref",
    )
    return Finding(
        history.step,
        "kl_runaway",
        "error" if now > limit("kl_per_token_error") and history.penalizes_kl else "warning",
        "the policy runs away from the reference",
        evidence,
        cause,
        f"{held}; a policy this far away has usually left fluent text: read its responses",
    )


def negative_kl(history: History) -> Finding | None:
    """The KL to the reference stays negative, which no policy's own samples allow."""
    recent = history.last(_KL, count("negative_kl_steps"))
    if not recent or fmean(recent) >= limit("negative_kl") or history.config.get("kl_estimator", "k1") != "k1":
        return None
    return Finding(
        history.step,
        "negative_kl",
        "warning",
        "the KL to the reference is negative",
        f"{_KL} is {fmean(recent):.3g} nats per token over {len(recent)} steps; an expected KL is at least 0",
        "the responses are not samples of the policy that is evaluated: a sampler that changes the logits (top_p, "
        "top_k, another temperature), or a difference between sampler and trainer",
        "look at mismatch/logprob_abs_mean, sample with the run's temperature alone, or set old_policy: correct",
    )


def entropy_collapse(history: History) -> Finding | None:
    """The policy has become almost deterministic."""
    name = _entropy_of(history)
    start, recent = history.first(name, 1), history.last(name, 2)
    if not (start and recent) or start[0] < limit("entropy_floor"):
        return None
    if max(recent) >= limit("entropy_collapse") * start[0]:
        return None
    window = count("window")
    first, now = history.first("objective/scores", window), history.last("objective/scores", window)
    spread = history.first("objective/scores_std", window)
    gained = not (first and now and spread) or fmean(now) - fmean(first) > limit("reward_rise_stds") * fmean(spread)
    useless = max(recent) < limit("entropy_collapse_error") * start[0] and not gained
    return Finding(
        history.step,
        "entropy_collapse",
        "error" if useless else "warning",
        "the entropy has collapsed",
        f"{name} fell from {start[0]:.3g} to {recent[-1]:.3g} nats per token"
        + (", and the reward has not risen" if useless else ""),
        "the policy has settled on few responses: there is little left to explore, and to learn from",
        f"set entropy_coef (0.001 to 0.01) or cliprange_high (0.28); {stronger_kl(history)}; lower learning_rate"
        + ("; sample at temperature: 1" if (history.config.get("temperature") or 1.0) < 1 else ""),
    )


def entropy_explosion(history: History) -> Finding | None:
    """The policy's distribution dissolves into noise."""
    name = _entropy_of(history)
    start, recent = history.first(name, 1), history.last(name, 2)
    if not (start and recent) or min(recent) <= max(limit("entropy_explosion") * start[0], start[0] + 0.5):
        return None
    bonus = (history.config.get("entropy_coef") or 0.0) > 0
    return Finding(
        history.step,
        "entropy_explosion",
        "warning",
        "the entropy explodes",
        f"{name} rose from {start[0]:.3g} to {recent[-1]:.3g} nats per token",
        either("an entropy_coef that outweighs the reward" if bonus else "", "updates that destroy the model"),
        f"read the responses; {either('lower entropy_coef' if bonus else '', 'lower learning_rate')}, and set "
        "target_kl_stop: 0.02",
    )


def _entropy_of(history: History) -> str:
    return "objective/entropies" if history.count("objective/entropies") > 1 else "ppo/policy/entropy"


def length_explosion(history: History) -> Finding | None:
    """Responses grow until many are cut off."""
    window = count("window")
    start, recent = (
        history.first("objective/response_length", window),
        history.last("objective/response_length", window),
    )
    cut = history.last("objective/truncated_fraction", window)
    if not (start and recent and cut):
        return None
    if fmean(recent) <= limit("length_growth") * fmean(start) or fmean(cut) <= limit("length_growth_truncated"):
        return None
    return Finding(
        history.step,
        "length_explosion",
        "warning",
        "the responses grow until they are cut off",
        f"objective/response_length rose from {fmean(start):.4g} to {fmean(recent):.4g} tokens; "
        f"{fmean(cut):.0%} of the responses end at a limit, without a stop token",
        "a reward that favors length, or a policy that has forgotten to stop",
        f"set penalty_reward_value for responses that do not stop, or overlong_buffer_len; {stronger_kl(history)}; "
        "raise response_len if long responses are wanted",
    )


def length_collapse(history: History) -> Finding | None:
    """Responses shrink to a fraction of what they were."""
    window = count("window")
    start, recent = (
        history.first("objective/response_length", window),
        history.last("objective/response_length", window),
    )
    if not (start and recent) or fmean(recent) >= limit("length_collapse") * fmean(start):
        return None
    weaker = weaker_kl(history)
    empty = fmean(recent) < limit("length_empty") and fmean(start) >= limit("length_empty_start")
    return Finding(
        history.step,
        "length_collapse",
        "error" if empty else "warning",
        "the responses are empty" if empty else "the responses collapse to a few tokens",
        f"objective/response_length fell from {fmean(start):.4g} to {fmean(recent):.4g} tokens",
        "a reward that short answers satisfy, or tokens that cost more than they earn"
        + (" (the KL penalty)" if weaker else ""),
        "score short answers by hand"
        + weaker
        + ("; lower overlong_penalty_factor" if history.config.get("overlong_buffer_len") else ""),
    )


def all_truncated(history: History) -> Finding | None:
    """Hardly any response ends by itself."""
    name, window = "objective/truncated_fraction", count("window")
    start, recent = history.first(name, 1), history.last(name, window)
    if not recent or min(recent) < limit("all_truncated"):
        return None
    from_start = start[0] >= limit("truncated_at_start")
    masked = bool(history.config.get("mask_truncated"))
    limits = "max_turns, max_turn_tokens, max_policy_tokens or " if history.last("objective/turns", 1) else ""
    length = history.last("objective/response_length", 1)
    evidence = f"{name} is at least {min(recent):.2f} in the last {window} steps ({start[0]:.2f} in the first)"
    evidence += f"; the responses have {length[0]:.4g} tokens on average" if length else ""
    evidence += f", with response_len {history.config['response_len']}" if history.config.get("response_len") else ""
    remedy = (
        f"raise {limits}response_len, and check that the prompts have the form on which the model was fine-tuned and "
        "that the tokenizer's eos_token is its stop token; set penalty_reward_value, so that stopping pays"
        if from_start
        else f"set penalty_reward_value, so that stopping pays; {stronger_kl(history)}; start from an "
        "earlier checkpoint"
    )
    return Finding(
        history.step,
        "all_truncated",
        "warning" if from_start and not masked else "error",
        "almost every response is cut off",
        evidence + ("; mask_truncated leaves all of these out" if masked else ""),
        f"a {limits}response_len below what the task needs, or a base model or a template that never emits the stop "
        "token"
        if from_start
        else "the policy has learned not to stop",
        f"{remedy}. If responses of full length are meant, ignore this",
    )


def grad_norm_spike(history: History) -> Finding | None:
    """A gradient is many times as large as those before it."""
    for part, bound in (("policy", "max_grad_norm"), ("val", "critic_max_grad_norm")):
        name = f"ppo/{part}/grad_norm"
        values = [value for _, value in history.series(name)[-count("grad_spike_steps") - 1 :]]
        if len(values) <= count("grad_spike_steps") // 2:
            continue
        usual, now = median(values[:-1]), values[-1]
        clipped_to = history.config.get(bound) or history.config.get("max_grad_norm") or 0.0
        if now <= limit("grad_spike") * usual or now <= clipped_to:
            continue
        owner, rate = ("policy", "learning_rate") if part == "policy" else ("critic", "critic_learning_rate")
        bound = bound if history.config.get(bound) else "max_grad_norm"
        times = f", {now / usual:.0f} times as large as usual" if usual > 0 else ""
        clipped = f". It is clipped to {clipped_to:g}" if clipped_to else ""
        return Finding(
            history.step,
            "grad_norm_spike",
            "error" if now > limit("grad_spike_error") * usual else "warning",
            f"the gradient of the {owner} spikes",
            f"{name} is {now:.3g}{times}; the median of the {len(values) - 1} steps before is {usual:.3g}{clipped}",
            "an unusual batch (a reward of another size, a very long response), or a model that becomes unstable",
            f"look at the step's rollouts; if it recurs, lower {rate} or {bound}, and bound the rewards",
        )
    return None


def skipped_updates(history: History) -> Finding | None:
    """Optimizer steps had to be skipped, because a loss or a gradient was not finite."""
    recent = history.last("ppo/policy/skipped_updates", 1)
    if not recent or recent[0] == 0:
        return None
    return Finding(
        history.step,
        "skipped_updates",
        "warning",
        "updates are skipped",
        f"{counted(round(recent[0]), 'optimizer step')} of this step had a loss or a gradient that is not finite",
        either(
            "half precision that overflows" if history.half_precision else "",
            "weights that have become too large",
            "a reward that is not finite",
        ),
        "read skipped_updates.jsonl for the prompts and the cause, and lower learning_rate",
    )


def clip_fraction_high(history: History) -> Finding | None:
    """The clipping of the ratio stops a large part of each batch."""
    window = count("window")
    recent = history.last("ppo/policy/clipfrac", window)
    if not recent or history.config.get("policy_loss", "clip") in _UNCLIPPED_LOSSES:
        return None
    if fmean(recent) <= limit("clip_high"):
        return None
    return Finding(
        history.step,
        "clip_fraction_high",
        "error" if fmean(recent) > limit("clip_high_error") else "warning",
        "a large part of each batch is clipped",
        f"ppo/policy/clipfrac is {fmean(recent):.2f} (mean of {window} steps); 0.01 to 0.1 is usual",
        "updates that are too large: the policy leaves the clip range within the first optimizer steps of a rollout",
        f"{smaller_updates(history)}, raise step_batch_size, or set target_kl_stop: 0.02",
    )


def clip_fraction_zero(history: History) -> Finding | None:
    """No ratio ever reaches the clip range, so that larger or more updates would be possible."""
    steps = history.steps_at_full_rate(count("clip_zero_steps"))
    if not steps or history.config.get("policy_loss", "clip") in _UNCLIPPED_LOSSES:
        return None
    if (history.last("ppo/policy/optimizer_steps", 1) or [1.0])[0] <= 1:
        return None
    if any(history.value_at("ppo/policy/clipfrac", step) != 0.0 for step in steps):
        return None
    return Finding(
        history.step,
        "clip_fraction_zero",
        "info",
        "nothing is ever clipped",
        f"ppo/policy/clipfrac is 0 in {len(steps)} steps with several optimizer steps each",
        "updates that are small beside the clip range",
        "raise learning_rate or ppo_epochs if the reward rises too slowly",
    )


def update_too_large(history: History) -> Finding | None:
    """One step moves the policy so far that its rollouts no longer describe it."""
    window = count("window")
    recent = history.last("ppo/policy/approx_kl_k3", window)
    if not recent or fmean(recent) <= limit("update_kl"):
        return None
    return Finding(
        history.step,
        "update_too_large",
        "warning",
        "each update changes the policy a lot",
        f"ppo/policy/approx_kl_k3 is {fmean(recent):.3g} nats per token (mean of {window} steps)",
        "a learning_rate that is too large, or too many optimizer steps on the same rollouts",
        f"{smaller_updates(history)}, or set target_kl_stop: 0.02",
    )


def sampler_mismatch(history: History) -> Finding | None:
    """Sampler and trainer give the same tokens different probabilities."""
    recent = history.last("mismatch/logprob_abs_mean", 1)
    bound = limit("mismatch_half" if history.half_precision else "mismatch_float32")
    if history.half_precision:
        bound = min(bound / min(history.config.get("temperature") or 1.0, 1.0), limit("mismatch_error"))
    if not recent or recent[0] <= bound:
        return None
    corrected = history.config.get("old_policy") == "correct"
    return Finding(
        history.step,
        "sampler_mismatch",
        "error" if recent[0] > limit("mismatch_error") and not corrected else "warning",
        "sampler and trainer disagree",
        f"mismatch/logprob_abs_mean is {recent[0]:.3g} nats per token; rounding explains {bound:g} at most",
        "a model whose recurrent state or padding makes sampling differ from one pass over the row (RecurrentGemma "
        "through generate: 0.2 nats), a sampler with other logits or older weights, or dropout",
        "try generation_backend: generate, or rollout_per_device_batch_size equal to num_return_sequences; "
        + ("" if corrected else "set old_policy: correct, which weights the loss by the ratio; ")
        + "docs/troubleshooting.md has the causes one by one",
    )


def first_ratio_off(history: History) -> Finding | None:
    """Before the first optimizer step, the ratio of new and old policy is not 1."""
    recent = history.last("ppo/policy/first_ratio_error_max", 1)
    half = history.half_precision
    if not recent or recent[0] <= limit("first_ratio_half" if half else "first_ratio_float32"):
        return None
    from_sampler = (history.last("mismatch/recomputed", 1) or [1.0])[0] == 0 or history.config.get("old_policy") in (
        "rollout",
        "correct",
    )
    return Finding(
        history.step,
        "first_ratio_off",
        "error" if recent[0] > limit("first_ratio_error") and not half else "warning",
        "the first ratio is not 1",
        f"ppo/policy/first_ratio_error_max is {recent[0]:.3g}: before any update, a token's probability differs from "
        "the one that the loss calls old",
        "the old log-probs are the sampler's, which differs from the trainer"
        if from_sampler
        else "dropout or another random part of the model, an overridden hook that changes the log-probs or the mask, "
        "or attention that depends on the rows of a batch",
        "set old_policy: recompute"
        if from_sampler
        else "switch dropout off in a custom model; try padding_free: false",
    )
