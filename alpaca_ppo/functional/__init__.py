"""The mathematics of PPO as pure functions of tensors, and the decorators that register estimators and losses.

The modules import only torch, the standard library and `alpaca_ppo.registry`. Masks are bool, True = counts; entries
where the mask is False, NaN included, affect neither results nor gradients. Half-precision inputs are computed and
returned in float32, float64 inputs in float64. No function modifies its inputs or communicates with other processes.
"""

from alpaca_ppo.functional.advantages import (
    AdvantageInputs,
    Advantages,
    decoupled_gae,
    gae,
    length_adaptive_lam,
    register_adv_estimator,
    reinforce_plus_plus,
    remax,
)
from alpaca_ppo.functional.distributional import (
    c51_atoms,
    c51_loss,
    c51_project,
    cvar_from_categorical,
    cvar_from_quantiles,
    hl_gauss_centres,
    hl_gauss_loss,
    hl_gauss_project,
    hl_gauss_value,
    quantile_huber_loss,
    quantile_midpoints,
)
from alpaca_ppo.functional.groups import GROUP_ESTIMATORS, gdpo_advantages, group_advantages, informative_rows
from alpaca_ppo.functional.kl import kl_penalty, register_kl_estimator
from alpaca_ppo.functional.logprobs import chunked_logprobs, entropy_from_logits, token_logprobs
from alpaca_ppo.functional.masked import (
    LOSS_AGG_MODES,
    Loss,
    aggregate_loss,
    masked_mean,
    masked_var,
    masked_whiten,
    zero_outside,
)
from alpaca_ppo.functional.policy_losses import (
    ROLLOUT_CORRECTION_LEVELS,
    cispo_policy_loss,
    dppo_policy_loss,
    gmpo_policy_loss,
    gspo_policy_loss,
    policy_loss,
    positive_nll_loss,
    register_policy_loss,
    rollout_correction_weights,
    sapo_policy_loss,
)
from alpaca_ppo.functional.shaping import last_token_index, overlong_penalty, response_lengths, shape_rewards
from alpaca_ppo.functional.value_losses import value_loss

__all__ = [
    "GROUP_ESTIMATORS", "LOSS_AGG_MODES", "ROLLOUT_CORRECTION_LEVELS", "AdvantageInputs", "Advantages", "Loss",
    "aggregate_loss", "c51_atoms", "c51_loss", "c51_project", "chunked_logprobs", "cispo_policy_loss",
    "cvar_from_categorical", "cvar_from_quantiles", "decoupled_gae", "dppo_policy_loss", "entropy_from_logits", "gae",
    "gdpo_advantages", "gmpo_policy_loss", "group_advantages", "gspo_policy_loss", "hl_gauss_centres", "hl_gauss_loss",
    "hl_gauss_project", "hl_gauss_value", "informative_rows", "kl_penalty", "last_token_index", "length_adaptive_lam",
    "masked_mean", "masked_var", "masked_whiten", "overlong_penalty", "policy_loss", "positive_nll_loss",
    "quantile_huber_loss", "quantile_midpoints", "register_adv_estimator", "register_kl_estimator",
    "register_policy_loss", "reinforce_plus_plus", "remax", "response_lengths", "rollout_correction_weights",
    "sapo_policy_loss", "shape_rewards", "token_logprobs", "value_loss", "zero_outside",
]  # fmt: skip
