"""How a command ends after a mistake of its user or Ctrl-C: a message on stderr and the exit status 2 or 130, without
a traceback.
"""

import os
import signal
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from alpaca_ppo.library_output import ignore_known_lines

TRACEBACK = "--traceback"
_SHOW = "ALPACA_PPO_TRACEBACK"
MISTAKE = 2
"""The exit status; argparse's too."""
_PACKAGE = Path(__file__).parents[1]
_LIBRARIES = [Path(path) for path in {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}]
_OTHER_RANKS_WAIT = 20.0
"""Seconds. Most mistakes are found by all ranks at once. The launcher ends the others as soon as one has ended, so they
leave it to rank 0 to report the mistake, and report it only if they are still there after this time."""


def exit_status(main: Callable[[Sequence[str]], int], argv: Sequence[str]) -> int:
    """Calls `main` with `argv` and returns its exit status, or 2 for a ValueError or OSError, whose message it prints,
    or 130 for Ctrl-C where no run was there to be saved.

    With `--traceback` in `argv`, every exception is passed on. So is one from code of the user's own, such as a reward
    function, because only the traceback says where that is.
    """
    shown = os.environ.get(_SHOW)
    if TRACEBACK in argv:
        # For the processes that this one starts.
        os.environ[_SHOW] = shown = "1"
    ignore_known_lines()
    try:
        return main([word for word in argv if word != TRACEBACK])
    except (ValueError, OSError) as error:
        if shown or runs_own_code(error, error.__traceback__ and error.__traceback__.tb_next):
            raise
        rank = os.environ.get("RANK", "0")
        if rank != "0":
            time.sleep(_OTHER_RANKS_WAIT)
        print(f"error{f' on rank {rank}' if rank != '0' else ''}: {error}", file=sys.stderr, flush=True)
        return MISTAKE
    except KeyboardInterrupt:
        if shown:
            raise
        # Of several processes the launcher's, or rank 0.
        if os.environ.get("RANK", "0") == "0":
            print("interrupted", file=sys.stderr, flush=True)
        return 128 + signal.SIGINT
    finally:
        if TRACEBACK in argv:
            del os.environ[_SHOW]


def runs_own_code(error: BaseException, frames: TracebackType | None) -> bool:
    """Whether `error`, or what it was raised from, passed through a file of the user's, called by this package."""
    files = [Path(frame.filename) for frame in traceback.extract_tb(frames)]
    called = next((i for i, file in enumerate(files) if file.is_relative_to(_PACKAGE)), len(files))
    libraries = (_PACKAGE, *_LIBRARIES)
    own = [f for f in files[called:] if f.is_file() and not any(f.is_relative_to(folder) for folder in libraries)]
    cause = error.__cause__
    return bool(own) or (cause is not None and runs_own_code(cause, cause.__traceback__))
