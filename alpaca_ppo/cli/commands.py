"""The subcommands; `main`, which calls the one that the command line names; and how a command ends after a mistake."""

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
"""Each subcommand with its function, as module:function in this folder, and its summary. The function gets the words
after the subcommand and returns the exit status. Only then is it imported, so that `--help` needs no library."""
TRACEBACK = "--traceback"
_SHOW = "ALPACA_PPO_TRACEBACK"
MISTAKE = 2
"""The exit status after a mistake of the user, as argparse's."""
# Seconds after which ranks other than 0 report a mistake. Most mistakes are found by all ranks at once: rank 0 reports
# it, and the launcher then ends the others.
_OTHER_RANKS_WAIT = 20.0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the subcommand at the beginning of `argv` (default: the command line); returns the exit status."""
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

    def run(arguments: Sequence[str]) -> int:
        # Imported here, within `exit_status`, which handles Ctrl-C during the seconds that this may take.
        return int(resolve_name(f"alpaca_ppo.cli.{COMMANDS[name][0]}")(arguments))

    return exit_status(run, words)


def usage() -> str:
    """The text of `alpaca-ppo --help`."""
    lines = "\n".join(f"  {name:<16} {summary}" for name, (_, summary) in COMMANDS.items())
    return (
        "usage: alpaca-ppo SUBCOMMAND [--option VALUE ...]\n\nCritic-based PPO for language models.\n\n"
        f"{lines}\n\n"
        "alpaca-ppo SUBCOMMAND --help describes its options; --traceback shows where a mistake was found."
    )


def exit_status(command: Callable[[Sequence[str]], int], argv: Sequence[str]) -> int:
    """Calls `command` with `argv` and returns its exit status; 2 for a mistake of the user, which is printed; and 130
    for Ctrl-C before a run could handle it.

    Other exceptions are passed on. So are all if `--traceback` is in `argv`, here or in the process that started this
    one; and those of a user's module, such as a reward function, because only the traceback says from where.
    """
    if TRACEBACK in argv:
        # Not a variable here, because the processes that this one starts read it too.
        os.environ[_SHOW] = "1"
    rank = os.environ.get("RANK", "0")
    # For users' modules such as `my_rewards:polite`; Python's path begins with the folder of the command instead.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    ignore_known_lines()
    try:
        return command([word for word in argv if word != TRACEBACK])
    except (ValueError, OSError, ImportError, SyntaxError) as error:
        # Here, because `--help` needs no library.
        from alpaca_ppo.config.modules import raised_by

        if (users_function := raised_by(error)) is not None:
            error.add_note(f"It came through {users_function}, which this run has loaded.")
        if _SHOW in os.environ or users_function is not None:
            raise
        if rank != "0":
            time.sleep(_OTHER_RANKS_WAIT)
        print(f"error{f' on rank {rank}' if rank != '0' else ''}: {error}", file=sys.stderr, flush=True)
        return MISTAKE
    except KeyboardInterrupt:
        if _SHOW in os.environ:
            raise
        # Printed by the launcher, which has no rank, or else by rank 0.
        if rank == "0":
            print("interrupted", file=sys.stderr, flush=True)
        return 128 + signal.SIGINT
