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
    """The overrides in a shell script that starts verl; `file` is its name in errors."""
    variables, overrides = {"HOME": str(Path.home())}, list[str]()

    def value_of(found: re.Match[str]) -> str:
        # Digits and operators alone are calculated; otherwise there is a name, and perhaps a default.
        value = eval(found[4].replace("/", "//")) if found[4] else variables.get(found[1] or found[3]) or found[2]
        return found[0] if value is None else str(value)

    # Without comments and here-documents.
    text = re.sub(r"(?ms)^\s*#.*?$|<<-?\s*(['\"]?)(\w+)\1.*?^\s*\2$", "", text).replace("\\\n", " ")
    # A calculation becomes one word, whose names are variables; an array its elements; and what is set in a branch gets
    # a variable without a value.
    text = re.sub(_CALCULATION, lambda s: re.sub(r"(?<![\w${])(?=[A-Za-z_])", "$", "".join(s[0].split())), text)
    text = re.sub(_BRANCH, lambda branch: re.sub(r"(?<=\w=)|(?<=\w\+=)", "${branch}", branch[0]), text)
    text = re.sub(r"(?:--config-name|-cn)[= ]+", "hydra.config_name=", re.sub(_ARRAY, r"= \1 ", text))
    for word in shlex.split(text, comments=True):
        expanded = reduce(lambda expanded, _: re.sub(_EXPANSION, value_of, expanded), range(9), word)
        [(name, value)] = re.findall(r"(?s)\A(?:(\w+\+?)=)?(.*)", expanded)
        # Text that is no override itself may have several of them.
        parts = [expanded] if re.fullmatch(OVERRIDE, word, re.DOTALL) else value.split()
        overrides += [part for part in parts if re.fullmatch(OVERRIDE, part, re.DOTALL)]
        # A variable that only a run decides stands for itself.
        variables[name.rstrip("+")] = f"${{{name}}}" if "$" in value or name.endswith("+") else value
    if not overrides or re.findall(r"[./]main_(\w+)", text) not in ([], ["ppo"], ["ppo_sync"], ["dapo"]):
        raise ValueError(f"{file} has no overrides of verl.trainer.main_ppo, or starts others too; give it alone")
    return sorted(overrides, key=lambda override: "$" in override)
