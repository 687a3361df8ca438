"""Hides lines that libraries print and users can do nothing about, and prints those of this package.

A hidden line is named by its text and its module; all other warnings are shown.
"""

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


def ignore_known_lines() -> None:
    """Hides known warnings of libraries, and the line in which DeepSpeed names its accelerator. transformers imports
    DeepSpeed to save any model.
    """
    # transformers 5.23 has renamed what PEFT and this package call; 5.17 does not have the new name yet.
    renamed = "`(is_gradient_checkpointing|gradient_checkpointing_enable)` is deprecated"
    warnings.filterwarnings("ignore", renamed, FutureWarning, r"transformers\.modeling_utils\Z")
    # The filter stays when DeepSpeed sets up this logger on import.
    logging.getLogger("DeepSpeed").addFilter(lambda record: record.filename != "real_accelerator.py")


def say(text: str) -> None:
    """Prints `text` on the main process, to stderr."""
    if os.environ.get("RANK", "0") == "0":
        print(text, file=sys.stderr, flush=True)


def say_loading() -> None:
    """Prints that libraries are being loaded, which takes seconds, unless they are loaded already."""
    if "torch" not in sys.modules:
        say("loading the libraries ...")


def has_screen() -> bool:
    """Whether there is a terminal or a notebook for progress bars; in a file one would leave many lines."""
    return sys.stderr.isatty() or "ipykernel" in sys.modules


@contextmanager
def transformers_bars(*, shown: bool) -> Iterator[None]:
    """A block in which transformers draws progress bars of loading and saving models only if `shown`. Bars that were
    turned off before stay off.
    """
    # Imported only now, because it takes seconds.
    from transformers.utils import logging as transformers_logging

    before = transformers_logging.is_progress_bar_enabled()
    if not shown:
        transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if before:
            transformers_logging.enable_progress_bar()
