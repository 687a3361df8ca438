"""Fingerprints of models and functions, by which a resumed run recognises what it started from.

They are made to be compared, and to be cheap rather than complete. Not seen are, of a model, a change that is confined
to weights between the sampled ones (a few rows of a large matrix); of a function, the functions and files that it uses,
what its decorators add, and the state of the object that it belongs to, unless that is a dataclass.
"""

import ast
import dataclasses
import functools
import hashlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from types import CellType, FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from alpaca_ppo.config.ppo_config import PPOConfig

SAMPLED_WEIGHTS = 16384
"""About so many weights of a tensor are hashed; tensors of less than twice that size are hashed in full."""
_MAX_READABLE = 200
"""Longer texts of containers are replaced by their hash."""


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


def model_fingerprint(model: nn.Module) -> str:
    """The `tensors_fingerprint` of a whole model, which must not be sharded yet."""
    return tensors_fingerprint(model_state(model))


def callable_identity(function: Callable[..., Any]) -> str:
    """A name for `function`, with a hash of its source if Python has it: of the definition of a function, a method
    with its class, or an object with its class.

    Only the last part of the module's name counts, so that the same file may be moved, started as a script, or named
    by its path. The defaults of a function, what it has in its closure, the arguments of a `functools.partial` and the
    fields of a dataclass are included, as they are when this is called.
    """
    return _callable(function, ())


def _callable(function: Callable[..., Any], inside: tuple[int, ...]) -> str:
    if isinstance(function, functools.partial):
        given = [_value(value, inside) for value in function.args]
        given += [f"{name}={_value(value, inside)}" for name, value in sorted(function.keywords.items())]
        return f"{_callable(function.func, inside)} with {_shortened(', '.join(given)) or 'nothing'}"
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
    made_with: dict[str, Any] = {}
    if isinstance(function, FunctionType):
        code, defaults = function.__code__, function.__defaults__ or ()
        positional = code.co_varnames[: code.co_argcount]
        made_with |= zip(positional[len(positional) - len(defaults) :], defaults, strict=True)
        made_with |= function.__kwdefaults__ or {}
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            # The variable may be assigned later, or never.
            if not _is_empty(cell):
                made_with[name] = cell.cell_contents
    if not made_with:
        return _definition(function)
    if id(function) in inside:
        return "itself"
    values = [f"{name}={_value(value, (*inside, id(function)))}" for name, value in sorted(made_with.items())]
    return f"{_definition(function)} made with {_shortened(', '.join(values))}"


def _is_empty(cell: CellType) -> bool:
    return cell == CellType()


def _object(value: Any, inside: tuple[int, ...]) -> str:
    """The class of an object, and the fields of a dataclass that are part of its `==`.

    Of a `PPOConfig` the class alone: its options are compared, or are free to change, by themselves.
    """
    name = _definition(type(value))
    if not dataclasses.is_dataclass(value) or isinstance(value, PPOConfig):
        return name
    # A field that the constructor does not set may be missing.
    names = [field.name for field in dataclasses.fields(value) if field.compare and hasattr(value, field.name)]
    fields = [f"{field}={_value(getattr(value, field), (*inside, id(value)))}" for field in names]
    return f"{name} with {_shortened(', '.join(fields)) or 'nothing'}"


def _definition(defined: Any) -> str:
    """Module, qualified name and hash of the source of a function or a class."""
    name = f"{_module_name(defined.__module__ or 'builtins')}.{defined.__qualname__}"
    try:
        source = _lambda_source(defined) if defined.__name__ == "<lambda>" else inspect.getsource(defined)
    except (OSError, TypeError):
        # Built in, or typed into an interpreter.
        return name
    return f"{name} (source {_hash(textwrap.dedent(source))})"


def _lambda_source(function: FunctionType) -> str:
    """The text of a lambda alone: its line may hold several, and what else is there does not matter.

    Where it cannot be told apart (`python -X no_debug_ranges`, a notebook cell with magics), its lines.
    """
    text, code = "".join(inspect.findsource(function)[0]), function.__code__
    # Of each instruction: first and last line, first and last column. An instruction that sets up the call is nowhere.
    places = [place for place in code.co_positions() if None not in place and place[0::2] != place[1::2]]
    spans = [((first, start), (last, end)) for first, last, start, end in places]
    try:
        nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Lambda)]
    except SyntaxError:
        nodes = []
    around = [
        node
        for node in nodes
        if spans
        and node.lineno == code.co_firstlineno
        and (node.body.lineno, node.body.col_offset) <= min(start for start, _ in spans)
        and max(end for _, end in spans) <= (node.body.end_lineno, node.body.end_col_offset)
    ]
    # Of lambdas inside each other, the innermost that holds all instructions.
    segments = [ast.get_source_segment(text, node) or "" for node in around]
    return min(segments, key=len, default="") or inspect.getsource(function)


def _module_name(name: str) -> str:
    module = sys.modules.get(name)
    file = vars(module).get("__file__") if module else None
    if not file:
        return name.rpartition(".")[2]
    path = Path(file)
    return path.parent.name if path.stem in ("__init__", "__main__") else path.stem


def _value(value: Any, inside: tuple[int, ...]) -> str:
    """A value that a function was given: that of plain data, arrays, models and dataclasses, the class of anything
    else. `inside` has the ids of what it is part of.

    Text is hashed, because it may be long, or secret; so is what is longer than a line of it.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Enum):
        return f"{_definition(type(value))} {value.name}"
    if value is None or isinstance(value, bool | int | float | complex):
        return repr(value)
    if isinstance(value, str | bytes | Path):
        return _hash(repr(value))
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return f"{value.dtype} {value.shape} {hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()[:16]}"
    if isinstance(value, Tensor) and value.layout is torch.strided:
        return tensors_fingerprint({"": value})
    if isinstance(value, nn.Module):
        return f"{type(value).__name__} {model_fingerprint(value)}"
    if id(value) in inside:
        return "itself"
    within = (*inside, id(value))
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return f"[{_shortened(', '.join(_value(entry, within) for entry in value))}]"
    if isinstance(value, set | frozenset):
        return f"{{{_shortened(', '.join(sorted(_value(entry, within) for entry in value)))}}}"
    if isinstance(value, Mapping):
        entries = sorted(f"{_value(key, within)}: {_value(entry, within)}" for key, entry in value.items())
        return f"{{{_shortened(', '.join(entries))}}}"
    return _callable(value, inside) if callable(value) else _object(value, inside)


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_READABLE else _hash(text)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()[:16]
