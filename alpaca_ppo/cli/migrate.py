"""`alpaca-ppo migrate`: a TRL script, or a YAML file or command line of verl, as this package's options."""

import argparse
from collections.abc import Sequence

from alpaca_ppo.migrate import translate


def main(argv: Sequence[str]) -> int:
    """Prints the translation of what `argv` names; returns the exit status.

    Raises:
        ValueError: for a file that does not exist, or that is none of the kinds.
    """
    parser = argparse.ArgumentParser(prog="alpaca-ppo migrate", description=__doc__, allow_abbrev=False)
    parser.add_argument("--num_processes", type=int, default=1, help="of the TRL run; it multiplies batch sizes")
    parser.add_argument("file", help="script.py, config.yaml or run.sh; or verl's overrides alone")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="TRL's flags, or verl's overrides (key=value)")
    given = parser.parse_args(argv)
    print(translate(given.file, given.arguments, processes=given.num_processes).as_yaml(), end="")
    return 0
