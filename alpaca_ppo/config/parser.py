"""The command line: `parse_args` turns YAML files, presets and flags into dataclasses; the flags are in `flags`."""

import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from alpaca_ppo.config.checks import MUTUALLY_EXCLUSIVE
from alpaca_ppo.config.fields import Option, check_null, check_value, options_of, shown
from alpaca_ppo.config.flags import FlagParser, did_you_mean
from alpaca_ppo.config.foreign_names import CONFIG_SECTIONS, explain_names, flattened
from alpaca_ppo.config.model_names import where
from alpaca_ppo.config.modules import import_modules
from alpaca_ppo.config.run_file import MODELS, check_run_files, without_provenance
from alpaca_ppo.config.script_arguments import ScriptArguments
from alpaca_ppo.presets import preset_names, preset_path


@dataclasses.dataclass(frozen=True)
class ParsedOptions:
    """What a command line says.

    Attributes:
        instances: one of each dataclass, in order.
        presets: names of the presets that were read, in order.
        config_files: paths of the YAML files that were read, in order, as given.
    """

    instances: tuple[Any, ...]
    presets: tuple[str, ...]
    config_files: tuple[str, ...]


def parse_args(
    dataclass_types: Sequence[type],
    argv: Sequence[str] | None = None,
    *,
    prog: str | None = None,
    epilog: str | None = None,
) -> tuple[Any, ...]:
    """One instance of each dataclass in `dataclass_types`: see `parse_options`."""
    return parse_options(dataclass_types, argv, prog=prog, epilog=epilog).instances


def parse_options(
    dataclass_types: Sequence[type],
    argv: Sequence[str] | None = None,
    *,
    prog: str | None = None,
    epilog: str | None = None,
) -> ParsedOptions:
    """The options of each dataclass in `dataclass_types`, from files, presets and flags.

    Of several `--config` and `--preset`, later ones win. A flag or a `--set option=value` wins over all of them. What
    wins also replaces an option that it excludes (`checks.MUTUALLY_EXCLUSIVE`). A flag of a field that may be None
    takes `null` or `none` for it. If one of the dataclasses has the field `import_modules`, those modules are imported
    before `--help` is printed and before any value is checked, so that the names that they register are valid.

    Args:
        dataclass_types: dataclasses with distinct field names.
        argv: the command line without the program's name; `sys.argv[1:]` by default.
        prog: the program's name, for the help; that of the script by default.
        epilog: a paragraph at the end of the help.

    Raises:
        ValueError: when a file does not exist, is not valid YAML, does not hold a mapping, or has an unknown key or
            one key twice; for a run's own file that cannot repeat it (`run_file`); for an unknown preset or flag; for
            an option that is given by a flag and by `--set`; for a module that cannot be imported; and what the
            dataclasses raise.
    """
    options = {name: option for cls in dataclass_types for name, option in options_of(cls).items()}
    parser = FlagParser(options, prog=prog)
    flags = parser.read(list(sys.argv[1:] if argv is None else argv))
    values: dict[str, Any] = {}
    presets: list[str] = []
    contents: dict[str, dict[str, Any]] = {}
    for kind, name in flags.sources:
        if kind == "config":
            contents[name] = read_yaml(name)
            _override(values, _typed(without_provenance(contents[name]), options, f"the --config file {name}"))
        elif kind == "preset":
            presets.append(name)
            _override(values, _typed(read_preset(name), options, f"the preset {name}"))
    set_values = _typed(_assignments([text for kind, text in flags.sources if kind == "set"]), options, "--set")
    if twice := sorted(set(set_values) & set(flags.values)):
        raise ValueError(f"{', '.join(twice)} is given by --set and by a flag; give it once")
    of_runs = [cls for cls in dataclass_types if issubclass(cls, ScriptArguments)]
    needed = of_runs[0].needed_objects() if of_runs else MODELS
    check_run_files(contents, given=set_values | flags.values, needed=needed)
    _override(values, set_values | flags.values)
    _import_named(values, options)
    if flags.wants_help:
        # A new parser, because the help texts list the names that are registered by now.
        FlagParser(options, prog=prog, epilog=epilog).print_help()
        sys.exit(0)
    parser.refuse_unknown(flags.unknown)
    instances = tuple(
        cls(**{name: values[name] for name in options_of(cls) if name in values}) for cls in dataclass_types
    )
    return ParsedOptions(instances, tuple(presets), tuple(contents))


def _override(values: dict[str, Any], given: Mapping[str, Any]) -> None:
    """Puts `given` over `values`, with null for what `given` excludes."""
    for names in MUTUALLY_EXCLUSIVE:
        if any(given.get(name) is not None for name in names):
            values |= dict.fromkeys(set(names) & set(values))
    values |= given


def _import_named(values: Mapping[str, Any], options: Mapping[str, Option]) -> None:
    if "import_modules" in values:
        args = SimpleNamespace(**values)
        check_value(options["import_modules"], args.import_modules)
        import_modules(args.import_modules or [])


def _assignments(texts: Sequence[str]) -> dict[str, Any]:
    """The options and values of `--set`."""
    given: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise ValueError(f"--set is {shown(text)}; write it as option=value")
        try:
            given[name] = yaml.load(value, Loader=_UniqueKeyLoader)
        # As in `_read_mapping`.
        except Exception as error:
            raise ValueError(f"--set {text} cannot be read as YAML: {error}") from error
    return given


def read_yaml(path: str) -> dict[str, Any]:
    """The mapping in the YAML file at `path`.

    Raises:
        ValueError: when there is no such file, or it is not valid YAML in UTF-8, has a key twice, or does not hold a
            mapping.
    """
    # False for a path that is no file name at all, where Path.is_file would raise an OSError.
    if os.path.isfile(path):
        return _read_mapping(Path(path), f"--config {path}")
    names = preset_names()
    meant = path if path in names else next(iter(get_close_matches(path, names, n=1, cutoff=0.75)), None)
    if meant is not None:
        problem = "which is a preset and no file" if meant == path else "but there is no such file"
        raise ValueError(f"--config is {shown(path)}, {problem}; did you mean --preset {meant}?")
    raise ValueError(f"--config is {shown(path)}, but{where(path, what='file')}")


def read_preset(name: str) -> dict[str, Any]:
    """The mapping of the preset `name`.

    Raises:
        ValueError: for a preset that does not exist.
    """
    names = preset_names()
    if name not in names:
        file = f" did you mean --config {name}?" if os.path.isfile(name) else ""
        raise ValueError(
            f"--preset is {shown(name)}, but there is no preset of that name;{file or did_you_mean([name], names)} the "
            f"presets are {', '.join(names)}"
        )
    return _read_mapping(preset_path(name), f"the preset {name}")


def _read_mapping(file: Path, where: str) -> dict[str, Any]:
    try:
        content = yaml.load(file.read_text(encoding="utf-8"), Loader=_UniqueKeyLoader)
    # PyYAML raises whatever the value at fault provokes: KeyError for "!!bool x", RecursionError for deep nesting.
    except Exception as error:
        reason = error if isinstance(error, yaml.YAMLError) else f"{type(error).__name__}: {error}"
        raise ValueError(f"{where} cannot be read as YAML: {reason}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{where} holds a {type(content).__name__}; it must map option names to values")
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


def _typed(given: Mapping[str, Any], options: Mapping[str, Option], where: str) -> dict[str, Any]:
    """The values of a YAML file, as numbers and lists where the fields are declared so."""
    if unknown := sorted(map(str, set(given) - set(options))):
        # Of verl's sections, `critic` alone has the name of an option.
        nested = {k: v for k, v in given.items() if k not in options or (k == "critic" and isinstance(v, Mapping))}
        names = flattened(nested) | {k: v for k, v in given.items() if k not in nested}
        raise ValueError(
            f"unknown keys in {where}: {', '.join(unknown)}; --help lists the valid ones\n"
            + explain_names(names, options, CONFIG_SECTIONS)
        )
    typed = {}
    for name, value in given.items():
        if value is None:
            check_null(options[name], f" in {where}")
        kinds = options[name].entry_kinds
        if kinds is None or value is None:
            typed[name] = _number(name, value, options[name].kinds, where)
        else:
            typed[name] = [_number(name, v, kinds, where) for v in (value if isinstance(value, list) else [value])]
    return typed


def _number(name: str, value: Any, kinds: tuple[Any, ...], where: str) -> Any:
    """YAML reads 1e-5 as text: `value` as the number that `kinds` declare. Of kinds that allow text too, a float alone
    is read from it.
    """
    if isinstance(value, str) and {float, str} <= set(kinds):
        try:
            return float(value)
        except ValueError:
            return value
    kind = float if float in kinds else int if int in kinds else None
    if not isinstance(value, str) or kind is None or str in kinds:
        return value
    try:
        return kind(value)
    except ValueError as error:
        raise ValueError(f"{name} is {shown(value)} in {where}; it must be {kind.__name__}") from error
