"""`translate`: a TRL script, a YAML file of either, or a command line of verl in, the translated configuration out."""

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
    """The translation of a file of another trainer.

    Args:
        file: a Python script of TRL, a YAML file of TRL or verl, a shell script that starts verl, or the first of
            verl's overrides (`key=value`), without a file.
        arguments: TRL's flags, or verl's overrides; they replace what the file says.
        processes: of a TRL run, by which TRL multiplies the batch sizes of a device.

    Raises:
        ValueError: for a file that does not exist, or that is none of these.
    """
    path, unread = Path(file), dict[str, str]()
    if re.fullmatch(OVERRIDE, file):
        return translate_verl(file, read_overrides([file, *arguments]))
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
    if any("." in name for name in content) and path.suffix != ".py":
        return translate_verl(file, {**content, **read_overrides(arguments)})
    return translate_trl(path.name, {**content, **_flags(arguments)}, unread, processes)


def _flags(arguments: Sequence[str]) -> dict[str, Any]:
    """Names and values of TRL's flags; a flag without a value is true, and one with several values a list.

    Raises:
        ValueError: for a value before the first flag.
    """
    values: dict[str, list[Any]] = {}
    for word in [part for argument in arguments for part in argument.split("=", 1 if argument.startswith("--") else 0)]:
        if word.startswith("--"):
            values[word.removeprefix("--").replace("-", "_")] = []
        elif values:
            values[list(values)[-1]].append(yaml.safe_load(word))
        else:
            raise ValueError(f"{word} is no flag of TRL; write --name value")
    return {name: True if not found else found[0] if len(found) == 1 else found for name, found in values.items()}
