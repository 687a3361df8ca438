"""Loading what others have saved: the error that names a damaged file, and code that comes with a model.

The errors of libraries often name no file. So after a load has failed, the files of the folder are tried one by one; of
a model on the hub, only the library's text is reported.

Code that comes with a model runs only where `trust_remote_code` allows it; otherwise it is an error. transformers would
ask on the terminal, which would stop a run.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors import SafetensorError, safe_open
from transformers import dynamic_module_utils
from transformers.utils import TRANSFORMERS_DYNAMIC_MODULE_NAME


@contextmanager
def loading(problem: str, name: str, remedy: str) -> Iterator[None]:
    """A block in which a library loads `name`, a folder or hub id, and nothing else happens.

    Args:
        problem: how the error starts, such as "no model can be loaded from 'x'".
        remedy: what the user can check, if no file is damaged.

    Raises:
        ValueError: for any error of the library, chained to it; names the damaged file if there is one. Errors of
            missing packages and memory are passed on.
    """
    try:
        yield
    except (ImportError, MemoryError, torch.OutOfMemoryError):
        raise  # the machine or its packages are at fault, no file
    except Exception as error:
        if damage := damaged_file(Path(name)):
            raise ValueError(f"{problem}: {damage}; copy or save that folder again") from error
        text = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        raise ValueError(f"{problem} ({text}); {remedy}") from error


def damaged_file(folder: Path) -> str | None:
    """The first .json or .safetensors file of `folder` that cannot be read as such, and why; None if all can."""
    for path in sorted(folder.glob("*.json")) + sorted(folder.glob("*.safetensors")):
        try:
            if path.suffix == ".json":
                json.loads(path.read_text(encoding="utf-8"))
            else:
                with safe_open(path, "pt"):
                    pass
        except (OSError, ValueError, RecursionError, SafetensorError) as error:
            return f"{path} is damaged ({error})"
    return None


@contextmanager
def remote_code(name: str, *, trust: bool) -> Iterator[None]:
    """A block that loads or builds the model, tokenizer or configuration `name`, and runs its code if `trust`.

    It also answers for the models inside a model: many classes of transformers call `AutoModel.from_config` without
    passing on `trust_remote_code`.

    Raises:
        ValueError: if code would have to run without `trust`; names the model and the option.
    """
    # The module asks the user by `input`; a global of that name in it replaces the builtin there alone.
    # Remove it once transformers passes `trust_remote_code` on to the models inside a model.
    answered = mock.patch.object(dynamic_module_utils, "input", lambda question: "yes" if trust else "no", create=True)
    try:
        with answered:
            yield
    except ValueError as error:
        if trust or "trust_remote_code=True" not in str(error):
            raise
        raise ValueError(f"{name!r} comes with code of its own; read it, and set trust_remote_code: true") from error


def has_remote_code(model: Any) -> bool:
    """Whether the class of `model` is code that came with it."""
    return type(model).__module__.partition(".")[0] == TRANSFORMERS_DYNAMIC_MODULE_NAME
