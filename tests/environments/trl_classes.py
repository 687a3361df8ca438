"""Environments and reward functions as TRL's documentation of GRPOTrainer describes them, and nothing of this package:
the tests run them as they are.
"""

import asyncio

from datasets import Dataset


class Vault:
    """Keeps its result for a reward function; says that the game is over with an exception."""

    def __init__(self):
        self.client = {"opened": 0}
        self.reward = 0.0
        self.done = False

    def reset(self, **kwargs) -> str | None:
        self.reward = 0.0
        self.done = False
        self.code = kwargs["code"]
        return f" It has {len(str(self.code))} digit(s)."

    async def turn(self, digit: int) -> str:
        """
        Turn the dial.

        Args:
            digit: From 0 to 9.

        Returns:
            What is heard.
        """
        if self.done:
            raise ValueError("Game over.")
        await asyncio.sleep(0.001)
        self.client["opened"] += 1
        self.done = digit == self.code
        self.reward = 1.0 if self.done else 0.1
        return "It opens." if self.done else "Click."

    def _secret(self):
        return self.code


def multiply(a: int, b: int) -> int:
    """
    Multiplies two integers.

    Args:
        a: The first integer.
        b: The second integer.

    Returns:
        The product.
    """
    return a * b


def vault_reward(environments, **kwargs) -> list[float]:
    return [environment.reward for environment in environments]


VAULTS = Dataset.from_dict(
    {"prompt": [[{"role": "user", "content": "Open the vault."}]] * 10, "code": [i % 4 for i in range(10)]}
)
