"""Errors for saved models, adapters and tokenizers that a library cannot load; they name the file that is damaged.

The libraries raise whatever their parsers raise, often without a file name. A file is opened here only after a load has
failed. Of a model on the hub, whose files lie in a cache, only the library's own text is reported.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

_OBJECTS = ("config.json", "adapter_config.json", "critic_head.json", "tokenizer.json", "tokenizer_config.json")
"""Files whose JSON is an object; other ones beside a model may hold anything."""
_NOT_OF_FILES = (ImportError, MemoryError, torch.OutOfMemoryError)
"""Errors of the machine or its packages, which say nothing about the files."""


@contextmanager
def loading(problem: str, name: str, remedy: str) -> Iterator[None]:
    """A block in which a library loads `name`, a folder or hub id, and nothing else happens.

    Args:
        problem: what does not work, for the error, such as "no model can be loaded from 'x'".
        name: the folder or hub id.
        remedy: what the user can check, if no file is damaged.

    Raises:
        ValueError: for any error of the library, chained to it; names the damaged file if there is one. Missing
            packages and memory keep their errors.
    """
    try:
        yield
    except _NOT_OF_FILES:
        raise
    except Exception as error:
        if damage := damaged_file(Path(name)):
            raise ValueError(f"{problem}: {damage}; copy or save that folder again") from error
        text = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        raise ValueError(f"{problem} ({text}); {remedy}") from error


def damaged_file(folder: Path) -> str | None:
    """The first file of `folder` that is no JSON or safetensors although its name says so, and why; None if all are."""
    for path in sorted(folder.glob("*.json")) + sorted(folder.glob("*.safetensors")):
        if path.is_file() and (reason := _json_damage(path) if path.suffix == ".json" else _tensor_damage(path)):
            return f"{path} is damaged ({reason})"
    return None


def _json_damage(path: Path) -> str | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        return "its JSON is nested too deeply"
    except ValueError as error:
        return f"it is not JSON: {error}"
    if path.name in _OBJECTS and not isinstance(content, dict):
        return f"it holds a {type(content).__name__} instead of an object"
    return None


def _tensor_damage(path: Path) -> str | None:
    try:
        with safe_open(path, "pt"):
            return None
    except SafetensorError as error:
        return f"it is not a whole safetensors file: {error}"
