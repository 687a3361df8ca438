"""`LearningOptions`, the part of `PPOConfig` about what the policy learns from the rollouts."""

from dataclasses import dataclass
from typing import Literal

from alpaca_ppo.config.environment_options import EnvironmentOptions
from alpaca_ppo.config.fields import argument, unless, when, when_trait
from alpaca_ppo.registry import ADV_ESTIMATORS, KL_ESTIMATORS, POLICY_LOSSES, LossAggMode, RolloutCorrectionLevel

ADAPTIVE = "adaptive"
"""The word that `lam_policy` may be."""

_CRITIC = when_trait(ADV_ESTIMATORS, "needs_critic")


@dataclass(frozen=True)
class LearningOptions(EnvironmentOptions):
    """The options of advantages, policy loss and KL to the reference policy."""

    adv_estimator: str = argument(
        "gae",
        "Advantage estimator: gae needs a critic; those that compare responses need num_return_sequences > 1.",
        registry=ADV_ESTIMATORS,
        group="Advantages",
    )
    gamma: float = argument(
        1.0,
        "Discount per token.",
        at_least=0,
        at_most=1,
        needs=when_trait(ADV_ESTIMATORS, "needs_critic", "uses_gamma"),
    )
    lam: float = argument(0.95, "Lambda of GAE.", at_least=0, at_most=1, needs=_CRITIC)
    lam_policy: float | str | None = argument(
        None,
        "Lambda of GAE's advantages: a number; adaptive = 1 - 1 / (lam_alpha * length), at least 0, for each response "
        "(VAPO); null = lam.",
        at_least=0,
        at_most=1,
        needs=_CRITIC,
    )
    lam_critic: float | None = argument(
        None,
        "Lambda of GAE's returns, which the critic learns; 1 = no bootstrapping (VC-PPO); null = lam.",
        at_least=0,
        at_most=1,
        needs=_CRITIC,
    )
    lam_alpha: float = argument(
        0.05,
        "With lam_policy adaptive: responses of at most 1 / lam_alpha tokens have lambda 0.",
        above=0,
        needs=when("lam_policy", ADAPTIVE),
    )
    turn_gamma: float | None = argument(
        None,
        "Discount from a turn's last token to the next turn's first one; null = gamma.",
        at_least=0,
        at_most=1,
        needs=(_CRITIC, when("environments or tools")),
    )
    turn_lam: float | None = argument(
        None,
        "Lambda of GAE from a turn's last token to the next turn's first one; null = that within a turn.",
        at_least=0,
        at_most=1,
        needs=(_CRITIC, when("environments or tools")),
    )
    whiten_advantages: bool = argument(True, "Whiten GAE's advantages over the step's rollouts.", needs=_CRITIC)

    policy_loss: str = argument(
        "clip",
        "clip is PPO's; gspo clips the ratio of a sequence, gmpo those in a geometric mean; cispo clips importance "
        "weights and keeps every gradient; sapo has a smooth gate; dppo bounds the change of probabilities, dppo_kl "
        "its binary KL.",
        registry=POLICY_LOSSES,
        group="Policy loss",
    )
    cliprange: float = argument(
        0.2,
        "Clip range of the policy ratio (gmpo: of its logarithm; dppo: of the change; dppo_kl: of the KL).",
        above=0,
        below=1,
        needs=when_trait(POLICY_LOSSES, "clips"),
    )
    cliprange_high: float | None = argument(
        None,
        "Upper clip range (clip-higher); null = cliprange on both sides.",
        above=0,
        needs=when_trait(POLICY_LOSSES, "clips"),
    )
    clip_ratio_c: float | None = argument(
        None,
        "Dual clip: bound of the ratio where the advantage is negative; null = none. With dppo, bound of every ratio; "
        "null = 20.",
        above=1,
        needs=when_trait(POLICY_LOSSES, "dual_clip"),
    )
    loss_agg_mode: LossAggMode = argument("token-mean", "How the losses of tokens are averaged into one loss.")
    entropy_coef: float = argument(0.0, "Weight of the entropy bonus.", at_least=0)
    positive_nll_coef: float = argument(
        0.0, "Weight of the negative log-likelihood of responses that succeeded (VAPO: 0.1).", at_least=0
    )
    positive_nll_threshold: float = argument(
        0.0, "A response whose score, before any penalty, is above this succeeded.", needs=when("positive_nll_coef")
    )
    mask_truncated: bool = argument(
        False, "Responses without a stop token give no gradient; their scores still count where responses are compared."
    )
    old_policy: Literal["auto", "recompute", "rollout", "correct"] = argument(
        "auto",
        "Old log-probabilities: recompute runs the trainer's forward pass, rollout takes the sampler's, correct "
        "recomputes and weights the loss by their ratio. auto compares the two before the first rollout: rollout from "
        "the second step on if they agree in float32, else recompute.",
    )
    rollout_correction_level: RolloutCorrectionLevel = argument(
        "token", "One weight per token, or one per sequence.", needs=when("old_policy", "correct")
    )
    rollout_correction_threshold: float = argument(
        2.0, "Upper limit of a weight; .inf = no limit.", above=0, allow_inf=True, needs=when("old_policy", "correct")
    )
    mismatch_action: Literal["stop", "warn", "ignore"] = argument(
        "stop",
        "If the log-probabilities of sampler and trainer differ so much that an update would be meaningless: stop "
        "(with old_policy correct, warn), warn once, or ignore.",
    )
    target_kl_stop: float | None = argument(
        None, "Approximate KL to the old policy, in nats per token, above which a step's updates end.", above=0
    )

    kl_coef: float = argument(
        0.05,
        "Weight of the KL to the reference policy in the reward, the initial one if a controller adapts it; 0 = none.",
        at_least=0,
        group="KL to the reference policy",
    )
    kl_estimator: str = argument("k1", "KL estimator in the reward.", registry=KL_ESTIMATORS)
    kl_controller: Literal["fixed", "proportional", "horizon"] = argument(
        "fixed",
        "How kl_coef follows the observed KL: fixed, proportional (AlpacaFarm) or horizon (arXiv:1909.08593).",
        needs=when("kl_coef"),
    )
    target_kl: float = argument(
        6.0,
        "Target of the KL controllers, in nats per sequence; Stable-Baselines3's target_kl is target_kl_stop.",
        above=0,
        needs=when("kl_controller", "proportional", "horizon"),
    )
    kl_horizon: int = argument(
        10000, "Horizon of the horizon controller, in responses.", at_least=1, needs=when("kl_controller", "horizon")
    )
    kl_loss_coef: float = argument(0.0, "Weight of the KL to the reference policy in the loss; 0 = none.", at_least=0)
    kl_loss_type: str = argument(
        "k3",
        "KL estimator in the loss, not abs or k1_clamped; the gradient of k1 is zero in expectation.",
        registry=KL_ESTIMATORS,
        needs=when("kl_loss_coef"),
    )
    max_kl_to_ref: float | None = argument(
        None,
        "Value of objective/kl_sum_seq above which a step ends the run, with a checkpoint.",
        above=0,
        needs=unless("reference", "none"),
    )
