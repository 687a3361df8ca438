"""Translate a TRL script, or a YAML file or command line of verl, into this package's options."""

from collections.abc import Sequence

from alpaca_ppo.migrate.command import SUMMARY as SUMMARY
from alpaca_ppo.migrate.command import main as run


def main(argv: Sequence[str]) -> int:
    """Prints the translation of the file that `argv` names; returns the exit status."""
    return run(argv)
