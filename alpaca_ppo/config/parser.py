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
from alpaca_ppo.config.names import did_you_mean, path_problem
from alpaca_ppo.config.run_file import PROVENANCE, check_run_files
from alpaca_ppo.config.script_arguments import ModelArguments, ScriptArguments
from alpaca_ppo.presets import preset_names, preset_path

_SOURCES = {
    "config": "FILE: YAML file of options; flags win over it, later files over earlier ones.",
    "preset": "NAME: options by the name of a preset, read as such a file: {}.",
}
# Other names of options: those of the arguments in Python.
_ALIASES = {"model": "model_name_or_path"}


@dataclasses.dataclass(frozen=True)
class ParsedOptions:
    """What a command line gives: instances of the dataclasses, the names of presets, and the mapping in each file."""

    instances: tuple[Any, ...]
    presets: tuple[str, ...]
    config_files: Mapping[str, Mapping[str, Any]]


def parse_args(
    dataclass_types: Sequence[type], argv: Sequence[str] | None = None, *, prog: str | None = None
) -> tuple[Any, ...]:
    """The instances of `parse_options`."""
    return parse_options(dataclass_types, argv, prog=prog).instances


def parse_options(
    dataclass_types: Sequence[type],
    argv: Sequence[str] | None = None,
    *,
    prog: str | None = None,
    epilog: str = "",
    common: Collection[str] = (),
) -> ParsedOptions:
    """The options of each dataclass in `dataclass_types`, from files, presets and flags; with `--help`, prints the help
    and exits.

    Of several `--config` and `--preset`, later ones win; a flag wins over all of them. Values are read as in YAML; a
    flag without a value is true. Modules in `import_modules` are imported before the help is printed and values are
    checked, so that the names that they register are valid.

    Args:
        dataclass_types: dataclasses with distinct field names.
        argv: `sys.argv[1:]` by default.
        prog: the program's name in the help; by default the script's.
        epilog: a paragraph at the end of the help.
        common: the options that `--help` shows; empty = all, as `--help-all`.
    """
    options = {name: option for cls in dataclass_types for name, option in options_of(cls).items()}
    flags = _split_flags(sys.argv[1:] if argv is None else argv, options)
    given = {name: flag_value(options[name], words) for name, words in flags if name in options}
    values: dict[str, Any] = {}
    files: dict[str, dict[str, Any]] = {}
    for flag, words in flags:
        if flag in _SOURCES and len(words) != 1:
            raise ValueError(f"--{flag} needs one name after it, not {' '.join(words) or 'none'}")
        if flag == "config":
            files[words[0]] = _without_aliases(read_yaml(words[0]), options)
            _update(values, _file_values(files[words[0]], options, f"the --config file {words[0]}"))
        elif flag == "preset":
            _update(values, _file_values(read_preset(words[0]), options, f"the preset {words[0]}"))
    # A command without script arguments, such as `export`, needs only the models of a run.
    script_type = next((cls for cls in dataclass_types if issubclass(cls, ScriptArguments)), ModelArguments)
    check_run_files(files, given=given, needed=script_type.needed_objects)
    _update(values, given)
    if "import_modules" in values:
        options["import_modules"].check(values["import_modules"])
        import_modules(values["import_modules"] or [])
    if asked := [flag for flag, _ in flags if flag in ("help", "help_all")]:
        print(_help(options, prog, epilog, common if asked[-1] == "help" else ()))
        sys.exit(0)
    if unknown := {flag: " ".join(words) for flag, words in flags if flag not in {*options, *_SOURCES}}:
        problem = f"unknown command-line arguments: {', '.join(unknown)}; --help-all lists the valid ones"
        valid = [*_valid_names(options, unknown), *_SOURCES]
        raise ValueError(f"{problem}\n{explain_names(unknown, valid, CONFIG_SECTIONS)}")
    instances = [cls(**{name: values[name] for name in options_of(cls) if name in values}) for cls in dataclass_types]
    presets = tuple(words[0] for flag, words in flags if flag == "preset")
    return ParsedOptions(tuple(instances), presets, files)


def _valid_names(options: Mapping[str, Option], given: Collection[str]) -> list[str]:
    """The options and their aliases. An alias in `given` is invalid, because it stands beside the option's name."""
    return [*options, *(alias for alias, name in _ALIASES.items() if name in options and alias not in given)]


def _split_flags(words: Sequence[str], options: Mapping[str, Option]) -> list[tuple[str, list[str]]]:
    """The flags in `words` by name, each with the words after it; `-` and `_` are the same in a name, and `--no_x` is
    `--x false`. A word before the first flag and an override of verl (`+optim.lr=1`) are returned as flags, to be
    reported as unknown.
    """
    flags: list[tuple[str, list[str]]] = []
    for word in words:
        start, equals, value = word.partition("=")
        is_verl_override = equals and "." in start and start.replace(".", "").lstrip("+~").isidentifier()
        if word.startswith("--") or word == "-h":
            name = "help" if word == "-h" else start[2:].replace("-", "_")
            name = name if name in options else _ALIASES.get(name, name)
            positive = name.removeprefix("no_")
            if name not in options and positive in options and not equals:
                flags.append((positive, ["false"]))
            else:
                flags.append((name, [value] if equals else []))
        elif is_verl_override or not flags:
            flags.append((start.lstrip("+~"), [value] if equals else []))
        else:
            flags[-1][1].append(word)
    return flags


def flag_value(option: Option, words: list[str]) -> Any:
    """The value of a flag with `words` after it; in a list, a word in brackets stands for its entries."""
    if not words and option.accepts(True):
        return True
    if not words:
        raise ValueError(f"--{option.name} needs a value after it")
    # TrainingArguments.report_to, which takes a text in place of a list, has "none" for a value.
    none_is_text = option.is_list and option.accepts(words[0])
    if option.nullable and not none_is_text and len(words) == 1 and words[0].lower() in ("null", "none"):
        return None
    if option.is_list:
        entries: list[Any] = []
        for word in words:
            # A single line "- x" may be text, such as a stop string.
            value = word if _accepts(option, word) and not re.match(r"\[|\s*- .+\n\s*- ", word) else _parse_yaml(word)
            entries += _entries(option, value) if isinstance(value, list) else [_parse_word(option, word)]
        return entries
    if len(words) > 1:
        raise ValueError(f"{option.name} has the values {shown(words)}; give one")
    return _parse_word(option, words[0])


def _parse_word(option: Option, word: str) -> Any:
    """What YAML reads in `word`; or `word` itself, if the option takes text but not what YAML reads."""
    value = _parse_yaml(word)
    if not _accepts(option, word) and not (option.is_list and value is None):
        return value
    # "null" stays text, because the caller has read it where the option may be null; and so do dates.
    is_text = value is None or (isinstance(value, str) and word[:1] not in ("'", '"'))
    return word if is_text or not _accepts(option, value) else value


def _file_values(content: Mapping[str, Any], options: Mapping[str, Option], source: str) -> dict[str, Any]:
    """The options in `content`, which errors call `source`. Text becomes another type if the option takes no text, and
    a single value becomes a list if it takes a list.
    """
    given = {name: value for name, value in content.items() if name != PROVENANCE}
    if unknown := sorted(map(str, set(given) - set(options))):
        # One of verl's sections has the name of an option: `critic`.
        foreign = {k: v for k, v in given.items() if k not in options or (k == "critic" and isinstance(v, Mapping))}
        names = flattened(foreign) | {k: v for k, v in given.items() if k not in foreign}
        problem = f"unknown keys in {source}: {', '.join(unknown)}; --help-all lists the valid ones"
        raise ValueError(f"{problem}\n{explain_names(names, _valid_names(options, unknown), CONFIG_SECTIONS)}")
    values = {}
    for name, value in given.items():
        option = options[name]
        if value is None and not option.nullable and option.default is not None:
            raise ValueError(f"{name} is null in {source}; give a value, or leave it out for {shown(option.default)}")
        if option.is_list and value is not None:
            values[name] = _entries(option, value if isinstance(value, list) else [value])
        else:
            values[name] = value if option.accepts(value) else _parse_yaml(value)
    return values


def _without_aliases(content: Mapping[str, Any], options: Mapping[str, Option]) -> dict[str, Any]:
    """`content` with options in place of their aliases. An alias beside its option's name stays, which is invalid."""
    aliases = {alias: name for alias, name in _ALIASES.items() if name in options and name not in content}
    return {aliases.get(name, name): value for name, value in content.items()}


def _entries(option: Option, values: list[Any]) -> list[Any]:
    """The entries of a list. If the option takes no text, text becomes another type; a single one may be a list."""
    read = [value if _accepts(option, value) else _parse_yaml(value) for value in values]
    is_list_as_text = len(values) == 1 and isinstance(values[0], str) and isinstance(read[0], list)
    return read[0] if is_list_as_text else read


def _accepts(option: Option, value: Any) -> bool:
    return option.accepts([value] if option.is_list else value)


def _parse_yaml(text: Any) -> Any:
    """What YAML reads in `text`; `text` itself if it is no string or no valid YAML."""
    try:
        return yaml.load(text, Loader=_Loader) if isinstance(text, str) else text
    # PyYAML lets errors of all kinds through: KeyError for "!!bool x", RecursionError for deep nesting.
    except Exception:
        return text


def _update(values: dict[str, Any], given: Mapping[str, Any]) -> None:
    """Updates `values` with `given`; an option of `LENGTHS` in `given` unsets the others."""
    if any(given.get(name) is not None for name in LENGTHS):
        values |= {name: None for name in LENGTHS if name in values}
    values |= given


def read_yaml(path: str, *, option: str = "--config") -> dict[str, Any]:
    """The mapping in the YAML file at `path`. Errors begin with `option`, which names the file."""
    # Path.is_file would raise an OSError for a text that is no file name.
    if os.path.isfile(path):
        return _read_mapping(Path(path), f"{option} {path}")
    preset = did_you_mean(path, preset_names(), prefix="--preset ")
    raise ValueError(f"{option} is {shown(path)}, but{path_problem(path, what='file')}{preset}")


def read_preset(name: str) -> dict[str, Any]:
    """The mapping of the preset `name`."""
    names = preset_names()
    if name not in names:
        meant = f" did you mean --config {name}?" if os.path.isfile(name) else did_you_mean(name, names)
        problem = f"--preset is {shown(name)}, but there is no preset of that name"
        raise ValueError(f"{problem};{meant} the presets are {', '.join(names)}")
    return _read_mapping(preset_path(name), f"the preset {name}")


def _read_mapping(file: Path, source: str) -> dict[str, Any]:
    try:
        content = yaml.load(file.read_text(encoding="utf-8"), Loader=_Loader)
    # As in `_parse_yaml`.
    except Exception as error:
        reason = error if isinstance(error, yaml.YAMLError) else f"{type(error).__name__}: {error}"
        raise ValueError(f"{source} cannot be read as YAML: {reason}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{source} holds a {type(content).__name__}; it must map option names to values")
    return content


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Reads 1e-5 as a number, and refuses a mapping with a key twice, of which PyYAML would take the last one."""

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if (key.tag, str(key.value)) in seen:
                raise yaml.MarkedYAMLError(problem=f"the key {key.value!r} occurs twice", problem_mark=key.start_mark)
            seen.add((key.tag, str(key.value)))
        return node


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Writes text in quotes that `_Loader` would read as a number."""


for _class in (_Loader, _Dumper):
    _exponent = re.compile(r"^[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+$", re.ASCII)
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _exponent, list("-+.0123456789"))


def as_yaml(content: Any) -> str:
    """`content` as YAML, which `read_yaml` reads back unchanged."""
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True)  # type: ignore[no-any-return]


def _help(options: Mapping[str, Option], prog: str | None, epilog: str, common: Collection[str]) -> str:
    """The text of `--help`, of the options in `common`, or of all if it is empty."""
    lines = [f"usage: {prog or Path(sys.argv[0]).name} [--config FILE] [--option VALUE ...]"]
    width = max(60, min(shutil.get_terminal_size().columns, 120))
    indented = textwrap.TextWrapper(width, initial_indent=" " * 8, subsequent_indent=" " * 8)
    presets = [name for name in preset_names() if read_preset(name).keys() <= options.keys()]
    for name, text in _SOURCES.items():
        if presets or name != "preset":
            lines += [f"  --{name}", *indented.wrap(text.format(", ".join(presets)))]
    group = ""
    for option in options.values():
        if common and option.name not in common:
            continue
        if option.group != group:
            group = option.group
            lines.append(f"\n{group}:")
        lines += [f"  --{option.name} {type_in_words(option.hint)}", *indented.wrap(description(option))]
    if common:
        lines.append(f"\n--help-all describes all {len(options)} options.")
    return "\n".join([*lines, *textwrap.wrap(epilog, width)])


def type_in_words(hint: Any) -> str:
    """The type `hint` without None, such as "int or list of str", for the help."""
    origin = typing.get_origin(hint)
    parts = [part for part in typing.get_args(hint) if part is not type(None)]
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
    """The help of an option with its valid names, needs, default and bounds; `built_in` leaves out users' names."""
    text = option.help
    if option.registry is not None:
        text += f" One of {', '.join(option.registry.built_in if built_in else option.registry.names)}."
    if option.needs:
        text += f" Needs {', and '.join(str(need) for need in option.needs)}."
    notes = []
    if option.default not in ("", dataclasses.MISSING):
        notes.append(f"default {json.dumps(option.default, default=str)}")
    if option.range:
        notes.append(option.range)
    if option.nullable and option.default is not None:
        notes.append("or null")
    return f"{text} ({'; '.join(notes)})" if notes else text
