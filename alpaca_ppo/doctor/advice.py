"""Pieces of the findings' sentences that depend on the run's options, so that no advice names what the run lacks."""

from alpaca_ppo.doctor.history import History


def either(*parts: str) -> str:
    """Returns the parts that are not empty as "a", "a or b", or "a, b, or c"."""
    given = [part for part in parts if part]
    if len(given) < 3:
        return " or ".join(given)
    return f"{', '.join(given[:-1])}, or {given[-1]}"


def counted(number: float, thing: str) -> str:
    """Returns "1 step", "2 steps"."""
    return f"{number:g} {thing}{'' if number == 1 else 's'}"


def kl_weights(history: History) -> str:
    """Returns the options that weigh the run's KL to the reference, joined by "and"; empty if there is no penalty."""
    if not history.penalizes_kl:
        return ""
    in_reward = history.config.get("use_kl_in_reward") and (history.config.get("kl_coef") or 0) > 0
    names = ["kl_coef"] * bool(in_reward) + ["kl_loss_coef"] * bool(history.config.get("use_kl_loss"))
    return " and ".join(names)


def stronger_kl(history: History) -> str:
    """Returns how the run could be held nearer to its reference."""
    if history.config.get("reference") == "none":
        return "train with a reference (reference: auto) and kl_coef above 0"
    if weights := kl_weights(history) or ("" if history.config else "kl_coef"):
        return f"raise {weights}"
    return "penalize the KL (use_kl_in_reward: true with kl_coef above 0)"


def weaker_kl(history: History) -> str:
    """Returns how the KL penalty could be made smaller, starting with "; "; empty if the run has none."""
    weights = kl_weights(history)
    if "kl_coef" in weights:
        return (
            f"; compare objective/non_score_rewards with objective/scores and lower {weights} if the penalty is larger"
        )
    return weights and f"; lower {weights} if the penalty outweighs the reward"


def smaller_updates(history: History) -> str:
    """Returns how a step could change the policy less."""
    several = (history.config.get("ppo_epochs") or 2) > 1
    return either("lower learning_rate", "ppo_epochs" if several else "")
