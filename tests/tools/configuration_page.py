"""Writes docs/configuration.md: `python -m tests.tools.configuration_page > docs/configuration.md`."""

import textwrap

from alpaca_ppo.config.fields import Option, options_of
from alpaca_ppo.config.parser import description, type_in_words
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

This page is generated: `python -m tests.tools.configuration_page > docs/configuration.md`."""
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
    text = f"- **`{option.name}`** ({type_in_words(option.hint)}): {description(option, built_in=True)}"
    return textwrap.fill(text, _WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    print(configuration_page(), end="")
