"""Writes files and folders atomically: complete or not at all, even if the process is killed or the disk is full.

Only one process may write a given path at a time.
"""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

# Ends the hidden name of a text file that is being written, or of the working folder of a folder.
TEMPORARY_SUFFIX = ".alpaca_ppo-tmp"
# The contents of a working folder: an incomplete folder, the complete one that it replaces, and one to be deleted.
# Anything else in it is not from this module, and stays.
_NEW, _OLD, _REMOVED = "new.alpaca_ppo", "old.alpaca_ppo", "removed.alpaca_ppo"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

StrPath = str | os.PathLike[str]


@contextlib.contextmanager
def write_folder_atomically(path: StrPath) -> Iterator[Path]:
    """Yields an empty temporary folder that becomes `path` at the end of the block; an exception leaves `path` as is.

    The temporary folder lies in a hidden working folder beside `path`; it is synced to the disk and then renamed. Only
    then is an older `path` removed. Leftovers of a killed process are removed when `path` is next written.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = _open_work(path) / _NEW
    try:
        with explain_disk_full(path):
            new.mkdir()
            yield new
            for file in [*new.rglob("*"), new]:
                _sync_to_disk(file)
        if os.path.lexists(path):
            os.rename(path, new.with_name(_OLD))
        os.rename(new, path)
        _sync_to_disk(path.parent)
    finally:
        _finish(path)


def write_text_atomically(path: StrPath, text: str) -> None:
    """Replaces the file at `path` by `text` in one step: a process killed here leaves the old file or the new one."""
    path = Path(path)
    tmp_file = _hidden(path)
    try:
        with explain_disk_full(path):
            # UTF-8 cannot encode a lone surrogate; it becomes \udXXX, as in JSON.
            tmp_file.write_bytes(text.encode("utf-8", errors="backslashreplace"))
            _sync_to_disk(tmp_file)
            os.replace(tmp_file, path)
    except BaseException:
        tmp_file.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def explain_disk_full(path: StrPath) -> Iterator[None]:
    """Turns the error of a full disk into an `OSError` that names `path` and the bytes left on the disk."""
    try:
        yield
    except Exception as error:
        if not is_full(error):
            raise
        place = next(parent for parent in Path(path).absolute().parents if parent.exists())
        raise OSError(
            errno.ENOSPC,
            f"no room for {path}: its disk has {shutil.disk_usage(place).free} bytes left (a quota may allow less). "
            "Everything saved before is intact and no partial file remains: free some space, then resume",
        ) from error


def is_full(error: BaseException) -> bool:
    """Whether `error` means that a disk is full, or that a quota or the maximum file size is reached."""
    if isinstance(error, OSError):
        return error.errno in _FULL
    # Errors of safetensors and tokenizers, which are in Rust, have the number only in their text. torch raises a second
    # error when it closes the file.
    cause = error.__context__
    return any(f"(os error {number})" in str(error) for number in _FULL) or (cause is not None and is_full(cause))


def list_committed(parent: StrPath, pattern: str) -> list[Path]:
    """The complete folders in `parent` whose names match the glob `pattern`, sorted. If a killed process was about to
    replace a folder, that is included under its path, to which `clean_leftovers` will move it back.
    """
    visible = {path for path in Path(parent).glob(pattern) if path.is_dir()}
    hidden = {_visible(work) for work in Path(parent).glob(f".{pattern}{TEMPORARY_SUFFIX}")}
    return sorted(visible | {path for path in hidden if committed_path(path).is_dir()})


def committed_path(path: Path) -> Path:
    """Where the folder `path` is now: in its working folder if a killed process was about to replace it."""
    old = _hidden(path) / _OLD
    return old if not path.exists() and old.is_dir() else path


def remove_folder(path: Path) -> None:
    """Removes `path`; a process killed here leaves it complete or absent. The target of a link is not removed."""
    os.rename(path, _open_work(path) / _REMOVED)
    _finish(path)


def clean_leftovers(folder: StrPath) -> None:
    """Removes partial files and folders that killed processes left in `folder`, and restores what they were replacing.

    Only one process may call this, while no other one uses `folder`.
    """
    for hidden in Path(folder).glob(f".?*{TEMPORARY_SUFFIX}"):
        _finish(_visible(hidden))


def _hidden(path: Path) -> Path:
    return path.with_name(f".{path.name}{TEMPORARY_SUFFIX}")


def _visible(hidden: Path) -> Path:
    return hidden.with_name(hidden.name[1 : -len(TEMPORARY_SUFFIX)])


def _open_work(path: Path) -> Path:
    _finish(path)
    work = _hidden(path)
    with explain_disk_full(path):
        work.mkdir()
    return work


def _finish(path: Path) -> None:
    """Removes what a write of `path` has left; restores the old content if nothing has replaced it."""
    work = _hidden(path)
    if work.is_symlink():
        return
    if work.is_file():
        work.unlink()
    elif work.is_dir():
        old = work / _OLD
        if os.path.lexists(old):
            # Renamed before it is removed, so that a folder of the old name is always complete.
            os.rename(old, work / _REMOVED if path.exists() else path)
        for rubbish in (work / _NEW, work / _REMOVED):
            if rubbish.is_symlink():
                rubbish.unlink()
            elif rubbish.exists():
                shutil.rmtree(rubbish)
        if not any(work.iterdir()):
            work.rmdir()


def _sync_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
