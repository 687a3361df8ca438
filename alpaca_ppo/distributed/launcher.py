"""The launcher that started this process: the rank it assigned, and the end of the process when it dies.

When torchrun, `accelerate launch` or deepspeed are killed (SIGKILL, or out of memory), their ranks would train on
unnoticed, so each rank watches its launcher from the import of `alpaca_ppo.trainer` on. Ranks of `notebook_launcher`
end with the notebook.
"""

import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
from accelerate.utils import get_int_from_env

# Where Accelerate looks for the rank.
_RANK = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")
# By torchrun (and `accelerate launch` of several processes), by `accelerate launch` of one process, and by deepspeed.
_SET_BY_LAUNCHERS = ("TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION", "CROSS_SIZE")
_MODULES = """
torch.distributed.run torch.distributed.launch accelerate.commands.launch accelerate.commands.accelerate_cli
deepspeed.launcher.launch alpaca_ppo.cli
""".split()
_SCRIPTS = ("torchrun", "accelerate", "accelerate-launch", "alpaca-ppo")
_POLL_SECONDS = 1.0
# Ctrl-C and Slurm signal the launcher and its ranks; a rank may get the signal after its launcher has ended.
_SIGNAL_SECONDS = 2.0
# For a rank to save its state; a run that is started meanwhile waits for it (`directory.WAIT_SECONDS`).
_SAVE_SECONDS = 10.0

_watched: int | None = None
_stopping = False


def launched_rank() -> int:
    """The rank of this process before there is an Accelerator; 0 without a launcher."""
    return get_int_from_env(_RANK, 0)


def watch_launcher() -> None:
    """Ends this process soon after its launcher's death, if a launcher started it: first by SIGTERM, on which a trainer
    saves a checkpoint. May be called repeatedly.

    The parent must run a launcher's command: its variables may be exported in a shell, whose runs outlive it.
    """
    global _watched
    if _watched is None and any(name in os.environ for name in _SET_BY_LAUNCHERS) and launcher_command() is not None:
        _watched = os.getppid()
        threading.Thread(target=_end_with, args=(_watched,), daemon=True, name="launcher watch").start()


def launcher_command() -> tuple[str, ...] | None:
    """The command line of the launcher that started this process; None if no launcher did."""
    try:
        words = psutil.Process(os.getppid()).cmdline()
    except psutil.Error:
        # The parent has just ended, or belongs to another user.
        return None
    files = tuple(f"{module.replace('.', '/')}.py" for module in _MODULES)
    started = any(word in _MODULES or word.endswith(files) or Path(word).name in _SCRIPTS for word in words)
    return tuple(words) if started else None


def end_without_launcher() -> None:
    """Lets this process, which was asked to stop, end by itself even if its launcher dies first."""
    global _stopping
    _stopping = True


def _end_with(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(_POLL_SECONDS)
    time.sleep(_SIGNAL_SECONDS)
    if _stopping:
        return
    # The launcher may have been the reader of stderr.
    with suppress(OSError):
        cause = f"process {os.getpid()}: the launcher (process {launcher}) has died, so this rank ends too"
        advice = "everything saved is intact: continue with --resume_from_checkpoint"
        os.write(2, f"\n{cause}; {advice}\n".encode())
    # Interrupts a blocking call of the main thread. Without a handler it ends the process.
    main = threading.main_thread().ident
    assert main is not None, "the main thread has started"
    signal.pthread_kill(main, signal.SIGTERM)
    time.sleep(_SAVE_SECONDS)
    # Not sys.exit, which waits for collectives that other ranks will never join.
    os._exit(1)
