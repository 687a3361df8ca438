"""The rows of the table: which options each one changes in `examples/configs/long_horizon.yaml`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Settings = dict[str, Any]

GRADES = "examples.long_horizon.task:grades"
"""The reward."""

PPO, VAPO, GRPO, PASS = "PPO, lam 0.95", "VAPO", "GRPO, 8 samples", "GRPO, pass or fail"
MARKS, UNEVEN = "GRPO, grade and true marks", "GRPO, pass or fail, uneven prompts"
QUANTILE, SMALL = "quantile critic", "small critic"
SMALL_CRITIC, UNEVEN_PROMPTS = "small", "uneven"
"""Names of models and data in the settings of rows, where `Experiment` puts the folder or file."""
_VAPO: Settings = {
    "num_return_sequences": 8,
    "critic_pretraining_steps": 6,
    "critic_learning_rate": 1.0e-3,
    "critic_epochs": 4,
    "critic_step_batch_size": 4,
    "lam_policy": "adaptive",
    "lam_critic": 1.0,
    "cliprange_high": 0.28,
    "positive_nll_coef": 0.1,
    "positive_nll_threshold": 2.0,
}
"""The preset `vapo` at the size of this task. A grade above 2 has more than 70 % of the steps right. The paper has no
optimizer steps of the critic's own. Its value loss without clipping is in the YAML, for all rows with a critic."""
_NO_CRITIC: Settings = {"vf_coef": 0.1}
"""The default in place of the YAML's, which weighs a loss that there is not."""
_GRPO: Settings = _NO_CRITIC | {"adv_estimator": "grpo", "num_return_sequences": 8}
_PASS: Settings = _GRPO | {
    # The grade is only watched.
    "reward_funcs": [GRADES, "examples.long_horizon.other_rewards:passes"],
    "reward_weights": [0.0, 1.0],
}
_MARKS: Settings = _GRPO | {
    "reward_funcs": [GRADES, "examples.long_horizon.other_rewards:true_marks"],
    "reward_weights": [1.0, 1.0],
}
_UNEVEN: Settings = _PASS | {"dataset_name": UNEVEN_PROMPTS}
_BY_SEQUENCE: Settings = {"loss_agg_mode": "seq-mean-token-mean"}
_SUPPORT: Settings = {"value_support": [-6.0, 6.0]}
"""Grades are between -5 and 5; a KL penalty and the bins' margin come on top."""
_QUANTILE: Settings = _VAPO | {"critic": "quantile"}
_SMALL: Settings = _VAPO | {"value_model_name_or_path": SMALL_CRITIC}


def _without(*names: str, **others: Any) -> Settings:
    """Returns VAPO's options without `names`, with `others` changed."""
    return {name: value for name, value in _VAPO.items() if name not in names} | others


MAIN: Mapping[str, Settings] = {
    PPO: {"learning_rate": 1.0e-3},
    "PPO, lam 1": {"lam": 1.0},
    "GRPO, 4 samples": _NO_CRITIC | {"adv_estimator": "grpo", "num_return_sequences": 4},
    GRPO: _GRPO,
    "RLOO, 4 samples": _NO_CRITIC | {"adv_estimator": "rloo", "num_return_sequences": 4},
    VAPO: _VAPO,
}
ABLATIONS: Mapping[str, Settings] = {
    "VAPO without value pretraining": _without("critic_pretraining_steps"),
    "VAPO with one response a prompt": _without("num_return_sequences"),
    "VAPO without decoupled GAE": _without("lam_critic", "lam_policy", lam=0.95),
    "VAPO without adaptive lam": _without("lam_policy", lam_policy=0.95),
    "VAPO without clip-higher": _without("cliprange_high"),
    "VAPO without positive NLL": _without("positive_nll_coef", "positive_nll_threshold"),
    "VAPO without a rate and steps of the critic's own": _without(
        "critic_learning_rate", "critic_epochs", "critic_step_batch_size"
    ),
}
OTHERS: Mapping[str, tuple[str, Settings]] = {
    "a rate and steps of the critic's own": (
        PPO,
        {"learning_rate": 1.0e-3, "critic_learning_rate": 1.0e-3, "critic_epochs": 4, "critic_step_batch_size": 4},
    ),
    "warm-up of the critic": (VAPO, _VAPO | {"critic_lr_warmup_steps": 100}),
    QUANTILE: (VAPO, _QUANTILE),
    "lower tail": (QUANTILE, _QUANTILE | {"risk_level": "0.1"}),
    "upper tail": (QUANTILE, _QUANTILE | {"risk_level": "upper:0.1"}),
    "HL-Gauss critic": (VAPO, _VAPO | _SUPPORT | {"critic": "hl_gauss"}),
    SMALL: (VAPO, _SMALL),
    "CISPO loss": (VAPO, _VAPO | {"policy_loss": "cispo", "cliprange": 0.99, "cliprange_high": 0.8}),
    "DPPO loss": ("VAPO without clip-higher", _without("cliprange_high") | {"policy_loss": "dppo"}),
    "SAPO loss": (GRPO, _GRPO | _BY_SEQUENCE | {"policy_loss": "sapo"}),
    "GSPO loss": (GRPO, _GRPO | _BY_SEQUENCE | {"policy_loss": "gspo", "cliprange": 3.0e-4, "cliprange_high": 4.0e-4}),
    "GMPO loss": (GRPO, _GRPO | _BY_SEQUENCE | {"policy_loss": "gmpo", "cliprange": 0.4}),
    "pass@k": (GRPO, _GRPO | {"adv_estimator": "grpo_passk"}),
    MARKS: (GRPO, _MARKS),
    "GDPO, grade and true marks": (MARKS, _MARKS | {"adv_estimator": "gdpo"}),
    PASS: (GRPO, _PASS),
    "QAE, pass or fail": (PASS, _PASS | {"adv_estimator": "qae"}),
    "dynamic sampling, pass or fail": (PASS, _PASS | {"dynamic_sampling": 3}),
    UNEVEN: (PASS, _UNEVEN),
}
"""Further options, each with the row that it is compared with. Their own settings are defaults or a preset's, and were
not tuned."""
ROWS: Mapping[str, Settings] = {**MAIN, **ABLATIONS, **{name: settings for name, (_, settings) in OTHERS.items()}}


@dataclass(frozen=True)
class Sizes:
    """The options that say how much a run samples."""

    rollout_batch_size: int
    """Prompts of a step, when each gets one response."""
    total_episodes: int
    """Prompts of a run, when each gets one response."""


def settings_of(name: str, sizes: Sizes) -> Settings:
    """Returns the flags of the row `name`. All rows sample equally many responses, in as many steps.

    Raises:
        ValueError: if there is no such row.
    """
    if name not in ROWS:
        raise ValueError(f"there is no row {name!r}; choose one of {', '.join(map(repr, ROWS))}")
    settings = dict(ROWS[name])
    samples = settings.get("num_return_sequences", 1)
    settings["rollout_batch_size"] = sizes.rollout_batch_size // samples
    settings["total_episodes"] = sizes.total_episodes // samples
    return settings
