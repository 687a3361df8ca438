"""Checkpoints from which a run goes on as if it had never stopped.

A checkpoint holds tensors as safetensors, everything else as JSON, and a manifest of sizes and hashes. Nothing is
pickled. One process writes; what a run keeps besides model, optimizer, schedule and random states it passes as `extra`.
Which checkpoint folders there are is in `checkpoint_folders`, what `from_pretrained` loads in `export`, how a folder
comes to be all or nothing in `folders`.
"""

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from alpaca_ppo.atomic_io import StrPath, clean_leftovers, write_folder_atomically
from alpaca_ppo.checkpoint.directory import FILES, rotate_checkpoints, verify_files, write_manifest

_WEIGHTS, _STATE, _STATE_TENSORS = FILES


def save_checkpoint(
    folder: StrPath,
    *,
    weights: Mapping[str, Tensor],
    optimizer: Mapping[str, Any],
    scheduler: Any,
    rng: Sequence[Mapping[str, Any]],
    extra: Mapping[str, Any],
    save_total_limit: int | None = None,
    best: StrPath | None = None,
) -> None:
    """Writes `folder` (`.../checkpoint-<step>`) with `save_state`, all or nothing, then removes surplus older ones,
    but never `best`.

    Raises:
        OSError: when the disk is full; the older checkpoints stay as they were.
    """
    folder = Path(folder)
    needed = sum(tensor.nbytes for tensor in _tensors([weights, optimizer]))
    with write_folder_atomically(folder, needed=needed) as aside:
        save_state(aside, weights=weights, optimizer=optimizer, scheduler=scheduler, rng=rng, extra=extra)
    clean_leftovers(folder.parent)
    rotate_checkpoints(folder.parent, save_total_limit, keep=[folder] if best is None else [folder, Path(best)])


def save_state(
    folder: Path,
    *,
    weights: Mapping[str, Tensor],
    optimizer: Mapping[str, Any],
    scheduler: Any,
    rng: Sequence[Mapping[str, Any]],
    extra: Mapping[str, Any],
) -> None:
    """Writes a run's state into the existing `folder`, the manifest last.

    Args:
        folder: existing, best a fresh one of `write_folder_atomically`.
        weights: of the model, by name.
        optimizer: its state dictionary, of tensors and plain values.
        scheduler: anything with `state_dict` of the same kind.
        rng: `random_states` of each rank.
        extra: plain values (None, bool, int, float, str, list, tuple, dict) and tensors.

    Raises:
        ValueError: for a value that is neither plain nor a tensor.
    """
    parts = {
        "optimizer": dict(optimizer),
        "scheduler": scheduler.state_dict(),
        "rng": list(rng),
        "extra": dict(extra),
    }
    tensors: dict[str, Tensor] = {}
    (folder / _STATE).write_text(json.dumps(_encode(parts, "", tensors)), encoding="utf-8")
    _save_tensors(folder / _STATE_TENSORS, tensors)
    _save_tensors(folder / _WEIGHTS, weights)
    write_manifest(folder)


class Trained(Protocol):
    """What trains, with its optimizer; both as of whole parameters, however they lie in memory."""

    def weights(self) -> dict[str, Tensor]:
        """The model's tensors by name."""
        ...

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Puts back what `weights` gave."""
        ...

    def optimizer_state(self) -> dict[str, Any]:
        """The optimizer's state dictionary."""
        ...

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        """Puts back what `optimizer_state` gave."""
        ...


def load_checkpoint(
    folder: StrPath,
    *,
    trained: Trained,
    scheduler: Any,
    rank: int = 0,
    expected: Mapping[str, Any] | None = None,
    remedies: Mapping[str, str] | None = None,
    check: Callable[[Mapping[str, Any]], Any] = lambda extra: None,
) -> dict[str, Any]:
    """Restores what `save_state` saved, in place and to the last bit, and returns `extra`.

    Args:
        folder: of `save_state`.
        trained: a model of the same tensors (names, shapes, dtypes) as the saved one, on any device, and an optimizer
            of the same kind, over the same parameters in the same groups.
        scheduler: of the same kind.
        rank: of this process; takes the random states of its number, where there were as many.
        expected: entries that `extra` must have, such as the data's identity.
        remedies: what to do where an entry of that name is another.
        check: is given `extra`, and raises where it will not do.

    Raises:
        ValueError: for a missing, foreign, incomplete or damaged folder (the file is named), another model or
            optimizer, or an `extra` that is not as expected. Nothing in memory has changed then.
    """
    folder = Path(folder)
    verify_files(folder)
    weights = safetensors.torch.load_file(folder / _WEIGHTS)
    tensors = safetensors.torch.load_file(folder / _STATE_TENSORS)
    state = _decode(json.loads((folder / _STATE).read_text(encoding="utf-8")), tensors)
    extra: dict[str, Any] = state["extra"]
    check(extra)
    wanted = dict(expected or {})
    _compare(folder, "entry", _flat({key: extra.get(key) for key in wanted}), _flat(wanted), remedies)
    here = {name: _describe(tensor) for name, tensor in trained.weights().items()}
    _compare(folder, "tensor", {name: _describe(tensor) for name, tensor in weights.items()}, here)
    _compare(folder, "optimizer group", _groups(state["optimizer"]), _groups(trained.optimizer_state()))
    trained.load_weights(weights)
    trained.load_optimizer_state(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    if rank < len(state["rng"]):
        set_random_states(state["rng"][rank])
    return extra


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    for part in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
        yield from _tensors(part)


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
    """The states of this process's random number generators."""
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


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _groups(state: Mapping[str, Any]) -> dict[str, Any]:
    """What two optimizers must share: in each group the number of parameters and the names of the settings."""
    groups = enumerate(state["param_groups"])
    return {str(i): {"parameters": len(group["params"]), "settings": sorted(group)} for i, group in groups}


def _compare(
    folder: Path,
    what: str,
    saved: Mapping[str, Any],
    current: Mapping[str, Any],
    remedies: Mapping[str, str] | None = None,
) -> None:
    for name in [*current, *saved]:
        if saved.get(name) != current.get(name):
            remedy = "resume with the models, optimizer and data it was written with"
            raise ValueError(
                f"checkpoint {folder} is of another run: {what} {name} is {saved.get(name, 'absent')} in it and "
                f"{current.get(name, 'absent')} here; {(remedies or {}).get(name.partition('.')[0], remedy)}"
            )


def _flat(entries: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The leaves of nested mappings, under names such as policy.hidden_size."""
    flat: dict[str, Any] = {}
    for name, value in entries.items():
        nested = isinstance(value, Mapping) and value
        flat |= _flat(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": value}
    return flat
