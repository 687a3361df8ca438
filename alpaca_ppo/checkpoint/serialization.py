"""Writes and reads a checkpoint, from which a run resumes as if it had never stopped.

Tensors are stored as safetensors, everything else as JSON, with a manifest of sizes and hashes; nothing is pickled. One
process writes. State other than weights, optimizer, schedule and random states is passed as `extra`. Finding and
deleting checkpoint folders is in `directory`, the models that `from_pretrained` loads in `export`.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import safetensors
import safetensors.torch
from torch import Tensor

from alpaca_ppo.atomic_io import StrPath, clean_leftovers, write_folder_atomically
from alpaca_ppo.checkpoint.directory import FILES, rotate_checkpoints, verify_files, write_manifest
from alpaca_ppo.distributed.random_states import check_random_states, set_random_states

_WEIGHTS, _STATE, _STATE_TENSORS = FILES
_PARTS = {"optimizer": dict, "scheduler": dict, "rng": list, "extra": dict}


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
    """Writes `folder` (`.../checkpoint-<step>`) atomically, then deletes the oldest checkpoints beyond the limit.

    Args:
        folder: of the checkpoint.
        weights: see `save_state`.
        optimizer: see `save_state`.
        scheduler: see `save_state`.
        rng: see `save_state`.
        extra: see `save_state`.
        save_total_limit: checkpoints to keep; None = all.
        best: a checkpoint that is never deleted.

    Raises:
        OSError: when the disk is full; the older checkpoints are intact.
    """
    folder = Path(folder)
    needed = sum(tensor.nbytes for tensor in _tensors([weights, optimizer]))
    with write_folder_atomically(folder, needed=needed) as tmp_dir:
        save_state(tmp_dir, weights=weights, optimizer=optimizer, scheduler=scheduler, rng=rng, extra=extra)
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
    """Writes a run's state into the existing `folder`; the manifest comes last.

    Args:
        folder: exists; usually a temporary one from `write_folder_atomically`.
        weights: of the model, by name.
        optimizer: its state dictionary.
        scheduler: the learning-rate schedule.
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


class Checkpointable(Protocol):
    """A model and its optimizer that exchange their state as unsharded tensors, however they are sharded."""

    def weights(self) -> dict[str, Tensor]:
        """The tensors of the model to save, by name."""
        ...

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Restores what `weights` returned."""
        ...

    def optimizer_state(self) -> dict[str, Any]:
        """The optimizer's state dictionary."""
        ...

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        """Restores what `optimizer_state` returned."""
        ...


def load_checkpoint(
    folder: StrPath,
    *,
    trained: Checkpointable,
    scheduler: Any,
    rank: int = 0,
    check: Callable[[Mapping[str, Any]], Any] = lambda extra: None,
) -> dict[str, Any]:
    """Restores a checkpoint in place, bit for bit, and returns its `extra`.

    Args:
        folder: of the checkpoint.
        trained: a model with the same tensors (names, shapes, dtypes) as the saved one, on any device, and an optimizer
            of the same kind over the same parameter groups.
        scheduler: of the same kind as the saved one.
        rank: of this process. It gets the random states of the same rank, if the saved run had that many.
        check: called with `extra` before anything is restored; raises to reject the checkpoint.

    Raises:
        ValueError: for a folder that is missing, incomplete, damaged or not a checkpoint (names the file and what is
            wrong in it), and for another model or optimizer. Nothing has been restored then.
    """
    folder = Path(folder)
    verify_files(folder)
    weights, tensors = _read_tensors(folder / _WEIGHTS), _read_tensors(folder / _STATE_TENSORS)
    state = _read_state(folder / _STATE, tensors)
    extra: dict[str, Any] = state["extra"]
    check(extra)
    here = {name: _describe(tensor) for name, tensor in trained.weights().items()}
    _compare(folder, "tensor", {name: _describe(tensor) for name, tensor in weights.items()}, here)
    _compare(folder, "optimizer group", _groups(state["optimizer"]), _groups(trained.optimizer_state()))
    trained.load_weights(weights)
    trained.load_optimizer_state(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    if rank < len(state["rng"]):
        set_random_states(state["rng"][rank])
    return extra


def load_weights(folder: StrPath, trained: Checkpointable) -> None:
    """Restores the weights of a checkpoint in place, and nothing else.

    Args:
        folder: of the checkpoint.
        trained: a model with the same tensors (names, shapes, dtypes) as the saved one, on any device.

    Raises:
        ValueError: as `load_checkpoint`.
    """
    folder = Path(folder)
    verify_files(folder, [_WEIGHTS])
    weights = _read_tensors(folder / _WEIGHTS)
    here = {name: _describe(tensor) for name, tensor in trained.weights().items()}
    _compare(folder, "tensor", {name: _describe(tensor) for name, tensor in weights.items()}, here)
    trained.load_weights(weights)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    for part in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
        yield from _tensors(part)


def _save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    seen: set[int] = set()
    separate = {}
    for name, tensor in tensors.items():
        # safetensors rejects tensors that share a storage, even views that do not overlap.
        pointer = tensor.untyped_storage().data_ptr()
        dense = tensor.contiguous()
        separate[name] = dense.clone() if pointer in seen else dense
        seen.add(pointer)
    safetensors.torch.save_file(separate, path)


def _encode(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """`value` as JSON. Tensors are moved to `tensors` under their path; tuples and dictionaries are tagged."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        tensors[path] = value
        return {"__tensor__": path}
    if isinstance(value, list | tuple):
        entries = [_encode(entry, f"{path}/{i}", tensors) for i, entry in enumerate(value)]
        return entries if isinstance(value, list) else {"__tuple__": entries}
    if isinstance(value, Mapping):
        # The index keeps paths unique: one dictionary may have both 1 and "1" as keys.
        return {
            "__dict__": [
                [_encode(key, "", {}), _encode(entry, f"{path}/{i}.{key}", tensors)]
                for i, (key, entry) in enumerate(value.items())
            ]
        }
    raise ValueError(
        f"a checkpoint cannot hold {path} = {value!r}, a {type(value).__name__}; use plain values or tensors"
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


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load_file(path)
    except safetensors.SafetensorError as error:
        raise _unreadable(path, str(error)) from error


def _read_state(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The parts that `save_state` wrote to `path`, each of the kind that it wrote.

    Raises:
        ValueError: if the file holds anything else.
    """
    try:
        state = _decode(json.loads(path.read_text(encoding="utf-8")), tensors)
    except RecursionError as error:
        raise _unreadable(path, "its JSON is nested too deeply") from error
    except (ValueError, TypeError, KeyError) as error:
        raise _unreadable(path, f"{type(error).__name__}: {error}") from error
    if not isinstance(state, dict):
        raise _unreadable(path, f"it holds a {type(state).__name__} instead of a dictionary")
    for name, kind in _PARTS.items():
        if not isinstance(state.get(name), kind):
            found = f"a {type(state[name]).__name__} instead of a {kind.__name__}" if name in state else "missing"
            raise _unreadable(path, f"its entry {name} is {found}")
    for name in ("state", "param_groups"):
        if name not in state["optimizer"]:
            raise _unreadable(path, f"its entry optimizer has no {name}")
    if not state["rng"]:
        raise _unreadable(path, "its entry rng is empty; it has the random states of each rank")
    for rank, states in enumerate(state["rng"]):
        try:
            check_random_states(states)
        except Exception as error:
            problem = f"its entry rng has no random states of rank {rank} ({type(error).__name__}: {error})"
            raise _unreadable(path, problem) from error
    return state


def _unreadable(path: Path, problem: str) -> ValueError:
    return ValueError(
        f"{path} is not the state of a run: {problem}; resume from another checkpoint, or start a new run in another "
        "output_dir"
    )


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _groups(state: Mapping[str, Any]) -> dict[str, Any]:
    """What two optimizers must have in common: the number of parameters and the setting names of each group."""
    groups = enumerate(state["param_groups"])
    return {str(i): {"parameters": len(group["params"]), "settings": sorted(group)} for i, group in groups}


def _compare(folder: Path, what: str, saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    for name in [*current, *saved]:
        if saved.get(name) != current.get(name):
            raise ValueError(
                f"checkpoint {folder} does not match this run: {what} {name} is {saved.get(name, 'absent')} in the "
                f"checkpoint and {current.get(name, 'absent')} here; resume with the models and the optimizer of the "
                "checkpoint's run"
            )
