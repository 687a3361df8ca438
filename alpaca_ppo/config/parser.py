"""The command line: `parse_args` reads a YAML file and flags into dataclasses, `ScriptArguments` is train_ppo.py's."""

import argparse
import dataclasses
import sys
import types
import typing
from collections.abc import Callable, Sequence, Set
from typing import Any

import yaml
from transformers import HfArgumentParser

from alpaca_ppo.config.checks import MUTUALLY_EXCLUSIVE, members


def parse_args(dataclass_types: Sequence[type], argv: Sequence[str] | None = None) -> tuple[Any, ...]:
    """One instance of each dataclass in `dataclass_types`, from `--config run.yaml` and flags; a flag wins over the
    file, and over the file's rival of it (`validation.MUTUALLY_EXCLUSIVE`).

    A flag of a field that may be None takes `null` or `none` for it.

    Args:
        dataclass_types: dataclasses with distinct field names.
        argv: the command line without the program's name; `sys.argv[1:]` by default.

    Raises:
        ValueError: when the file is missing, is no mapping, or has a key that no dataclass has; for a flag that none
            has; and what the dataclasses raise.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    arguments = [part for text in arguments for part in text.split("=", 1 if text.startswith("--config=") else 0)]
    given: dict[str, Any] = {}
    if "--config" in arguments:
        at = arguments.index("--config")
        if at + 1 == len(arguments):
            raise ValueError("--config names no file; give the path of a YAML file")
        given = read_yaml(arguments[at + 1])
        del arguments[at : at + 2]
    fields = {cls: [field.name for field in dataclasses.fields(cls) if field.init] for cls in dataclass_types}
    hints = {name: hint for cls in fields for name, hint in typing.get_type_hints(cls).items() if name in fields[cls]}
    unknown = sorted(set(given) - set(hints))
    if unknown:
        raise ValueError(
            f"unknown keys in the --config file: {', '.join(unknown)}; known are {', '.join(sorted(hints))}"
        )
    values = {name: _as_declared(name, hints[name], value) for name, value in given.items()}
    flags = _read_flags(dataclass_types, hints, arguments)
    for rivals in MUTUALLY_EXCLUSIVE:
        if any(flags.get(name) is not None for name in rivals):
            values |= dict.fromkeys(set(rivals) & set(values))
    values |= flags
    return tuple(cls(**{name: values[name] for name in names if name in values}) for cls, names in fields.items())


def read_yaml(path: str) -> dict[str, Any]:
    """The mapping that the YAML file at `path` holds.

    Raises:
        ValueError: when there is no such file or it holds something else.
    """
    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.safe_load(file)
    except FileNotFoundError as error:
        raise ValueError(f"--config {path}: there is no such file") from error
    if not isinstance(content, dict):
        raise ValueError(f"--config {path} holds {type(content).__name__}; it must map argument names to values")
    return content


def _as_declared(name: str, hint: Any, value: Any) -> Any:
    """YAML reads 1e-5 as text: brings it to the number that `hint` declares, and a single value to a list."""
    kinds = [kind for kind in members(hint) if kind is not type(None)]
    if len(kinds) == 1 and typing.get_origin(kinds[0]) is list and value is not None:
        entry = typing.get_args(kinds[0])[0]
        return [_as_declared(name, entry, part) for part in (value if isinstance(value, list) else [value])]
    number = float if float in kinds else int if int in kinds else None
    if not isinstance(value, str) or number is None or str in kinds:
        return value
    try:
        return number(value)
    except ValueError as error:
        raise ValueError(f"{name} is {value!r} in the --config file; it must be {number.__name__}") from error


class _FlagParser(HfArgumentParser):
    """HfArgumentParser that reads `null` and `none` as None for the fields in `nullable`, and the union `str | int`:
    digits are a number.
    """

    def __init__(self, dataclass_types: Sequence[type], *, nullable: Set[str]) -> None:
        # The base class adds all arguments as it is built.
        self.nullable = nullable
        super().__init__(list(dataclass_types), allow_abbrev=False)  # type: ignore[arg-type]

    def add_argument(self, *names: Any, **options: Any) -> Any:
        convert = options.get("type")
        if isinstance(convert, types.UnionType):
            convert = options["type"] = _number_or_text
        if convert is not None and names[0].removeprefix("--") in self.nullable:
            options["type"] = _or_null(convert)
        return super().add_argument(*names, **options)


def _number_or_text(text: str) -> int | str:
    return int(text) if text.isascii() and text.isdigit() else text


def _or_null(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        return None if text.lower() in ("null", "none") else convert(text)

    # argparse says "invalid <name> value".
    read.__name__ = convert.__name__
    return read


def _read_flags(dataclass_types: Sequence[type], hints: dict[str, Any], arguments: list[str]) -> dict[str, Any]:
    """The fields that the command line names, without anyone's defaults."""
    # Fields of three kinds are left alone: the `none` of TrainingArguments.report_to is a word of its own.
    nullable = {name for name, hint in hints.items() if type(None) in members(hint) and len(members(hint)) == 2}
    absent = object()
    parsed, unused = _FlagParser(dataclass_types, nullable=nullable).parse_known_args(
        arguments, argparse.Namespace(**dict.fromkeys(hints, absent))
    )
    if unused:
        raise ValueError(f"no argument takes {' '.join(unused)!r} of the command line; --help lists the arguments")
    return {name: None if value == [None] else value for name, value in vars(parsed).items() if value is not absent}
