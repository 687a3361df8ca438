"""`EnvironmentOptions`, the part of `PPOConfig` about tools, environments and responses of several turns."""

from dataclasses import dataclass

from alpaca_ppo.config.fields import argument, when
from alpaca_ppo.config.rollout_options import RolloutOptions


@dataclass(frozen=True)
class EnvironmentOptions(RolloutOptions):
    """The options of runs with `tools` or an `environment_factory`."""

    max_turns: int | None = argument(
        None,
        "Turns of the policy after which an episode ends as truncated; null = no limit.",
        at_least=1,
        group="Environments",
        needs=when("environments or tools"),
    )
    max_turn_tokens: int | None = argument(
        None,
        "Most tokens of a turn of the policy; null = up to response_len.",
        at_least=1,
        needs=when("environments or tools"),
    )
    tool_timeout: float | None = argument(
        None,
        "Seconds for a call of a tool, after which the policy reads an error, or of an environment, after which the "
        "run stops; null waits.",
        above=0,
        needs=when("environments or tools"),
    )
