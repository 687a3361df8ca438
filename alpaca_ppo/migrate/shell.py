"""Reads the overrides in a shell script that starts verl, without running it.

Words, quotes, comments and continued lines are divided as bash does. What is followed: plain assignments at the top
level, arrays, defaults (`${A:-${B:-3}}`) and arithmetic with whole numbers (`$((1024 * 2))`). A variable that any other
command names, such as `read`, or one in a branch, a loop, a function or a subshell, is followed nowhere. Where an
override needs it, it stays with its `$`, and so do commands, other expansions, and variables of the environment other
than HOME.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

OVERRIDE = r"[+~]{0,2}\w+\.[\w.]+=.*"
# Once verl is known to be started, a group of hydra is an override as well, such as `trainer=x`.
_ARGUMENT = r"(?s:[+~]{0,2}[\w.@/]+=.*)"
_PROGRAM = r"(?:[\w./-]*[./])?main_(\w+?)(?:\.py)?"
_NAME = r"[A-Za-z_]\w*"
_ASSIGNMENT = re.compile(rf"({_NAME})(\+?)=(?!\(.*(?<=[\s(])\[)(.*)", re.DOTALL)

# What changes a variable within a calculation.
_STEP = r"\+\+|--|(?<![=!<>])=(?!=)|<<=|>>="
_OPERATOR = re.compile(r"&&|\|\||;;?&?|&>>?|\|&?|<<<|<<-?|[<>]&|>>|<>|>\||[&()<>\n]")
# What begins text with rules of its own, also between double quotes.
_OPENING = re.compile(r"[$<>]?\(|\$\{|\$?'|[\"`]")
_OPENING_IN_QUOTES = re.compile(r"\$[({]|[\"`]")
_WITHOUT_QUOTES = str.maketrans("", "", "'\"\\")
# Whitespace in a variable's value divides it into words, unless it stands between quotes.
_DIVIDING, _JOINING = str.maketrans(" \t\n", "\ue000\ue001\ue002"), str.maketrans("\ue000\ue001\ue002", " \t\n")

# Reserved words that begin a block with those that end it, and words after which a command follows.
_BLOCKS = {"if": "fi", "while": "done", "until": "done", "for": "done", "select": "done", "case": "esac", "{": "}"}
_BEFORE_COMMANDS = {"if", "while", "until", "{", "then", "do", "else", "elif", "!", "time", "command", "function"}
_DECLARATIONS = ("export", "readonly", "declare", "typeset")
# References to variables, other positional parameters, and other separators of words.
_REFUSED = re.compile(r"(?:declare|typeset|local) (?:.* )?-\w*n.*|set (?!(?:[-+]\w+|pipefail| )+$).*|IFS=\S*")


class _Command(NamedTuple):
    """A simple command: its words as they are written, whether it stands outside of all blocks, and whether it runs in
    any case and in the script's own process.
    """

    line: int
    words: list[str]
    is_outside: bool
    is_plain: bool

    def assignments(self) -> list[re.Match[str]]:
        """The words that assign, if the command is plain and does nothing else."""
        declares = self.words[0] in _DECLARATIONS
        words = [word for word in self.words[declares:] if not (declares and re.fullmatch(_NAME, word))]
        found = [match for word in words if (match := _ASSIGNMENT.fullmatch(word))]
        return found if self.is_plain and len(found) == len(words) else []

    def changes_all(self) -> bool:
        """Whether it may change any variable, as `source env.sh` and `export $(cat .env)` do."""
        command = next((word for word in self.words if not _ASSIGNMENT.fullmatch(word)), "")
        is_expanded = any(re.match(r"[^\w-]", word) for word in self.words)
        return command in ("source", ".", "eval", "shopt", "alias") or (command in _DECLARATIONS and is_expanded)

    def changed(self) -> set[str]:
        """The names of variables that it may change, other than by an assignment that is followed."""
        text = " ".join(word for word in self.words if not word.startswith("(("))
        calculations = [part for word in self.words for part in re.findall(r"(?s)\(\(.*\)\)|\$\[.*\]", word)]
        names = {name for part in calculations if re.search(_STEP, part) for name in re.findall(_NAME, part)}
        is_harmless = self.is_plain and self.words[0] in ("echo", ":")
        if self.assignments() or is_harmless or any(re.fullmatch(_PROGRAM, word) for word in self.words):
            return names
        return names | {*re.findall(rf"(?<![\w$./-])(?<!\$\{{){_NAME}|(?<=\$\{{)\w+(?=:?=)", text)}


def overrides_of_shell(text: str, file: str) -> list[str]:
    """The overrides that the shell script `text` gives verl, in their order.

    Raises:
        ValueError: begins with the name `file`; if it does not start one training at the top level, or has what may
            hold overrides that only a run decides.
    """
    try:
        commands = list(_commands(text + "\n"))
    except ValueError as error:
        raise ValueError(f"{file} cannot be read as a shell script ({error}); give a YAML file") from error
    variables, starts = _Variables(set().union(*(command.changed() for command in commands))), list[list[str]]()
    for command in commands:
        line, words = f"{file}, line {command.line}", command.words
        if _REFUSED.fullmatch(" ".join(words)) or (command.changes_all() and not command.is_outside):
            raise ValueError(f"{line}: what follows from `{' '.join(words)}` is not known; write the script without it")
        if command.changes_all():
            variables.forget()
        if assignments := command.assignments():
            variables.assign(assignments, at_once=words[0] in _DECLARATIONS)
            continue
        words = [field for word in words for field in variables.fields(word)]
        if words and re.match(OVERRIDE, words[0]):
            raise ValueError(f"{line}: a comment or an empty line before {words[0]} ends the command; remove it")
        for i, word in enumerate(words):
            if program := re.fullmatch(_PROGRAM, word):
                starts.append([program[1], *(_overrides(words[i + 1 :], line) if command.is_outside else ())])
    if len(starts) != 1 or len(starts[0]) == 1 or starts[0][0] not in ("ppo", "ppo_sync", "dapo"):
        message = "has no overrides of verl.trainer.main_ppo outside of all blocks, or starts others too; give it alone"
        raise ValueError(f"{file} {message}")
    return starts[0][1:]


def _overrides(words: list[str], line: str) -> list[str]:
    """The overrides among the words after the program."""
    text = "\0".join(word + "=null" * bool(re.fullmatch(r"~[\w.]+", word)) for word in words)
    for name, flags in (("name", "--config-name|-cn"), ("path", "--config-path|-cp")):
        text = re.sub(rf"(?<![^\0])(?:{flags})[=\0]", f"hydra.config_{name}=", text)
    for word in text.split("\0"):
        if re.search(r"[$`]", word) and not re.fullmatch(_ARGUMENT, word):
            raise ValueError(f"{line}: {word} may hold overrides, which only a run decides; write them in its place")
    return [word for word in text.split("\0") if re.fullmatch(_ARGUMENT, word)]


def _commands(text: str) -> Iterator[_Command]:
    """The simple commands of a script, also those in blocks.

    Raises:
        ValueError: if a quote or a block is not closed.
    """
    blocks, words, first_line = list[str](), list[str](), 0
    is_joined = is_dropped = False
    for line, token, is_operator in _tokens(text):
        if is_operator and (token[0] in "<>" or token.startswith("&>")):
            # The file of a redirection.
            is_dropped = True
        elif is_operator:
            joins = token in ("&&", "||", "|", "|&")
            if words:
                yield _Command(first_line, words, not blocks, not (blocks or is_joined or joins or token == "&"))
            # A line may end after `&&`.
            is_joined = joins or (is_joined and not words and token == "\n")
            words = []
            blocks += ")" * (token == "(")
            if token == ")" and blocks[-1:] != ["esac"] and (not blocks or blocks.pop() != ")"):
                raise ValueError(f"line {line}: nothing is open that ) closes")
        elif is_dropped:
            is_dropped = False
        elif not words and token in _BLOCKS.values():
            if not blocks or blocks.pop() != token:
                raise ValueError(f"line {line}: nothing is open that {token} closes")
        else:
            blocks += [_BLOCKS[token]] if not words and token in _BLOCKS else []
            # The name of a function is no command.
            is_dropped = not words and token == "function"
            if words or token not in _BEFORE_COMMANDS:
                first_line = first_line if words else line
                words.append(token)
    if blocks:
        raise ValueError(f"No closing {blocks[-1]}")


def _tokens(text: str) -> Iterator[tuple[int, str, bool]]:
    """The words and operators of a script: the line, the text, and whether it is an operator."""
    position, previous, documents = 0, "", list[str]()
    while position < len(text):
        start, line = position, text.count("\n", 0, position) + 1
        operator = _OPERATOR.match(text, position)
        # A comment begins where a word would.
        if blank := re.compile(r"(?:[ \t]|\\\n)+|#[^\n]*").match(text, position):
            position = blank.end()
        elif operator and text[position : position + 2] not in ("((", "<(", ">("):
            position, previous = operator.end(), operator[0]
            while documents and previous == "\n":
                if not (end := re.compile(documents.pop(0), re.MULTILINE).search(text, position)):
                    raise ValueError(f"line {line}: a document does not end")
                position = end.end()
            yield line, previous, True
        else:
            while (
                position == start or text[position] not in " \t\n;&|<>()" or text[position - 1 : position + 1] == "=("
            ):
                position = _end(text, position)
            word = text[start:position]
            if previous in ("<<", "<<-"):
                tabs = r"\t*" if previous == "<<-" else ""
                documents.append(rf"^{tabs}{re.escape(word.translate(_WITHOUT_QUOTES))}$")
            previous = ""
            yield line, word, False


def _end(text: str, position: int, *, in_quotes: bool = False) -> int:
    """The end of what begins at `position`: an escaped character, a name with its `$`, quotes or brackets with all that
    is between them, or one character.
    """
    opening = (_OPENING_IN_QUOTES if in_quotes else _OPENING).match(text, position)
    if opening is None:
        name = re.compile(rf"\\.|\$(?:{_NAME}(?:\\\n\w+)*|[\d@*#?$!-])", re.DOTALL).match(text, position)
        return name.end() if name else position + 1
    last, position = opening[0][-1], opening.end()
    closing = {"(": ")", "{": "}"}.get(last, last)
    in_quotes = last == '"' or (last == "{" and in_quotes)
    while position < len(text) and text[position] != closing:
        if last == "(" and text[position] == "#" and text[position - 1] in "( \t\n":
            position = text.index("\n", position)
        elif last in "'`":
            position += 2 if text[position] == "\\" and opening[0] != "'" else 1
        else:
            position = _end(text, position, in_quotes=in_quotes)
    if position >= len(text):
        raise ValueError(f"No closing {closing}")
    return position + 1


def _pieces(word: str, *, in_quotes: bool = False) -> Iterator[str]:
    position = 0
    while position < len(word):
        start, position = position, _end(word, position, in_quotes=in_quotes)
        yield word[start:position]


def _unquoted(word: str) -> str:
    """The characters of `word` that stand outside of quotes and expansions."""
    return "".join(piece for piece in _pieces(word) if len(piece) == 1)


class _Variables:
    """The values of variables while a script is read from top to bottom; of those in `changed`, none is known."""

    def __init__(self, changed: set[str]) -> None:
        self._changed, self._is_unset_known = changed, True
        self._values: dict[str, str | list[str]] = {"HOME": str(Path.home())}

    def forget(self) -> None:
        """Forgets all values except HOME's, and that other variables are not set."""
        self._values, self._is_unset_known = {"HOME": str(Path.home())}, False

    def assign(self, assignments: list[re.Match[str]], *, at_once: bool) -> None:
        """Sets values from left to right, or all `at_once` after they were expanded."""
        pairs = ((found[1], found[2], self._assigned(found[3])) for found in assignments)
        for name, appends, value in list(pairs) if at_once else pairs:
            old = self._values.get(name, type(value)()) if appends else type(value)()
            if isinstance(value, str) and isinstance(old, str):
                self._values[name] = old + value
            elif isinstance(value, list) and isinstance(old, list):
                self._values[name] = old + value
            else:
                self._changed.add(name)

    def _assigned(self, text: str) -> str | list[str]:
        if not text.startswith("("):
            text = re.sub(r"^~(?=/|$)", "$HOME", text)
            return "$(...)" if "~" in _unquoted(text) else self._expanded(text).translate(_JOINING)
        elements = (token for _, token, is_operator in _tokens(text[1:-1] + "\n") if not is_operator)
        return [field for element in elements for field in self.fields(element)]

    def fields(self, word: str) -> list[str]:
        """The words that `word` becomes. What only a run decides has a `$` or a backquote."""
        if array := re.fullmatch(r"(\"?)\$\{(\w+)\[@\]\}\1", word):
            try:
                value = self._value_of(array[2]) or []
            except LookupError:
                return [word]
            elements = [value] if isinstance(value, str) else value
            return elements if array[1] else " ".join(elements).split()
        # {a,b} becomes two words.
        if re.search(r"\{.*(,|\.\.).*\}", _unquoted(word)):
            return [f"${word}"]
        return [field for field in re.split("[\ue000-\ue002]+", self._expanded(word)) if field]

    def _expanded(self, word: str, *, in_quotes: bool = False) -> str:
        parts = list[str]()
        for piece in _pieces(word, in_quotes=in_quotes):
            try:
                parts.append(self._expanded_piece(piece, in_quotes))
            except (LookupError, ArithmeticError, SyntaxError):
                # Only a run decides it. Its whitespace does not divide, and ${name} would be a reference of verl.
                name = re.fullmatch(r"\$\{?(\w+)\}?", piece)
                parts.append(f"${name[1]}" if name else "$(...)" if re.search(r"\s|^[^$`]", piece) else piece)
        # A `$` that was quoted is no variable, but may begin one of verl's references.
        return re.sub(r"\\\$(?=\{)", "$", "".join(parts))

    def _expanded_piece(self, piece: str, in_quotes: bool) -> str:
        """Raises LookupError, ArithmeticError or SyntaxError, if only a run decides the value."""
        if len(piece) == 1:
            return piece if in_quotes else piece.translate(_DIVIDING)
        if piece[0] == "\\":
            stays = piece[1] == "$" or (in_quotes and piece[1] not in '"\\`\n')
            return piece if stays else piece[1].strip("\n")
        if piece[0] == '"':
            return self._expanded(piece[1:-1], in_quotes=True)
        if piece[0] == "'":
            return re.sub(r"\$(?=\w)", r"\\$", piece[1:-1])
        if piece.startswith("$((") and piece.endswith("))"):
            return self._calculated(piece[3:-2])
        # A comment between backquotes is nothing, as are the arguments of the script, which are given after its name.
        if re.fullmatch(r"`\s*(?:#[^\n]*)?`|\$[@*]|\$\{[@*](:\d+)?\}", piece):
            return ""
        found = re.fullmatch(r"(?s)\$(?:\{(\w+)(?:(:?[-=])(.*))?\}|(\w+))", piece)
        value = self._value_of(found[1] or found[4]) if found else []
        if found and found[2] and (value is None or (value == "" and found[2][0] == ":")):
            value = self._expanded(found[3], in_quotes=in_quotes)
            self._values |= {found[1]: value.translate(_JOINING)} if "=" in found[2] else {}
            return value
        if not isinstance(value, str):
            raise LookupError
        return value if in_quotes else value.translate(_DIVIDING)

    def _value_of(self, name: str) -> str | list[str] | None:
        """The value; None for a variable that is not set. Raises LookupError, if only a run decides it."""
        if name in self._changed or not (self._is_unset_known or name in self._values):
            raise LookupError
        return self._values.get(name)

    def _calculated(self, text: str) -> str:
        def number(found: re.Match[str]) -> str:
            if not re.fullmatch(r"-?(?:0|[1-9]\d*)", value := str(self._value_of(found[0]))):
                raise LookupError
            return f"({value})"

        text = re.sub(rf"(?<![\w$]){_NAME}", number, self._expanded(text, in_quotes=True))
        # A shell rounds toward zero, Python down: below zero they differ, so this is no calculation.
        if not re.fullmatch(r"[\d\s()+*/%-]+", text) or re.search(r"(?s)\*\*|[\d)]\s*\(|-.*[/%]|[/%].*-", text):
            raise LookupError
        # It holds nothing but digits, brackets and operators.
        return str(eval(f"({text.replace('/', '//')})"))
