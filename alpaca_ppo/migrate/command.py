"""The command: a script, a YAML file, a shell script or a command line in, the translated configuration out."""

import argparse
import re
import shlex
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from alpaca_ppo.config.model_names import where
from alpaca_ppo.migrate.scripts import CONFIGS, read_flags, read_script
from alpaca_ppo.migrate.trainer_arguments import (
    add_trainer_arguments,
    default_test_split,
    require_names,
    uses_lora,
)
from alpaca_ppo.migrate.translation import Translation
from alpaca_ppo.migrate.trl import DEFAULTS, translate_trl
from alpaca_ppo.migrate.verl import translate_verl

SUMMARY = "Translate a TRL script, or a YAML file or command line of verl, into this package's options."
_SECTIONS_OF_VERL = {"actor_rollout_ref", "data", "critic", "algorithm", "trainer", "reward_model", "reward"}
_ASSIGNMENT = re.compile(r"^(?:export\s+)?([A-Za-z_]\w*)=(.*)$")
_DEFAULT = re.compile(r"\$\{(\w+):?-([^}]*)\}")


def main(argv: Sequence[str]) -> int:
    """Prints the translation of what `argv` names; returns the exit status.

    Raises:
        ValueError: for a file that does not exist, or that is none of the kinds.
    """
    # These flags may stand anywhere, and all that is left is the file and what its script would be given.
    flags = argparse.ArgumentParser(prog="alpaca-ppo migrate", add_help=False, allow_abbrev=False)
    flags.add_argument("--python", action="store_true", help="Print a call of PPOConfig instead of YAML.")
    flags.add_argument(
        "--num_processes", type=int, default=1, help="Processes of the TRL run, by which it multiplies batch sizes."
    )
    parser = argparse.ArgumentParser(
        prog="alpaca-ppo migrate",
        description=SUMMARY,
        usage="%(prog)s [--python] [--num_processes N] FILE [ARGUMENT ...]",
        parents=[flags],
        allow_abbrev=False,
    )
    parser.add_argument("file", help="script.py, config.yaml or run.sh; or verl's overrides alone.")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, help="The script's own command line, or hydra's overrides (key=value)."
    )
    own, rest = flags.parse_known_args(argv)
    options = parser.parse_args(["--help"] if {"-h", "--help"} & set(rest) else rest, own)
    result = translate(options.file, options.arguments, num_processes=options.num_processes)
    print(result.as_python() if options.python else result.as_yaml(), end="")
    return 0


def translate(file: str, arguments: Sequence[str] = (), *, num_processes: int = 1) -> Translation:
    """The translation of a file of another trainer.

    Args:
        file: a Python script of TRL, a YAML file of TRL or verl, a shell script that starts one of them, or the first
            of verl's overrides (`key=value`), without a file.
        arguments: the command line of the script, or the overrides.
        num_processes: processes of a TRL run, by which TRL multiplies the batch sizes of a device.

    Raises:
        ValueError: for a file that does not exist, or that is none of these.
    """
    path = Path(file)
    if re.fullmatch(r"[+~]{0,2}[\w.]+=.*", file):
        return translate_verl({}, "overrides of verl's ppo_trainer.yaml", overrides=[file, *arguments])
    if not path.is_file():
        raise ValueError(f"{file}: give a script or a YAML file;{where(file, what='file')}")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not a text file in UTF-8; give a script or a YAML file") from error
    if path.suffix == ".sh":
        return _shell_script(text, path, arguments, num_processes)
    if path.suffix in (".yaml", ".yml"):
        return _yaml_file(text, path, arguments, num_processes)
    return _script(text, path, arguments, num_processes)


def _script(text: str, path: Path, arguments: Sequence[str], num_processes: int) -> Translation:
    arguments = [*_from_yaml_flag(arguments, path.parent), *arguments]
    script = read_script(text, str(path), arguments)
    if arguments and not script.reads_arguments:
        raise ValueError(
            f"{path} does not read {shlex.join(arguments)}: it parses no command line (with argparse, HfArgumentParser "
            "or TrlParser), so leave that out, and change the value in the script or in what this command prints"
        )
    config = script.config | ({"use_peft": True} if uses_lora(script) else {})
    result = translate_trl(script.kind, config, f"TRL's {script.kind} in {path.name}", num_processes=num_processes)
    result.variable = script.variable or result.variable
    for name, source in script.unknown.items():
        result.to_do.append(f"{name}: {source}, which the script alone knows")
    add_trainer_arguments(result, script, path)
    if script.parses_flags:
        default_test_split(result)
    require_names(result)
    return result


def _yaml_file(text: str, path: Path, arguments: Sequence[str], num_processes: int) -> Translation:
    content = _mapping(text, path)
    if _SECTIONS_OF_VERL & set(content) or any("." in str(key) for key in content):
        result = translate_verl(content, f"verl's {path.name}", overrides=arguments)
    else:
        if arguments and not arguments[0].startswith("--"):
            raise ValueError(f"{arguments[0]} after {path}, which is TRL's, is no flag; write it as --name value")
        values = content | read_flags(arguments)
        kind = CONFIGS[1] if set(values) & (set(DEFAULTS[CONFIGS[1]]) - set(DEFAULTS[CONFIGS[0]])) else CONFIGS[0]
        result = translate_trl(kind, values, f"TRL's {kind} in {path.name}", num_processes=num_processes)
        default_test_split(result)
    require_names(result)
    return result


def _shell_script(text: str, path: Path, arguments: Sequence[str], num_processes: int) -> Translation:
    """The command in a shell script that starts verl or a Python script of TRL."""
    variables: dict[str, str] = {}
    for line in text.replace("\\\n", " ").splitlines():
        if found := _ASSIGNMENT.match(line.strip()):
            variables[found[1]] = _expanded(found[2].strip().strip("\"'"), variables)
            continue
        try:
            tokens = shlex.split(_expanded(line, variables), comments=True)
        except ValueError:
            continue
        tokens = [token for token in tokens if token not in ("$@", "${@}")]
        if any(token.startswith("verl.trainer.main_ppo") for token in tokens):
            overrides = [
                token for token in tokens if re.match(r"[+~]{0,2}[\w.]+=", token) and "." in token.partition("=")[0]
            ]
            result = translate_verl({}, f"verl's command line in {path.name}", overrides=[*overrides, *arguments])
            require_names(result)
            return result
        scripts = [index for index, token in enumerate(tokens) if token.endswith(".py")]
        if scripts and tokens[0] in ("python", "python3", "accelerate", "torchrun", "uv"):
            script = path.parent / tokens[scripts[-1]]
            if script.is_file():
                rest = [*tokens[scripts[-1] + 1 :], *arguments]
                return _script(script.read_text(encoding="utf-8"), script, rest, num_processes)
        if "trl" in tokens and "grpo" in tokens:
            flags = [*tokens[tokens.index("grpo") + 1 :], *arguments]
            values = read_flags([*_from_yaml_flag(flags, path.parent), *flags])
            result = translate_trl(CONFIGS[0], values, f"`trl grpo` in {path.name}", num_processes=num_processes)
            default_test_split(result)
            require_names(result)
            return result
    raise ValueError(
        f"{path} has no command that starts verl.trainer.main_ppo, `trl grpo` or a Python script that exists; give the "
        "Python script or the YAML file itself"
    )


def _from_yaml_flag(arguments: Sequence[str], folder: Path) -> list[str]:
    """The content of the YAML file after TrlParser's `--config`, as flags."""
    config = read_flags(arguments).get("config")
    if config is None:
        return []
    path = next((p for p in (Path(str(config)), folder / str(config)) if p.is_file()), None)
    if path is None:
        raise ValueError(f"--config is {config}, but there is no such file; give its path, or leave it out")
    flags = []
    for name, value in _mapping(path.read_text(encoding="utf-8"), path).items():
        entries = value if isinstance(value, list) else [value]
        flags += [f"--{name}", *("null" if entry is None else str(entry) for entry in entries)]
    return flags


def _mapping(text: str, path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{path} cannot be read as YAML: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}; it must map option names to values")
    return content


def _expanded(text: str, variables: Mapping[str, str]) -> str:
    """`text` with the shell variables replaced that the script itself sets; others stay."""
    text = _DEFAULT.sub(lambda found: variables.get(found[1], found[2]), text)
    return string.Template(text).safe_substitute(variables)
