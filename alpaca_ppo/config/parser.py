"""The command line: `parse_args` turns YAML files, presets and flags into dataclasses."""

import dataclasses
import json
import os
import re
import shutil
import sys
import textwrap
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from alpaca_ppo.config.checks import LENGTHS
from alpaca_ppo.config.fields import Option, options_of, shown
from alpaca_ppo.config.foreign_names import CONFIG_SECTIONS, explain_names, flattened
from alpaca_ppo.config.modules import import_modules
from alpaca_ppo.config.names import did_you_mean, where
from alpaca_ppo.config.run_file import PROVENANCE, check_run_files
from alpaca_ppo.config.script_arguments import MODELS, ScriptArguments
from alpaca_ppo.presets import preset_names, preset_path

_SOURCES = {
    "config": "FILE: YAML file of options; flags win over it, later files over earlier ones.",
    "preset": "NAME: options by the name of a preset, read as such a file: {}.",
}
HELP = ("help", "help_all")
_ALIASES = {"model": "model_name_or_path"}
"""What an option is called in Python, as by TRL."""


@dataclasses.dataclass(frozen=True)
class ParsedOptions:
    """What a command line says.

    Attributes:
        instances: one of each dataclass, in order.
        presets: names of the presets that were read, in order.
        config_files: what each YAML file holds, by its path as given, in order.
    """

    instances: tuple[Any, ...]
    presets: tuple[str, ...]
    config_files: Mapping[str, Mapping[str, Any]]


def parse_args(
    dataclass_types: Sequence[type], argv: Sequence[str] | None = None, *, prog: str | None = None, epilog: str = ""
) -> tuple[Any, ...]:
    """One instance of each dataclass in `dataclass_types`: see `parse_options`."""
    return parse_options(dataclass_types, argv, prog=prog, epilog=epilog).instances


def parse_options(
    dataclass_types: Sequence[type],
    argv: Sequence[str] | None = None,
    *,
    prog: str | None = None,
    epilog: str = "",
    common: Collection[str] = (),
) -> ParsedOptions:
    """The options of each dataclass in `dataclass_types`, from files, presets and flags.

    Of several `--config` and `--preset`, later ones win; a flag wins over all of them. Values are read as YAML does,
    `null` among them; a flag alone is true. If one of the dataclasses has the field `import_modules`, those modules are
    imported before `--help` is printed and before any value is checked, so that the names that they register are valid.

    Args:
        dataclass_types: dataclasses with distinct field names.
        argv: the command line without the program's name; `sys.argv[1:]` by default.
        prog: the program's name, for the help; that of the script by default.
        epilog: a paragraph at the end of the help.
        common: the options that `--help` shows, where only `--help-all` shows all of them.

    Raises:
        ValueError: when a file does not exist, is not valid YAML, does not hold a mapping, or has an unknown key or
            one key twice; for a run's own file that cannot repeat it (`run_file`); for an unknown preset or flag; for a
            module that cannot be imported; and what the dataclasses raise.
    """
    options = {name: option for cls in dataclass_types for name, option in options_of(cls).items()}
    found = _split(sys.argv[1:] if argv is None else argv, options)
    given = {name: _from_words(options[name], words) for name, words in found if name in options}
    values: dict[str, Any] = {}
    contents: dict[str, dict[str, Any]] = {}
    presets = []
    for kind, words in found:
        if kind in _SOURCES and len(words) != 1:
            raise ValueError(f"--{kind} needs one name after it, not {' '.join(words) or 'none'}")
        if kind == "config":
            contents[words[0]] = read_yaml(words[0])
            _override(values, _from_file(contents[words[0]], options, f"the --config file {words[0]}"))
        elif kind == "preset":
            presets.append(words[0])
            _override(values, _from_file(read_preset(words[0]), options, f"the preset {words[0]}"))
    of_runs = [cls for cls in dataclass_types if issubclass(cls, ScriptArguments)]
    check_run_files(contents, given=given, needed=of_runs[0].needed_objects if of_runs else MODELS)
    _override(values, given)
    if "import_modules" in values:
        options["import_modules"].check(values["import_modules"])
        import_modules(values["import_modules"] or [])
    if asked := [name for name, _ in found if name in HELP]:
        print(_help(options, prog, epilog, common if asked[-1] == "help" else ()))
        sys.exit(0)
    if unknown := {name: " ".join(words) for name, words in found if name not in {*options, *_SOURCES}}:
        raise ValueError(
            f"unknown command-line arguments: {', '.join(unknown)}; --help-all lists the valid ones\n"
            + explain_names(unknown, [*_spellings(options, unknown), *_SOURCES], CONFIG_SECTIONS)
        )
    instances = [cls(**{name: values[name] for name in options_of(cls) if name in values}) for cls in dataclass_types]
    return ParsedOptions(tuple(instances), tuple(presets), contents)


def _spellings(options: Mapping[str, Option], given: Collection[str]) -> list[str]:
    """The names that one in `given` may mean: a file that has both names of an option has one too many."""
    return [*options, *(alias for alias, name in _ALIASES.items() if name in options and alias not in given)]


def _split(words: Sequence[str], options: Mapping[str, Option]) -> list[tuple[str, list[str]]]:
    """The flags in `words` by name, each with the words after it; `-` and `_` are the same in a name, and `--no_x` is
    `--x false`. An override of verl (`+optim.lr=1`) and a word before the first flag are names of their own.
    """
    found: list[tuple[str, list[str]]] = []
    for word in words:
        flag, equals, value = word.partition("=")
        of_verl = equals and "." in flag and flag.replace(".", "").lstrip("+~").isidentifier()
        if word.startswith("--") or word == "-h":
            name = "help" if word == "-h" else flag[2:].replace("-", "_")
            name = name if name in options else _ALIASES.get(name, name)
            positive = name.removeprefix("no_")
            if name not in options and name != positive and positive in options and not equals:
                found.append((positive, ["false"]))
            else:
                found.append((name, [value] if equals else []))
        elif of_verl or not found:
            found.append((flag.lstrip("+~"), [value] if equals else []))
        else:
            found[-1][1].append(word)
    return found


def _from_words(option: Option, words: list[str]) -> Any:
    """The value of a flag with `words` after it."""
    if not words and option.accepts(True):
        return True
    if not words:
        raise ValueError(f"--{option.name} needs a value after it")
    # Where text may stand in place of a list, as in the trackers of TrainingArguments, "none" is one.
    may_be_null = option.nullable and not (option.is_list and option.accepts(words[0]))
    if may_be_null and len(words) == 1 and words[0].lower() in ("null", "none"):
        return None
    if option.is_list:
        return [_from_word(option, word) for word in words]
    if len(words) > 1:
        raise ValueError(f"{option.name} has the values {shown(words)}; give one")
    return _from_word(option, words[0])


def _from_word(option: Option, word: str) -> Any:
    """`word` as what YAML reads in it, or as it is where the option takes text and nothing else that this could be."""
    value = _from_text(word)
    if not _takes(option, word) or (not isinstance(value, str | None) and _takes(option, value)):
        return value
    return word


def _from_file(content: Mapping[str, Any], options: Mapping[str, Option], where: str) -> dict[str, Any]:
    """The values of a YAML file: text as the number or the like that the field takes, and one entry as a list of it."""
    given = {name: value for name, value in content.items() if name != PROVENANCE}
    for alias, name in _ALIASES.items():
        if alias in given and name in options and name not in given:
            given[name] = given.pop(alias)
    if unknown := sorted(map(str, set(given) - set(options))):
        # Of verl's sections, `critic` alone has the name of an option.
        nested = {k: v for k, v in given.items() if k not in options or (k == "critic" and isinstance(v, Mapping))}
        names = flattened(nested) | {k: v for k, v in given.items() if k not in nested}
        raise ValueError(
            f"unknown keys in {where}: {', '.join(unknown)}; --help-all lists the valid ones\n"
            + explain_names(names, _spellings(options, unknown), CONFIG_SECTIONS)
        )
    values = {}
    for name, value in given.items():
        option = options[name]
        if value is None and not option.nullable and option.default is not None:
            raise ValueError(f"{name} is null in {where}; give a value, or leave it out for {shown(option.default)}")
        if option.is_list and value is not None:
            entries = value if isinstance(value, list) else [value]
            values[name] = [entry if _takes(option, entry) else _from_text(entry) for entry in entries]
        else:
            values[name] = value if option.accepts(value) else _from_text(value)
    return values


def _takes(option: Option, value: Any) -> bool:
    """Whether the option, or, of a list, an entry of it, may be `value`."""
    return option.accepts([value] if option.is_list else value)


def _from_text(text: Any) -> Any:
    """What YAML reads in `text`; anything else, and text that is no YAML, as it is."""
    try:
        return yaml.load(text, Loader=_Loader) if isinstance(text, str) else text
    # PyYAML raises whatever the value at fault provokes: KeyError for "!!bool x", RecursionError for deep nesting.
    except Exception:
        return text


def _override(values: dict[str, Any], given: Mapping[str, Any]) -> None:
    """Puts `given` over `values`; a length of the run in it replaces another one."""
    if any(given.get(name) is not None for name in LENGTHS):
        values |= dict.fromkeys(set(LENGTHS) & set(values))
    values |= given


def read_yaml(path: str) -> dict[str, Any]:
    """The mapping in the YAML file at `path`.

    Raises:
        ValueError: when there is no such file, or it is not valid YAML in UTF-8, has a key twice, or does not hold a
            mapping.
    """
    # False for a path that is no file name at all, where Path.is_file would raise an OSError.
    if os.path.isfile(path):
        return _read_mapping(Path(path), f"--config {path}")
    preset = did_you_mean(path, preset_names()).replace("mean", "mean --preset")
    raise ValueError(f"--config is {shown(path)}, but{where(path, what='file')}{preset}")


def read_preset(name: str) -> dict[str, Any]:
    """The mapping of the preset `name`.

    Raises:
        ValueError: for a preset that does not exist.
    """
    names = preset_names()
    if name not in names:
        file = f" did you mean --config {name}?" if os.path.isfile(name) else ""
        raise ValueError(
            f"--preset is {shown(name)}, but there is no preset of that name;{file or did_you_mean(name, names)} the "
            f"presets are {', '.join(names)}"
        )
    return _read_mapping(preset_path(name), f"the preset {name}")


def _read_mapping(file: Path, where: str) -> dict[str, Any]:
    try:
        content = yaml.load(file.read_text(encoding="utf-8"), Loader=_Loader)
    # As in `_from_text`.
    except Exception as error:
        reason = error if isinstance(error, yaml.YAMLError) else f"{type(error).__name__}: {error}"
        raise ValueError(f"{where} cannot be read as YAML: {reason}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{where} holds a {type(content).__name__}; it must map option names to values")
    return content


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Reads 1e-5 as a number, and refuses a key that occurs twice in a mapping, of which PyYAML takes the last one."""

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if (key.tag, str(key.value)) in seen:
                raise yaml.MarkedYAMLError(problem=f"the key {key.value!r} occurs twice", problem_mark=key.start_mark)
            seen.add((key.tag, str(key.value)))
        return node


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Writes text that `_Loader` would read as a number in quotes."""


for _class in (_Loader, _Dumper):
    _exponent = re.compile(r"^[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+$", re.ASCII)
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _exponent, list("-+.0123456789"))


def as_yaml(content: Any) -> str:
    """`content` as YAML that `read_yaml` reads as the same."""
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True)  # type: ignore[no-any-return]


def _help(options: Mapping[str, Option], prog: str | None, epilog: str, common: Collection[str]) -> str:
    """The text of `--help`: the options in `common`, or all of them."""
    lines = [f"usage: {prog or Path(sys.argv[0]).name} [--config FILE] [--option VALUE ...]"]
    width, group = max(60, min(shutil.get_terminal_size().columns, 120)), ""
    entries = [(f"--{name}", text.format(", ".join(preset_names()))) for name, text in _SOURCES.items()]
    for option in options.values():
        if common and option.name not in common:
            continue
        if option.group != group:
            group = option.group
            entries.append((f"\n{group}:", ""))
        entries.append((f"--{option.name} {type_in_words(option.hint)}", description(option)))
    for head, text in entries:
        lines += [
            head if head.startswith("\n") else f"  {head}",
            *textwrap.wrap(text, width, initial_indent=" " * 8, subsequent_indent=" " * 8),
        ]
    if common:
        lines.append(f"\n--help-all describes all {len(options)} options.")
    return "\n".join([*lines, *textwrap.wrap(epilog, width)])


def type_in_words(hint: Any) -> str:
    """The type of an option, as help and documentation name it."""
    origin, parts = typing.get_origin(hint), [part for part in typing.get_args(hint) if part is not type(None)]
    if origin is typing.Literal:
        return " | ".join(choice if isinstance(choice, str) else json.dumps(choice) for choice in parts)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(type_in_words, parts))
    if origin is typing.Annotated:
        return type_in_words(parts[0])
    if origin is list:
        return f"list of {type_in_words(parts[0])}"
    return "mapping" if origin is dict else str(getattr(hint, "__name__", hint))


def description(option: Option, *, built_in: bool = False) -> str:
    """What an option does, with its names, bounds and needs and its default; `built_in` leaves out registered names."""
    text = option.help
    if option.registry is not None:
        text += f" One of {', '.join(option.registry.built_in if built_in else option.registry.names)}."
    if option.needs:
        text += f" Needs {', and '.join(str(need) for need in option.needs)}."
    known = option.default not in ("", dataclasses.MISSING)
    notes = [
        f"default {json.dumps(option.default, default=str)}" if known else "",
        option.range,
        "or null" if option.nullable and option.default is not None else "",
    ]
    return f"{text} ({'; '.join(filter(None, notes))})" if any(notes) else text
