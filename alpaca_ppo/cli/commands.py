"""The table of subcommands, `main`, which calls the one that the command line names, and `exit_status`: how a command
ends after a mistake of its user or Ctrl-C.
"""

import difflib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pkgutil import resolve_name

from alpaca_ppo.library_output import ignore_known_lines

COMMANDS = {
    "sft": ("train:sft", "fine-tune a language model on prompts and completions"),
    "reward": ("train:reward", "train a reward model on preference pairs"),
    "train": ("train:train", "train a policy with PPO"),
    "evaluate": ("evaluate:evaluate", "measure a policy on prompts"),
    "sample": ("sample:sample", "answer prompts with a trained policy and its reference"),
    "report": ("finished_runs:report", "write one HTML file about one run or several"),
    "export": ("finished_runs:export", "write any checkpoint of a run as a folder for from_pretrained"),
    "estimate-memory": ("configurations:estimate_memory", "estimate the memory of a run without loading weights"),
    "presets": ("configurations:presets", "list the presets, or show one"),
    "vllm-env": ("vllm_environment:vllm_env", "make an environment with vLLM, which samples"),
    "migrate": ("configurations:migrate", "translate the configuration of TRL or verl"),
}
"""Each subcommand with its function, in a module of this folder, and its summary. The function takes the words after
the subcommand and returns the exit status. The module is imported when the subcommand is called, so that
`alpaca-ppo --help` needs no library.
"""
TRACEBACK = "--traceback"
_SHOW = "ALPACA_PPO_TRACEBACK"
MISTAKE = 2
"""The exit status; argparse's too."""
_OTHER_RANKS_WAIT = 20.0
"""Seconds. Most mistakes are found by all ranks at once. The launcher ends the others as soon as one has ended, so they
leave it to rank 0 to report the mistake, and report it only if they are still there after this time."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the subcommand that `argv` (default: the command line) starts with; returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    name = words.pop(0) if words else "--help"
    if name in ("-h", "--help", "--version"):
        print(f"alpaca_ppo {version('alpaca_ppo')}" if name == "--version" else usage())
        return 0
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        print(f"error: there is no subcommand {name!r}{hint}\n\n{usage()}", file=sys.stderr)
        return MISTAKE

    # Importing it may take seconds, in which Ctrl-C has no traceback either.
    return exit_status(lambda words: int(resolve_name(f"alpaca_ppo.cli.{COMMANDS[name][0]}")(words)), words)


def usage() -> str:
    """The text of `alpaca-ppo --help`."""
    lines = "\n".join(f"  {name:<16} {summary}" for name, (_, summary) in COMMANDS.items())
    return (
        "usage: alpaca-ppo SUBCOMMAND [--option VALUE ...]\n\nCritic-based PPO for language models.\n\n"
        f"{lines}\n\n"
        "alpaca-ppo SUBCOMMAND --help describes its options; --traceback shows where a mistake was found."
    )


def exit_status(command: Callable[[Sequence[str]], int], argv: Sequence[str]) -> int:
    """Calls `command` with `argv` and returns its exit status, or 2 for a mistake of the user, which one sentence
    reports, or 130 for Ctrl-C where no run was there to be saved.

    With `--traceback` in `argv`, every exception is passed on. So is one that a module of the user's has raised, such
    as that of a reward function, because only the traceback says where that is.
    """
    if TRACEBACK in argv:
        # For the processes that this one starts, too.
        os.environ[_SHOW] = "1"
    rank = os.environ.get("RANK", "0")
    # From it `my_rewards:polite` counts; the folder of the command or of the script is there instead.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    ignore_known_lines()
    try:
        return command([word for word in argv if word != TRACEBACK])
    except (ValueError, OSError, ImportError, SyntaxError) as error:
        # Its libraries are there once a command has run.
        from alpaca_ppo.config.modules import raised_by

        if (own := raised_by(error)) is not None:
            error.add_note(f"It came through {own}, which this run has loaded.")
        if _SHOW in os.environ or own is not None:
            raise
        if rank != "0":
            time.sleep(_OTHER_RANKS_WAIT)
        print(f"error{f' on rank {rank}' if rank != '0' else ''}: {error}", file=sys.stderr, flush=True)
        return MISTAKE
    except KeyboardInterrupt:
        if _SHOW in os.environ:
            raise
        # Of several processes the launcher's, or rank 0.
        if rank == "0":
            print("interrupted", file=sys.stderr, flush=True)
        return 128 + signal.SIGINT
