"""`translate`: a TRL script, a YAML file of either, or a command line of verl in, the translated configuration out."""

import re
import shlex
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from alpaca_ppo.config.foreign_names import flattened
from alpaca_ppo.config.model_names import where
from alpaca_ppo.migrate.scripts import Script
from alpaca_ppo.migrate.translation import Translation, defaults
from alpaca_ppo.migrate.trl import translate_trl
from alpaca_ppo.migrate.verl import SECTION, read_overrides, translate_verl

_OVERRIDE = r"[+~]{0,2}\w+\.[\w.]+=.*"
_OF_PPO = ("num_ppo_epochs", "response_length", "num_mini_batches", "kl_coef", "reward_model_path")


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
    path, script = Path(file), None
    content: Any = {}
    if re.fullmatch(_OVERRIDE, file):
        content = read_overrides([file, *arguments])
    elif not path.is_file():
        raise ValueError(f"{file}: give a script or a YAML file;{where(file, what='file')}")
    else:
        try:
            text = path.read_text(encoding="utf-8")
            if path.suffix in (".yaml", ".yml"):
                content = flattened(yaml.safe_load(text))
            elif path.suffix == ".sh":
                content = read_overrides(_of_shell(text, file))
            else:
                script = Script(text)
        except (SyntaxError, UnicodeDecodeError, yaml.YAMLError, AttributeError) as error:
            raise ValueError(f"{file} is no TRL script, and no YAML file that maps names to values: {error}") from error
    if script is None and any("." in name for name in content):
        content = {**content, **read_overrides(arguments if path.is_file() else ())}
        given = {name: value for name, value in _numbers(content).items() if value not in (None, "???")}
        result = Translation(f"verl's configuration ({file})", given, SECTION)
        translate_verl(result)
        result.finish()
        return result
    kind = script.kind if script else "PPOConfig" if set(_OF_PPO) & set(content) else "GRPOConfig"
    given = {**(script.given if script else content), **_flags(arguments)}
    result = Translation(f"TRL's {kind} in {path.name}", _numbers(given), kind, script.lines if script else {})
    translate_trl(result, processes)
    result.finish()
    for name, source in (script.unread if script else {}).items():
        # An option that another name has set is known, unless that was TRL's default.
        if name not in given and (name in defaults(kind) or not result.options.get(name)):
            how = f"give --{name} VALUE after the file" if name.isidentifier() else "give its entries as flags after it"
            result.leave(name, f"`{source}` is no literal; {how}")
    for name, reason in script.notes if script else ():
        result.leave(name, reason)
    return result


def _of_shell(text: str, file: str) -> list[str]:
    """The overrides in a shell script that starts verl, with the variables that the script sets.

    Raises:
        ValueError: if there are none.
    """
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text.replace("\\\n", " "))
    words = shlex.split(text, comments=True)
    variables = dict(word.split("=", 1) for word in words if re.fullmatch(r"\w+=.*", word))
    overrides = [string.Template(word).safe_substitute(variables) for word in words if re.fullmatch(_OVERRIDE, word)]
    if not overrides:
        raise ValueError(f"{file} has no overrides of verl.trainer.main_ppo; give the script or its YAML file")
    return overrides


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


def _numbers(values: dict[str, Any]) -> dict[str, Any]:
    """`values` with numbers for the texts that spell them: YAML reads 1e-6 as text."""
    texts = {name: value for name, value in values.items() if isinstance(value, str)}
    return {**values, **{name: float(text) for name, text in texts.items() if re.fullmatch(r"[-+.\d]+e[-+]?\d+", text)}}
