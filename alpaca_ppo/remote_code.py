"""Code that comes with a model: run where `trust_remote_code` allows it, refused with an error otherwise.

transformers asks on the terminal where nobody has decided, which would stop a run. Here it never asks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import dynamic_module_utils
from transformers.utils import TRANSFORMERS_DYNAMIC_MODULE_NAME


@contextmanager
def remote_code(name: str, *, trust: bool) -> Iterator[None]:
    """A block that loads or builds the model, tokenizer or configuration `name`, and runs its code if `trust`.

    It covers what the model loads itself: many classes of transformers call `AutoModel.from_config` without passing on
    `trust_remote_code`.

    Raises:
        ValueError: if code would have to run without `trust`; names the model and the option.
    """
    # The module has no name `input` of its own, so this one takes the place of the builtin in its question alone.
    # Remove it once transformers passes `trust_remote_code` on to the models inside a model.
    names = vars(dynamic_module_utils)
    outer = names.get("input")
    names["input"] = lambda question: "yes" if trust else "no"
    try:
        yield
    except ValueError as error:
        if trust or "trust_remote_code=True" not in str(error):
            raise
        raise ValueError(
            f"{name!r} comes with code of its own, and trust_remote_code is False; read that code, and set "
            "trust_remote_code: true to run it"
        ) from error
    finally:
        if outer is None:
            del names["input"]
        else:
            names["input"] = outer


def has_remote_code(model: Any) -> bool:
    """Whether the class of `model` is code that came with it."""
    return type(model).__module__.partition(".")[0] == TRANSFORMERS_DYNAMIC_MODULE_NAME
