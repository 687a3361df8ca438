"""What was tried: changes to the old defaults, alone and beside a critic with steps of its own."""

from collections.abc import Mapping
from typing import Any

from examples.defaults.tasks import RATE_TIMES_WIDTH, TASKS

Settings = dict[str, Any]
CRITIC_RATE, CRITIC_BATCH = "times the learning rate", "of a step batch"
"""Keys of rows in place of `critic_learning_rate` and `critic_step_batch_size`, which they give relative to the
policy's."""

BEFORE: Settings = {
    "critic_epochs": None,
    "cliprange_value": 0.2,
    "kl_coef": 0.05,
    "kl_controller": "fixed",
    "kl_loss_coef": 0.0,
    "lr_scheduler_type": "constant",
}
"""The defaults before, where a row or today's default differs."""
_CRITIC: Settings = {**BEFORE, "critic_epochs": 4, CRITIC_RATE: 3, "cliprange_value": None}
"""Values that are clipped by a fixed number would depend on the scale of the reward."""
_KL_LOSS: Settings = {"kl_coef": 0.0, "kl_loss_type": "k3"}
"""Whitened advantages have no scale, and so a KL in the loss weighs the same whatever the reward."""
_SCALED: Settings = {"kl_controller": "scaled", "kl_coef": 0.1}
_ALONE: Mapping[str, Settings] = {
    "the old defaults": BEFORE,
    "critic: 4 epochs": {**_CRITIC, CRITIC_RATE: 1},
    "critic: 4 epochs, 3 times the rate": _CRITIC,
    "critic: 2 epochs, quarter batches, 3 times the rate": {**_CRITIC, "critic_epochs": 2, CRITIC_BATCH: 0.25},
}
_BESIDE_CRITIC: Mapping[str, Settings] = {
    "lam 1": {"lam": 1.0},
    "lam_critic 1": {"lam_critic": 1.0},
    "lam_critic 1, adaptive lam_policy": {"lam_critic": 1.0, "lam_policy": "adaptive"},
    "pretraining of the critic, 4 steps": {"critic_pretraining_steps": 4},
    "4 responses a prompt": {"num_return_sequences": 4},
    "clip-higher": {"cliprange_high": 0.28},
    "positive NLL": {"positive_nll_coef": 0.1},
    "no whitening": {"whiten_advantages": False},
    "scaled KL in the reward, 0.05": {"kl_controller": "scaled"},
    "scaled KL in the reward, 0.1": _SCALED,
    "scaled KL in the reward, 0.1, linear schedule": {**_SCALED, "lr_scheduler_type": "linear"},
    "scaled KL in the reward, 0.05, linear schedule": {"kl_controller": "scaled", "lr_scheduler_type": "linear"},
    "scaled KL in the reward, 0.1, 4 epochs": {**_SCALED, "ppo_epochs": 4},
    "scaled KL in the reward, 0.1, 4 epochs, linear schedule": {
        **_SCALED,
        "ppo_epochs": 4,
        "lr_scheduler_type": "linear",
    },
    "KL in the loss, 0.05": {**_KL_LOSS, "kl_loss_coef": 0.05},
    "KL in the loss, 0.2": {**_KL_LOSS, "kl_loss_coef": 0.2},
    "linear schedule": {"lr_scheduler_type": "linear"},
}
ROWS: Mapping[str, Settings] = {
    **_ALONE,
    **{f"+ {name}": {**_CRITIC, **settings} for name, settings in _BESIDE_CRITIC.items()},
}
"""Rows with a plus are beside "critic: 4 epochs, 3 times the rate"."""
SCALES = (0.1, 1, 10)


def of_scale(name: str, scale: float) -> str:
    """Returns the row with the settings of the row `name`, and the reward times `scale`."""
    return name if scale == 1 else f"{name}, reward times {scale}"


OLD, CRITIC, CHOSEN = (
    "the old defaults",
    "critic: 4 epochs, 3 times the rate",
    "+ scaled KL in the reward, 0.05, linear schedule",
)
TWICE = (OLD, CRITIC, "+ scaled KL in the reward, 0.1", "+ scaled KL in the reward, 0.1, linear schedule", CHOSEN)
"""Rows of two seeds; the others have one."""
KL_RULES = {"`fixed`, 0.05": CRITIC, "`scaled`, 0.1": "+ scaled KL in the reward, 0.1"}
"""Rows whose KL is compared at other scales of the reward, by `kl_controller` and `kl_coef`."""
OF_SCALES: Mapping[str, Settings] = {
    of_scale(name, scale): {**ROWS[name], "reward_weights": [scale, 0]}
    for name in KL_RULES.values()
    for scale in SCALES
    if scale != 1
}
"""Rows of mini_farm alone, whose second source, the gold score, has weight 0."""
_FROM_REWARD: Settings = {"init_value_with_reward": True, "kl_coef": 0.02}
RLHF: Mapping[str, Settings] = {
    "today's default": {},
    "critic from the reward model": {"init_value_with_reward": True},
    "`kl_coef` 0.02": {"kl_coef": 0.02},
    "both": _FROM_REWARD,
    "both, 1 pass of the policy": {**_FROM_REWARD, "ppo_epochs": 1},
    "both, constant rate": {**_FROM_REWARD, "lr_scheduler_type": "constant"},
    "1 pass of the policy": {"ppo_epochs": 1},
}
"""Rows of mini_farm alone, beside today's default, by what other projects set."""
GIVEN_UP = ("+ scaled KL in the reward, 0.1, 4 epochs", "+ scaled KL in the reward, 0.1, 4 epochs, linear schedule")
"""Rows that were given up after their first runs."""


def grpo(task: str) -> Settings:
    """Returns the settings of GRPO's paper (arXiv:2402.03300, section 4.2): a single update on each rollout, and the KL
    in the loss. Its 64 responses a prompt are 8 here, or rollouts would have half a prompt to two.
    """
    return {
        "adv_estimator": "grpo",
        "num_return_sequences": 8,
        "step_batch_size": TASKS[task].sizes["rollout_batch_size"],
        "ppo_epochs": 1,
        "loss_agg_mode": "seq-mean-token-mean",
        "kl_coef": 0.0,
        "kl_loss_coef": 0.04,
        "kl_loss_type": "k3",
        "lr_scheduler_type": "constant",
    }


def settings_of(row: str, task: str) -> Settings:
    """Returns the options of `row` for `task`."""
    settings = dict({**ROWS, **OF_SCALES, **RLHF}[row])
    if CRITIC_RATE in settings:
        settings["critic_learning_rate"] = settings.pop(CRITIC_RATE) * RATE_TIMES_WIDTH / TASKS[task].width
    if CRITIC_BATCH in settings:
        settings["critic_step_batch_size"] = int(settings.pop(CRITIC_BATCH) * TASKS[task].sizes["step_batch_size"])
    return settings
