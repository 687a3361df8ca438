"""Folders and files that are complete or absent, whatever moment a process is killed at or the disk is full.

Knows nothing of what is in them. One process writes a path at a time.
"""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

_INCOMPLETE, _REPLACED = ".incomplete", ".replaced"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

StrPath = str | os.PathLike[str]


@contextlib.contextmanager
def write_folder_atomically(path: StrPath, *, needed: int | None = None) -> Iterator[Path]:
    """Gives an empty folder to fill, which becomes `path` when the block ends; on an exception `path` stays as it was.

    The folder is filled beside `path` under a hidden name, forced to the disk and renamed. An older `path` is removed
    only after that. What a killed process left behind is removed the next time the same `path` is written.

    Args:
        path: of the folder.
        needed: bytes that will be written, for the error; None = not known.

    Raises:
        OSError: when the disk is full; says which folder, and how much it needed and had.
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
    except BaseException as error:
        written = sum(file.stat().st_size for file in aside.rglob("*") if file.is_file())
        shutil.rmtree(aside)
        if is_full(error):
            raise _no_room(path, f"more than {written}" if needed is None else str(needed)) from error
        raise
    if path.exists():
        os.rename(path, _hidden(path, _REPLACED))
    os.rename(aside, path)
    _force_to_disk(path.parent)
    _settle(path)


def write_text_atomically(path: StrPath, text: str) -> None:
    """Puts `text` at `path` in one step: a process that is killed here leaves the old file or the new one.

    Raises:
        OSError: when the disk is full; the old file stays.
    """
    path = Path(path)
    aside = _hidden(path, _INCOMPLETE)
    # A lone surrogate, which UTF-8 cannot hold, becomes \udXXX: what JSON writes for it.
    content = text.encode("utf-8", errors="backslashreplace")
    try:
        with explain_disk_full(path, needed=len(content)):
            aside.write_bytes(content)
            _force_to_disk(aside)
            os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def explain_disk_full(path: StrPath, *, needed: int | None = None) -> Iterator[None]:
    """Inside, the error of a full disk becomes one that names `path` and, where they are known, the bytes it needed."""
    try:
        yield
    except Exception as error:
        if is_full(error):
            raise _no_room(Path(path), "some" if needed is None else str(needed)) from error
        raise


def is_full(error: BaseException) -> bool:
    """Whether `error` says that a disk, a quota or a file has no room left."""
    if isinstance(error, OSError):
        return error.errno in _FULL
    # safetensors and tokenizers are written in Rust, whose errors name the number.
    return any(f"(os error {number})" in str(error) for number in _FULL)


def _no_room(path: Path, needed: str) -> OSError:
    place = next(parent for parent in path.absolute().parents if parent.exists())
    return OSError(
        errno.ENOSPC,
        f"no room for {path}: it needed {needed} bytes, and its disk has {shutil.disk_usage(place).free} left (a quota "
        "may allow less). Nothing half written stays, and what was saved before is whole: make room, and go on from it",
    )


def list_committed(parent: StrPath, pattern: str) -> list[Path]:
    """The folders in `parent` whose name matches `pattern`, also one that a killed process was about to replace:
    `clean_leftovers` puts it back under the path that is returned.
    """
    names = {path.name for path in Path(parent).glob(pattern) if path.is_dir()}
    replaced = (path.name for path in Path(parent).glob(f".{pattern}{_REPLACED}"))
    return [Path(parent) / name for name in sorted(names | {name[1 : -len(_REPLACED)] for name in replaced})]


def committed_path(path: Path) -> Path:
    """Where the folder `path` is now: under another name, where a killed process was about to replace it."""
    replaced = _hidden(path, _REPLACED)
    return replaced if replaced.is_dir() and not path.exists() else path


def remove_folder(path: Path) -> None:
    """Removes `path`; a process that is killed here leaves it whole or absent."""
    os.rename(path, _hidden(path, _INCOMPLETE))
    _settle(path)


def clean_leftovers(folder: StrPath) -> None:
    """Removes what killed processes left half written in `folder`, and puts back what they were about to replace.

    To be called by one process while no other looks into `folder`.
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
