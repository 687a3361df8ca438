"""`alpaca-ppo presets`: the presets, and what one of them sets."""

import argparse
import itertools
import textwrap
from collections.abc import Sequence

from alpaca_ppo.config.model_names import did_you_mean
from alpaca_ppo.presets import preset_names, preset_path


def main(argv: Sequence[str]) -> int:
    """Prints the list of presets, or one of them; returns the exit status.

    Raises:
        ValueError: for a preset that does not exist.
    """
    parser = argparse.ArgumentParser(prog="alpaca-ppo presets", description="Options by name, for --preset NAME.")
    actions = parser.add_subparsers(dest="action", metavar="{list,show}")
    actions.add_parser("list", help="names and where they come from (default)")
    actions.add_parser("show", help="the YAML file of one").add_argument("name")
    given = parser.parse_args(argv)
    if given.action == "show":
        if given.name not in preset_names():
            raise ValueError(
                f"there is no preset {given.name!r};{did_you_mean([given.name], preset_names())} there are "
                f"{', '.join(preset_names())}"
            )
        print(preset_path(given.name).read_text(encoding="utf-8"), end="")
        return 0
    for name in preset_names():
        lines = preset_path(name).read_text(encoding="utf-8").splitlines()
        comment = itertools.takewhile(lambda line: line.startswith("#"), lines)
        text = " ".join(line.removeprefix("#").strip() for line in comment)
        print(f"{name:<14}{textwrap.shorten(text, 120, placeholder=' ...')}")
    return 0
