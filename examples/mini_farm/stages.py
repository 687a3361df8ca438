"""Stages of an experiment on disk: each one fills a folder, and runs again only if something it depends on changed.

The screen shows one line per stage. The output of the stage itself (progress bars, warnings, losses) goes to log.txt in
its folder; if the stage fails, the end of that log is printed.
"""

import contextlib
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from alpaca_ppo.atomic_io import write_text_atomically

MARKER, LOG = "stage.json", "log.txt"
SHOWN_ON_FAILURE = 25
"""Lines of the log that are printed if a stage fails."""
_REPOSITORY = Path(__file__).resolve().parents[2]


def run_stage(
    folder: Path,
    title: str,
    fill: Callable[[Path], None],
    *,
    settings: Mapping[str, Any],
    sources: Sequence[Path] = (),
    parents: Sequence[Path] = (),
) -> Path:
    """Returns `folder`, filled by `fill` unless an earlier run filled it with the same settings, sources and parents.

    A folder is complete if its marker, which is written last, has the fingerprint of all three. An incomplete folder,
    such as that of a killed run, is removed first.

    Args:
        folder: the stage's folder.
        title: the line on the screen.
        fill: writes the stage's files to the folder passed to it.
        settings: plain values that `fill` depends on.
        sources: files that it depends on (code, presets).
        parents: folders of earlier stages that it reads.
    """
    fingerprint = _fingerprint(settings, sources, parents)
    if _marker(folder).get("fingerprint") == fingerprint:
        print(f"  {title:<58} kept from an earlier run", flush=True)
        return folder
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    print(f"  {title:<58} ", end="", flush=True)
    start = time.perf_counter()
    try:
        with _output_to(folder / LOG):
            fill(folder)
    except Exception:
        lines = (folder / LOG).read_text(encoding="utf-8", errors="replace").splitlines()
        print("\n".join(["failed", f"The end of {folder / LOG}:", *lines[-SHOWN_ON_FAILURE:]]), flush=True)
        raise
    seconds = time.perf_counter() - start
    marker = {"fingerprint": fingerprint, "seconds": round(seconds, 1), "settings": dict(settings)}
    write_text_atomically(folder / MARKER, json.dumps(marker, indent=2) + "\n")
    print(f"{seconds:5.0f} s", flush=True)
    return folder


@contextlib.contextmanager
def _output_to(log: Path) -> Iterator[None]:
    """Redirects standard output and error of this process and its children to `log`.

    The file descriptors are redirected, because loggers and progress bars keep the stream that existed at their
    creation; and so are Python's streams, which in a notebook do not write to the descriptors.
    """
    streams = (sys.stdout, sys.stderr)
    for stream in streams:
        stream.flush()
    originals = [os.dup(descriptor) for descriptor in (1, 2)]
    with log.open("w", encoding="utf-8", buffering=1) as file:
        try:
            for descriptor in (1, 2):
                os.dup2(file.fileno(), descriptor)
            with contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
                yield
        finally:
            for stream in streams:
                stream.flush()
            for descriptor, original in zip((1, 2), originals, strict=True):
                os.dup2(original, descriptor)
                os.close(original)


def _fingerprint(settings: Mapping[str, Any], sources: Sequence[Path], parents: Sequence[Path]) -> str:
    depends_on = {
        "settings": dict(settings),
        "sources": {_name(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in sources},
        "parents": [_marker(parent)["fingerprint"] for parent in parents],
    }
    return hashlib.sha256(json.dumps(depends_on, sort_keys=True).encode()).hexdigest()


def _name(path: Path) -> str:
    """Returns a source's path relative to the repository, so that a moved checkout keeps its stages."""
    path = path.resolve()
    return str(path.relative_to(_REPOSITORY)) if path.is_relative_to(_REPOSITORY) else path.name


def _marker(folder: Path) -> dict[str, Any]:
    path = folder / MARKER
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
