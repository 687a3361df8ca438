"""A program that runs a server, and ends it once its own parent process has ended in any way; then it removes that
process's folders. It uses the standard library alone.

    python watchdog.py PARENT FOLDERS COMMAND

`FOLDERS`, which may be links, and `COMMAND` are JSON lists; an empty command starts no server. The program leads the
session of the server.
"""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

_POLL_SECONDS = 0.2
# That a server may take to end after SIGTERM; while it starts, its engine ignores that.
_END_SECONDS = 5.0


def watch(parent: int, folders: list[str], command: list[str]) -> int:
    """Runs `command`, and ends the whole session when that or `parent` has ended; in the second case, also removes
    `folders`. Returns the exit status of the command.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A link leads to something else once a later run has made it.
    targets = {folder: os.path.realpath(folder) for folder in folders}
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL) if command else None
    try:
        while os.getppid() == parent and (server is None or server.poll() is None):
            time.sleep(_POLL_SECONDS)
    finally:
        end_session(os.getpid())
        if os.getppid() != parent:
            for folder, target in targets.items():
                if os.path.realpath(folder) == target:
                    # It removes a link or a folder.
                    subprocess.run(["rm", "-rf", folder])
    return 0 if server is None else server.wait()


def end_session(leader: int) -> None:
    """Ends the other processes of a session, by SIGTERM first: they free their shared memory."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in _others(leader):
            with suppress(OSError):
                os.kill(process, number)
                # It may be stopped, and would not obey.
                os.kill(process, signal.SIGCONT)
        until = time.monotonic() + _END_SECONDS
        while _others(leader) and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)


def _others(leader: int) -> list[int]:
    """The other live processes of the session, except Python's tracker of shared memory, which ends after them."""
    processes = []
    for folder in Path("/proc").glob("[0-9]*"):
        # It may have ended meanwhile.
        with suppress(OSError, ValueError):
            # After the name, which may hold blanks: state, parent, group, session.
            state, _, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            # Z is a zombie.
            is_other = int(session) == leader and int(folder.name) != leader and state != "Z"
            if is_other and b"resource_tracker" not in (folder / "cmdline").read_bytes():
                processes.append(int(folder.name))
    return processes


if __name__ == "__main__":
    sys.exit(watch(int(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])))
