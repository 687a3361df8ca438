"""`alpaca-ppo reward`: a reward model from preference pairs."""

from collections.abc import Sequence

from alpaca_ppo.cli.sft import ALL, EPILOG
from alpaca_ppo.config.parser import parse_args
from alpaca_ppo.config.script_arguments import LoraArguments
from alpaca_ppo.config.supervised_arguments import RewardModelArguments


def main(argv: Sequence[str]) -> int:
    """Trains; returns the exit status."""
    if "--help" in argv or "-h" in argv:
        # Importing the others takes seconds.
        parse_args([RewardModelArguments, LoraArguments], ["--help"], prog="alpaca-ppo reward", epilog=EPILOG)
    from alpaca_ppo.supervised.reward_model import train_reward_model

    train_reward_model(["--help" if word in ALL else word for word in argv])
    return 0
