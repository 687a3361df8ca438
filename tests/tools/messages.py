"""Writes `tests/messages.txt`, every sentence with which the package refuses something: `make messages`.

A reworded error changes this file and no test; whoever reviews the change reads its diff. What a message fills in
stands in braces, as in the source, but for text that a line above names, in the same block. Left out is what is raised
again as it came.
"""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
MESSAGES = ROOT / "tests/messages.txt"


def template(node: ast.expr, named: Mapping[str, str]) -> str:
    """The text of a message as it stands in the source, without quotes, with the texts `named` in place of their names;
    of another expression its code in braces.
    """
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(template(v.value if isinstance(v, ast.FormattedValue) else v, named) for v in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return template(node.left, named) + template(node.right, named)
    code = ast.unparse(node)
    return named.get(code, "{" + code + "}")


def messages(source: str) -> Iterator[str]:
    """`Exception: sentence` for each `raise` of an exception that is made there, from top to bottom."""
    found: dict[int, str] = {}
    for node in ast.walk(ast.parse(source)):
        for block in (getattr(node, part, None) for part in ("body", "orelse", "finalbody")):
            named: dict[str, str] = {}
            for statement in block if isinstance(block, list) else ():
                match statement:
                    case ast.Assign([ast.Name(name)], ast.Constant(str()) | ast.JoinedStr() as text):
                        named[name] = template(text, named)
                    case ast.Raise(ast.Call(function, arguments)):
                        sentence = ", ".join(template(argument, named) for argument in arguments)
                        found[statement.lineno] = f"{ast.unparse(function)}: {sentence}".replace("\n", "\\n")
    yield from (found[line] for line in sorted(found))


def listing() -> str:
    """The whole file."""
    parts = []
    for path in sorted((ROOT / "alpaca_ppo").rglob("*.py")):
        found = list(messages(path.read_text()))
        if found:
            parts.append("\n".join([path.relative_to(ROOT).as_posix(), *(f"  {line}" for line in found)]))
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    MESSAGES.write_text(listing())
    print(f"{MESSAGES}: {listing().count(chr(10) + '  ')} messages")
