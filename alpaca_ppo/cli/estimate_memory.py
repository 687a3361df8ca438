"""`alpaca-ppo estimate-memory`: the memory of a run, without loading weights."""

import json
from collections.abc import Sequence

from alpaca_ppo.config.estimate_arguments import EstimateArguments
from alpaca_ppo.config.parser import parse_args
from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.config.script_arguments import LoraArguments


def main(argv: Sequence[str]) -> int:
    """Prints the estimate; returns the exit status."""
    script, lora, args = parse_args(
        [EstimateArguments, LoraArguments, PPOConfig], argv, prog="alpaca-ppo estimate-memory"
    )
    # They import torch, for which `--help` need not wait.
    from alpaca_ppo.estimate_memory.estimator import estimate, table

    result = estimate(script, lora, args)
    print(json.dumps(result, indent=2) if script.json else table(result))
    return 0
