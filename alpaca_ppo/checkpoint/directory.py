"""The checkpoint folders of a run: which there are, which one to resume from, which are removed, and whether one is
complete.

What is in a checkpoint is in `checkpointing`.
"""

import hashlib
import itertools
import json
import re
from collections.abc import Collection
from pathlib import Path

from alpaca_ppo.atomic_io import StrPath, committed_path, list_committed, remove_folder

FORMAT = {"format": "alpaca_ppo checkpoint", "version": 1}
FILES = ("model.safetensors", "state.json", "state.safetensors")


def newest_checkpoint(output_dir: StrPath) -> Path | None:
    """The checkpoint folder of `output_dir` with the highest step, or None."""
    found = _checkpoints(output_dir)
    return found[-1] if found else None


def resolve_checkpoint(resume_from_checkpoint: bool | str, output_dir: StrPath) -> Path:
    """The folder to resume from: the one named, or the newest of `output_dir` for True (or the text `true`).

    Raises:
        ValueError: when `output_dir` holds no checkpoint; or one is named that lies elsewhere, and `output_dir` holds
            those of another run.
    """
    if str(resume_from_checkpoint).lower() != "true":
        named = Path(str(resume_from_checkpoint))
        if named.is_dir() and named.parent.resolve() != Path(output_dir).resolve():
            refuse_finished_run(output_dir)
        return named
    newest = newest_checkpoint(output_dir)
    if newest is None:
        raise ValueError(
            f"resume_from_checkpoint is true but output_dir ({output_dir}) holds no checkpoint-<step> folder; "
            "name a folder, or leave it out to start anew"
        )
    return newest


def refuse_finished_run(output_dir: StrPath) -> None:
    """Guards a run that starts anew against writing over an older one.

    Raises:
        ValueError: when `output_dir` holds a checkpoint or final models, also such that a killed process was about to
            replace.
    """
    for found in (newest_checkpoint(output_dir), Path(output_dir) / "final"):
        if found is not None and committed_path(found).exists():
            raise ValueError(
                f"output_dir ({output_dir}) already holds {found.name} of another run; set resume_from_checkpoint to "
                "continue that run, choose another output_dir, or move the old one away"
            )


def set_aside_later(folder: Path) -> list[Path]:
    """Renames the checkpoints beside `folder` that have more steps to `abandoned-...`, and returns what they are now: a
    run that goes on from `folder` leaves that branch, and would take them for its own newest ones.
    """
    found = [path.resolve() for path in _checkpoints(folder.parent)]
    later = found[found.index(folder.resolve()) + 1 :] if folder.resolve() in found else []
    moved = []
    for path in later:
        numbered = (path.with_name(f"abandoned-{path.name}{f'-{i}' if i else ''}") for i in itertools.count())
        moved.append(path.rename(next(name for name in numbered if not name.exists())))
    return moved


def rotate_checkpoints(output_dir: StrPath, save_total_limit: int | None, *, keep: Collection[Path] = ()) -> None:
    """Removes the oldest checkpoints until `save_total_limit` are left (None: no limit); those of `keep` count but
    stay.
    """
    kept = {path.resolve() for path in keep}
    found = _checkpoints(output_dir)
    surplus = 0 if save_total_limit is None else max(0, len(found) - save_total_limit)
    for path in [path for path in found if path.resolve() not in kept][:surplus]:
        remove_folder(path)


def write_manifest(folder: Path) -> None:
    """Writes manifest.json, the sizes and hashes of `FILES`, all of which are in `folder`."""
    manifest = FORMAT | {
        "files": {name: {"bytes": (folder / name).stat().st_size, "sha256": _hash(folder / name)} for name in FILES}
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2), encoding="utf-8")


def check_manifest(folder: Path) -> dict[str, tuple[int, str]]:
    """Size in bytes and hash of each of `FILES`, as they were written; they are there, of these sizes.

    Raises:
        ValueError: for a missing, foreign or incomplete folder; the file is named.
    """
    there = committed_path(folder)
    if not there.is_dir():
        raise ValueError(
            f"checkpoint {folder} does not exist or is no folder; name an existing checkpoint-<step> folder"
        )
    try:
        manifest = json.loads((there / "manifest.json").read_text(encoding="utf-8"))
        entries = {name: manifest["files"][name] for name in FILES}
        files = {name: (int(entry["bytes"]), str(entry["sha256"])) for name, entry in entries.items()}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{folder} has no readable manifest.json of alpaca_ppo; it is no checkpoint of it, or a damaged one; "
            f"{_remedy(folder)}"
        ) from error
    found = {key: manifest.get(key) for key in FORMAT}
    if found != FORMAT:
        raise ValueError(f"{folder}/manifest.json says {found}; this version of alpaca_ppo reads {FORMAT}")
    for name, (size, _) in files.items():
        if not (there / name).is_file():
            raise ValueError(f"checkpoint file {folder / name} is missing; {_remedy(folder)}")
        if (actual := (there / name).stat().st_size) != size:
            raise ValueError(
                f"checkpoint file {folder / name} is damaged: {actual} bytes, written with {size}; {_remedy(folder)}"
            )
    return files


def verify_files(folder: Path) -> None:
    """Checks that `folder` is a complete checkpoint whose files are as they were written.

    Raises:
        ValueError: as `check_manifest`, and for a file of another content.
    """
    for name, (_, written) in check_manifest(folder).items():
        if (actual := _hash(folder / name)) != written:
            raise ValueError(
                f"checkpoint file {folder / name} is damaged: its hash is {actual[:12]}, written with {written[:12]}; "
                f"{_remedy(folder)}"
            )


def _hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _remedy(folder: Path) -> str:
    """Which other checkpoint to take: never one that nobody chose, steps would be lost without a word."""
    others = [path for path in _checkpoints(folder.parent) if path.name != folder.name]
    if not others:
        return f"{folder.parent} holds no other checkpoint to resume from: start anew"
    return f"set resume_from_checkpoint to another one by name: {', '.join(map(str, reversed(others)))}"


def _checkpoints(output_dir: StrPath) -> list[Path]:
    found = list_committed(output_dir, "checkpoint-*")
    numbered = [(re.fullmatch(r"checkpoint-(\d+)", path.name), path) for path in found]
    return [path for _, path in sorted((int(match[1]), path) for match, path in numbered if match)]
