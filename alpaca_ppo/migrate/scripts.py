"""Reads what a Python script gives to TRL's configuration and trainer, without executing it.

Understood are literals and arithmetic of them, names that are assigned once, `dict(...)` and `**kwargs`, attributes
that are set later, the options of argparse with their defaults, and the flags that `HfArgumentParser` or `TrlParser`
turns into configurations. What else a value may be stays unknown, and is named.
"""

import ast
import contextlib
import dataclasses
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

CONFIGS = ("GRPOConfig", "PPOConfig")
TRAINERS = ("GRPOTrainer", "PPOTrainer")
_PARSERS = ("HfArgumentParser", "TrlParser")
_PARSING = ("ArgumentParser", "parse_args", "parse_known_args", "parse_args_into_dataclasses", "parse_args_and_config")
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}
_DEFAULT_PATHS = dict.fromkeys(("sft_model_path", "reward_model_path"), "EleutherAI/pythia-160m")
"""What scripts read of a PPOConfig that was not given it."""


class Unknown(Exception):
    """An expression whose value only the running script knows."""


@dataclasses.dataclass
class Script:
    """What a script does with TRL.

    Attributes:
        kind: the class of its configuration, "GRPOConfig" or "PPOConfig".
        config: names and values that the configuration gets.
        unknown: names whose values could not be read, with their source text.
        trainer: the arguments of the trainer, as expressions.
        guarded: whether the script can be imported without training: the trainer is made in a function or under
            `if __name__ == "__main__"`.
        names: the script's.
        reads_arguments: whether it parses its command line in a way that is understood here.
        variable: the name of its configuration, or None.
        parses_flags: whether HfArgumentParser or TrlParser makes the configuration from the command line.
    """

    kind: str
    config: dict[str, Any]
    unknown: dict[str, str]
    trainer: dict[str, ast.expr]
    guarded: bool
    names: "Names"
    parses_flags: bool
    reads_arguments: bool
    variable: str | None


class Names:
    """The names of a script: the expressions that each was assigned, its functions, and what it imports."""

    def __init__(self, tree: ast.AST, flags: Mapping[str, Any]) -> None:
        self.assigned: dict[str, ast.expr] = {}
        """The last of each."""
        self.earlier: dict[str, list[ast.expr]] = {}
        """Those before it, in order."""
        self.functions: set[str] = set()
        self.imports: dict[str, str] = {}
        self.flags = flags
        self.options: dict[str, ast.expr | None] = {}
        self.parsed: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                self._assign(node.targets[0].id, node.value)
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
                self._unpack(node.targets[0], node.value)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
                self._assign(node.target.id, node.value)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self.functions.add(node.name)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                self.imports |= {alias.asname or alias.name: f"{node.module}:{alias.name}" for alias in node.names}
            if isinstance(node, ast.Call) and called(node) == "add_argument":
                self._add_option(node)
        self.parsed = {name for name, value in self.assigned.items() if called(value) == "parse_args"}

    def value(self, node: ast.expr) -> Any:
        """The value of an expression.

        Raises:
            Unknown: if only the running script knows it.
        """
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name) and node.id in self.assigned:
            return Names.value(_without(self, node.id), self.assigned[node.id])
        if isinstance(node, ast.List | ast.Tuple):
            return [self.value(element) for element in node.elts]
        if isinstance(node, ast.Dict) and all(node.keys):
            return {
                self.value(key): self.value(value) for key, value in zip(node.keys, node.values, strict=True) if key
            }
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -self._number(node.operand)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return self._computed(node)
        if isinstance(node, ast.JoinedStr):
            return "".join(str(self.value(p.value if isinstance(p, ast.FormattedValue) else p)) for p in node.values)
        # Of a quantization, what the library would compute is of no interest.
        if called(node) == "BitsAndBytesConfig" and isinstance(node, ast.Call):
            return self._known_arguments(node)
        if isinstance(node, ast.Call) and called(node) == "dict" and not node.args:
            return {keyword.arg: self.value(keyword.value) for keyword in node.keywords if keyword.arg}
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            return self._attribute(node.value.id, node.attr)
        raise Unknown(ast.unparse(node))

    def _assign(self, name: str, value: ast.expr) -> None:
        if name in self.assigned:
            self.earlier.setdefault(name, []).append(self.assigned[name])
        self.assigned[name] = value

    def _unpack(self, target: ast.Tuple, value: ast.expr) -> None:
        """The names in `a, b = load_dataset(..., split=[x, y])`, each with its own split."""
        if not isinstance(value, ast.Call) or called(value) != "load_dataset":
            return
        splits = next((k.value for k in value.keywords if k.arg == "split"), None)
        if not isinstance(splits, ast.List) or len(splits.elts) != len(target.elts):
            return
        others = [keyword for keyword in value.keywords if keyword.arg != "split"]
        for name, split in zip(target.elts, splits.elts, strict=True):
            if isinstance(name, ast.Name):
                self._assign(name.id, ast.Call(value.func, value.args, [*others, ast.keyword("split", split)]))

    def _computed(self, node: ast.BinOp) -> Any:
        left, right = self.value(node.left), self.value(node.right)
        try:
            return _OPERATORS[type(node.op)](left, right)
        except (TypeError, ZeroDivisionError) as error:
            raise Unknown(ast.unparse(node)) from error

    def _number(self, node: ast.expr) -> Any:
        value = self.value(node)
        if not isinstance(value, int | float):
            raise Unknown(ast.unparse(node))
        return value

    def _attribute(self, owner: str, name: str) -> Any:
        if owner in ("torch", "np", "numpy"):
            return name
        if owner in self.parsed and name in {*self.flags, *self.options}:
            if name in self.flags:
                return self.flags[name]
            default = self.options[name]
            return None if default is None else self.value(default)
        if name in self.flags or name in _DEFAULT_PATHS:
            return self.flags.get(name, _DEFAULT_PATHS.get(name))
        raise Unknown(f"{owner}.{name}")

    def _known_arguments(self, node: ast.Call) -> dict[str, Any]:
        known = {}
        for keyword in node.keywords:
            with contextlib.suppress(Unknown):
                known[str(keyword.arg)] = self.value(keyword.value)
        return known

    def _add_option(self, node: ast.Call) -> None:
        flags = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        name = next((f for f in flags if f.startswith("--")), "").removeprefix("--").replace("-", "_")
        action = given.get("action")
        if isinstance(action, ast.Constant) and action.value == "store_true":
            given.setdefault("default", ast.Constant(False))
        if name:
            self.options[name] = given.get("default")


def read_script(text: str, path: str, arguments: Sequence[str] = ()) -> Script:
    """What the script `text` gives to TRL.

    Args:
        text: the script.
        path: its path, for errors.
        arguments: the command line that it would be run with.

    Raises:
        ValueError: if it is no valid Python, or makes neither a GRPOConfig nor a PPOConfig of TRL.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise ValueError(f"{path} is not valid Python: {error}") from error
    flags = read_flags(arguments)
    names = Names(tree, flags)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    made = next((node for node in calls if called(node) in CONFIGS), None)
    trainer = next((node for node in calls if called(node) in TRAINERS), None)
    config: dict[str, Any] = {}
    unknown: dict[str, str] = {}
    if made is not None:
        kind = called(made)
        _read_call(made, kind, names, config, unknown)
        _read_later(tree, kind, names, config, unknown)
    else:
        kind = _parsed_kind(calls) or (trainer and called(trainer).replace("Trainer", "Config")) or ""
        config = dict(flags) if _parsed_kind(calls) else {}
        if not kind:
            raise ValueError(f"{path} makes neither a GRPOConfig nor a PPOConfig of TRL; give the script that does")
    arguments_of_trainer: dict[str, ast.expr] = {}
    if trainer is not None:
        positional = (
            ("model", "reward_funcs", "args", "train_dataset") if called(trainer) == "GRPOTrainer" else ("args",)
        )
        arguments_of_trainer = dict(zip(positional, trainer.args, strict=False))
        arguments_of_trainer |= {k.arg: k.value for k in trainer.keywords if k.arg}
    parses_flags = made is None and _parsed_kind(calls) is not None
    given = arguments_of_trainer.get("args")
    return Script(
        kind,
        config,
        unknown,
        arguments_of_trainer,
        guarded=_is_guarded(tree, names),
        names=names,
        parses_flags=parses_flags,
        reads_arguments=any(called(node) in (*_PARSERS, *_PARSING) for node in calls),
        variable=given.id if isinstance(given, ast.Name) else _assigned_to(made, names),
    )


def read_flags(arguments: Sequence[str]) -> dict[str, Any]:
    """Names and values of flags; a flag without a value is true, and one with several values a list."""
    values: dict[str, list[Any]] = {}
    name = ""
    for argument in arguments:
        if argument.startswith("--"):
            name, equals, text = argument.removeprefix("--").partition("=")
            name = name.replace("-", "_")
            values[name] = [_scalar(text)] if equals else []
        elif name:
            values[name].append(_scalar(argument))
    return {n: True if not found else found[0] if len(found) == 1 else found for n, found in values.items()}


def called(node: ast.AST) -> str:
    """The last part of the name of what a call calls; empty for anything else."""
    if not isinstance(node, ast.Call):
        return ""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _assigned_to(node: ast.expr | None, names: Names) -> str | None:
    return next((name for name, value in names.assigned.items() if value is node), None)


def _without(names: Names, name: str) -> Names:
    """`names` without one of them, which is being read, so that `x = x + 1` does not go round in circles."""
    inner = object.__new__(Names)
    inner.__dict__ |= names.__dict__
    inner.assigned = {known: value for known, value in names.assigned.items() if known != name}
    return inner


def _read_call(node: ast.Call, kind: str, names: Names, config: dict[str, Any], unknown: dict[str, str]) -> None:
    given: list[tuple[str | None, ast.expr]] = [(keyword.arg, keyword.value) for keyword in node.keywords]
    if node.args:
        given.insert(0, ("output_dir", node.args[0]))
    for name, value in given:
        try:
            read = names.value(value)
            config.update({name: read} if name else read)
        except Unknown as error:
            unknown[name or "**"] = str(error)
            if name and (known := _known_entries(value, names)):
                config[name] = known


def _known_entries(node: ast.expr, names: Names) -> dict[str, Any]:
    """The entries of a mapping whose values can be read."""
    entries: dict[str, ast.expr] = {}
    if isinstance(node, ast.Name):
        node = names.assigned.get(node.id, node)
    if isinstance(node, ast.Dict):
        entries = {str(k.value): v for k, v in zip(node.keys, node.values, strict=True) if isinstance(k, ast.Constant)}
    elif isinstance(node, ast.Call) and called(node) == "dict":
        entries = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
    known = {}
    for name, value in entries.items():
        with contextlib.suppress(Unknown):
            known[name] = names.value(value)
    return known


def _read_later(tree: ast.AST, kind: str, names: Names, config: dict[str, Any], unknown: dict[str, str]) -> None:
    """Attributes that are set on the configuration after it was made."""
    variables = {name for name, value in names.assigned.items() if called(value) == kind}
    for node in ast.walk(tree):
        target = node.targets[0] if isinstance(node, ast.Assign) and len(node.targets) == 1 else None
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id in variables:
            assert isinstance(node, ast.Assign)
            try:
                config[target.attr] = names.value(node.value)
            except Unknown as error:
                unknown[target.attr] = str(error)


def _parsed_kind(calls: Sequence[ast.Call]) -> str | None:
    for node in calls:
        if called(node) in _PARSERS:
            text = ast.unparse(node)
            return next((kind for kind in CONFIGS if kind in text), None) or _kind_of_names(calls)
    return None


def _kind_of_names(calls: Sequence[ast.Call]) -> str | None:
    """The configuration that goes with the trainer, where the parser gets its classes from a variable."""
    trainers = [called(node) for node in calls if called(node) in TRAINERS]
    return trainers[0].replace("Trainer", "Config") if trainers else None


def _is_guarded(tree: ast.Module, names: Names) -> bool:
    """Whether no statement at the top level of the script makes a trainer, or calls a function that may."""
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test):
            continue
        if any(called(node) in TRAINERS for node in ast.walk(statement)):
            return False
        if isinstance(statement, ast.Expr) and called(statement.value) in names.functions:
            return False
    return True


def _scalar(text: str) -> Any:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value if isinstance(value, bool | int | float) or value is None else text
