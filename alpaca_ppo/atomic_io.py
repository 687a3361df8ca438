"""Writes files and folders atomically: complete or not at all, even if the process is killed or the disk is full.

Only one process may write a given path at a time.
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
    """Yields an empty temporary folder that becomes `path` at the end of the block; an exception leaves `path` as is.

    The temporary folder lies beside `path` under a hidden name; it is synced to the disk and then renamed. An older
    `path` is removed only after that. Leftovers of a killed process are removed the next time `path` is written.

    Args:
        path: of the folder.
        needed: bytes that will be written, for the error message; None = unknown.

    Raises:
        OSError: when the disk is full; names the folder, the bytes it needed and the bytes available.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    _finish_rename(path)
    tmp_dir = _hidden(path, _INCOMPLETE)
    tmp_dir.mkdir()
    try:
        yield tmp_dir
        for file in [*tmp_dir.rglob("*"), tmp_dir]:
            _sync_to_disk(file)
    except BaseException as error:
        written = sum(file.stat().st_size for file in tmp_dir.rglob("*") if file.is_file())
        shutil.rmtree(tmp_dir)
        if is_full(error):
            raise _no_room(path, f"more than {written}" if needed is None else str(needed)) from error
        raise
    if path.exists():
        os.rename(path, _hidden(path, _REPLACED))
    os.rename(tmp_dir, path)
    _sync_to_disk(path.parent)
    _finish_rename(path)


def write_text_atomically(path: StrPath, text: str) -> None:
    """Replaces the file at `path` by `text` in one step: a process killed here leaves the old file or the new one.

    Raises:
        OSError: when the disk is full; the old file stays.
    """
    path = Path(path)
    tmp_file = _hidden(path, _INCOMPLETE)
    # UTF-8 cannot encode a lone surrogate; it becomes \udXXX, as in JSON.
    content = text.encode("utf-8", errors="backslashreplace")
    try:
        with explain_disk_full(path, needed=len(content)):
            tmp_file.write_bytes(content)
            _sync_to_disk(tmp_file)
            os.replace(tmp_file, path)
    except BaseException:
        tmp_file.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def explain_disk_full(path: StrPath, *, needed: int | None = None) -> Iterator[None]:
    """Turns the error of a full disk into one that names `path` and the bytes `needed`, if known."""
    try:
        yield
    except Exception as error:
        if is_full(error):
            raise _no_room(Path(path), "some" if needed is None else str(needed)) from error
        raise


def is_full(error: BaseException) -> bool:
    """Whether `error` means that a disk is full, or that a quota or the maximum file size is reached."""
    if isinstance(error, OSError):
        return error.errno in _FULL
    # safetensors and tokenizers are Rust libraries; their errors only contain the number.
    return any(f"(os error {number})" in str(error) for number in _FULL)


def _no_room(path: Path, needed: str) -> OSError:
    place = next(parent for parent in path.absolute().parents if parent.exists())
    return OSError(
        errno.ENOSPC,
        f"no room for {path}: it needed {needed} bytes, and its disk has {shutil.disk_usage(place).free} left (a quota "
        "may allow less). Everything saved before is intact and no partial file remains: free some space, then resume",
    )


def list_committed(parent: StrPath, pattern: str) -> list[Path]:
    """The complete folders in `parent` whose names match the glob `pattern`.

    A folder that a killed process was about to replace is included: `clean_leftovers` will move it back to the path
    that is returned here.
    """
    names = {path.name for path in Path(parent).glob(pattern) if path.is_dir()}
    replaced = (path.name for path in Path(parent).glob(f".{pattern}{_REPLACED}"))
    return [Path(parent) / name for name in sorted(names | {name[1 : -len(_REPLACED)] for name in replaced})]


def committed_path(path: Path) -> Path:
    """Where the folder `path` is now: under a hidden name if a killed process was about to replace it."""
    replaced = _hidden(path, _REPLACED)
    return replaced if replaced.is_dir() and not path.exists() else path


def remove_folder(path: Path) -> None:
    """Removes `path`; a process killed here leaves it complete or absent."""
    os.rename(path, _hidden(path, _INCOMPLETE))
    _finish_rename(path)


def clean_leftovers(folder: StrPath) -> None:
    """Removes partial files and folders that killed processes left in `folder`, and restores what they were replacing.

    One process may call this, while no other one uses `folder`.
    """
    for hidden in Path(folder).glob(".*"):
        for suffix in (_INCOMPLETE, _REPLACED):
            if hidden.name.endswith(suffix):
                _finish_rename(hidden.with_name(hidden.name[1 : -len(suffix)]))


def _hidden(path: Path, suffix: str) -> Path:
    return path.with_name(f".{path.name}{suffix}")


def _finish_rename(path: Path) -> None:
    """Ends an interrupted write of `path`: removes partial content; restores the old one if nothing replaced it."""
    replaced = _hidden(path, _REPLACED)
    if replaced.exists() and not path.exists():
        os.rename(replaced, path)
    for leftover in (replaced, _hidden(path, _INCOMPLETE)):
        if leftover.is_symlink() or leftover.is_file():
            leftover.unlink()
        elif leftover.exists():
            shutil.rmtree(leftover)


def _sync_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
