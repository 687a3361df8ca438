"""`LearningOptions`, the part of `PPOConfig` about what policy and critic learn from the rollouts."""

from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import Field

from alpaca_ppo.config.fields import argument, unless, when, when_trait
from alpaca_ppo.config.run_options import SEVERAL_TURNS, RunOptions
from alpaca_ppo.registry import (
    ADV_ESTIMATORS,
    CRITIC_HEADS,
    KL_ESTIMATORS,
    POLICY_LOSSES,
    CVaRTail,
    LossAggMode,
    RolloutCorrectionLevel,
)

_CRITIC = when_trait(ADV_ESTIMATORS, "needs_critic")
_FIXED_SUPPORT = when_trait(CRITIC_HEADS, "fixed_support")
_CACHED = (_CRITIC, when("critic_layout", "auto", "cached"))
_OWN_STEPS = (_CRITIC, unless("critic_layout", "shared"))
_KL_IN_REWARD = when("kl_coef") | when("kl_controller", "fixed")
HAS_WARMUP = unless("lr_scheduler_type", "constant")
WarmupSteps = Annotated[int, Field(ge=0)] | Annotated[float, Field(ge=0, lt=1)]


def chosen_rate(given: float | None, *, has_adapter: bool) -> float:
    """Returns the policy's learning rate: `given`, or the default of an adapter, or of all weights."""
    return given if given is not None else 1e-5 if has_adapter else 1e-6


class RiskLevel(NamedTuple):
    """The mean of the distribution of returns (`alpha` None), or of its tail with the probability `alpha` in (0, 1]."""

    alpha: float | None
    tail: CVaRTail

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses the option `risk_level`: neutral, or a probability such as 0.1 or upper:0.2; else a `ValueError`."""
        if text == "neutral":
            return cls(None, "lower")
        try:
            alpha = float(text.removeprefix("upper:"))
        except ValueError:
            alpha = 0.0
        if not 0 < alpha <= 1:
            raise ValueError(f"risk_level is {text!r}; write neutral, 0.1 (the lower tail, up to 1) or upper:0.1")
        return cls(alpha, "upper" if text.startswith("upper:") else "lower")


@dataclass(frozen=True)
class LearningOptions(RunOptions):
    """The options of advantages, policy loss, KL to the reference policy, and the critic."""

    adv_estimator: str = argument("gae", registry=ADV_ESTIMATORS, group="Advantages")
    """Advantage estimator: gae needs a critic; those that compare responses need num_return_sequences > 1."""
    gamma: float = argument(1.0, ge=0, le=1, needs=when_trait(ADV_ESTIMATORS, "needs_critic", "uses_gamma"))
    """Discount per token."""
    lam: float = argument(0.95, ge=0, le=1, needs=(_CRITIC, unless("lam_policy") | unless("lam_critic")))
    """Lambda of GAE, where lam_policy and lam_critic do not replace it."""
    lam_policy: Annotated[float, Field(ge=0, le=1)] | Literal["adaptive"] | None = argument(None, needs=_CRITIC)
    """Lambda of GAE's advantages; adaptive (VAPO) is max(0, 1 - 1 / (lam_alpha * length)) per response; null = lam."""
    lam_critic: float | None = argument(None, ge=0, le=1, needs=_CRITIC)
    """Lambda of GAE's returns, which the critic learns; 1 = no bootstrapping (VC-PPO); null = lam."""
    lam_alpha: float = argument(0.05, gt=0, needs=when("lam_policy", "adaptive"))
    """Alpha of the adaptive lam_policy: responses of at most 1 / lam_alpha tokens have lambda 0."""
    turn_gamma: float | None = argument(None, ge=0, le=1, needs=(_CRITIC, SEVERAL_TURNS))
    """Discount from a turn's last token to the next turn's first one; null = gamma."""
    turn_lam: float | None = argument(None, ge=0, le=1, needs=(_CRITIC, SEVERAL_TURNS))
    """Lambda of GAE from a turn's last token to the next turn's first one; null = the lambda within a turn."""
    whiten_advantages: bool = argument(True, needs=_CRITIC)
    """Whiten GAE's advantages over the step's rollouts."""

    policy_loss: str = argument("clip", registry=POLICY_LOSSES, group="Policy loss")
    """clip is PPO's; gspo clips one ratio per sequence, gmpo the ratios of a geometric mean; cispo clips importance
    weights, not gradients; sapo has a smooth gate; dppo bounds the change of probabilities, dppo_kl its binary KL."""
    cliprange: float = argument(0.2, gt=0, lt=1, needs=when_trait(POLICY_LOSSES, "clips"))
    """Clip range of the policy ratio (gmpo: of its logarithm; dppo: of the change; dppo_kl: of the KL)."""
    cliprange_high: float | None = argument(None, gt=0, needs=when_trait(POLICY_LOSSES, "clips"))
    """Upper clip range (clip-higher); null = cliprange on both sides."""
    clip_ratio_c: float | None = argument(None, gt=1, needs=when_trait(POLICY_LOSSES, "dual_clip"))
    """Dual clip: bound of the ratio for negative advantages; null = none. With dppo, of every ratio; null = 20."""
    loss_agg_mode: LossAggMode = "token-mean"
    """How the losses of tokens are averaged into one loss."""
    entropy_coef: float = argument(0.0, ge=0)
    """Weight of the entropy bonus."""
    positive_nll_coef: float = argument(0.0, ge=0)
    """Weight of the negative log-likelihood of responses that succeeded (VAPO: 0.1)."""
    positive_nll_threshold: float = argument(0.0, needs=when("positive_nll_coef"))
    """A response whose score, before any penalty, is above this counts as a success."""
    mask_truncated: bool = False
    """Responses without a stop token give no gradient; their scores still count where responses are compared."""
    old_policy: Literal["auto", "recompute", "rollout", "correct"] = "auto"
    """Old log-probabilities: recompute runs the trainer's forward pass; rollout takes the sampler's; correct recomputes
    them and weights the loss by their ratio. auto compares the two before the first rollout: rollout from the second
    step on if they agree in float32 and the critic is not shared, else recompute."""
    rollout_correction_level: RolloutCorrectionLevel = argument("token", needs=when("old_policy", "correct"))
    """Whether the loss has one weight per token or one per sequence."""
    rollout_correction_threshold: float = argument(2.0, gt=0, allow_inf_nan=True, needs=when("old_policy", "correct"))
    """Upper limit of a weight; .inf = no limit."""
    mismatch_action: Literal["stop", "warn", "ignore"] = "stop"
    """If the log-probabilities of sampler and trainer differ so much that an update would be meaningless: stop (with
    old_policy correct, warn), warn once, or ignore."""
    target_kl_stop: float | None = argument(None, gt=0)
    """Approximate KL to the old policy, in nats per token, above which a step's updates end."""

    kl_coef: float = argument(0.05, ge=0, group="KL to the reference policy")
    """Weight of the KL to the reference policy in the reward; 0 = none. kl_controller says whether it changes."""
    kl_estimator: str = argument("k1", registry=KL_ESTIMATORS)
    """KL estimator in the reward."""
    kl_controller: Literal["fixed", "proportional", "horizon", "scaled"] = argument("scaled", needs=_KL_IN_REWARD)
    """scaled multiplies kl_coef by the standard deviation of a step's scores, averaged over the steps so far; fixed
    keeps kl_coef; proportional (AlpacaFarm) and horizon (arXiv:1909.08593) adapt it to target_kl."""
    target_kl: float = argument(6.0, gt=0, needs=when("kl_controller", "proportional", "horizon"))
    """Target of the KL controllers, in nats per sequence; Stable-Baselines3's target_kl is target_kl_stop."""
    kl_horizon: int = argument(10000, ge=1, needs=when("kl_controller", "horizon"))
    """Horizon of the horizon controller, in responses."""
    kl_loss_coef: float = argument(0.0, ge=0)
    """Weight of the KL to the reference policy in the loss; 0 = none."""
    kl_loss_type: str = argument("k3", registry=KL_ESTIMATORS, needs=when("kl_loss_coef"))
    """KL estimator in the loss; abs and k1_clamped are refused, and the gradient of k1 is zero in expectation."""
    max_kl_to_ref: float | None = argument(None, gt=0, needs=unless("reference", "none"))
    """Value of objective/kl_sum_seq above which the run ends after the step, with a checkpoint."""

    critic: str = argument("scalar", registry=CRITIC_HEADS, group="Critic", needs=_CRITIC)
    """Critic head: scalar predicts the mean return; c51 and hl_gauss predict the probabilities of fixed returns;
    quantile and iqn predict quantiles of the return."""
    critic_layout: Literal["auto", "separate", "shared", "adapter", "cached"] = argument("auto", needs=_CRITIC)
    """separate = its own backbone; shared = a head on the policy's backbone; adapter = a second LoRA on its base;
    cached = a small transformer on states of the policy, which are computed once for each rollout; auto = cached if it
    has at most a tenth of the weights of the policy's layers, otherwise separate, as for a critic that starts from a
    model."""
    critic_layers: list[int] | None = argument(None, min_length=1, needs=_CACHED)
    """Layers of the policy, from 1, whose states a cached critic reads; null = those at 1/2 and 3/4 of the depth."""
    critic_width: int = argument(256, ge=64, multiple_of=64, needs=_CACHED)
    """Hidden size of a cached critic."""
    critic_depth: int = argument(3, ge=1, needs=_CACHED)
    """Blocks of a cached critic."""
    vf_coef: float = argument(0.1, ge=0, needs=_CRITIC)
    """Weight of the value loss."""
    cliprange_value: float | None = argument(None, gt=0, needs=(_CRITIC, when("critic", "scalar")))
    """Clip range of the scalar critic's values; null = no clipping. One range does not suit rewards of every scale."""
    value_support: list[float] = argument([-10.0, 10.0], min_length=2, max_length=2, needs=_FIXED_SUPPORT)
    """Lowest and highest return of the c51 and hl_gauss critics; returns beyond are clamped to them."""
    critic_learning_rate: float | None = argument(None, ge=0, needs=_CRITIC)
    """Learning rate of the critic; null = 3e-4 if cached, else learning_rate, times three if it has its own steps. If
    learning_rate is null too, a separate critic starts from the 1e-6 of all weights, also beside an adapter."""
    critic_lr_warmup_steps: WarmupSteps | None = argument(None, needs=(_CRITIC, HAS_WARMUP))
    """The critic's warmup_steps; null = warmup_steps."""
    critic_max_grad_norm: float | None = argument(None, gt=0, needs=_CRITIC)
    """Maximum norm of the critic's gradient; null = max_grad_norm."""
    critic_epochs: Annotated[int, Field(ge=1)] | Literal["auto"] | None = argument("auto", needs=_OWN_STEPS)
    """Epochs of the critic over each rollout, in its own optimizer steps before those of the policy; target_kl_stop
    does not end them. auto = 8 if cached, otherwise 4; null = ppo_epochs if cached or with a critic_step_batch_size,
    else none: the critic is then trained in the policy's steps, as a shared one always is."""
    critic_step_batch_size: int | None = argument(None, ge=1, needs=_OWN_STEPS)
    """Responses in an optimizer step of the critic, which then always has its own steps; null = step_batch_size."""
    critic_pretraining_steps: int = argument(0, ge=0, needs=_CRITIC)
    """First steps, in which the critic alone learns, with lam_critic 1; the policy's schedule begins after them."""
    init_value_with_reward: bool = argument(False, needs=(_CRITIC, when("critic_layout", "auto", "separate")))
    """Start the critic from the reward model (a distributional one from its backbone), which makes it separate.
    Otherwise a separate one starts from the policy, a cached one from random weights."""
    quantile_huber_kappa: float = argument(1.0, gt=0, needs=when("critic", "quantile", "iqn"))
    """Error at which the loss of the quantile and iqn critics turns from quadratic to linear."""
    num_atoms: int | None = argument(None, ge=2, needs=unless("critic", "scalar"))
    """Atoms of c51 or bins of hl_gauss (null = 51), quantiles of the others (null = 32)."""
    risk_level: float | str = argument("neutral", needs=(_CRITIC, when_trait(CRITIC_HEADS, "distributional")))
    """What GAE takes from a distributional critic: neutral = the mean; 0.1 = the mean of the lowest 10 % (CVaR);
    upper:0.1 = that of the highest 10 %."""
