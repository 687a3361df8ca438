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
    if not path.is_file():
        raise ValueError(f"{file}: give a script or a YAML file;{where(file, what='file')}")
    try:
        content, unread = _read_file(path, file)
    except (SyntaxError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{file} is no TRL script, and no YAML file that maps names to values: {error}") from error
    # Names of verl are paths with dots (actor_rollout_ref.model.path); a script of TRL may have such names too.
    if any("." in name for name in content) and path.suffix != ".py":
        return translate_verl(file, {**content, **read_overrides(arguments)})
    return translate_trl(path.name, {**content, **_flags(arguments)}, unread, processes)


def _read_file(path: Path, file: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The names in a file with their values, and the expressions of a script that are no literals."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".sh":
        return read_overrides(overrides_of_shell(text, file)), {}
    if path.suffix not in (".yaml", ".yml"):
        return read_script(text)
    content = yaml.safe_load(text)
    if not isinstance(content, dict):
        raise yaml.YAMLError(f"it holds a {type(content).__name__}")
    return flattened(content), {}


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
