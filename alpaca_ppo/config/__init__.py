"""The arguments of a run: `PPOConfig`, what its values may be, and how YAML files and flags become one."""

from alpaca_ppo.config.parser import parse_args
from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.config.script_arguments import LoraArguments, ScriptArguments

__all__ = ["LoraArguments", "PPOConfig", "ScriptArguments", "parse_args"]
