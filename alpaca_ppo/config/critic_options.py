"""`CriticOptions`, the part of `PPOConfig` about the critic and how it is trained."""

from dataclasses import dataclass
from typing import Literal

from alpaca_ppo.config.fields import argument, unless, when, when_trait
from alpaca_ppo.config.learning_options import LearningOptions
from alpaca_ppo.registry import ADV_ESTIMATORS, CRITIC_HEADS

_CRITIC = when_trait(ADV_ESTIMATORS, "needs_critic")


@dataclass(frozen=True)
class CriticOptions(LearningOptions):
    """The options of the critic."""

    critic: str = argument(
        "scalar",
        "Critic head: scalar predicts the mean return; c51 and hl_gauss a distribution over fixed returns, quantile "
        "and iqn its quantiles.",
        registry=CRITIC_HEADS,
        group="Critic",
        needs=_CRITIC,
    )
    critic_layout: Literal["separate", "shared", "adapter"] = argument(
        "separate",
        "separate = a backbone of its own; shared = a head on the policy's backbone; adapter = a second LoRA on its "
        "base.",
        needs=_CRITIC,
    )
    vf_coef: float = argument(0.1, "Weight of the value loss.", at_least=0, needs=_CRITIC)
    cliprange_value: float | None = argument(
        0.2,
        "Clip range of the scalar critic's values; null = no clipping.",
        above=0,
        needs=(_CRITIC, when("critic", "scalar")),
    )
    value_support: list[float] = argument(
        [-10.0, 10.0],
        "Lowest and highest return of the c51 and hl_gauss critics; returns beyond are clamped to them.",
        needs=when_trait(CRITIC_HEADS, "fixed_support"),
    )
    critic_learning_rate: float | None = argument(
        None, "Learning rate of the critic; null = learning_rate.", at_least=0, needs=_CRITIC
    )
    critic_lr_warmup_steps: float | None = argument(
        None,
        "The critic's warmup_steps; null = warmup_steps.",
        at_least=0,
        needs=(_CRITIC, unless("lr_scheduler_type", "constant")),
    )
    critic_max_grad_norm: float | None = argument(
        None, "Maximum norm of the critic's gradient; null = max_grad_norm.", above=0, needs=_CRITIC
    )
    critic_epochs: int | None = argument(
        None,
        "Passes of the critic over each rollout, in optimizer steps of its own that come before all of the policy's; "
        "null = the critic steps with the policy, unless critic_step_batch_size is set. target_kl_stop takes no step "
        "from it.",
        at_least=1,
        needs=_CRITIC,
    )
    critic_step_batch_size: int | None = argument(
        None,
        "Responses in an optimizer step of the critic, which then takes steps of its own, as with critic_epochs; null "
        "= step_batch_size.",
        at_least=1,
        needs=_CRITIC,
    )
    critic_pretraining_steps: int = argument(
        0,
        "Initial steps in which the policy is frozen and the critic learns Monte-Carlo returns (lam_critic 1); the "
        "policy's schedule begins after them.",
        at_least=0,
        needs=_CRITIC,
    )
    init_value_with_reward: bool = argument(
        False,
        "Initialize the critic from the reward model (a distributional one from its backbone), not the policy.",
        needs=(_CRITIC, when("critic_layout", "separate")),
    )
    quantile_huber_kappa: float = argument(
        1.0,
        "Error at which the loss of the quantile and iqn critics turns from quadratic to linear.",
        above=0,
        needs=when("critic", "quantile", "iqn"),
    )
    num_atoms: int | None = argument(
        None,
        "Atoms of c51 or bins of hl_gauss (null = 51), quantiles of the others (null = 32).",
        at_least=2,
        needs=unless("critic", "scalar"),
    )
    risk_level: str = argument(
        "neutral",
        "What GAE takes from a distributional critic: neutral = the mean; 0.1 = the mean of that lower tail (CVaR); "
        "upper:0.1 = of that upper tail.",
        needs=(_CRITIC, when_trait(CRITIC_HEADS, "distributional")),
    )
