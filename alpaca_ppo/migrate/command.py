"""`translate`, which recognizes the trainer and the format of a file, and translates it."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from alpaca_ppo.config.foreign_names import CONFIG_SECTIONS, find_foreign_name, flattened
from alpaca_ppo.config.names import path_problem
from alpaca_ppo.migrate.shell import OVERRIDE, overrides_of_shell
from alpaca_ppo.migrate.translation import OPTIONS, Translation, defaults
from alpaca_ppo.migrate.trl import read_script, translate_trl
from alpaca_ppo.migrate.verl import read_overrides, translate_verl


def translate(file: str, arguments: Sequence[str] = (), *, processes: int = 0) -> Translation:
    """The translation of a configuration of another trainer; a `ValueError` says what cannot be translated.

    Args:
        file: a Python script of TRL, a YAML file of TRL or verl, a shell script that starts verl, or in place of a file
            the first of verl's overrides (`key=value`).
        arguments: TRL's flags, or verl's overrides; they replace what the file says.
        processes: of the TRL run, because TRL's batch sizes are for one process; 0: num_processes of the file, or 1.
    """
    is_override = bool(re.fullmatch(OVERRIDE, file))
    try:
        content, unread = (read_overrides([file, *arguments]), {}) if is_override else _read_file(Path(file), file)
        if any(name.split(".")[0] == "actor_rollout_ref" for name in content):
            return translate_verl(file, {**flattened(content), **read_overrides(arguments)})
        content |= {} if is_override else _flags(arguments)
    except (SyntaxError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{file} is no TRL script, and the YAML in it or after it cannot be read: {error}") from error
    if isinstance(adapters := content.get("peft_config"), Mapping):
        content |= {**adapters, "peft_config": True}
    if is_override or not file.endswith(".py"):
        _check_names(content, file)
    return translate_trl(Path(file).name, content, unread, processes)


def _check_names(content: Mapping[str, Any], file: str) -> None:
    """Raises a `ValueError` unless the names are those of TRL's GRPO or PPO, and of no other project or trainer."""
    names, known = defaults("names"), {name for name in content if find_foreign_name(name, CONFIG_SECTIONS[:-1])}
    of_trl = known & {*names["of PPO"], *names["of GRPO"]} - {"kl_coef"}
    if len(ours := sorted(content.keys() & OPTIONS.keys() - known)) > 1 and not of_trl - OPTIONS.keys():
        raise ValueError(f"{file} has {', '.join(ours)}, which are options here: it is a file for --config already")
    # Options of this package do not tell TRL's file from one for --config; kl_coef is one.
    if not of_trl or not known - OPTIONS.keys():
        raise ValueError(f"{file} has no name of TRL's GRPO or PPO and no actor_rollout_ref of verl; write it by hand")
    kind, other_kind = ("PPO", "GRPO") if of_trl & {*names["of PPO"]} else ("GRPO", "PPO")
    for name, value in content.items():
        is_nested = name in known and re.search("_kwargs$|_config$|_mixture$|^deep", name)
        is_of_other = name in names["of other trainers"] + names[f"of {other_kind}"]
        if is_of_other or (isinstance(value, Mapping) and not is_nested):
            raise ValueError(f"{file} has {name}, which {kind} of TRL does not have so; write it by hand")


def _read_file(path: Path, file: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The names in a file with their values, and the expressions of a script that are no literals."""
    if not path.is_file():
        raise ValueError(f"{file}: give a script or a YAML file;{path_problem(file, what='file')}")
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".sh":
        return read_overrides(overrides_of_shell(text, file)), {}
    if path.suffix not in (".yaml", ".yml"):
        return read_script(text)
    content = yaml.safe_load(text)
    if not isinstance(content, dict):
        raise yaml.YAMLError(f"it holds a {type(content).__name__}, not names with values")
    return {str(name): value for name, value in content.items()}, {}


def _flags(arguments: Sequence[str]) -> dict[str, Any]:
    """TRL's flags by name; a flag without a value is true, and one with several values a list."""
    values: dict[str, list[Any]] = {}
    name = ""
    for argument in arguments:
        flag, equals, text = argument.partition("=")
        if flag.startswith("--"):
            name = flag[2:].replace("-", "_")
            values[name] = [yaml.safe_load(text)] if equals else []
        elif name:
            values[name].append(yaml.safe_load(argument))
        else:
            raise ValueError(f"{argument} is no flag of TRL; write --name value")
    return {name: given if len(given) > 1 else given[0] if given else True for name, given in values.items()}
