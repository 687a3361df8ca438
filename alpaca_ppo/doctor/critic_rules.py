"""Rules about the critic: whether its values help, are on the scale of the returns, and can represent them."""

from statistics import fmean

from alpaca_ppo.doctor.advice import either
from alpaca_ppo.doctor.finding import Finding
from alpaca_ppo.doctor.history import History
from alpaca_ppo.doctor.limits import count, limit


def critic_useless(history: History) -> Finding | None:
    """For many steps, the critic predicts the returns worse than a constant."""
    recent = history.last("ppo/val/explained_variance", count("critic_useless_steps"))
    if not recent or max(recent) >= 0:
        return None
    return Finding(
        history.step,
        "critic_useless",
        "error" if fmean(recent) < limit("critic_harmful") else "warning",
        "the critic is worse than a constant",
        f"ppo/val/explained_variance is below 0 in all of the last {len(recent)} steps, {fmean(recent):.3g} on average",
        "a critic that learns too slowly or diverges, a start on another scale, or returns that change faster than it "
        "follows",
        "try another critic_learning_rate (ten times learning_rate is usual), critic_pretraining_steps: 10 to 50, or "
        "more steps of the critic (critic_epochs, critic_step_batch_size); look at init_value_with_reward and "
        "lam_critic: 1; or do without a critic: adv_estimator: rloo or grpo with num_return_sequences above 1",
    )


def critic_off_scale(history: History) -> Finding | None:
    """The values lie far from the returns, or vary much more."""
    steps, mean_name = count("critic_offset_steps"), "ppo/val/mean"
    if history.count("ppo/val/distribution_mean"):
        # The values that GAE reads may be those of a tail of the distribution, and lie off on purpose.
        mean_name = "ppo/val/distribution_mean"
    means, returns = history.last(mean_name, steps), history.last("ppo/returns/mean", steps)
    spreads, variances = history.last("ppo/val/var", steps), history.last("ppo/returns/var", steps)
    if not (means and returns and spreads and variances) or history.count(mean_name) < 2 * steps:
        return None
    if fmean(variances) <= 1e-12:
        return None
    offset = fmean(means) - fmean(returns)
    scale = fmean(variances) ** 0.5
    too_wide = fmean(spreads) > limit("critic_spread") * fmean(variances)
    if abs(offset) <= limit("critic_offset_stds") * scale and not too_wide:
        return None
    return Finding(
        history.step,
        "critic_off_scale",
        "warning",
        "the values are off scale",
        f"in the last {steps} steps, values have mean {fmean(means):.3g} and variance {fmean(spreads):.3g}, returns "
        f"mean {fmean(returns):.3g} and variance {fmean(variances):.3g}",
        "a critic that starts on another scale, or learns too slowly",
        either(
            "set critic_pretraining_steps",
            "raise critic_learning_rate",
            "scale the reward to a standard deviation of about 1 (reward_weights)",
        ),
    )


def returns_outside_support(history: History) -> Finding | None:
    """Returns lie outside the range that a distributional critic can represent."""
    window = count("window")
    outside, edges = history.last("ppo/val/outside_support", window), history.last("ppo/val/edge_mass", window)
    share = fmean(outside) if outside else 0.0
    at_edges = fmean(edges) if edges else 0.0
    if share <= limit("outside_support") and at_edges <= limit("edge_mass"):
        return None
    low, high = history.config.get("value_support") or (-10.0, 10.0)
    mean, variance = history.last("ppo/returns/mean", 1), history.last("ppo/returns/var", 1)
    found = ""
    if mean and variance:
        found = f"; the returns have mean {mean[0]:.3g} and standard deviation {variance[0] ** 0.5:.3g}"
    return Finding(
        history.step,
        "returns_outside_support",
        "error" if share > limit("outside_support_error") else "warning",
        "the critic's support does not hold the returns",
        f"{share:.1%} of the returns lie outside of value_support ([{low:g}, {high:g}]), and {at_edges:.1%} of "
        f"the predicted probability lies on these ends{found}",
        "a support that was chosen for other rewards"
        + ("; the KL penalty is part of the returns, too" if history.config.get("use_kl_in_reward") else ""),
        "set value_support to the smallest and largest return with some room, or use critic: quantile, which "
        "needs none",
    )
