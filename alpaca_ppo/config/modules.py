"""Loads Python modules that a user names by file or by dotted name, and functions in them."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any


class NoSuchModule(ValueError):
    """The named file or module does not exist. An error raised inside an existing module is never one of these."""


def import_modules(names: Sequence[str]) -> None:
    """Imports the modules and files of the option `import_modules`, for what they register.

    Raises:
        ValueError: when one does not exist or raises while it is imported; names the entry and the reason.
    """
    for name in names:
        try:
            load_module(name)
        except Exception as error:
            reason = error if isinstance(error, NoSuchModule) else f"{type(error).__name__}: {error}"
            raise ValueError(f"import_modules holds {name!r}, which cannot be imported: {reason}") from error


def load_module(name: str) -> ModuleType:
    """The module `name`: "package.module", or the path of a file that ends in .py.

    A relative path counts from the current folder, and a module is searched there before the rest of Python's path. A
    file can import the modules beside it while it is loaded. A second call returns the same module.

    Raises:
        NoSuchModule: when there is no such file or module. An error inside the module is raised unchanged.
    """
    return _load_file(Path(name).resolve()) if name.endswith(".py") else _import_by_name(name)


def load_function(spec: str, *, what: str) -> Callable[..., Any]:
    """The function that `spec` names: "package.module:function" or "path/to/file.py:function"; a class is one, too.

    Relative paths and modules are looked up as in `load_module`.

    Args:
        spec: see above.
        what: what it is called in errors, such as "reward function".

    Raises:
        ValueError: if `spec` has another form, or the module, file or function does not exist. An exception raised
            inside the module is passed on unchanged.
    """
    target, _, name = spec.rpartition(":")
    if not target or not name.isidentifier():
        raise ValueError(f"{what} {spec!r} must be 'module:function' or 'path/to/file.py:function'")
    try:
        module = load_module(target)
    except NoSuchModule as error:
        raise ValueError(f"{what} {spec!r}: {error}") from error
    function: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(function):
        found = [key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")]
        raise ValueError(f"{what} {spec!r}: {target} has no function {name!r}, only {found}")
    return function


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise NoSuchModule(f"the file {path} does not exist")
    # The prefix keeps a file named json.py from replacing the module of that name.
    module_name = f"_user_file_{path.stem}_{abs(hash(path)):x}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        with _importable(path.parent):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module


def _import_by_name(name: str) -> ModuleType:
    try:
        with _importable(Path.cwd()):
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if name != missing and not name.startswith(f"{missing}."):
            raise
        raise NoSuchModule(
            f"there is no module {missing!r} in {Path.cwd()} or on Python's path; use the file's path instead"
        ) from error


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Puts `folder` first on Python's path; `python script.py` puts the script's folder there, not the current one."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
