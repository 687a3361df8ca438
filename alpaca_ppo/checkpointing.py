"""Checkpoints from which a run goes on as if it had never stopped.

A checkpoint holds tensors as safetensors, everything else as JSON, and a manifest of sizes and hashes. Nothing is
pickled. One process writes; what a run keeps besides model, optimizer, schedule and random states it passes as `extra`.
Folders that `from_pretrained` loads are not here (`export`), nor how a folder comes to be all or nothing (`folders`).
"""

import hashlib
import json
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn

from alpaca_ppo.folders import StrPath, clean_leftovers, kept_folders, remove_folder, write_folder_atomically

FORMAT = {"format": "alpaca_ppo checkpoint", "version": 1}
_WEIGHTS, _STATE, _STATE_TENSORS = FILES = ("model.safetensors", "state.json", "state.safetensors")


def newest_checkpoint(output_dir: StrPath) -> Path | None:
    """The checkpoint folder of `output_dir` with the highest step, or None."""
    found = _checkpoints(output_dir)
    return found[-1] if found else None


def resolve_checkpoint(resume_from_checkpoint: bool | str, output_dir: StrPath) -> Path:
    """The folder to resume from: the one named, or the newest of `output_dir` for True (or the text `true`).

    Raises:
        ValueError: when `output_dir` holds no checkpoint.
    """
    if str(resume_from_checkpoint).lower() != "true":
        return Path(str(resume_from_checkpoint))
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
        ValueError: when `output_dir` holds a checkpoint or final models.
    """
    for found in (newest_checkpoint(output_dir), Path(output_dir) / "final"):
        if found is not None and found.exists():
            raise ValueError(
                f"output_dir ({output_dir}) already holds {found.name} of another run; set resume_from_checkpoint to "
                "continue that run, choose another output_dir, or move the old one away"
            )


def rotate_checkpoints(output_dir: StrPath, save_total_limit: int | None, *, keep: Path | None = None) -> None:
    """Removes the oldest checkpoints until `save_total_limit` are left (None: no limit); `keep` counts but stays."""
    found = _checkpoints(output_dir)
    surplus = 0 if save_total_limit is None else max(0, len(found) - save_total_limit)
    for path in [p for p in found if keep is None or p.name != keep.name][:surplus]:
        remove_folder(path)


def save_checkpoint(
    folder: StrPath,
    *,
    model: nn.Module,
    optimizer: Any,
    scheduler: Any,
    extra: Mapping[str, Any],
    save_total_limit: int | None = None,
) -> None:
    """Writes `folder` (`.../checkpoint-<step>`) with `save_state`, all or nothing, then removes surplus older ones."""
    folder = Path(folder)
    with write_folder_atomically(folder) as aside:
        save_state(aside, model=model, optimizer=optimizer, scheduler=scheduler, extra=extra)
    clean_leftovers(folder.parent)
    rotate_checkpoints(folder.parent, save_total_limit, keep=folder)


def save_state(folder: Path, *, model: nn.Module, optimizer: Any, scheduler: Any, extra: Mapping[str, Any]) -> None:
    """Writes model, optimizer, schedule, random states and `extra` into the existing `folder`, the manifest last.

    Args:
        folder: existing, best a fresh one of `write_folder_atomically`.
        model: its parameters and persistent buffers are saved, shared ones once.
        optimizer: anything with `state_dict` made of tensors and plain values.
        scheduler: likewise.
        extra: plain values (None, bool, int, float, str, list, tuple, dict) and tensors.

    Raises:
        ValueError: for a value that is neither plain nor a tensor.
    """
    parts = {
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "rng": random_states(),
        "extra": dict(extra),
    }
    tensors: dict[str, Tensor] = {}
    (folder / _STATE).write_text(json.dumps(_encode(parts, "", tensors)), encoding="utf-8")
    _save_tensors(folder / _STATE_TENSORS, tensors)
    _save_tensors(folder / _WEIGHTS, _weights(model))
    manifest = FORMAT | {"files": {name: _fingerprint(folder / name) for name in FILES}}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2), encoding="utf-8")


def load_checkpoint(
    folder: StrPath, *, model: nn.Module, optimizer: Any, scheduler: Any, expected: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Restores what `save_state` saved, in place and to the last bit, and returns `extra`.

    Args:
        folder: of `save_state`.
        model: of the same tensors (names, shapes, dtypes) as the saved one; on any device.
        optimizer: of the same kind, over the same parameters in the same groups.
        scheduler: of the same kind.
        expected: entries that `extra` must have, such as the data's identity.

    Raises:
        ValueError: for a missing, foreign, incomplete or damaged folder (the file is named), another model or
            optimizer, or an `extra` that is not as expected. Nothing in memory has changed then.
    """
    folder = Path(folder)
    _verify_files(folder)
    weights = safetensors.torch.load_file(folder / _WEIGHTS)
    tensors = safetensors.torch.load_file(folder / _STATE_TENSORS)
    state = _decode(json.loads((folder / _STATE).read_text(encoding="utf-8")), tensors)
    targets = _weights(model)
    _compare(
        folder, "tensor", {n: _describe(t) for n, t in weights.items()}, {n: _describe(t) for n, t in targets.items()}
    )
    _compare(folder, "optimizer group", _groups(state["optimizer"]), _groups(optimizer.state_dict()))
    extra: dict[str, Any] = state["extra"]
    wanted = dict(expected or {})
    _compare(folder, "entry", {key: extra.get(key) for key in wanted}, wanted)
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(weights[name])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    set_random_states(state["rng"])
    return extra


def _checkpoints(output_dir: StrPath) -> list[Path]:
    found = kept_folders(output_dir, "checkpoint-*")
    numbered = [(re.fullmatch(r"checkpoint-(\d+)", path.name), path) for path in found]
    return [path for _, path in sorted((int(match[1]), path) for match, path in numbered if match)]


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, those that share one object once, under their first name.

    Of a model whose base is frozen, only what trains: the base lies where it was loaded from.
    """
    parameters = dict(model.named_parameters())
    first = parameters.keys() | {name for name, _ in model.named_buffers()}
    if not all(parameter.requires_grad for parameter in parameters.values()):
        first = {name for name, parameter in parameters.items() if parameter.requires_grad}
    return {name: tensor for name, tensor in model.state_dict().items() if name in first}


def _save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    seen: set[int] = set()
    separate = {}
    for name, tensor in tensors.items():
        # safetensors refuses two views of one memory, even where neither can be rebuilt from the other.
        pointer = tensor.untyped_storage().data_ptr()
        dense = tensor.contiguous()
        separate[name] = dense.clone() if pointer in seen else dense
        seen.add(pointer)
    safetensors.torch.save_file(separate, path)


def _encode(value: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    """JSON for `value`; its tensors go into `tensors` under their place, and tuples and non-text keys are marked."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        tensors[where] = value
        return {"__tensor__": where}
    if isinstance(value, list | tuple):
        entries = [_encode(entry, f"{where}/{i}", tensors) for i, entry in enumerate(value)]
        return entries if isinstance(value, list) else {"__tuple__": entries}
    if isinstance(value, Mapping):
        # The position makes the name unique: 1 and "1" may be keys of one dict.
        return {
            "__dict__": [
                [_encode(key, "", {}), _encode(entry, f"{where}/{i}.{key}", tensors)]
                for i, (key, entry) in enumerate(value.items())
            ]
        }
    raise ValueError(
        f"a checkpoint cannot hold {where} = {value!r}, a {type(value).__name__}; give it as plain values or tensors"
    )


def _decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(entry, tensors) for entry in value]
    if isinstance(value, dict):
        ((mark, content),) = value.items()
        if mark == "__tensor__":
            return tensors[content]
        entries = _decode(content, tensors)
        return tuple(entries) if mark == "__tuple__" else {key: entry for key, entry in entries}
    return value


def random_states() -> dict[str, Any]:
    """The states of every random number generator of this process, as plain values and tensors."""
    legacy = np.random.get_state(legacy=False)
    key = legacy["state"]["key"].tolist()
    return {
        "python": random.getstate(),
        "numpy": legacy | {"state": legacy["state"] | {"key": key}},
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_random_states(state: Mapping[str, Any]) -> None:
    """Puts back what `random_states` returned."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    # A machine with fewer devices takes the first ones' states: a GPU run may be looked at where there is none.
    for device, cuda in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):
        torch.cuda.set_rng_state(cuda, device)


def _fingerprint(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _verify_files(folder: Path) -> None:
    if not folder.is_dir():
        raise ValueError(
            f"checkpoint {folder} does not exist or is no folder; name an existing checkpoint-<step> folder"
        )
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        files = {name: manifest["files"][name] for name in FILES}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{folder} has no readable manifest.json of alpaca_ppo; it is no checkpoint of it") from error
    found = {key: manifest.get(key) for key in FORMAT}
    if found != FORMAT:
        raise ValueError(f"{folder}/manifest.json says {found}; this version of alpaca_ppo reads {FORMAT}")
    for name, fingerprint in files.items():
        if not (folder / name).is_file():
            raise ValueError(f"checkpoint file {folder / name} is missing; resume from another checkpoint")
        actual = _fingerprint(folder / name)
        if actual != fingerprint:
            raise ValueError(
                f"checkpoint file {folder / name} is damaged: {actual['bytes']} bytes, hash {actual['sha256'][:12]}, "
                f"written with {fingerprint['bytes']}, {fingerprint['sha256'][:12]}; resume from another checkpoint"
            )


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _groups(state: Mapping[str, Any]) -> dict[str, Any]:
    """What two optimizers must share: in each group the number of parameters and the names of the settings."""
    groups = enumerate(state["param_groups"])
    return {str(i): {"parameters": len(group["params"]), "settings": sorted(group)} for i, group in groups}


def _compare(folder: Path, what: str, saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    for name in [*current, *saved]:
        if saved.get(name) != current.get(name):
            raise ValueError(
                f"checkpoint {folder} is of another run: {what} {name} is {saved.get(name, 'absent')} in it and "
                f"{current.get(name, 'absent')} here; resume with the models, optimizer and data it was written with"
            )
