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
# A variable that never has a value. Put before what is assigned, it says that only a run decides.
_UNKNOWN = "${branch}"
_NAME = r"[A-Za-z_]\w*"
# Text in which every bracket is closed, at most five deep.
_BALANCED = reduce(lambda inner, _: rf"(?:[^()]|\({inner}\))*", range(6), "")

_COMMENT_OR_HERE_DOCUMENT = r"(?ms)^\s*#.*?$|<<-?\s*(['\"]?)(\w+)\1.*?^\s*\2$"
_ARRAY = rf"=(?:{re.escape(_UNKNOWN)})*\((?P<elements>{_BALANCED})\)"
_FUNCTION = r"(?:function +[\w-]+|[\w-]+ *\(\))"
# `if` to `fi` and so on, and a function's body; they end on the line, or on one with the same indentation.
_BLOCK = rf"^([ \t]*)(?:(?:if|case|for|while|until)\b|{_FUNCTION})(?:[^\n]*;[ \t]*|.*?^\1)(?:(?:fi|esac|done)\b|\}})"
# `|| A=1` and `&& A=1` depend on the command before them.
_BRANCH = rf"(?ms){_BLOCK}|(?:&&|\|\|)\s*\w+\+?=[^\n]*"

# Where a command begins, and commands that may change every variable, or those that the rest of the line names.
_START = r"(?m)(?:^|[;&|(!]|\{(?=\s)|\b(?:then|do|else|if|while|until)\b)[ \t]*(?:IFS=\S*[ \t]+)?"
_SOURCE = rf"{_START}(?:source|\.|eval|shift|set[ \t]+--|export(?=[ \t]+\"?\$))(?![\w./=-])"
_SETTER = rf"{_START}(?:read|unset|mapfile|readarray|getopts|let|for|select|printf[ \t]+-v)\b(.*)"
# What a calculation changes: the name in `n++`, `n = 1` and `n += 1`, and in `++n`.
_STEPPED_AFTER = rf"{_NAME}(?=\s*(?:\+\+|--|(?:[-+*/%^|&]|<<|>>)?=(?!=)))"
_STEPPED_BEFORE = rf"(?:(?<=\+\+)|(?<=--)|(?<=[+-]{{2}}\$)){_NAME}"

# An expansion without another inside: a variable, perhaps with a default, or a calculation with nothing but numbers.
_NUMBERS = _BALANCED.replace("[^()]", r"[\d+/-]|\*(?!\*)")
_EXPANSION = re.compile(
    r"\$\{(?P<name>\w+)(?::?[-=](?P<default>[^{}]*))?\}"
    r"|\$(?P<bare_name>\w+)"
    rf"|\$(?P<calculation>\(\({_NUMBERS}\)\))"
)


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
        assignment = re.fullmatch(r"(\w+)(\+?)=(.*)", expanded, re.DOTALL)
        name, appends, value = assignment.groups() if assignment else ("", "", expanded)
        # A variable, or text in quotes, may hold several overrides.
        parts = [expanded] if re.fullmatch(OVERRIDE, word, re.DOTALL) else value.split()
        overrides += [part for part in parts if re.fullmatch(OVERRIDE, part, re.DOTALL)]
        # A variable whose value only a run decides is replaced by its own name, `${name}`.
        variables[name] = f"${{{name}}}" if appends or "$" in value else value
    if not overrides or programs not in ([], ["ppo"], ["ppo_sync"], ["dapo"]):
        raise ValueError(f"{file} has no overrides of verl.trainer.main_ppo, or starts others too; give it alone")
    return sorted(overrides, key=lambda override: "$" in override)


def _simplified(text: str) -> str:
    """The script in a form that can be read word by word: without comments and here-documents; a calculation as one
    word, with `$` before its names; the elements of an array as words; `--config-name` as an override; and `_UNKNOWN`
    before what only a run decides.
    """
    text = re.sub(_COMMENT_OR_HERE_DOCUMENT, "", text).replace("\\\n", " ")
    text = re.sub(rf"\$\(\({_BALANCED}\)\)", _calculation_as_word, text)
    text = _with_unknown_values(text)
    text = re.sub(_ARRAY, r"= \g<elements> ", text)
    return re.sub(r"(?:--config-name|-cn)[= ]+", "hydra.config_name=", text)


def _calculation_as_word(found: re.Match[str]) -> str:
    return re.sub(r"(?<![\w${])(?=[A-Za-z_])", "$", "".join(found[0].split()))


def _with_unknown_values(text: str) -> str:
    """The script, in which no value is known of names that calculations, commands and functions change; of any name
    after a command that may change all; and of what a branch assigns.
    """
    changed = _changed_names(text)
    used = {*re.findall(r"\$\{?(\w+)", text)} - {"HOME"}
    text = re.sub(rf"(?<![\w.])(?:{'|'.join(changed) or '(?!)'})\+?=", rf"\g<0>{_UNKNOWN}", text)
    text = re.sub(_SOURCE, rf"\g<0>{''.join(f' {name}={_UNKNOWN} ' for name in used)}", text)
    text = "".join(f"{name}={_UNKNOWN}\n" for name in changed) + text
    return re.sub(_BRANCH, lambda branch: re.sub(r"(?<=\w=)|(?<=\w\+=)", _UNKNOWN, branch[0]), text)


def _changed_names(text: str) -> list[str]:
    """Names with no value anywhere, because it is not followed when a function is called or a command runs."""
    calculations = " ".join(re.findall(rf"\(\({_BALANCED}\)\)", text))
    arguments = " ".join(re.findall(_SETTER, text))
    blocks = [block[0] for block in re.finditer(_BRANCH, text)]
    functions = " ".join(block for block in blocks if re.match(rf"\s*{_FUNCTION}", block))
    return [
        *re.findall(rf"{_STEPPED_AFTER}|{_STEPPED_BEFORE}", calculations),
        *re.findall(rf"(?<![\w$.{{/-]){_NAME}", arguments),
        *re.findall(r"(?<![\w.])(\w+)\+?=", functions),
    ]


def _expanded(word: str, variables: dict[str, str]) -> str:
    """`word` with the values of variables, defaults and calculations, as far as they are known."""

    def value_of(found: re.Match[str]) -> str:
        if found["calculation"] is None:
            value = variables.get(found["name"] or found["bare_name"]) or found["default"]
            return found[0] if value is None else value
        try:
            # It holds nothing but digits, brackets and operators. A shell rounds toward zero, Python down: below zero
            # they differ, so this is no calculation.
            return str(eval(found["calculation"].replace("/", "?" if "-" in found["calculation"] else "//")))
        except (ArithmeticError, SyntaxError):
            return found[0]

    # Each round replaces the innermost expansions.
    for _ in range(9):
        word = _EXPANSION.sub(value_of, word)
    return word
