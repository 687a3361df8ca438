"""Environments, tools and conversation partners: what answers the policy between its turns.

The sampler's side of it is `generation.turns`; the trainer begins and ends episodes in `trainer.rollout_trainer`.
"""

from alpaca_ppo.environments.kinds import EnvironmentKind, Tool
from alpaca_ppo.environments.tool_calls import ToolCall, ToolCallParser

__all__ = ["EnvironmentKind", "Tool", "ToolCall", "ToolCallParser"]
