"""Tells the launcher why a process failed, so that its report, the last thing on the screen, shows the cause.

torchrun and `accelerate launch` end the other processes by themselves.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.elastic.multiprocessing.errors import ErrorHandler


@contextmanager
def record_error() -> Iterator[None]:
    """Leaves an exception's traceback where the launcher reads it; without a launcher it does nothing."""
    try:
        yield
    except Exception as error:
        # A rank whose peer has gone fails in a collective: true, but not the cause.
        if not is_consequence(error):
            ErrorHandler().record_exception(error)
        raise


def is_consequence(error: Exception) -> bool:
    """Whether `error` says that another process has gone, or has not come."""
    text = str(error)
    return isinstance(error, RuntimeError) and ("gloo/" in text or "NCCL" in text or "ProcessGroup" in text)
