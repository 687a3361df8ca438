"""Flags of the command line: `FlagParser` makes one of each field of the dataclasses, with its help."""

import argparse
import dataclasses
import json
import re
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from enum import Enum
from typing import Any

import yaml

from alpaca_ppo.config.fields import Option
from alpaca_ppo.config.foreign_names import CONFIG_SECTIONS, explain_names
from alpaca_ppo.presets import preset_names

_ABSENT = object()
# argparse's own pattern has neither exponents nor infinity, so that it would take -1e1 for a flag.
_NEGATIVE_NUMBER = re.compile(r"^-(?:(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|inf|infinity|nan)$", re.IGNORECASE)
_WORDS = {"true": True, "yes": True, "t": True, "y": True, "1": True}
_WORDS |= {"false": False, "no": False, "f": False, "n": False, "0": False}
SOURCES = ("config", "preset", "set")
"""Flags that name where further options are read. Their order on the command line is kept."""


@dataclasses.dataclass(frozen=True)
class Flags:
    """What a command line holds, before any file is read.

    Attributes:
        values: the options given as flags, without defaults.
        sources: (name, text) of each `--config`, `--preset` and `--set`, in order.
        wants_help: whether `--help` is among the flags.
        unknown: the words that belong to no flag.
    """

    values: dict[str, Any]
    sources: list[tuple[str, str]]
    wants_help: bool
    unknown: list[str]


class FlagParser(argparse.ArgumentParser):
    """A flag for each option, in the groups of `--help`; a boolean that is True by default also has `--no_<name>`.

    `-` and `_` are the same in the name of a flag. A field that may be None takes `null` or `none` for it, a mapping is
    written as YAML or JSON, and of the types `str | int` and `float | str`, what can be read as a number is one.

    Args:
        options: by name.
        prog: how the program was called; by default, the name of the script.
        epilog: a paragraph at the end of the help.
    """

    def __init__(self, options: Mapping[str, Option], *, prog: str | None = None, epilog: str | None = None) -> None:
        usage = "%(prog)s [--config CONFIG] [--option VALUE ...]"
        formatter = argparse.HelpFormatter
        super().__init__(
            prog=prog, usage=usage, epilog=epilog, formatter_class=formatter, allow_abbrev=False, add_help=False
        )
        self._negative_number_matcher = _NEGATIVE_NUMBER
        self._options = options
        self.add_argument("-h", "--help", action="store_true", default=argparse.SUPPRESS, help="Show this help.")
        for name, metavar, words, nargs in (
            ("config", "FILE", "YAML file of options; flags win over it.", None),
            ("preset", "NAME", f"Options by the name of a preset ({', '.join(preset_names())}).", None),
            ("set", "OPTION=VALUE", "Options with values as in YAML; they win over files, as flags do.", "+"),
        ):
            words += " May be repeated; later ones win." if nargs is None else ""
            self.add_argument(f"--{name}", metavar=metavar, nargs=nargs, action=_Source, dest="_sources", help=words)
        groups: dict[str, Any] = {}
        for option in options.values():
            if (settings := _settings(option)) is None:
                continue
            if option.group not in groups:
                groups[option.group] = self.add_argument_group(option.group)
            groups[option.group].add_argument(f"--{option.name}", dest=option.name, **settings)
            if option.kinds == (bool,) and option.default is True:
                groups[option.group].add_argument(
                    f"--no_{option.name}", dest=option.name, action="store_false", help=argparse.SUPPRESS
                )

    def read(self, arguments: Sequence[str]) -> Flags:
        """The flags in `arguments`. A value of the wrong type ends the process with the usage and the exit status 2."""
        absent = argparse.Namespace(_sources=[], **dict.fromkeys(self._options, _ABSENT))
        known = set(self._option_string_actions)
        parsed, unknown = self.parse_known_args([_with_underscores(word, known) for word in arguments], absent)
        values = {name: vars(parsed)[name] for name in self._options if vars(parsed)[name] is not _ABSENT}
        return Flags(
            values={name: None if value == [None] else value for name, value in values.items()},
            sources=vars(parsed)["_sources"],
            wants_help="help" in parsed,
            unknown=unknown,
        )

    def refuse_unknown(self, words: Sequence[str]) -> None:
        """Refuses `words` that belong to no flag.

        Raises:
            ValueError: if there are any; says what each may have been meant to be.
        """
        if words:
            raise ValueError(
                f"unknown command-line arguments: {' '.join(words)}; --help lists the valid ones\n"
                + explain_names(_named_values(words), [*self._options, *SOURCES], CONFIG_SECTIONS)
            )


def did_you_mean(words: Iterable[str], known: Iterable[str]) -> str:
    """ " did you mean x?" for those of `known` that are spelled almost as `words` are; empty if none is."""
    pool = list(known)
    close = [match for word in words for match in get_close_matches(word, pool, n=1, cutoff=0.75)]
    return f" did you mean {', '.join(dict.fromkeys(close))}?" if close else ""


def _named_values(words: Sequence[str]) -> dict[str, str]:
    """Names and values of words that are no flags here: `--name value`, `--name=value`, and verl's `name=value`."""
    values: dict[str, str] = {}
    name = ""
    for word in words:
        flag, equals, value = word.partition("=")
        if word.startswith("--") or equals:
            name = flag.removeprefix("--").replace("-", "_") if word.startswith("--") else flag.lstrip("+~")
            values[name] = value
        elif name:
            values[name] = f"{values[name]} {word}".strip()
        else:
            values[word] = ""
    return values


class _Source(argparse.Action):
    """Notes `--config`, `--preset` and `--set` in the order in which they are given."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        name = str(option_string).removeprefix("--")
        given = values if isinstance(values, list) else [values]
        namespace._sources = [*namespace._sources, *((name, value) for value in given)]


def _with_underscores(word: str, known: set[str]) -> str:
    name, equals, value = word.partition("=")
    spelled = "--" + name[2:].replace("-", "_")
    return f"{spelled}{equals}{value}" if word.startswith("--") and name not in known and spelled in known else word


def _settings(option: Option) -> dict[str, Any] | None:
    """How argparse reads and shows an option; None for a type that no text can give."""
    kinds = option.entry_kinds or option.kinds
    is_dict = any(typing.get_origin(kind) is dict or kind is dict for kind in kinds)
    settings: dict[str, Any] = {"help": _help(option)}
    if option.choices and str not in kinds:
        names = [str(choice).lower() if isinstance(choice, bool) else str(choice) for choice in option.choices]
        names += ["null"] if option.nullable else []
        settings |= {"choices": [*option.choices, *([None] if option.nullable else [])]}
        settings |= {"metavar": f"{{{','.join(names)}}}", "type": _choice(option.choices)}
    elif bool in kinds:
        settings |= {"metavar": "{true,false}", "type": _boolean if str not in kinds else _boolean_or_text}
        settings |= {"nargs": "?", "const": True}
    elif int in kinds:
        settings |= {"metavar": "INT", "type": int if str not in kinds else _number_or_text}
    elif float in kinds:
        settings |= {"metavar": "FLOAT", "type": float if str not in kinds else _float_or_text}
    elif str in kinds or any(isinstance(kind, type) and issubclass(kind, Enum) for kind in kinds):
        settings |= {"metavar": "TEXT", "type": str}
    elif is_dict:
        settings |= {"metavar": "MAPPING", "type": _mapping}
    else:
        return None
    if option.flag_alone is not None:
        settings |= {"nargs": "?", "const": option.flag_alone}
    if option.entry_kinds is not None:
        settings["nargs"] = "+"
    # In fields that also accept other types (TrainingArguments.report_to), "none" is a value of its own and is not
    # converted to None.
    if option.nullable and (len(option.kinds) == 1 or (float in kinds and str in kinds)):
        settings["type"] = _or_null(settings["type"])
    return settings


def _help(option: Option) -> str:
    words = [option.help.strip()]
    if option.registry is not None:
        words.append(f"One of {', '.join(option.registry.names)}.")
    notes = [str(option.bounds)] if str(option.bounds) else []
    if option.default is not dataclasses.MISSING and option.default != "":
        default = option.default.value if isinstance(option.default, Enum) else option.default
        notes.insert(0, f"default: {default if isinstance(default, str) else json.dumps(default, default=str)}")
    words.append(f"({'; '.join(notes)})" if notes else "")
    return " ".join(filter(None, words)).replace("%", "%%")


def _choice(choices: tuple[Any, ...]) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        given = _boolean_or_text(text) if True in choices else text
        return next((choice for choice in choices if str(choice) == text), given)

    return read


def _boolean(text: str) -> bool:
    if text.lower() not in _WORDS:
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return _WORDS[text.lower()]


def _boolean_or_text(text: str) -> bool | str:
    return {"true": True, "false": False}.get(text.lower(), text)


def _number_or_text(text: str) -> int | str:
    return int(text) if text.isascii() and text.isdigit() else text


def _float_or_text(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _mapping(text: str) -> dict[str, Any]:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not YAML: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no mapping; write it as '{{key: value}}'")
    return value


def _or_null(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        return None if text.lower() in ("null", "none") else convert(text)

    # argparse reports "invalid <name> value".
    read.__name__ = convert.__name__
    return read
