"""The command line: `parse_args` turns a YAML file and flags into dataclasses."""

import argparse
import os
import re
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from transformers import HfArgumentParser

from alpaca_ppo.config.checks import MUTUALLY_EXCLUSIVE
from alpaca_ppo.config.fields import METADATA, Option, check_value, options_of, shown
from alpaca_ppo.config.modules import import_modules
from alpaca_ppo.presets import preset_names, preset_path

_ABSENT = object()
# argparse's own pattern has neither exponents nor infinity, so that it would take -1e1 for a flag.
_NEGATIVE_NUMBER = re.compile(r"^-(?:(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|inf|infinity|nan)$", re.IGNORECASE)


def parse_args(dataclass_types: Sequence[type], argv: Sequence[str] | None = None) -> tuple[Any, ...]:
    """One instance of each dataclass in `dataclass_types`, from `--config run.yaml` (or a preset's name) and flags.

    A flag wins over the file, and over an option in the file that it excludes (`checks.MUTUALLY_EXCLUSIVE`). A flag of
    a field that may be None takes `null` or `none` for it. If one of the dataclasses has the field `import_modules`,
    those modules are imported before `--help` is printed and before any value is checked, so that the names that they
    register are valid.

    Args:
        dataclass_types: dataclasses with distinct field names.
        argv: the command line without the program's name; `sys.argv[1:]` by default.

    Raises:
        ValueError: when the file does not exist, is not valid YAML, does not hold a mapping, or has an unknown key or
            one key twice; for an unknown flag; for a module that cannot be imported; and what the dataclasses raise.
    """
    options = {name: option for cls in dataclass_types for name, option in options_of(cls).items()}
    flags, unknown = _FlagParser(dataclass_types, options).read(list(sys.argv[1:] if argv is None else argv))
    config, wants_help = flags.pop("config", None), flags.pop("help", False)
    values = {} if config is None else _typed(read_yaml(config), options)
    for names in MUTUALLY_EXCLUSIVE:
        if any(flags.get(name) is not None for name in names):
            values |= dict.fromkeys(set(names) & set(values))
    values |= flags
    if "import_modules" in values:
        given_args = argparse.Namespace(**values)
        check_value(options["import_modules"], given_args.import_modules)
        import_modules(given_args.import_modules or [])
    if wants_help:
        # A new parser, because the help texts list the names that are registered by now.
        _FlagParser(dataclass_types, options).print_help()
        sys.exit(0)
    if unknown:
        raise ValueError(f"unknown command-line arguments: {' '.join(unknown)}; --help lists the valid ones")
    return tuple(cls(**{name: values[name] for name in options_of(cls) if name in values}) for cls in dataclass_types)


def read_yaml(path: str) -> dict[str, Any]:
    """The mapping in the YAML file at `path`, or in the preset of that name if there is no such file.

    Raises:
        ValueError: when there is neither, or the file is not valid YAML in UTF-8, has a key twice, or does not hold a
            mapping.
    """
    file = Path(path)
    # False for a path that is no file name at all, where Path.is_file would raise an OSError.
    if not os.path.isfile(path):
        if path not in preset_names():
            raise ValueError(
                f"--config is {shown(path)}, but there is no such file (relative paths count from {Path.cwd()}) and no "
                f"preset of that name; the presets are {', '.join(preset_names())}"
            )
        file = preset_path(path)
    try:
        content = yaml.load(file.read_text(encoding="utf-8"), Loader=_UniqueKeyLoader)
    # PyYAML raises whatever the value at fault provokes: KeyError for "!!bool x", RecursionError for deep nesting.
    except Exception as error:
        reason = error if isinstance(error, yaml.YAMLError) else f"{type(error).__name__}: {error}"
        raise ValueError(f"--config {path} cannot be read as YAML: {reason}") from error
    if not isinstance(content, dict):
        raise ValueError(f"--config {path} holds a {type(content).__name__}; it must map option names to values")
    return content


class _UniqueKeyLoader(yaml.SafeLoader):  # type: ignore[misc]
    """Refuses a key that occurs twice in a mapping; PyYAML would silently take the last one."""

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if (key.tag, str(key.value)) in seen:
                raise yaml.MarkedYAMLError(problem=f"the key {key.value!r} occurs twice", problem_mark=key.start_mark)
            seen.add((key.tag, str(key.value)))
        return node


def _typed(given: Mapping[str, Any], options: Mapping[str, Option]) -> dict[str, Any]:
    """The values of a YAML file, as numbers and lists where the fields are declared so."""
    if unknown := sorted(map(str, set(given) - set(options))):
        raise ValueError(
            f"unknown keys in the --config file: {', '.join(unknown)}; valid keys: {', '.join(sorted(options))}"
        )
    typed = {}
    for name, value in given.items():
        kinds = options[name].entry_kinds
        if kinds is None or value is None:
            typed[name] = _number(name, value, options[name].kinds)
        else:
            typed[name] = [_number(name, v, kinds) for v in (value if isinstance(value, list) else [value])]
    return typed


def _number(name: str, value: Any, kinds: tuple[Any, ...]) -> Any:
    """YAML reads 1e-5 as text: `value` as the number that `kinds` declare. Of kinds that allow text too, a float alone
    is read from it.
    """
    if isinstance(value, str) and {float, str} <= set(kinds):
        return _float_or_text(value)
    kind = float if float in kinds else int if int in kinds else None
    if not isinstance(value, str) or kind is None or str in kinds:
        return value
    try:
        return kind(value)
    except ValueError as error:
        raise ValueError(f"{name} is {shown(value)} in the --config file; it must be {kind.__name__}") from error


class _FlagParser(HfArgumentParser):
    """`HfArgumentParser` with groups in `--help`, registered names in the help texts, `null` for fields that may be
    None, and the unions `str | int` and `float | str`, where what can be read as a number is one.
    """

    def __init__(self, dataclass_types: Sequence[type], options: Mapping[str, Option]) -> None:
        # The base class adds all flags while it is built.
        self._options = options
        self._sections: dict[str, Any] = {}
        usage = "%(prog)s [--config CONFIG] [--option VALUE ...]"
        super().__init__(list(dataclass_types), usage=usage, allow_abbrev=False, add_help=False)  # type: ignore[arg-type]
        self._negative_number_matcher = _NEGATIVE_NUMBER
        self.add_argument("-h", "--help", action="store_true", default=argparse.SUPPRESS, help="Show this help.")
        presets = f"YAML file of options, or a preset ({', '.join(preset_names())}); flags win over it."
        self.add_argument("--config", default=argparse.SUPPRESS, help=presets)

    def add_argument(self, *names: Any, **settings: Any) -> Any:
        option = self._options.get(settings.get("dest", names[0].removeprefix("--")))
        if option is None:
            return super().add_argument(*names, **settings)
        settings = {key: value for key, value in settings.items() if key not in METADATA}
        if option.registry is not None:
            settings["help"] += f" One of {', '.join(option.registry.names)}."
        if isinstance(settings.get("type"), types.UnionType):
            settings["type"] = _number_or_text
        if {float, str} <= set(option.kinds):
            settings["type"] = _or_null(_float_or_text) if option.nullable else _float_or_text
        if True in option.choices:
            settings["type"] = _boolean_or_text
        # In fields that also accept other types (TrainingArguments.report_to), "none" is a value of its own and is not
        # converted to None.
        if option.nullable and len(option.kinds) == 1 and "type" in settings:
            settings["type"] = _or_null(settings["type"])
            if option.choices:
                settings["choices"] = [*option.choices, None]
        if option.group not in self._sections:
            self._sections[option.group] = self.add_argument_group(option.group)
        return self._sections[option.group].add_argument(*names, **settings)

    def read(self, arguments: list[str]) -> tuple[dict[str, Any], list[str]]:
        """The flags that `arguments` hold, without defaults, and the arguments that are not flags."""
        absent = argparse.Namespace(**dict.fromkeys(self._options, _ABSENT))
        parsed, unknown = self.parse_known_args(arguments, absent)
        given = {name: value for name, value in vars(parsed).items() if value is not _ABSENT}
        return {name: None if value == [None] else value for name, value in given.items()}, unknown


def _number_or_text(text: str) -> int | str:
    return int(text) if text.isascii() and text.isdigit() else text


def _float_or_text(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _boolean_or_text(text: str) -> bool | str:
    return {"true": True, "false": False}.get(text.lower(), text)


def _or_null(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        return None if text.lower() in ("null", "none") else convert(text)

    # argparse reports "invalid <name> value".
    read.__name__ = convert.__name__
    return read
