"""An environment behind OpenEnv's client as a conversation partner of the policy. OpenEnv itself is not imported.

    from openenv.core import GenericEnvClient
    PPOTrainer(..., environment_factory=lambda: OpenEnvPartner(
        GenericEnvClient(base_url="http://localhost:8000"),
        to_action=lambda text: {"message": text},
        to_text=lambda observation: observation["text"],
    ))

Each row of a rollout has a client of its own, which keeps one session open for the whole run: the server must allow
`rollout_batch_size * num_return_sequences` sessions, over all processes. All clients of a process live in one event
loop, so that slow steps run side by side.

For tools instead of free text, write a class with `reset` and a method for each tool that awaits `client.step`.
"""

from collections.abc import Callable
from typing import Any


class OpenEnvPartner:
    """Plays an environment whose client is async: `await reset(seed=...)` and `await step(action)` return an object
    with `observation`, `reward` (None counts as 0) and `done`.

    An error of the server or of the connection stops the run, by name of environment, row and turn; the client's own
    `message_timeout_s`, or `tool_timeout`, bounds how long a step may take.

    Args:
        client: not connected yet: it connects with its first call, in the event loop of the run.
        to_action: returns the action for the policy's text. A ValueError stands for text that is no action: its message
            is what the policy reads, the server is not asked, and `max_turns` bounds how often this happens.
        to_text: returns an observation as the policy reads it.
        invalid_reward: of a turn that is no action.
    """

    def __init__(
        self,
        client: Any,
        *,
        to_action: Callable[[str], Any],
        to_text: Callable[[Any], str],
        invalid_reward: float = 0.0,
    ) -> None:
        self._client, self._to_action, self._to_text = client, to_action, to_text
        self._invalid_reward = invalid_reward

    async def reset(self, seed: int) -> str:
        """Begins an episode and returns its first observation.

        Args:
            seed: the dataset's column `seed`, or else the one of the prompt and step, which a prompt's samples share.
        """
        result = await self._client.reset(seed=seed)
        return self._to_text(result.observation)

    async def reply(self, completion: str) -> tuple[str | None, float]:
        """Takes the action `completion`; returns the observation, or None after the last one, and the reward."""
        try:
            action = self._to_action(completion)
        except ValueError as problem:
            return f"\n{problem}\n", self._invalid_reward
        result = await self._client.step(action)
        return None if result.done else self._to_text(result.observation), float(result.reward or 0.0)
