"""The options of a run: the dataclasses, their checks, and the command line that reads them from YAML and flags.

`TRAINING_ARGUMENTS` are the dataclasses of `alpaca-ppo train`, whose fields are the options of its configuration.
"""

from alpaca_ppo.config.parser import parse_args
from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.config.script_arguments import LoraArguments, ScriptArguments

__all__ = ["TRAINING_ARGUMENTS", "LoraArguments", "PPOConfig", "ScriptArguments", "parse_args"]

TRAINING_ARGUMENTS = (ScriptArguments, LoraArguments, PPOConfig)
