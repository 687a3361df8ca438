"""The package's size: lines of code by folder, files, statements that raise, functions with many parameters, options.

Lines of code are those that hold more than a comment or a docstring. A feature that needs more than its folder's budget
says in CHANGELOG.md what it pays.
"""

import ast
import dataclasses
import io
import tokenize
from collections import Counter
from pathlib import Path

from alpaca_ppo.config.ppo_config import PPOConfig

PACKAGE = Path(__file__).parents[1] / "alpaca_ppo"
BUDGET = {
    "config": 1499,
    "trainer": 1508,
    "models": 1436,
    "ppo": 1471,
    "generation": 1956,
    "functional": 1229,
    "distributed": 1291,
    "rewards": 783,
    "checkpoint": 841,
    "tracking": 703,
    "environments": 836,
    "root": 811,
    "cli": 531,
    "estimate_memory": 372,
    "data": 584,
    "adapters": 424,
    "migrate": 349,
    "report": 324,
    "doctor": 373,
    "evaluation": 249,
    "supervised": 218,
    "presets": 6,
}
FILES, RAISES, OPTIONS, WIDE_FUNCTIONS = 175, 429, 134, 13
NOT_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def docstring_lines(tree: ast.Module) -> set[int]:
    """The lines of all docstrings."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if ast.get_docstring(node) is not None:
                lines |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return lines


def lines_of_code(text: str) -> int:
    """The number of lines that hold code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NOT_CODE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - docstring_lines(ast.parse(text)))


def folder(path: Path) -> str:
    """The folder of the package in which `path` lies; "root" for a file beside the folders."""
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else "root"


def wide(node: ast.AST) -> bool:
    """Whether `node` is a function, not a constructor, with eight parameters or more beside `self`."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name == "__init__":
        return False
    named = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return len([argument for argument in named if argument.arg not in ("self", "cls")]) >= 8


SOURCES = {path: path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
NODES = {path: list(ast.walk(ast.parse(text))) for path, text in SOURCES.items()}


def test_lines_of_code_are_those_with_more_than_comments_and_docstrings():
    text = '"""One.\n\nTwo."""\n# three\n\nx = [\n    1,  # four\n]\n\n\ndef f():\n    """Five."""\n    return x\n'
    assert lines_of_code(text) == 5


def test_every_folder_stays_within_its_budget():
    lines = Counter[str]()
    for path, text in SOURCES.items():
        lines[folder(path)] += lines_of_code(text)
    assert lines.keys() == BUDGET.keys()
    over = {name: f"{count} lines, budget {BUDGET[name]}" for name, count in lines.items() if count > BUDGET[name]}
    assert not over, over


def test_files_errors_options_and_long_parameter_lists_stay_few():
    assert len(SOURCES) <= FILES
    assert sum(isinstance(node, ast.Raise) for nodes in NODES.values() for node in nodes) <= RAISES
    assert len(dataclasses.fields(PPOConfig)) <= OPTIONS
    assert sum(wide(node) for nodes in NODES.values() for node in nodes) <= WIDE_FUNCTIONS


def test_a_function_with_eight_parameters_is_found_and_a_constructor_is_not():
    functions = ast.parse("def f(self, a, b, c, d, *, e, f, g, h): ...\ndef __init__(a, b, c, d, e, f, g, h): ...")
    assert [wide(node) for node in functions.body] == [True, False]
