"""A tiny run that starts a vLLM server, in which processes are killed or stopped: for `tests.tools.torture_vllm`.

Usage: run_vllm_killed.py OUTPUT_DIR SHARED_MEMORY BLOWS [field=value ...]. BLOWS is PHASE:PROCESS:SIGNAL[,...], where
PHASE is starting, publishing, sampling or update, PROCESS is trainer, api, engine or worker, and SIGNAL may be
`SIGSTOP+SIGTERM`, which stops the process and then asks the run to end. The next blow falls when its phase comes and
all processes live. The run resumes by itself where OUTPUT_DIR holds a checkpoint.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import yaml

sys.path.insert(0, str(Path(__file__).parents[2]))

from alpaca_ppo.checkpoint.directory import newest_checkpoint  # noqa: E402
from alpaca_ppo.generation.vllm import server, weights  # noqa: E402
from alpaca_ppo.generation.vllm.local_server import LocalServer  # noqa: E402
from alpaca_ppo.ppo.updates import Updater  # noqa: E402
from tests.integration.run_vllm import trained  # noqa: E402

EVENTS = "events.jsonl"
RUN: dict[str, Any] = {"total_episodes": 300, "save_steps": 1, "save_total_limit": 2, "query_len": 80}
STOPPED_SECONDS = 5.0
"""After which a stopped trainer goes on."""


class Tormentor:
    """Strikes the `blows` one after the other, each in its phase, and writes down when."""

    def __init__(self, folder: Path, blows: list[str]) -> None:
        self.folder, self.blows, self.hurt = folder, blows, False

    def note(self, what: str, **more: Any) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / EVENTS).open("a") as file:
            file.write(json.dumps({"what": what, "at": time.time(), **more}) + "\n")

    def processes(self) -> dict[str, psutil.Process]:
        """Those of the server that live, by their names here."""
        found: dict[str, psutil.Process] = {}
        with suppress(psutil.NoSuchProcess):
            for watchdog in _children(psutil.Process()):
                if "watchdog.py" in " ".join(watchdog.cmdline()) and (below := _children(watchdog)):
                    parent = below[0]
                    found = {"watchdog": watchdog, "api": parent}
                    for name in ("engine", "worker"):
                        (parent,) = [p for p in _children(parent) if _is_part(p)] or [None]
                        if parent is None:
                            break
                        found[name] = parent
        return found

    def due(self, phase: str) -> str | None:
        """Takes the next blow if it is for `phase` and nothing is hurt; returns it."""
        alive = {"api", "engine", "worker"} <= self.processes().keys()
        if self.hurt or not self.blows or not self.blows[0].startswith(phase) or not (alive or phase == "starting"):
            return None
        self.hurt = ":trainer:" not in self.blows[0]
        return self.blows.pop(0)

    def in_flight(self, phase: str) -> None:
        """Strikes while a request is under way, for which the worker is kept from its work for half a second."""
        if (blow := self.due(phase)) is None:
            return
        worker, stays = self.processes()["worker"], "worker:SIGSTOP" in blow
        if blow.endswith("trainer:SIGKILL"):
            self.strike(blow)
        worker.suspend()

        def strike() -> None:
            time.sleep(0.5)
            self.strike(blow)
            time.sleep(0.2)
            with suppress(psutil.NoSuchProcess):
                None if stays else worker.resume()

        threading.Thread(target=strike).start()

    def while_starting(self) -> None:
        """Strikes a second after the process has appeared, the trainer once there is a worker."""
        if (blow := self.due("starting")) is None:
            return

        def strike() -> None:
            victim = blow.split(":")[1].replace("trainer", "worker")
            while victim not in self.processes():
                time.sleep(0.1)
            time.sleep(1)
            self.strike(blow)

        threading.Thread(target=strike, daemon=True).start()

    def strike(self, blow: str) -> None:
        _, victim, what = blow.split(":")
        number, *then = (signal.Signals[name] for name in what.split("+"))
        pid = os.getpid() if victim == "trainer" else self.processes()[victim].pid
        self.note_shared()
        if victim == "trainer" and number == signal.SIGSTOP:
            subprocess.Popen(["sh", "-c", f"sleep {STOPPED_SECONDS}; kill -CONT {pid}"])
        self.note("blow", blow=blow)
        os.kill(pid, number)
        if then:
            time.sleep(2)
            self.note("then", blow=blow)
            os.kill(os.getpid(), then[0])

    def note_shared(self) -> None:
        """Which files of shared memory the server has."""
        files = set()
        for process in self.processes().values():
            with suppress(psutil.Error):
                files |= {part.path for part in process.memory_maps() if part.path.startswith("/dev/shm/")}
        self.note("shared", files=sorted(files))


def _children(process: psutil.Process) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        return [child for child in process.children() if child.status() != psutil.STATUS_ZOMBIE]
    return []


def _is_part(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        words = " ".join(process.cmdline())
        return "spawn_main" in words or words.startswith("VLLM::")
    return False


def before(owner: Any, name: str, then: Callable[..., Any]) -> None:
    """Lets `owner.name` call `then` with its arguments first."""
    function = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: (then(*args, **kwargs), function(*args, **kwargs))[1])


def main(output_dir: str, memory: str, blows: str, *pairs: str) -> None:
    # A shell's background jobs ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    options = {name: yaml.safe_load(value) for name, value in (pair.split("=", 1) for pair in pairs)}
    tormentor = Tormentor(Path(output_dir), [blow for blow in blows.split(",") if blow])
    weights.MEMORY = Path(memory)
    if bound := options.pop("bound", None):
        server._ASK_SECONDS = server._LOAD_SECONDS = bound
    start = LocalServer.start

    def started(self: Any, *arguments: Any) -> None:
        tormentor.note("start", hurt=tormentor.hurt)
        tormentor.while_starting()
        start(self, *arguments)
        session = tormentor.processes()["watchdog"].pid
        tormentor.note("ready", session=session)
        tormentor.hurt = False

    def asks(self: Any, path: str, body: Any = None, **options: Any) -> None:
        if path == "/collective_rpc":
            tormentor.in_flight("publishing")
        elif path.endswith("generate") and "seed" in body["sampling_params"]:
            tormentor.in_flight("sampling")

    def updates(*arguments: Any) -> None:
        if (blow := tormentor.due("update")) is not None:
            tormentor.strike(blow)

    LocalServer.start = started
    before(server.Server, "ask", asks)
    before(Updater, "backward", updates)
    resume = newest_checkpoint(output_dir) is not None
    trained(Path(output_dir), "qwen2", resume=resume, overwrite_output_dir=not resume, **{**RUN, **options})
    tormentor.note("done", left=tormentor.blows)


if __name__ == "__main__":
    main(*sys.argv[1:])
