"""Stages of an experiment on disk: each fills one folder, and runs again only when what it depends on has changed."""

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from alpaca_ppo.folders import write_text_atomically

MARKER = "stage.json"


def run_stage(
    folder: Path,
    title: str,
    fill: Callable[[Path], None],
    *,
    settings: Mapping[str, Any],
    sources: Sequence[Path] = (),
    parents: Sequence[Path] = (),
) -> Path:
    """`folder`, filled by `fill` unless an earlier run filled it from the same settings, sources and parents.

    A folder counts as filled when its marker, written last, holds the fingerprint of all three; whatever a killed run
    left behind has none and is removed.

    Args:
        folder: the stage's own folder.
        title: what is said on the screen.
        fill: writes the stage's files into the folder that it is given.
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
    fill(folder)
    seconds = time.perf_counter() - start
    marker = {"fingerprint": fingerprint, "seconds": round(seconds, 1), "settings": dict(settings)}
    write_text_atomically(folder / MARKER, json.dumps(marker, indent=2) + "\n")
    print(f"{seconds:5.0f} s", flush=True)
    return folder


def _fingerprint(settings: Mapping[str, Any], sources: Sequence[Path], parents: Sequence[Path]) -> str:
    depends_on = {
        "settings": dict(settings),
        "sources": {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sources},
        "parents": [_marker(parent)["fingerprint"] for parent in parents],
    }
    return hashlib.sha256(json.dumps(depends_on, sort_keys=True).encode()).hexdigest()


def _marker(folder: Path) -> dict[str, Any]:
    path = folder / MARKER
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
