"""The table of subcommands, and `main`, which finds and calls the one that the command line names.

A subcommand is a module of this folder with `main(argv) -> int`, where `argv` excludes the subcommand itself and the
result is the exit status. It is imported when it is called, so that `alpaca-ppo --help` needs no library.
"""

import difflib
import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version

from alpaca_ppo.cli.errors import exit_status

COMMANDS = {
    "sft": "fine-tune a language model on prompts and completions",
    "reward": "train a reward model on preference pairs",
    "train": "train a policy with PPO",
    "evaluate": "measure a policy on prompts",
    "sample": "answer prompts with a trained policy and its reference",
    "report": "write one HTML file about one run or several",
    "export": "write any checkpoint of a run as a folder for from_pretrained",
    "estimate-memory": "estimate the memory of a run without loading weights",
    "presets": "list the presets, or show one",
    "migrate": "translate the configuration of TRL or verl",
}
"""Each subcommand with its summary. Its module has the same name, with _ for -."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the subcommand that `argv` (default: the command line) starts with; returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    name = words[0] if words else "--help"
    if name in ("-h", "--help"):
        print(usage())
        return 0
    if name == "--version":
        print(f"alpaca_ppo {version('alpaca_ppo')}")
        return 0
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        print(f"error: there is no subcommand {name!r}{hint}\n\n{usage()}", file=sys.stderr)
        return 2
    return exit_status(lambda rest: main_of(name)(rest), words[1:])


def main_of(name: str) -> Callable[[Sequence[str]], int]:
    """The `main` of the subcommand `name`."""
    function: Callable[[Sequence[str]], int] = importlib.import_module(f"alpaca_ppo.cli.{name.replace('-', '_')}").main
    return function


def usage() -> str:
    """The text of `alpaca-ppo --help`."""
    lines = [f"  {name:<16} {summary}" for name, summary in COMMANDS.items()]
    return "\n".join(
        [
            "usage: alpaca-ppo SUBCOMMAND [--option VALUE ...]",
            "",
            "Critic-based PPO for language models.",
            "",
            *lines,
            "",
            "alpaca-ppo SUBCOMMAND --help describes its options; --traceback shows where a mistake was found.",
        ]
    )
