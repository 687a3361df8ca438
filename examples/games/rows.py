"""The rows of the table: what each one changes in its game's options (`examples/configs/games_*.yaml`).

All rows of a game play equally many games, in as many steps; `BEST` has no steps.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Settings = Mapping[str, Any]

BY_TURN, BY_TOKEN, GRPO = "PPO, credit by turns", "PPO, credit by tokens", "GRPO, 8 games"
TURN_REWARDS = "PPO, credit and rewards by turns"
BEST = "best of 8, imitated"
GROUP = 8
"""Games of the same secret or question in a group."""

_CRITIC: Settings = {"critic_learning_rate": 3.0e-3, "critic_epochs": 2, "vf_coef": 1.0, "cliprange_value": None}
_BY_TOKEN: Settings = {**_CRITIC, "lam": 0.95}
_BY_TURN: Settings = {**_CRITIC, "lam": 1.0, "turn_gamma": 1.0, "turn_lam": 0.9}
_GRPO: Settings = {"adv_estimator": "grpo", "num_return_sequences": GROUP}
GUESSING: Mapping[str, Settings] = {
    TURN_REWARDS: {**_BY_TURN, "environment": "GuessByTurn"},
    BY_TURN: _BY_TURN,
    BY_TOKEN: _BY_TOKEN,
    # At the rate of the others, GRPO loses more games than the model of the demonstrations.
    GRPO: {**_GRPO, "learning_rate": 2.5e-4},
    BEST: {},
}
CALCULATOR: Mapping[str, Settings] = {BY_TURN: _BY_TURN, BY_TOKEN: _BY_TOKEN, GRPO: _GRPO, BEST: {}}
ROWS = {"guessing": GUESSING, "calculator": CALCULATOR}
MAIN = {"guessing": TURN_REWARDS, "calculator": BY_TURN}
"""The row of each game that the others are compared with."""


@dataclass(frozen=True)
class Sizes:
    """How much a run plays."""

    rollout_batch_size: int
    """Games of a step."""
    total_episodes: int
    """Games of a run."""


def settings_of(game: str, row: str, sizes: Sizes) -> dict[str, Any]:
    """Returns the options of a row, with its share of the prompts.

    Raises:
        ValueError: if there is no such game or row.
    """
    if game not in ROWS:
        raise ValueError(f"there is no game {game!r}; choose one of {', '.join(map(repr, ROWS))}")
    if row not in ROWS[game]:
        raise ValueError(f"{game} has no row {row!r}; choose one of {', '.join(map(repr, ROWS[game]))}")
    settings = dict(ROWS[game][row])
    samples = settings.get("num_return_sequences", 1)
    settings["rollout_batch_size"] = sizes.rollout_batch_size // samples
    settings["total_episodes"] = sizes.total_episodes // samples
    return settings
