"""Records which `raise` statements of the package a test run reaches, and names those that no test provokes.

An import hook puts a call before each `raise` when a module is compiled. Nothing is traced, so the tests run at full
speed. Processes that a test starts are not seen: an error raised there needs a test in this process as well.
"""

import ast
import importlib.machinery
import sys
from collections.abc import Container, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

PACKAGE = "alpaca_ppo"
ROOT = Path(__file__).resolve().parents[1]
_HOOK = "__raise_reached__"

reached: set[tuple[str, int]] = set()


class _CallBeforeRaise(ast.NodeTransformer):
    def visit_Raise(self, node: ast.Raise) -> list[ast.stmt]:
        call = ast.Expr(ast.Call(ast.Name(_HOOK, ast.Load()), [ast.Constant(node.lineno)], []))
        return [ast.fix_missing_locations(ast.copy_location(call, node)), node]


def compile_recording(source: str, path: str) -> CodeType:
    """Code of `source` that calls `__raise_reached__(line)` before it raises; lines and tracebacks stay as they are."""
    return compile(_CallBeforeRaise().visit(ast.parse(source, path)), path, "exec", dont_inherit=True)


class _RecordingLoader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        # Not SourceFileLoader's: it would read and write the bytecode cache that ordinary runs use.
        return compile_recording(self.get_source(fullname), self.path)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__[_HOOK] = lambda line: reached.add((self.path, line))
        super().exec_module(module)


class _Finder:
    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.partition(".")[0] != PACKAGE:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _RecordingLoader(spec.loader.name, spec.loader.path)
        return spec


def install() -> None:
    """Makes every later import of the package a recording one."""
    assert PACKAGE not in sys.modules, f"{PACKAGE} was imported before its raise statements could be recorded"
    sys.meta_path.insert(0, _Finder)


def raise_lines(source: str) -> list[int]:
    """Line of every `raise` statement in `source`."""
    return sorted(node.lineno for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Raise))


def unreached(reached: Container[tuple[str, int]]) -> list[str]:
    """`file:line: statement` of every `raise` in the package whose file and line are not in `reached`."""
    found = []
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        source = path.read_text()
        for line in raise_lines(source):
            if (str(path), line) not in reached:
                found.append(f"{path.relative_to(ROOT)}:{line}: {source.splitlines()[line - 1].strip()}")
    return found
