"""Reads the overrides in a shell script that starts verl, without running it.

Read are assignments of text, `$NAME`, `${NAME:-default}` and `$((1024 * 2))`, a few commands that change no variable,
and one command that starts verl. Anything else is refused by its line: a shell itself says with `printf '%q '` what the
words of that command are, and these are read.
"""

import re
from functools import reduce
from itertools import dropwhile
from pathlib import Path

OVERRIDE = r"[+~]{0,2}\w+\.[\w.]+=.*"
_NAME = r"[A-Za-z_]\w*"
# Between double quotes. A `$` that is quoted is read before a bracket only, where it begins one of verl's references.
_IN_QUOTES = r"\\(?:[`\"\\\n]|\$(?!\w))|\\(?![`\"\\\n$])|[^$`\"\\]"


def _pieces(expansion: str) -> str:
    """The pieces of a word: quotes, an escaped character, an expansion, or a character without a meaning."""
    single, double = r"'(?:[^'$]|\$(?!\w))*'", rf"\"(?:{_IN_QUOTES}|{expansion})*\""
    return rf"{single}|{double}|\\\$\{{[\w.]+\}}|\\(?!\$\w).|{expansion}|(?<=[^\s=:])~|[^\s'\"\\$`|&;<>(){{}}*?~]"


def _expansion(inner: str, _: int = 0) -> str:
    """`$NAME`, `${NAME:-default}` and `$((calculation))`, with `inner` expansions."""
    calculation = rf"\(\((?:[\w\s()*/%]|\+(?!\+)|-(?!-)|{inner})*\)\)"
    return rf"\$(?:{_NAME}(?!\w|\\\n)|\d|\{{\w+(?::-(?:{_pieces(inner)})*)?\}}|{calculation})"


_FLAGS = re.ASCII | re.DOTALL
_EXPANSION = reduce(_expansion, range(3), "(?!)")
_WORD = rf"(?:{_pieces(_EXPANSION)})+"
_PIECE, _PIECE_IN_QUOTES = (re.compile(p, _FLAGS) for p in (_pieces(_EXPANSION), rf"{_EXPANSION}|{_IN_QUOTES}"))
# The script's own arguments, and where the output goes: words without effect.
_VOID = re.compile(rf"\$@|\"\$@\"|[12&]?>>?(?:&[12]|[ \t]*{_WORD})|\|&?[ \t]*tee(?:[ \t]+{_WORD})+", _FLAGS)
_TOKEN = re.compile(
    rf"(?:[ \t]|\\\n)+|#[^\n]*|(?P<end>[\n;])|(?P<word>{_VOID.pattern}|{_WORD})|(?P<other>[^\n]+)", _FLAGS
)
# Variables that bash sets itself.
_OF_BASH = r"_|IFS|(?:OLD)?PWD|E?UID|PPID|GROUPS|S?RANDOM|SECONDS|LINENO|HOSTNAME|SHLVL|OPTARG|OPTIND|BASH\w*|EPOCH\w*"
_ASSIGNMENT = re.compile(rf"(?!(?:{_OF_BASH})=)({_NAME})=(.*)", _FLAGS)
_HARMLESS = re.compile(
    rf"set(?: [-+][euxvo]+| pipefail)+|export {_NAME}"
    r"|(?:echo|cd|mkdir|ulimit|pip3?|nvidia-smi|ray start|ray stop)(?: .*)?",
    _FLAGS,
)
_START = re.compile(
    r"(?:nohup\0|ray\0job\0submit\0(?:.*\0)?--\0)?(?:[^\0]*/)?python[\d.]*\0(?:-[um]\0)*"
    r"(?:[\w./-]*[./])?main_(?:ppo|ppo_sync|dapo)(?:\.py)?\0",
    _FLAGS,
)


def overrides_of_shell(text: str, file: str) -> list[str]:
    """The overrides that the shell script `text` gives verl, in their order.

    Raises:
        ValueError: begins with the name `file`; if it does not start one training, or has more than is read here.
    """
    variables, starts, command = {"HOME": str(Path.home())}, list[list[str]](), list[re.Match[str]]()
    for token in _TOKEN.finditer(text + "\n"):
        if token["word"]:
            command.append(token)
        if (not command or not token["end"]) and not token["other"]:
            continue
        try:
            if token["other"]:
                raise LookupError(text[text.rfind("\n", 0, token.start()) + 1 : token.end()].strip())
            starts += _run([word[0] for word in command], variables)
        except LookupError as error:
            line = text.count("\n", 0, token.start() if token["other"] else command[0].start()) + 1
            remedy = "put `printf '%q '` before the command that starts verl, run it, and give what it prints as a file"
            raise ValueError(f"{file}, line {line}: `{error}` is more than migrate reads; {remedy}") from None
        command = []
    if len(starts) != 1:
        raise ValueError(f"{file} starts verl.trainer.main_ppo {len(starts)} times; give a script that starts it once")
    return starts[0]


def _run(words: list[str], variables: dict[str, str]) -> list[list[str]]:
    """Sets the variables that a command assigns; returns the overrides, if it is one that starts verl.

    Raises:
        LookupError: with the part that is not read.
    """
    is_export = words[0] == "export"
    assigned = [found for word in words if (found := _ASSIGNMENT.fullmatch(word))]
    if len(words) == len(assigned) + is_export:
        # `export` assigns after all its words are expanded.
        before = dict(variables) if is_export else variables
        for found in assigned:
            variables[found[1]] = _expanded(found[2], before)
        return []
    if _HARMLESS.fullmatch(" ".join(words)):
        return []
    # Assignments in front are for the process alone.
    arguments = [word for word in dropwhile(_ASSIGNMENT.fullmatch, words) if not _VOID.fullmatch(word)]
    command = "\0".join(value for word in arguments if (value := _expanded(word, variables, is_divided=True))) + "\0"
    if not (start := _START.match(command)):
        raise LookupError(" ".join(words))
    overrides = re.sub(r"(?<=\0)--config-(name|path)[=\0]", r"hydra.config_\1=", command[start.end() - 1 :])
    for override in (found := overrides.strip("\0").split("\0")):
        if not re.fullmatch(r"(?s)[+~]{0,2}[\w.@/]+=.*|~[\w.]+", override):
            raise LookupError(override)
    return [found]


def _expanded(word: str, variables: dict[str, str], *, in_quotes: bool = False, is_divided: bool = False) -> str:
    """The text that a shell makes of `word`. A variable that is not set stays, with its `$`.

    Raises:
        LookupError: for a calculation that is not read; if `is_divided`, for a variable that becomes several words.
    """
    parts = list[str]()
    for found in (_PIECE_IN_QUOTES if in_quotes else _PIECE).finditer(word):
        piece = found[0]
        if piece[0] == "$":
            piece = _value(piece, variables, in_quotes)
            if is_divided and re.search(r"[\s*?]", piece):
                raise LookupError(word)
        elif piece[0] == "\\" and len(piece) > 1:
            piece = piece[1:].strip("\n")
        elif piece[0] in "'\"" and not in_quotes:
            piece = piece[1:-1] if piece[0] == "'" else _expanded(piece[1:-1], variables, in_quotes=True)
        parts.append(piece)
    return "".join(parts)


def _value(expansion: str, variables: dict[str, str], in_quotes: bool) -> str:
    """The value of `$NAME`, `${NAME:-default}` or `$((calculation))`."""
    if expansion.startswith("$(("):
        return _calculated(expansion[3:-2], variables)
    name, has_default, default = re.sub(r"^\$\{?|\}$", "", expansion).partition(":-")
    # Between double quotes, a default has other rules for these characters.
    if has_default and (re.fullmatch(_OF_BASH, name) or (in_quotes and re.search(r"['\\]", default))):
        raise LookupError(expansion)
    value = variables.get(name, "" if has_default else f"${name}")
    return value or _expanded(default, variables)


def _calculated(text: str, variables: dict[str, str]) -> str:
    def number(found: re.Match[str]) -> str:
        if not re.fullmatch(r"-?(?:0|[1-9]\d*)", value := variables.get(found[0], "")):
            raise LookupError(text)
        return f"({value})"

    numbers = re.sub(rf"(?<![\w$]){_NAME}", number, _expanded(text, variables, in_quotes=True))
    # Only digits, brackets and operators are left. A shell rounds toward zero, Python down: below zero they differ.
    if not re.fullmatch(r"[\d\s()+*/%-]+", numbers) or re.search(r"(?s)\*\*|[\d)]\s*\(|-.*[/%]|[/%].*-", numbers):
        raise LookupError(text)
    try:
        return str(int(eval(numbers.replace("/", "//"))))
    except (ArithmeticError, SyntaxError, TypeError):
        raise LookupError(text) from None
