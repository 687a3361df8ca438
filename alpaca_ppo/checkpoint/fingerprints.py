"""Fingerprints of models and functions, by which a resumed run recognises what it started from.

They are made to be compared, and to be cheap rather than complete. Not seen are, of a model, a change that is confined
to weights between the sampled ones (a few rows of a large matrix); of a function, the functions and files that it uses,
the values in its closure, and the state of the object that it belongs to.
"""

import functools
import hashlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

SAMPLED_WEIGHTS = 16384
"""About so many weights of a tensor are hashed; tensors of less than twice that size are hashed in full."""


def tensors_fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """A hash of names, dtypes, shapes and a sample of the values of `tensors`, equal on every device.

    The sample is strided over the whole tensor: for a model of 7 billion weights, 10 MB are read in about a second.
    """
    digest = hashlib.sha256()
    for name in sorted(tensors):
        flat = tensors[name].detach().reshape(-1)
        digest.update(f"{name} {flat.dtype} {tuple(tensors[name].shape)}\n".encode())
        # An even stride would stay in a few columns of a matrix whose width is a power of two.
        sample = flat[:: flat.numel() // SAMPLED_WEIGHTS | 1].contiguous().cpu()
        digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of `model` that saving it would write; buffers that follow from the configuration are left out."""
    return {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}


def model_fingerprint(model: nn.Module) -> str:
    """The `tensors_fingerprint` of a whole model, which must not be sharded yet."""
    return tensors_fingerprint(model_state(model))


def callable_identity(function: Callable[..., Any]) -> str:
    """A name for `function`, with a hash of its source if Python has it: of the definition of a function, a method
    with its class, or an object with its class.

    Only the last part of the module's name counts, so that the same file may be moved, started as a script, or named
    by its path. A `functools.partial` includes its arguments.
    """
    if isinstance(function, functools.partial):
        given = [_value(value) for value in function.args]
        given += [f"{name}={_value(value)}" for name, value in sorted(function.keywords.items())]
        return f"{callable_identity(function.func)} with {', '.join(given) or 'nothing'}"
    function = inspect.unwrap(function)
    if inspect.ismethod(function):
        owner: Any = function.__self__
        return f"{_definition(function.__func__)} of {_definition(owner if inspect.isclass(owner) else type(owner))}"
    if inspect.isroutine(function) or inspect.isclass(function):
        return _definition(function)
    method = inspect.unwrap(type(function).__call__)
    # A class written in C has no method that Python could describe.
    own = f"{_definition(method)} of " if inspect.isfunction(method) else ""
    return own + _definition(type(function))


def _definition(defined: Any) -> str:
    """Module, qualified name and hash of the source of a function or a class."""
    name = f"{_module_name(defined.__module__ or 'builtins')}.{defined.__qualname__}"
    try:
        source = inspect.getsource(defined)
    except (OSError, TypeError):
        # Built in, or typed into an interpreter.
        return name
    return f"{name} (source {_hash(textwrap.dedent(source))})"


def _module_name(name: str) -> str:
    module = sys.modules.get(name)
    file = vars(module).get("__file__") if module else None
    if not file:
        return name.rpartition(".")[2]
    path = Path(file)
    return path.parent.name if path.stem in ("__init__", "__main__") else path.stem


def _value(value: Any) -> str:
    """An argument of a partial: the value of plain data, arrays and models, the class of anything else.

    Text is hashed, because it may be long, or secret.
    """
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    if isinstance(value, str | bytes | Path):
        return _hash(repr(value))
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(map(_value, value)))}}}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_value(key)}: {_value(entry)}' for key, entry in value.items())}}}"
    if isinstance(value, Tensor):
        return tensors_fingerprint({"": value})
    if isinstance(value, nn.Module):
        return f"{type(value).__name__} {model_fingerprint(value)}"
    return callable_identity(value) if callable(value) else _definition(type(value))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()[:16]
