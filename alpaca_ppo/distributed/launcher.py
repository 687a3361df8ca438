"""The launcher that started this process: the rank it gave, and the end of the process when the launcher dies.

torchrun, `accelerate launch` and deepspeed end their ranks when a rank fails or when they are told to end. They cannot
when they are killed themselves (SIGKILL, or the kernel when memory runs out): their ranks would then train on, unseen.
So each rank watches its launcher. The ranks of `notebook_launcher` are children of the notebook and end with it anyway.
"""

import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

_RANK = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")
"""Where Accelerate looks for the rank."""
_SET_BY_LAUNCHERS = ("TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION", "CROSS_SIZE")
"""Set by torchrun (and `accelerate launch` of several processes), by `accelerate launch` of one, and by deepspeed."""
_MODULES = (
    "torch.distributed.run",
    "torch.distributed.launch",
    "accelerate.commands.launch",
    "accelerate.commands.accelerate_cli",
    "deepspeed.launcher.launch",
)
_SCRIPTS = ("torchrun", "accelerate", "accelerate-launch")
_POLL_SECONDS = 1.0
_SIGNAL_SECONDS = 2.0
"""Ctrl-C and Slurm signal the launcher and its ranks together; a rank may get the signal after its launcher ended."""

_watched: int | None = None
_stopping = False


def launched_rank() -> int:
    """The rank that the launcher gave this process, before there is an Accelerator; 0 without a launcher."""
    return next((int(os.environ[name]) for name in _RANK if name in os.environ), 0)


def watch_launcher() -> None:
    """Ends this process within seconds of its launcher's death, if a launcher started it; may be called repeatedly.

    The environment variables of a launcher are not enough, because a user may have exported them in a shell: the
    parent must also run a launcher's command. A run that a shell started lives on when the shell ends.
    """
    global _watched
    parent = os.getppid()
    if _watched is None and any(name in os.environ for name in _SET_BY_LAUNCHERS) and _is_launcher(_command(parent)):
        _watched = parent
        threading.Thread(target=_end_with, args=(parent,), daemon=True, name="launcher watch").start()


def end_without_launcher() -> None:
    """Notes that this process was asked to stop: it saves its state and ends by itself, even without its launcher.

    A signal handler may call it.
    """
    global _stopping
    _stopping = True


def _command(pid: int) -> list[str]:
    try:
        return psutil.Process(pid).cmdline()
    except psutil.Error:
        # It has just ended, or belongs to another user: no launcher of ours.
        return []


def _is_launcher(command: Sequence[str]) -> bool:
    """Whether `command` is `python -m <launcher> ...` or `python .../torchrun ...`."""
    arguments = list(command[1:])
    for i, word in enumerate(arguments):
        if word == "-m":
            return not set(arguments[i + 1 : i + 2]).isdisjoint(_MODULES)
        if word == "-c":
            return False
        if not word.startswith("-"):
            return Path(word).name in _SCRIPTS or any(word.endswith(f"{m.replace('.', '/')}.py") for m in _MODULES)
    return False


def _end_with(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(_POLL_SECONDS)
    time.sleep(_SIGNAL_SECONDS)
    if _stopping:
        return
    # The launcher may have read what this process writes.
    with suppress(OSError):
        message = (
            f"\nprocess {os.getpid()}: the launcher (process {launcher}) has died, so this rank ends too; "
            "everything saved is intact: continue with resume_from_checkpoint: true\n"
        )
        os.write(2, message.encode())
    # Not sys.exit, which waits for collectives that other ranks will never join.
    os._exit(1)
