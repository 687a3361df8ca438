"""Rules about time: what an update computes for nothing, and which phase of a step takes most of it."""

from statistics import fmean

from alpaca_ppo.doctor.advice import counted
from alpaca_ppo.doctor.finding import Finding
from alpaca_ppo.doctor.history import History
from alpaca_ppo.doctor.limits import count, limit

_PHASES = {
    "score": (
        "scoring",
        "reward functions or models that are slow or called one after another",
        "make functions async, or score whole batches",
    ),
    "rollout": (
        "sampling",
        "long responses, few of them at a time",
        "raise rollout_per_device_batch_size, lower response_len, or use a faster generation backend "
        "(docs/performance.md)",
    ),
    "logprobs": (
        "computing log-probs",
        "forward passes in small batches",
        "raise rollout_per_device_batch_size, and leave old_policy: auto, which takes the sampler's log-probs where "
        "the two agree",
    ),
    "update": (
        "updating",
        "many optimizer steps on each rollout, or small micro-batches",
        "lower ppo_epochs, or raise step_per_device_batch_size or max_tokens_per_micro_batch",
    ),
}


def padding(history: History) -> Finding | None:
    """Updates compute mostly padding."""
    window = count("window")
    recent = history.last("ppo/padding_fraction", window)
    if not recent or fmean(recent) <= limit("padding"):
        return None
    off = history.config.get("padding_free") in (False, "false")
    return Finding(
        history.step,
        "padding",
        "warning",
        "most of what an update computes is padding",
        f"ppo/padding_fraction is {fmean(recent):.2f} (mean of {window} steps)",
        "rows of very different lengths in a micro-batch"
        + (" with padding_free: false" if off else ", of a model that cannot read rows without padding"),
        f"set {'padding_free: auto' if off else 'another attn_implementation'} or a smaller max_tokens_per_micro_batch",
    )


def phase_dominates(history: History) -> Finding | None:
    """One phase takes most of a step."""
    window = count("window")
    steps = history.last("time/step", window)
    if not steps or fmean(steps) < limit("phase_seconds"):
        return None
    for phase, (doing, cause, remedy) in _PHASES.items():
        seconds = history.last(f"time/{phase}", window)
        if seconds and sum(seconds) > limit(f"phase_{phase}") * sum(steps):
            return Finding(
                history.step,
                "phase_dominates",
                "info",
                f"{doing} takes most of the time",
                f"time/{phase} is {fmean(seconds):.3g} s, of {fmean(steps):.3g} s for a step",
                cause,
                remedy,
            )
    return None


def evaluation_dominates(history: History) -> Finding | None:
    """Evaluating takes longer than training."""
    evaluations, steps = history.series("time/eval"), history.series("time/step")
    # The evaluations before and after training are there whatever eval_steps is.
    between = [seconds for step, seconds in evaluations if step > 0]
    if len(between) < 2 or not history.config.get("eval_steps"):
        return None
    recent = [seconds for step, seconds in steps[-count("window") :]]
    per_step = fmean(recent) * history.config["eval_steps"]
    share = between[-1] / (between[-1] + per_step)
    if share <= limit("phase_eval") or between[-1] < limit("phase_seconds"):
        return None
    return Finding(
        history.step,
        "evaluation_dominates",
        "info",
        "evaluating takes longer than training",
        f"an evaluation takes {between[-1]:.3g} s, and the training between two of them "
        f"({counted(history.config['eval_steps'], 'step')}) {per_step:.3g} s",
        "many or long held-out responses, evaluated often",
        "raise eval_steps, or evaluate on fewer prompts",
    )
