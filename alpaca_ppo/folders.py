"""Folders and files that are complete or absent, whatever moment a process is killed at.

Knows nothing of what is in them. One process writes a path at a time.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

_INCOMPLETE, _REPLACED = ".incomplete", ".replaced"

StrPath = str | os.PathLike[str]


@contextlib.contextmanager
def write_folder_atomically(path: StrPath) -> Iterator[Path]:
    """Gives an empty folder to fill, which becomes `path` when the block ends; on an exception `path` stays as it was.

    The folder is filled beside `path` under a hidden name, forced to the disk and renamed. An older `path` is removed
    only after that. What a killed process left behind is removed the next time the same `path` is written.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    _settle(path)
    aside = _hidden(path, _INCOMPLETE)
    aside.mkdir()
    try:
        yield aside
        for file in [*aside.rglob("*"), aside]:
            _force_to_disk(file)
    except BaseException:
        shutil.rmtree(aside)
        raise
    if path.exists():
        os.rename(path, _hidden(path, _REPLACED))
    os.rename(aside, path)
    _force_to_disk(path.parent)
    _settle(path)


def write_text_atomically(path: StrPath, text: str) -> None:
    """Puts `text` at `path` in one step: a process that is killed here leaves the old file or the new one."""
    path = Path(path)
    aside = _hidden(path, _INCOMPLETE)
    # A lone surrogate, which UTF-8 cannot hold, becomes \udXXX: what JSON writes for it.
    with open(aside, "w", encoding="utf-8", errors="backslashreplace", newline="\n") as file:
        file.write(text)
    _force_to_disk(aside)
    os.replace(aside, path)


def kept_folders(parent: StrPath, pattern: str) -> list[Path]:
    """The folders in `parent` whose name matches `pattern`, also one that a killed process was about to replace:
    `clean_leftovers` puts it back under the path that is returned.
    """
    names = {path.name for path in Path(parent).glob(pattern) if path.is_dir()}
    replaced = (path.name for path in Path(parent).glob(f".{pattern}{_REPLACED}"))
    return [Path(parent) / name for name in sorted(names | {name[1 : -len(_REPLACED)] for name in replaced})]


def where_kept(path: Path) -> Path:
    """Where the folder `path` is now: under another name, where a killed process was about to replace it."""
    replaced = _hidden(path, _REPLACED)
    return replaced if replaced.is_dir() and not path.exists() else path


def remove_folder(path: Path) -> None:
    """Removes `path`; a process that is killed here leaves it whole or absent."""
    os.rename(path, _hidden(path, _INCOMPLETE))
    _settle(path)


def clean_leftovers(folder: StrPath) -> None:
    """Removes what killed processes left half written in `folder`, and puts back what they were about to replace.

    To be called by one process before others look into `folder`.
    """
    for hidden in Path(folder).glob(".*"):
        for suffix in (_INCOMPLETE, _REPLACED):
            if hidden.name.endswith(suffix):
                _settle(hidden.with_name(hidden.name[1 : -len(suffix)]))


def _hidden(path: Path, suffix: str) -> Path:
    return path.with_name(f".{path.name}{suffix}")


def _settle(path: Path) -> None:
    """Ends what was under way at `path`: the unfinished goes; the replaced goes, or back where nothing replaced it."""
    replaced = _hidden(path, _REPLACED)
    if replaced.exists() and not path.exists():
        os.rename(replaced, path)
    for leftover in (replaced, _hidden(path, _INCOMPLETE)):
        if leftover.is_symlink() or leftover.is_file():
            leftover.unlink()
        elif leftover.exists():
            shutil.rmtree(leftover)


def _force_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
