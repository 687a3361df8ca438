"""`translate`, which recognizes the trainer and the format of a file, and translates it."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from alpaca_ppo.config.foreign_names import flattened
from alpaca_ppo.config.names import where
from alpaca_ppo.migrate.translation import Translation
from alpaca_ppo.migrate.trl import read_script, translate_trl
from alpaca_ppo.migrate.verl import OVERRIDE, overrides_of_shell, read_overrides, translate_verl


def translate(file: str, arguments: Sequence[str] = (), *, processes: int = 1) -> Translation:
    """The translation of a configuration of another trainer.

    Args:
        file: a Python script of TRL, a YAML file of TRL or verl, a shell script that starts verl, or in place of a file
            the first of verl's overrides (`key=value`).
        arguments: TRL's flags, or verl's overrides; they replace what the file says.
        processes: of the TRL run, because TRL's batch sizes are for one process.
    """
    if re.fullmatch(OVERRIDE, file):
        return translate_verl(file, read_overrides([file, *arguments]))
    path = Path(file)
    unread: dict[str, str] = {}
    if not path.is_file():
        raise ValueError(f"{file}: give a script or a YAML file;{where(file, what='file')}")
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix in (".yaml", ".yml"):
            content = flattened(yaml.safe_load(text))
        elif path.suffix == ".sh":
            content = read_overrides(overrides_of_shell(text, file))
        else:
            content, unread = read_script(text)
    except (SyntaxError, UnicodeDecodeError, yaml.YAMLError, AttributeError) as error:
        raise ValueError(f"{file} is no TRL script, and no YAML file that maps names to values: {error}") from error
    # Names of verl are paths with dots (actor_rollout_ref.model.path); a script of TRL may have such names too.
    if any("." in name for name in content) and path.suffix != ".py":
        return translate_verl(file, {**content, **read_overrides(arguments)})
    return translate_trl(path.name, {**content, **_flags(arguments)}, unread, processes)


def _flags(arguments: Sequence[str]) -> dict[str, Any]:
    """TRL's flags by name; a flag without a value is true, and one with several values a list."""
    flags: dict[str, list[Any]] = {}
    name = ""
    for argument in arguments:
        if argument.startswith("--"):
            flag, equals, text = argument.removeprefix("--").partition("=")
            name = flag.replace("-", "_")
            flags[name] = [yaml.safe_load(text)] if equals else []
        elif name:
            flags[name].append(yaml.safe_load(argument))
        else:
            raise ValueError(f"{argument} is no flag of TRL; write --name value")
    single = {name: values[0] if values else True for name, values in flags.items() if len(values) < 2}
    return {**flags, **single}
