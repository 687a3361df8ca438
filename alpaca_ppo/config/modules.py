"""Loads modules and functions that users name, by file or by dotted name, and finds them again in tracebacks."""

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from alpaca_ppo.config.names import did_you_mean

# Names of the loaded modules.
_LOADED: set[str] = set()


def import_modules(names: Sequence[str]) -> None:
    for name in names:
        load_module(name, what=f"import_modules holds {name!r}")


def load_function(spec: str, *, what: str) -> Callable[..., Any]:
    """The function or class that `spec` names: "package.module:function" or "path/to/file.py:function".

    Errors begin with `what`, such as "reward function". Modules and exceptions are as for `load_module`.
    """
    target, _, name = spec.rpartition(":")
    if not target or not name.isidentifier():
        raise ValueError(f"{what} {spec!r} must be 'module:function' or 'path/to/file.py:function'")
    module = load_module(target, what=f"{what} {spec!r}")
    function: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(function):
        callables = {k: v for k, v in vars(module).items() if callable(v) and not k.startswith("_")}
        public = [k for k, v in callables.items() if getattr(v, "__module__", "") == module.__name__]
        hint = did_you_mean(name, public, likeness=0.6) or f" it has {', '.join(public) or 'none'}"
        raise ValueError(f"{what} {spec!r}: {target} has no function {name!r};{hint}")
    return function


def load_module(name: str, *, what: str) -> ModuleType:
    """The module `name`: "package.module", or the path of a file that ends in .py. A second call returns the same one.

    Paths are relative to the current folder, where modules are searched first too. A file can import the modules beside
    it while it is loaded. Exceptions raised inside the module are passed on; errors of ours begin with `what`.
    """
    file = Path(name).resolve() if name.endswith(".py") else None
    if file is not None and not file.is_file():
        raise ValueError(f"{what}: the file {file} does not exist")
    # `python script.py` puts the script's folder on Python's path, not the current one.
    folder = str(file.parent if file else Path.cwd())
    sys.path.insert(0, folder)
    # The prefix keeps a file named json.py from replacing the module of that name.
    module_name = name if file is None else f"_user_file_{file.stem}_{abs(hash(file)):x}"
    _LOADED.add(module_name)
    try:
        return importlib.import_module(name) if file is None else _load_file(file, module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if file is not None or (name != missing and not name.startswith(f"{missing}.")):
            raise
        raise ValueError(f"{what}: {folder} and Python's path have no module {missing!r}; name its file") from error
    finally:
        sys.path.remove(folder)


def _load_file(path: Path, name: str) -> ModuleType:
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None, path
        sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules[name])
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def raised_by(error: BaseException) -> str | None:
    """The innermost function of a user's module in the traceback of `error` or a cause, with file and line, or None."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        if frame.f_globals.get("__name__") in _LOADED:
            return f"{frame.f_code.co_name} ({frame.f_code.co_filename}, line {line})"
    return None if error.__cause__ is None else raised_by(error.__cause__)
