"""Writes `tests/messages.txt`, every sentence with which the package refuses something: `make messages`.

A reworded error changes this file and no test; whoever reviews the change reads its diff. What a message fills in
stands in braces, as in the source. Left out is what is raised again as it came.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
MESSAGES = ROOT / "tests/messages.txt"


def template(node: ast.expr) -> str:
    """The text of a message as it stands in the source, without quotes; of another expression its code in braces."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        parts = (template(v) if isinstance(v, ast.Constant) else "{" + ast.unparse(v.value) + "}" for v in node.values)
        return "".join(parts)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return template(node.left) + template(node.right)
    return "{" + ast.unparse(node) + "}"


def messages(source: str) -> Iterator[str]:
    """`Exception: sentence` for each `raise` of an exception that is made there, from top to bottom."""
    raises = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Raise))
    for node in sorted(raises, key=lambda node: node.lineno):
        if isinstance(node.exc, ast.Call):
            yield f"{ast.unparse(node.exc.func)}: {', '.join(map(template, node.exc.args))}".replace("\n", "\\n")


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
