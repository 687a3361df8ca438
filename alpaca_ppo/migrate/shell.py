"""Reads the overrides in a shell script that starts verl, without running it.

Assignments, arrays, defaults (`${A:-${B:-3}}`) and arithmetic (`$((1024 * 2))`) are followed in their order. What only
a run decides keeps a `$`: commands, variables of the environment other than HOME, other operators, and what is set in a
branch, a loop or a function.
"""

import re
import shlex
from functools import reduce
from pathlib import Path

OVERRIDE = r"[+~]{0,2}\w+\.[\w.]+=.*"
# A block, which ends on its line or at its indentation; and an assignment that depends on the command before it.
_BRANCH = r"(?ms)^([ \t]*)(?:(?:if|case|for|while|until)\b|(?:function )?\w+ *\(\))(?:[^\n]*;[ \t]*|.*?^\1)"
_BRANCH += r"(?:(?:fi|esac|done)\b|\})|(?:&&|\|\|)\s*\w+\+?=[^\n]*"
# With brackets inside, five deep.
_BALANCED = reduce(lambda inner, _: rf"(?:[^()]|\({inner}\))*", range(6), "")
_CALCULATION, _ARRAY = rf"\$\(\({_BALANCED}\)\)", rf"=(?:\$\{{branch\}})?\(({_BALANCED})\)"
# One without another inside: a variable, perhaps with a default, or a calculation with nothing but numbers.
_NUMBERS = _BALANCED.replace("[^()]", r"[\d+/-]|\*(?!\*)")
_EXPANSION = r"\$\{(\w+)(?::?[-=]([^{}]*))?\}|\$(\w+)|\$(\(\(" + _NUMBERS + r"\)\))"


def overrides_of_shell(text: str, file: str) -> list[str]:
    """The overrides in a shell script that starts verl, those without a `$` first; `file` is its name in errors."""
    programs = re.findall(r"[./]main_(\w+)", text)
    variables, overrides = {"HOME": str(Path.home())}, list[str]()
    try:
        words = shlex.split(_simplified(text), comments=True)
    except ValueError as error:
        raise ValueError(f"{file} cannot be read as a shell script ({error}); give a YAML file") from error
    for word in words:
        expanded = _expanded(word, variables)
        [(name, value)] = re.findall(r"(?s)\A(?:(\w+\+?)=)?(.*)", expanded)
        # Text that is no override itself may have several of them.
        parts = [expanded] if re.fullmatch(OVERRIDE, word, re.DOTALL) else value.split()
        overrides += [part for part in parts if re.fullmatch(OVERRIDE, part, re.DOTALL)]
        # A variable that only a run decides stands for itself.
        variables[name.rstrip("+")] = f"${{{name}}}" if "$" in value or name.endswith("+") else value
    if not overrides or programs not in ([], ["ppo"], ["ppo_sync"], ["dapo"]):
        raise ValueError(f"{file} has no overrides of verl.trainer.main_ppo, or starts others too; give it alone")
    return sorted(overrides, key=lambda override: "$" in override)


def _simplified(text: str) -> str:
    """The script without comments and here-documents, in which words alone say what it sets.

    Calculations become words whose names are variables, arrays their elements, `--config-name` an override; what is set
    in a branch gets the value `${branch}`, which nothing sets.
    """
    text = re.sub(r"(?ms)^\s*#.*?$|<<-?\s*(['\"]?)(\w+)\1.*?^\s*\2$", "", text).replace("\\\n", " ")
    text = re.sub(_CALCULATION, lambda s: re.sub(r"(?<![\w${])(?=[A-Za-z_])", "$", "".join(s[0].split())), text)
    text = re.sub(_BRANCH, lambda branch: re.sub(r"(?<=\w=)|(?<=\w\+=)", "${branch}", branch[0]), text)
    return re.sub(r"(?:--config-name|-cn)[= ]+", "hydra.config_name=", re.sub(_ARRAY, r"= \1 ", text))


def _expanded(word: str, variables: dict[str, str]) -> str:
    """The word with the values of variables, defaults and calculations, from the innermost outwards."""

    def value_of(found: re.Match[str]) -> str:
        name, default, calculation = found[1] or found[3], found[2], found[4]
        if calculation is None:
            value = variables.get(name) or default
            return found[0] if value is None else value
        try:
            # Nothing but digits, brackets and operators.
            return str(eval(calculation.replace("/", "//")))
        except (ArithmeticError, SyntaxError):
            return found[0]

    for _ in range(9):
        word = re.sub(_EXPANSION, value_of, word)
    return word
