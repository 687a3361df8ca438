"""Reads the overrides in a shell script that starts verl, without running it.

Assignments, arrays, defaults (`${A:-${B:-3}}`) and arithmetic (`$((1024 * 2))`) are followed in their order. What only
a run decides is left as it is, with its `$`: commands, variables of the environment other than HOME, other operators,
what is set in a branch, a loop or a function, and what a command changes, such as `read`, `((n += 1))` or `source`.
"""

import re
import shlex
from functools import reduce
from pathlib import Path

OVERRIDE = r"[+~]{0,2}\w+\.[\w.]+=.*"
# `if` to `fi` and so on, and a function's body; they end on the line, or on one with the same indentation.
_FUNCTION = r"(?:function +[\w-]+|[\w-]+ *\(\))"
_BLOCK = rf"^([ \t]*)(?:(?:if|case|for|while|until)\b|{_FUNCTION})(?:[^\n]*;[ \t]*|.*?^\1)"
_BLOCK += r"(?:(?:fi|esac|done)\b|\})"
# A block, or `|| A=1` and `&& A=1`, which depend on the command before them.
_BRANCH = rf"(?ms){_BLOCK}|(?:&&|\|\|)\s*\w+\+?=[^\n]*"
# Text in which every bracket is closed, at most five deep.
_BALANCED = reduce(lambda inner, _: rf"(?:[^()]|\({inner}\))*", range(6), "")
_CALCULATION = rf"\$\(\({_BALANCED}\)\)"
_ARRAY = rf"=(?:\$\{{branch\}})*\(({_BALANCED})\)"
# Where a command begins, and commands that may change every variable, or those that the rest of the line names.
_START = r"(?m)(?:^|[;&|(!]|\{(?=\s)|\b(?:then|do|else|if|while|until)\b)[ \t]*(?:IFS=\S*[ \t]+)?"
_SOURCE = rf"{_START}(?:source|\.|eval|shift|set[ \t]+--|export(?=[ \t]+\"?\$))(?![\w./=-])"
_SETTER = rf"{_START}(?:read|unset|mapfile|readarray|getopts|let|for|select|printf[ \t]+-v)\b(.*)"
# What a calculation changes: `n++`, `--n`, `n = 1`, `n += 1`.
_STEP = r"[A-Za-z_]\w*(?=\s*(?:\+\+|--|(?:[-+*/%^|&]|<<|>>)?=(?!=)))|(?:(?<=\+\+)|(?<=--)|(?<=[+-]{2}\$))[A-Za-z_]\w*"
# An expansion without another inside: a variable, perhaps with a default, or a calculation with nothing but numbers.
_NUMBERS = _BALANCED.replace("[^()]", r"[\d+/-]|\*(?!\*)")
_EXPANSION = r"\$\{(\w+)(?::?[-=]([^{}]*))?\}|\$(\w+)|\$(\(\(" + _NUMBERS + r"\)\))"


def overrides_of_shell(text: str, file: str) -> list[str]:
    """The overrides in the shell script `text`, those without a `$` first.

    Raises:
        ValueError: begins with the name `file`; if there are none, or the script starts something else than training.
    """
    programs = re.findall(r"[./]main_(\w+)", text)
    variables, overrides = {"HOME": str(Path.home())}, list[str]()
    try:
        words = shlex.split(re.sub(r";(?=\s)", " ;", _simplified(text)), comments=True)
    except ValueError as error:
        raise ValueError(f"{file} cannot be read as a shell script ({error}); give a YAML file") from error
    for word in words:
        expanded = _expanded(word, variables)
        [(name, value)] = re.findall(r"(?s)\A(?:(\w+\+?)=)?(.*)", expanded)
        # A variable, or text in quotes, may hold several overrides.
        parts = [expanded] if re.fullmatch(OVERRIDE, word, re.DOTALL) else value.split()
        overrides += [part for part in parts if re.fullmatch(OVERRIDE, part, re.DOTALL)]
        # A variable whose value only a run decides is replaced by its own name, `${name}`.
        variables[name.rstrip("+")] = f"${{{name}}}" if "$" in value or name.endswith("+") else value
    if not overrides or programs not in ([], ["ppo"], ["ppo_sync"], ["dapo"]):
        raise ValueError(f"{file} has no overrides of verl.trainer.main_ppo, or starts others too; give it alone")
    return sorted(overrides, key=lambda override: "$" in override)


def _simplified(text: str) -> str:
    """The script in a form that can be read word by word: without comments and here-documents; a calculation as one
    word, with `$` before its names; the elements of an array as words; `--config-name` as an override; and what a
    branch sets with `${branch}`, a variable without a value, before it.
    """
    text = re.sub(r"(?ms)^\s*#.*?$|<<-?\s*(['\"]?)(\w+)\1.*?^\s*\2$", "", text).replace("\\\n", " ")
    text = re.sub(_CALCULATION, lambda s: re.sub(r"(?<![\w${])(?=[A-Za-z_])", "$", "".join(s[0].split())), text)
    used = "".join(f" {name}=${{branch}} " for name in {*re.findall(r"\$\{?(\w+)", text)} - {"HOME"})
    # When a function is called is not followed: what it or a command changes has no value anywhere.
    changed = re.findall(_STEP, " ".join(re.findall(rf"\(\({_BALANCED}\)\)", text)))
    changed += re.findall(r"(?<![\w$.{/-])[A-Za-z_]\w*", " ".join(re.findall(_SETTER, text)))
    functions = [block[0] for block in re.finditer(_BRANCH, text) if re.match(rf"\s*{_FUNCTION}", block[0])]
    changed += re.findall(r"(?<![\w.])(\w+)\+?=", " ".join(functions))
    text = re.sub(rf"(?<![\w.])(?:{'|'.join(changed) or '(?!)'})\+?=", r"\g<0>${branch}", text)
    text = "".join(f"{name}=${{branch}}\n" for name in changed) + re.sub(_SOURCE, rf"\g<0>{used}", text)
    text = re.sub(_BRANCH, lambda branch: re.sub(r"(?<=\w=)|(?<=\w\+=)", "${branch}", branch[0]), text)
    return re.sub(r"(?:--config-name|-cn)[= ]+", "hydra.config_name=", re.sub(_ARRAY, r"= \1 ", text))


def _expanded(word: str, variables: dict[str, str]) -> str:
    """`word` with the values of variables, defaults and calculations, as far as they are known."""

    def value_of(found: re.Match[str]) -> str:
        name, default, calculation = found[1] or found[3], found[2], found[4]
        if calculation is None:
            value = variables.get(name) or default
            return found[0] if value is None else value
        try:
            # It holds nothing but digits, brackets and operators. A shell rounds toward zero, Python down: below zero
            # they differ, so this is no calculation.
            return str(eval(calculation.replace("/", "?" if "-" in calculation else "//")))
        except (ArithmeticError, SyntaxError):
            return found[0]

    # Each round replaces the innermost expansions.
    for _ in range(9):
        word = re.sub(_EXPANSION, value_of, word)
    return word
