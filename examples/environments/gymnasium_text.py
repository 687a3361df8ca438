"""A text game with gymnasium's interface as a conversation partner of the policy. Gymnasium itself is not imported.

    import gymnasium
    PPOTrainer(..., environment_factory=lambda: GymnasiumText(gymnasium.make("MyTextGame-v0")))

A turn of the policy is one action. The reward of a step is that of the turn, on its last token. Only text is shown to
the policy: spaces, renderings and `info` are left out.
"""

from collections.abc import Callable
from typing import Any


def strip(completion: str) -> str:
    """Returns the policy's text without blanks around it."""
    return completion.strip()


def paragraph(observation: Any) -> str:
    """Returns the observation as a paragraph of its own."""
    return f"\n{observation}\n"


class GymnasiumText:
    """Plays an environment with `reset(seed=, options=) -> (observation, info)` and
    `step(action) -> (observation, reward, terminated, truncated, info)`.

    The policy does not read the observation of the last step, because nothing follows it.

    Args:
        game: the environment.
        to_action: returns the action for the policy's text. A ValueError stands for text that is no action: its message
            is what the policy reads, the game does not move, and `max_turns` bounds how often this happens.
        to_text: returns an observation as the policy reads it.
        invalid_reward: of a turn that is no action.
    """

    def __init__(
        self,
        game: Any,
        *,
        to_action: Callable[[str], Any] = strip,
        to_text: Callable[[Any], str] = paragraph,
        invalid_reward: float = 0.0,
    ) -> None:
        self._game, self._to_action, self._to_text = game, to_action, to_text
        self._invalid_reward = invalid_reward

    def reset(self, seed: int, options: dict[str, Any] | None = None) -> str:
        """Begins a game and returns its first observation.

        Args:
            seed: the dataset's column `seed`, or else the one of the prompt and step, which a prompt's samples share.
            options: the dataset's column `options`, if it has one.
        """
        observation, _ = self._game.reset(seed=seed, options=options)
        return self._to_text(observation)

    def reply(self, completion: str) -> tuple[str | None, float]:
        """Takes the action `completion`; returns the observation, or None after the last one, and the reward."""
        try:
            action = self._to_action(completion)
        except ValueError as problem:
            return f"\n{problem}\n", self._invalid_reward
        observation, reward, terminated, truncated, _ = self._game.step(action)
        return None if terminated or truncated else self._to_text(observation), float(reward)
