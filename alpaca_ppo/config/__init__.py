"""The options of a run: the dataclasses, their checks, and the command line that reads them from YAML and flags."""

from alpaca_ppo.config.parser import parse_args
from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.config.script_arguments import LoraArguments, ScriptArguments

__all__ = ["LoraArguments", "PPOConfig", "ScriptArguments", "parse_args"]
