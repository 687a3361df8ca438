"""Python processes that need not import torch first, which is most of the time of a test that starts processes.

`warm_python()` is an executable to start in place of `sys.executable`. Each process is forked from a server that has
imported the package and its libraries and has done nothing else. The command line, environment, working directory, open
streams and network are those of the caller; signals and exit codes pass both ways. Launchers start their workers with
it too.

A fork cannot show that the imports succeed in a fresh interpreter, nor what libraries read from the environment while
they are imported, and all processes share one hash seed: some tests of each kind must start `sys.executable`.
"""

import atexit
import ctypes
import functools
import gc
import importlib
import marshal
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import types
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PRELOADED = (
    "accelerate.commands.launch",
    "torch.distributed.run",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    # What DeepSpeed imports in every run.
    "setuptools",
    "deepspeed.module_inject.auto_ep_layer",
    "transformers.models.llama.modeling_llama",
    "tests.tools.torture",
    "tests.integration.run_tiny",
)
SERVER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    # Arrow's allocator would start a thread, and a fork takes along only the one that calls it.
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    # DeepSpeed chooses its accelerator when it is imported.
    "CUDA_VISIBLE_DEVICES": "",
    "DS_ACCELERATOR": "cpu",
}
# Without `site` and user settings: it starts in some milliseconds. It passes on its signals once the child is there.
_CLIENT = """\
#!{python} -SI
import marshal, os, signal, socket, sys
passed_on = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2]
signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
request = marshal.dumps((sys.argv[1:], dict(os.environ), os.getcwd(), os.getpid()))
socket.send_fds(server, [len(request).to_bytes(8, "big")], [0, 1, 2])
server.sendall(request)
for number in passed_on:
    if signal.getsignal(number) != signal.SIG_IGN:
        signal.signal(number, lambda number, frame: server.sendall(bytes([number])))
signal.pthread_sigmask(signal.SIG_UNBLOCK, passed_on)
status = int(server.makefile().read() or 1)
if status < 0:
    if -status != signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status)
"""


@functools.cache
def warm_python() -> str:
    """Path of the executable. The first call starts the server, which ends with this process."""
    folder = Path(tempfile.mkdtemp(prefix="warm"))
    executable, address = folder / "python", folder / "socket"
    executable.write_text(_CLIENT.format(python=sys.executable, address=str(address)))
    executable.chmod(0o700)
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.tools.warm_python", str(executable), str(address)],
        cwd=ROOT,
        env={**os.environ, **SERVER_ENVIRONMENT},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    atexit.register(_end, server, folder)
    assert server.stdout is not None
    assert b"ready\n" in iter(server.stdout.readline, b""), "the server of warm processes did not start"
    return str(executable)


def _end(server: subprocess.Popen, folder: Path) -> None:
    server.communicate()
    shutil.rmtree(folder)


class Request(NamedTuple):
    """What a caller wants to run."""

    arguments: list[str]
    environment: dict[str, str]
    folder: str
    caller: int
    streams: list[int]


def receive(connection: socket.socket) -> Request:
    """Reads the request that a client sends first."""
    size, streams, _, _ = socket.recv_fds(connection, 8, 3)
    with connection.makefile("rb") as file:
        return Request(*marshal.loads(file.read(int.from_bytes(size, "big"))), streams)


def serve(address: str) -> Request | None:
    """Forks a process for each request. Returns the request in that process, and None in the server once its standard
    input has ended.
    """
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    ended, note_end = os.pipe()
    os.set_blocking(note_end, False)
    # Ctrl-C reaches the processes through their callers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(note_end)
    print("ready", flush=True)
    children: dict[socket.socket, int] = {}
    while True:
        ready, _, _ = select.select([0, listener, ended, *children], [], [])
        if 0 in ready:
            for pid in children.values():
                os.kill(pid, signal.SIGKILL)
            return None
        if ended in ready:
            os.read(ended, 1024)
            _report(children)
        for connection in [one for one in ready if one in children]:
            # A client that was killed has closed its end.
            for number in connection.recv(64) or [signal.SIGKILL]:
                os.kill(children[connection], number)
        if listener in ready:
            connection, _ = listener.accept()
            request = receive(connection)
            pid = os.fork()
            if not pid:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                # Also where the tests run in the background, whose shell lets it be ignored.
                signal.signal(signal.SIGINT, signal.default_int_handler)
                for opened in (listener, connection, *children):
                    opened.close()
                for descriptor in (ended, note_end):
                    os.close(descriptor)
                return request
            for descriptor in request.streams:
                os.close(descriptor)
            children[connection] = pid


def _report(children: dict[socket.socket, int]) -> None:
    """Tells the clients of processes that have ended how they ended."""
    for connection, child in list(children.items()):
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            # The client may have been killed.
            with suppress(BrokenPipeError):
                connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())
            connection.close()
            del children[connection]


def enter_network(caller: int) -> None:
    """Moves this process into the network namespace of the process `caller`, and into its user namespace before that:
    only a user of the namespace may enter the network.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    for kind in ("user", "net"):
        theirs = f"/proc/{caller}/ns/{kind}"
        if Path(theirs).exists() and os.stat(theirs).st_ino != os.stat(f"/proc/self/ns/{kind}").st_ino:
            namespace = os.open(theirs, os.O_RDONLY)
            if libc.setns(namespace, 0):
                raise OSError(ctypes.get_errno(), f"process {os.getpid()} cannot enter {theirs}")
            os.close(namespace)


def become(request: Request) -> None:
    """Runs what `request` asks for in this process, as `python` would."""
    os.setsid()
    enter_network(request.caller)
    for target, stream in enumerate(request.streams):
        os.dup2(stream, target)
        os.close(stream)
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    first, *arguments = request.arguments
    if first == "-u":
        sys.stdout.reconfigure(write_through=True)
        first, *arguments = arguments
    if first == "-m":
        sys.path[0] = request.folder
        sys.argv = arguments
        # It may be one of those imported before.
        sys.modules.pop(arguments[0], None)
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        return
    code = arguments[0] if first == "-c" else Path(first).read_text()
    sys.path[0] = "" if first == "-c" else str(Path(first).resolve().parent)
    sys.argv = ["-c", *arguments[1:]] if first == "-c" else [first, *arguments]
    main = types.ModuleType("__main__")
    main.__file__ = first
    sys.modules["__main__"] = main
    exec(compile(code, first, "exec"), main.__dict__)


def main(executable: str, address: str) -> None:
    """The server, or a process that was forked from it."""
    # Looking for garbage would be a fifth of the time of these imports.
    gc.disable()
    for name in PRELOADED:
        importlib.import_module(name)
    threads = len(os.listdir("/proc/self/task")) if Path("/proc/self/task").exists() else 1
    assert threads == 1, f"{threads} threads are running after the imports: a fork would lose all but one"
    gc.freeze()
    gc.enable()
    request = serve(address)
    if request is None:
        return
    sys.executable = executable
    become(request)
    # As multiprocessing ends what it forks. The interpreter would free, and for that copy, all that was preloaded.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
