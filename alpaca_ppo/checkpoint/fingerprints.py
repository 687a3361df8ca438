"""Fingerprints of models and functions, by which a resumed run recognises what it started from.

They are made to be compared, and to be cheap rather than complete. Not seen are, of a model, a change that is confined
to weights between the sampled ones (a few rows of a large matrix); of a function, the functions and files that it uses,
what its decorators add, and the state of the object that it belongs to, unless that is a dataclass.

`datasets.fingerprint.Hasher` is stable too, but hashes an importable function by its name alone: an edited reward
function would be the same one, and a moved file another.
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

SAMPLED_WEIGHTS = 16384
"""About so many weights of a tensor are hashed; tensors of less than twice that size are hashed in full."""
_MAX_READABLE = 200
"""Longer texts of what a function was given are replaced by their hash."""


def tensors_fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """A hash of names, dtypes, shapes and a sample of the values of `tensors`, equal on every device.

    The sample is strided over the whole tensor: for a model of 7 billion weights, 10 MB are read in about a second.
    """
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        if tensor.is_meta:
            # Weights that Accelerate keeps on disk or in host memory have no values here.
            continue
        flat = tensor.reshape(-1)
        # An even stride would stay in a few columns of a matrix whose width is a power of two.
        sample = flat[:: flat.numel() // SAMPLED_WEIGHTS | 1].contiguous().cpu()
        digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of `model` that saving it would write; buffers that follow from the configuration are left out."""
    return {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}


def callable_identity(function: Callable[..., Any], inside: tuple[int, ...] = ()) -> str:
    """A name for `function`, with a hash of its source if Python has it: of the definition of a function, a method
    with its class, or an object with its class.

    Only the last part of the module's name counts, so that the same file may be moved, started as a script, or named
    by its path. The defaults of a function, what it has in its closure, the arguments of a `functools.partial` and the
    fields of a dataclass are included, as they are when this is called. `inside` has the ids of what it is part of.
    """
    if isinstance(function, functools.partial):
        given = {str(i): value for i, value in enumerate(function.args)} | function.keywords
        return f"{callable_identity(function.func, inside)} with {_named(given, inside) or 'nothing'}"
    function = inspect.unwrap(function)
    if inspect.ismethod(function):
        owner: Any = function.__self__
        of = _definition(owner) if inspect.isclass(owner) else _object(owner, inside)
        return f"{_function(function.__func__, inside)} of {of}"
    if inspect.isroutine(function) or inspect.isclass(function):
        return _function(function, inside)
    method = inspect.unwrap(type(function).__call__)
    # A class written in C has no method that Python could describe.
    own = f"{_function(method, inside)} of " if inspect.isfunction(method) else ""
    return own + _object(function, inside)


def _function(function: Any, inside: tuple[int, ...]) -> str:
    """The definition of a function, and the values that it was made with: defaults and closure, by name."""
    if not isinstance(function, FunctionType):
        return _definition(function)
    if id(function) in inside:
        return "itself"
    code, defaults = function.__code__, function.__defaults__ or ()
    positional = code.co_varnames[: code.co_argcount]
    made_with = dict(zip(positional[len(positional) - len(defaults) :], defaults, strict=True))
    made_with |= function.__kwdefaults__ or {}
    # A variable may be assigned later, or never.
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    made_with |= {name: cell.cell_contents for name, cell in cells if cell != CellType()}
    values = _named(made_with, (*inside, id(function)))
    return _definition(function) + (f" made with {values}" if values else "")


def _object(value: Any, inside: tuple[int, ...]) -> str:
    """The class of an object, and the fields of a dataclass that are part of its `==`.

    Of a `PPOConfig` the class alone: its options are compared, or are free to change, by themselves.
    """
    name = _definition(type(value))
    if not dataclasses.is_dataclass(value) or isinstance(value, PPOConfig):
        return name
    # A field that the constructor does not set may be missing.
    names = [field.name for field in dataclasses.fields(value) if field.compare and hasattr(value, field.name)]
    fields = _named({field: getattr(value, field) for field in names}, (*inside, id(value)))
    return f"{name} with {fields or 'nothing'}"


def _definition(defined: Any) -> str:
    """Module, qualified name and hash of the source of a function or a class; of a lambda, whose line may hold others,
    the hash of its code.
    """
    module = sys.modules.get(defined.__module__ or "builtins")
    path = Path(getattr(module, "__file__", None) or (defined.__module__ or "builtins").rpartition(".")[2])
    place = path.parent.name if path.stem in ("__init__", "__main__") else path.stem
    name = f"{place}.{defined.__qualname__}"
    if defined.__name__ == "<lambda>":
        return f"{name} (code {short_hash(_code(defined.__code__))})"
    try:
        return f"{name} (source {short_hash(textwrap.dedent(inspect.getsource(defined)))})"
    except (OSError, TypeError):
        # Built in, or typed into an interpreter.
        return name


def _code(code: CodeType) -> str:
    """What a code object does, wherever it is."""
    constants = [
        _code(c) if isinstance(c, CodeType) else repr(sorted(map(repr, c)) if isinstance(c, frozenset) else c)
        for c in code.co_consts
    ]
    return repr((code.co_code, code.co_names, constants))


def _named(values: Mapping[str, Any], inside: tuple[int, ...]) -> str:
    text = ", ".join(f"{name}={_value(value, inside)}" for name, value in sorted(values.items()))
    return text if len(text) <= _MAX_READABLE else short_hash(text)


def _value(value: Any, inside: tuple[int, ...]) -> str:
    """A value that a function was given: that of plain data, arrays, models and dataclasses, the class of anything
    else. Text is hashed, because it may be long, or secret; so is what is longer than a line of it.
    """
    if value is None or isinstance(value, bool | int | float | complex | Enum):
        return repr(value)
    if isinstance(value, str | bytes | Path):
        return short_hash(repr(value))
    if isinstance(value, np.ndarray | np.generic):
        return short_hash(pickle.dumps(value, protocol=4))
    if isinstance(value, Tensor) and value.layout is torch.strided:
        return tensors_fingerprint({"": value})
    if isinstance(value, nn.Module):
        return f"{type(value).__name__} {tensors_fingerprint(model_state(value))}"
    if id(value) in inside:
        return "itself"
    within = (*inside, id(value))
    if isinstance(value, list | tuple):
        return f"[{', '.join(_value(entry, within) for entry in value)}]"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(_value(entry, within) for entry in value))}}}"
    if isinstance(value, Mapping):
        entries = sorted(f"{_value(key, within)}: {_value(entry, within)}" for key, entry in value.items())
        return f"{{{', '.join(entries)}}}"
    return callable_identity(value, inside) if callable(value) else _object(value, inside)


def short_hash(content: str | bytes) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of `content`."""
    encoded = content if isinstance(content, bytes) else content.encode(errors="backslashreplace")
    return hashlib.sha256(encoded).hexdigest()[:16]
