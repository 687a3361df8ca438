"""Reads the overrides in a shell script that starts verl, without running it.

Read are assignments of text, `$NAME`, `${NAME:-default}` and `$((1024 * 2))`, a few commands that change no variable,
and one command that starts verl. `$(command)` stays as it is: only a run decides it. Anything else is refused by its
line: a shell itself says with `printf '%q '` what the words of that command are, and these are read.
"""

import re
from collections.abc import Iterator
from itertools import dropwhile
from pathlib import Path

OVERRIDE = r"[+~]{0,2}\w+\.[\w.]+=.*"
_NAME = r"[A-Za-z_]\w*"
_FLAGS = re.ASCII | re.DOTALL
# Between double quotes. A quoted `$` is read before a bracket only, where it begins one of verl's references.
_IN_QUOTES = r"\\(?:[`\"\\\n]|\$(?!\w))|\\(?![`\"\\\n$])|[^$`\"\\]"
# What `$` begins, and the pieces of a word: this, quotes, escaped characters, and characters without a meaning. Each
# may hold the other, here four deep.
_OUTPUT = r"\((?:[^()'\"`\\#\n]|'[^'\n]*'|\"[^\"()`\\\n]*\")*\)"
_EXPANSION = _PIECE = "(?!)"
for _ in range(4):
    _CALCULATION = rf"\(\((?:[\w\s()*/%]|\+(?!\+)|-(?!-)|{_EXPANSION})*\)\)"
    _EXPANSION = rf"\$(?:{_NAME}(?!\w|\\\n)|\d|\{{\w+(?::-(?:{_PIECE})*)?\}}|{_CALCULATION}|{_OUTPUT})"
    _QUOTED = rf"'(?:[^'$]|\$(?!\w))*'|\"(?:{_EXPANSION}|{_IN_QUOTES})*\"|\\\$\{{[\w.]+\}}|\\(?!\$\w)."
    _PIECE = rf"{_EXPANSION}|{_QUOTED}|(?<=[^\s=:-])~|[^\s'\"\\$`|&;<>(){{}}*?~]"
_WORD = rf"(?:{_PIECE})+"
# The script's own arguments, and where the output goes: words without effect.
_ARGUMENTS = r"\$(?:@|\{@:\d\})"
_TEE = rf"\|&?[ \t]*tee(?:[ \t]+(?!#){_WORD})+"
_VOID = rf"{_ARGUMENTS}|\"{_ARGUMENTS}\"|[12&]?>>?(?:&[12]|[ \t]*(?!#){_WORD})|{_TEE}"
_TOKEN = rf"(?:[ \t]|\\\n)+|#[^\n]*|(?P<end>[\n;])|(?P<word>{_VOID}|{_WORD}|[^\n]+)"
# Variables that bash sets itself.
_OF_BASH = r"_|IFS|(?:OLD)?PWD|E?UID|PPID|GROUPS|S?RANDOM|SECONDS|LINENO|HOSTNAME|SHLVL|OPTARG|OPTIND|BASH\w*|EPOCH\w*"
_ASSIGNMENT = re.compile(rf"(?!(?:{_OF_BASH})=)({_NAME})=((?:{_WORD})?)", _FLAGS)
_COMMANDS = rf"(?:echo|cd|mkdir|ulimit|pip3?|nvidia-smi|hf|huggingface-cli|ray st\w+)(?: (?:{_VOID}|{_WORD}))*"
_HARMLESS = rf"set(?: [-+][euxvo]+| pipefail)+|export {_NAME}|{_COMMANDS}"
_REMEDY = "put `printf '%q '` before the command that starts verl, run it, and give what it prints as a .sh file"
# The words up to the overrides, each with a zero after it.
_RUNNER = r"(?:ray\0job\0submit\0.*--\0|(?:nohup|uv\0run)\0(?:-[^\0]*\0)*)?"
_START = rf"{_RUNNER}[^\0]*python[\d.]*\0(?:-[um]\0)*[\w./-]*\bmain_(?:ppo|ppo_sync|dapo)(?:\.py)?\0"


def overrides_of_shell(text: str, file: str) -> list[str]:
    """The overrides that the shell script `text` gives verl, in their order.

    Raises:
        ValueError: if it does not start verl once, or has more than is read here; begins with the name `file`.
    """
    variables = {"HOME": str(Path.home())}
    starts: list[list[str]] = []
    for line, words in _commands(text):
        exports = words[0] == "export"
        targets = words[1:] if exports else words
        assigned = [found for word in targets if (found := _ASSIGNMENT.fullmatch(word))]
        try:
            if len(assigned) == len(targets) and (exports or len(targets) == 1):
                # `export` assigns after all its words are expanded.
                variables.update([(found[1], _expanded(found[2], variables)) for found in assigned])
            elif not re.fullmatch(_HARMLESS, " ".join(words), _FLAGS):
                starts.append(_overrides(words, variables))
        except LookupError as error:
            raise ValueError(f"{file}, line {line}: `{error}` is more than migrate reads; {_REMEDY}") from None
    if len(starts) != 1:
        raise ValueError(f"{file} starts verl.trainer.main_ppo {len(starts)} times; give a script that starts it once")
    return starts[0]


def _commands(text: str) -> Iterator[tuple[int, list[str]]]:
    """The commands of a script: the line, from 1, at which each begins, and its words."""
    command: list[re.Match[str]] = []
    for token in re.finditer(_TOKEN, text + "\n\n", _FLAGS):
        if token["word"]:
            command.append(token)
        elif token["end"] and command:
            yield text.count("\n", 0, command[0].start()) + 1, [word[0] for word in command]
            command = []


def _overrides(words: list[str], variables: dict[str, str]) -> list[str]:
    """The overrides of a command that starts verl.

    Raises:
        LookupError: with the part that is not read.
    """
    if not re.fullmatch(rf"{_VOID}|{_WORD}", words[-1], _FLAGS):
        raise LookupError(" ".join(words)[-80:])
    # Assignments in front are for the process alone.
    given = [word for word in dropwhile(_ASSIGNMENT.fullmatch, words) if not re.fullmatch(_VOID, word, _FLAGS)]
    command = "".join(f"{value}\0" for word in given if (value := _expanded(word, variables, splits_words=True)))
    if not (start := re.match(_START, command, _FLAGS)):
        raise LookupError(" ".join(words)[:80])
    arguments = re.sub(r"(?<=\0)--config-(name|path|dir)[=\0]", r"hydra.config_\1=", command[start.end() - 1 :])
    overrides = [word for word in arguments.split("\0") if word]
    if unread := [word for word in overrides if not re.fullmatch(r"(?s)[+~]{0,2}[\w.@/]+=.*|~[\w.]+", word)]:
        raise LookupError(unread[0])
    return overrides


def _expanded(word: str, variables: dict[str, str], *, in_quotes: bool = False, splits_words: bool = False) -> str:
    """The text that a shell makes of `word`. A variable that is not set stays, with its `$`.

    Raises:
        LookupError: for a calculation or a default value that is not read; if the shell `splits_words`, for a variable
            that becomes several.
    """
    parts = list[str]()
    for piece in re.findall(rf"{_EXPANSION}|{_IN_QUOTES}" if in_quotes else _PIECE, word, _FLAGS):
        if piece[0] == "$":
            parts.append(_value(piece, variables, in_quotes))
            if splits_words and re.search(r"[\s*?]", parts[-1]):
                raise LookupError(word)
        elif piece[0] in "'\"" and not in_quotes:
            parts.append(piece[1:-1] if piece[0] == "'" else _expanded(piece[1:-1], variables, in_quotes=True))
        elif piece != "\\\n":  # an escaped line break is no part of the word
            parts.append(piece[1:] if len(piece) > 1 and piece[0] == "\\" else piece)
    return "".join(parts)


def _value(expansion: str, variables: dict[str, str], in_quotes: bool) -> str:
    """The value of `$NAME`, `${NAME:-default}` or `$((calculation))`; `$(command)` without its spaces."""
    if re.fullmatch(rf"\${_OUTPUT}", expansion):
        return re.sub(r"\s", "", expansion)
    if not expansion.startswith("$(("):
        name, has_default, default = re.sub(r"^\$\{?|\}$", "", expansion).partition(":-")
        # Between double quotes, a default has other rules for these characters.
        if has_default and (re.fullmatch(_OF_BASH, name) or (in_quotes and re.search(r"['\\]", default))):
            raise LookupError(expansion)
        return variables.get(name, "" if has_default else f"${name}") or _expanded(default, variables)
    text = _expanded(expansion[3:-2], variables, in_quotes=True)
    # A name stands for a number.
    text = re.sub(rf"(?<![\w$]){_NAME}", lambda name: f"({variables.get(name[0], '?')})", text)
    # A shell rounds toward zero, Python down: below zero they differ.
    if re.search(r"(?s)[^\d\s()+*/%-]|\*\*|[\d)]\s*\(|-.*[/%]|[/%].*-", text):
        raise LookupError(expansion)
    try:
        return str(int(eval(text.replace("/", "//"))))
    except (ArithmeticError, SyntaxError, TypeError):
        raise LookupError(expansion) from None
