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


def callable_identity(function: Callable[..., Any]) -> str:
    """A name for `function`, with a hash of its source if Python has it: of the definition of a function, a method
    with its class, or an object with its class.

    Only the last part of the module's name counts, so that the same file may be moved, started as a script, or named
    by its path. The defaults of a function, what it has in its closure, the arguments of a `functools.partial` and the
    fields of a dataclass are included, as they are when this is called.
    """
    return _identity(function, ())


def _identity(value: Any, inside: tuple[int, ...]) -> str:
    """The identity of a callable or of a value that one was given; `inside` has the ids of what it is part of.

    Numbers are readable. Text is hashed, because it may be long, or secret. What is no plain data, array, model or
    dataclass counts by its class alone.
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
    within = (*inside, id(value))
    if isinstance(value, list | tuple):
        return f"[{', '.join(_identity(entry, within) for entry in value)}]"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(_identity(entry, within) for entry in value))}}}"
    if isinstance(value, Mapping):
        entries = sorted(f"{_identity(key, within)}: {_identity(entry, within)}" for key, entry in value.items())
        return f"{{{', '.join(entries)}}}"
    if isinstance(value, functools.partial):
        given = {str(i): argument for i, argument in enumerate(value.args)} | value.keywords
        return f"{_identity(value.func, within)} with {_named(given, within)}"
    value = inspect.unwrap(value)
    if inspect.ismethod(value):
        return f"{_identity(value.__func__, within)} of {_identity(value.__self__, within)}"
    if isinstance(value, FunctionType):
        parameters = inspect.signature(value).parameters.values()
        made_with = {each.name: each.default for each in parameters if each.default is not each.empty}
        # A variable may be assigned later, or never.
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        made_with |= {name: cell.cell_contents for name, cell in cells if cell != CellType()}
        return _definition(value) + (f" made with {_named(made_with, within)}" if made_with else "")
    if inspect.isroutine(value) or inspect.isclass(value):
        return _definition(value)
    name = _definition(type(value))
    if isinstance(value, nn.Module):
        return f"{name} {tensors_fingerprint(model_state(value))}"
    # A class written in C has no method that Python could describe.
    if inspect.isfunction(method := inspect.unwrap(type(value).__call__)):
        name = f"{_identity(method, within)} of {name}"
    # The options of a `PPOConfig` are compared, or are free to change, by themselves.
    if not dataclasses.is_dataclass(value) or isinstance(value, PPOConfig):
        return name
    # A field that the constructor does not set may be missing.
    names = [field.name for field in dataclasses.fields(value) if field.compare and hasattr(value, field.name)]
    return f"{name} with {_named({field: getattr(value, field) for field in names}, within)}"


def _named(values: Mapping[str, Any], inside: tuple[int, ...]) -> str:
    text = ", ".join(f"{name}={_identity(value, inside)}" for name, value in sorted(values.items())) or "nothing"
    return text if len(text) <= _MAX_READABLE else short_hash(text)


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


def short_hash(content: str | bytes) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of `content`."""
    encoded = content if isinstance(content, bytes) else content.encode(errors="backslashreplace")
    return hashlib.sha256(encoded).hexdigest()[:16]
