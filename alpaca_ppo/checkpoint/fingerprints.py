"""Fingerprints of models and functions, by which a resumed run recognises what it started from.

They are cheap, not complete: they leave out most weights of large tensors and, of a function, the functions and files
that it uses, what its decorators add, and its object's state, unless that is a dataclass.

`datasets.fingerprint.Hasher` hashes an importable function by its name alone: an edited reward function would count as
unchanged, and a moved file as changed.
"""

import dataclasses
import functools
import hashlib
import inspect
import pickle
import sys
import textwrap
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from types import CellType, CodeType, FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from alpaca_ppo.config.ppo_config import PPOConfig

# About this many weights of a tensor are hashed, and all of a tensor with less than twice as many.
SAMPLED_WEIGHTS = 16384
# Characters; longer texts of a function's arguments are replaced by their hash.
_MAX_READABLE = 200


def tensors_fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """A hash of names, dtypes, shapes and every n-th value of `tensors`, equal on every device."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        if tensor.is_meta:
            # As weights that Accelerate keeps on disk or in host memory.
            continue
        flat = tensor.reshape(-1)
        # An even stride would stay in a few columns of a matrix whose width is a power of two.
        sample = flat[:: flat.numel() // SAMPLED_WEIGHTS | 1].contiguous().cpu()
        digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """The tensors that saving `model` would write: parameters and persistent buffers."""
    return {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}


def callable_identity(function: Callable[..., Any]) -> str:
    """Name and source hash of a function, or of a method or an object with its class; also a function's defaults and
    closure, the arguments of a `functools.partial` and the fields of a dataclass.

    Only the last part of a module's name counts, so that a file may be moved, started as a script, or named by path.
    """
    return _identity(function, ())


def _identity(value: Any, inside: tuple[int, ...]) -> str:
    """The identity of `value`, a callable or one of its arguments; `inside` are the ids of the values that contain it.

    Numbers are readable. Text is hashed, because it may be long, or secret. An object counts by its class alone, unless
    it is plain data, an array, a model or a dataclass.
    """
    if value is None or isinstance(value, bool | int | float | complex | Enum):
        return repr(value)
    if isinstance(value, str | bytes | Path):
        return short_hash(repr(value))
    if isinstance(value, np.ndarray | np.generic):
        return short_hash(pickle.dumps(value, protocol=4))
    if isinstance(value, Tensor) and value.layout is torch.strided:
        return tensors_fingerprint({"": value})
    if id(value) in inside:
        return "itself"
    inside = (*inside, id(value))
    if isinstance(value, list | tuple):
        return f"[{', '.join(_identity(entry, inside) for entry in value)}]"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(_identity(entry, inside) for entry in value))}}}"
    if isinstance(value, Mapping):
        entries = sorted(f"{_identity(key, inside)}: {_identity(entry, inside)}" for key, entry in value.items())
        return f"{{{', '.join(entries)}}}"
    if isinstance(value, functools.partial):
        arguments = {str(i): argument for i, argument in enumerate(value.args)} | value.keywords
        return f"{_identity(value.func, inside)} with {_named(arguments, inside)}"
    return _code_identity(inspect.unwrap(value), inside)


def _code_identity(value: Any, inside: tuple[int, ...]) -> str:
    """`_identity` of a method, a function, a class or an object."""
    if inspect.ismethod(value):
        return f"{_identity(value.__func__, inside)} of {_identity(value.__self__, inside)}"
    if isinstance(value, FunctionType):
        parameters = inspect.signature(value).parameters.values()
        made_with = {p.name: p.default for p in parameters if p.default is not p.empty}
        # A cell is empty if its variable is assigned later, or never.
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        made_with |= {name: cell.cell_contents for name, cell in cells if cell != CellType()}
        return _definition(value) + (f" made with {_named(made_with, inside)}" if made_with else "")
    if inspect.isroutine(value) or inspect.isclass(value):
        return _definition(value)
    name = _definition(type(value))
    if isinstance(value, nn.Module):
        return f"{name} {tensors_fingerprint(model_state(value))}"
    # False for classes written in C.
    if inspect.isfunction(method := inspect.unwrap(type(value).__call__)):
        name = f"{_identity(method, inside)} of {name}"
    # `compatibility` compares the options of a `PPOConfig`.
    if not dataclasses.is_dataclass(value) or isinstance(value, PPOConfig):
        return name
    # A field that the constructor does not set may be missing.
    names = [field.name for field in dataclasses.fields(value) if field.compare and hasattr(value, field.name)]
    return f"{name} with {_named({field: getattr(value, field) for field in names}, inside)}"


def _named(values: Mapping[str, Any], inside: tuple[int, ...]) -> str:
    text = ", ".join(f"{name}={_identity(value, inside)}" for name, value in sorted(values.items())) or "nothing"
    return text if len(text) <= _MAX_READABLE else short_hash(text)


def _definition(defined: Any) -> str:
    """Module, qualified name and source hash of a function or class; of a lambda, whose line of source may hold others,
    the hash of its bytecode.
    """
    # Methods of classes written in C, such as str.lower, have no `__module__`.
    module_name = getattr(defined, "__module__", None) or "builtins"
    module = sys.modules.get(module_name)
    path = Path(getattr(module, "__file__", None) or module_name.rpartition(".")[2])
    place = path.parent.name if path.stem in ("__init__", "__main__") else path.stem
    name = f"{place}.{defined.__qualname__}"
    if defined.__name__ == "<lambda>":
        return f"{name} (code {short_hash(_bytecode(defined.__code__))})"
    try:
        return f"{name} (source {short_hash(textwrap.dedent(inspect.getsource(defined)))})"
    except (OSError, TypeError):
        # Built in, or typed into an interpreter.
        return name


def _bytecode(code: CodeType) -> str:
    """Instructions, names and constants, without file and lines."""
    constants = []
    for constant in code.co_consts:
        if isinstance(constant, frozenset):
            # Its order differs between processes.
            constant = sorted(map(repr, constant))
        constants.append(_bytecode(constant) if isinstance(constant, CodeType) else repr(constant))
    return repr((code.co_code, code.co_names, constants))


def short_hash(content: str | bytes) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of `content`."""
    encoded = content if isinstance(content, bytes) else content.encode(errors="backslashreplace")
    return hashlib.sha256(encoded).hexdigest()[:16]
