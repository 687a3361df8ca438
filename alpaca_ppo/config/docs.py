"""Writes docs/configuration.md from the dataclasses: `python -m alpaca_ppo.config.docs > docs/configuration.md`."""

import json
import textwrap
import typing

from alpaca_ppo.config.fields import Option, options_of
from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.config.script_arguments import LoraArguments, ScriptArguments

_WIDTH = 100
_INTRODUCTION = """\
# Configuration

Every option is a flag of `alpaca-ppo train` and a key of its YAML file: `--config run.yaml`. A flag
overrides the file; `null` means "not set", in the file and on the command line. `--preset trl` reads
the preset of that name: see [command line](command-line.md). In Python, the options are the fields of
the dataclasses below. An estimator, loss, critic or backend that a file in `import_modules` registers
is valid wherever built-in names are listed.

This page is generated: `python -m alpaca_ppo.config.docs > docs/configuration.md`."""
_SECTIONS = {
    PPOConfig: "the options of the trainer",
    ScriptArguments: "what `alpaca-ppo train` loads",
    LoraArguments: "LoRA, for `alpaca-ppo train` and `alpaca-ppo reward`",
}


def configuration_page() -> str:
    """The text of docs/configuration.md: every option by group, with its type, bounds, default and meaning."""
    lines = [_INTRODUCTION]
    for cls, title in _SECTIONS.items():
        lines.append(f"\n## `{cls.__name__}`: {title}")
        group = ""
        for option in options_of(cls).values():
            if option.group != group:
                group = option.group
                lines.append(f"\n### {group}\n")
            lines.append(_entry(option))
    return "\n".join(lines) + "\n"


def _entry(option: Option) -> str:
    default = f"; default `{json.dumps(option.default)}`" if option.default != "" else ""
    text = f"- **`{option.name}`** ({_type(option)}{default}): {option.help}"
    if option.registry is not None:
        text += f" One of {', '.join(f'`{name}`' for name in option.registry.built_in)}."
    return textwrap.fill(text, _WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _type(option: Option) -> str:
    if option.choices:
        choices = (choice if isinstance(choice, str) else json.dumps(choice) for choice in option.choices)
        words = [", ".join(f"`{choice}`" for choice in choices)]
    else:
        words = [_word(kind) for kind in option.kinds]
    text = " or ".join([*words, *(["null"] if option.nullable else [])])
    return f"{text}, {option.bounds}" if str(option.bounds) else text


def _word(kind: typing.Any) -> str:
    if typing.get_origin(kind) is list:
        entries = typing.get_args(kind)[0]
        return f"list of {' or '.join(part.__name__ for part in typing.get_args(entries) or [entries])}"
    return "mapping" if typing.get_origin(kind) is dict else str(kind.__name__)


if __name__ == "__main__":
    print(configuration_page(), end="")
