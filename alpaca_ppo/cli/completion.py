"""`alpaca-ppo completion`: a script with which bash, or zsh through bashcompinit, completes subcommands and flags."""

import argparse
import contextlib
import io
import re
from collections.abc import Callable, Iterable, Sequence

from alpaca_ppo.cli.launch import config_names
from alpaca_ppo.presets import preset_names

_SCRIPT = """\
_alpaca_ppo() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}}
    case $before in
        --preset) COMPREPLY=($(compgen -W "{presets}" -- "$current")); return ;;
        --accelerate_config) COMPREPLY=($(compgen -f -W "{configs}" -- "$current")); return ;;
    esac
    if [ "$COMP_CWORD" -eq 1 ]; then COMPREPLY=($(compgen -W "{commands}" -- "$current")); return; fi
    if [[ $current != -* ]]; then COMPREPLY=($(compgen -f -- "$current")); return; fi
    case ${{COMP_WORDS[1]}} in
{cases}
    esac
}}
complete -o filenames -F _alpaca_ppo alpaca-ppo
"""


def main(argv: Sequence[str]) -> int:
    """Prints the script; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="alpaca-ppo completion",
        description="Prints a completion script. In bash: source <(alpaca-ppo completion bash)",
    )
    parser.add_argument("shell", choices=["bash", "zsh"])
    shell = parser.parse_args(argv).shell
    # The table of subcommands imports nothing of this module.
    from alpaca_ppo.cli.commands import COMMANDS, main_of

    if shell == "zsh":
        print("autoload -U +X bashcompinit && bashcompinit")
    print(script({name: flags(main_of(name)) for name in COMMANDS if name != "completion"}), end="")
    return 0


def flags(command: Callable[[Sequence[str]], int]) -> list[str]:
    """The flags that the help of `command` describes, in its order."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        command(["--help"])
    return list(dict.fromkeys(re.findall(r"^  (?:-\w, )?(--[\w-]+)", shown.getvalue(), flags=re.MULTILINE)))


def script(flags_of: dict[str, list[str]]) -> str:
    """The text of the script for these flags of each subcommand."""
    cases = [
        f'        {name}) COMPREPLY=($(compgen -W "{_joined(words)}" -- "$current")) ;;'
        for name, words in flags_of.items()
    ]
    return _SCRIPT.format(
        presets=_joined(preset_names()),
        configs=_joined(config_names()),
        commands=_joined([*flags_of, "completion"]),
        cases="\n".join(cases),
    )


def _joined(words: Iterable[str]) -> str:
    return " ".join(words)
