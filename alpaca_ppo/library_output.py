"""What libraries print that a user of this package can do nothing about, and how it is left out.

Each line is named by its text and the module that prints it; every other warning is shown, those of the user's own code
among them.
"""

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


def ignore_known_lines() -> None:
    """Leaves out the known warnings of libraries, and the line in which DeepSpeed names the accelerator that it found:
    transformers imports it to save any model.
    """
    # transformers 5.23 has renamed what PEFT and this package call; 5.17 does not have the new name yet.
    renamed = "`(is_gradient_checkpointing|gradient_checkpointing_enable)` is deprecated"
    warnings.filterwarnings("ignore", renamed, FutureWarning, r"transformers\.modeling_utils\Z")
    # A filter stays on the logger that DeepSpeed sets up when it is imported.
    logging.getLogger("DeepSpeed").addFilter(lambda record: record.filename != "real_accelerator.py")


def say(text: str) -> None:
    """Prints `text` on the main process, beside what a command returns."""
    if os.environ.get("RANK", "0") == "0":
        print(text, file=sys.stderr, flush=True)


def say_loading() -> None:
    """Says that libraries are being loaded, which takes seconds, unless they are there already."""
    if "torch" not in sys.modules:
        say("loading the libraries ...")


def has_screen() -> bool:
    """Whether a progress bar has a terminal or a notebook to be drawn on; in a file it would leave many lines."""
    return sys.stderr.isatty() or "ipykernel" in sys.modules


@contextmanager
def transformers_bars(*, shown: bool) -> Iterator[None]:
    """A block in which transformers draws the progress bars of models that it loads or saves if `shown`, and if nobody
    has turned them off.
    """
    # It takes seconds, and whoever loads a model has imported it.
    from transformers.utils import logging as transformers_logging

    before = transformers_logging.is_progress_bar_enabled()
    if not shown:
        transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if before:
            transformers_logging.enable_progress_bar()
