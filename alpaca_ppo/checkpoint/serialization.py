"""`Checkpoint`: what a checkpoint holds, and how it is written, verified and read.

Which checkpoints a run has is in `directory`, the models that `from_pretrained` loads in `export`.
"""

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from alpaca_ppo.atomic_io import committed_path, write_folder_atomically
from alpaca_ppo.checkpoint.compatibility import differences
from alpaca_ppo.config.fields import shown
from alpaca_ppo.distributed.engine import Engine
from alpaca_ppo.distributed.random_states import set_random_states
from alpaca_ppo.models import ActorCritic

FORMAT = {"format": "alpaca_ppo checkpoint", "version": 5}
# `torch.load(weights_only=True)` reads the second, which holds everything but the weights.
_WEIGHTS, _STATE = "model.safetensors", "state.pt"
FILES = (_WEIGHTS, _STATE)
# No older checkpoint is chosen automatically, because that would silently lose steps.
_REMEDY = "set resume_from_checkpoint to another checkpoint, or start a new run"


@dataclass
class Checkpoint:
    """Tensors and plain values (None, bool, int, float, str, list, tuple, dict)."""

    weights: dict[str, Tensor]  # `Engine.weights`
    optimizer: dict[str, Any]  # `Engine.optimizer_state`
    scheduler: dict[str, Any]
    rng: list[dict[str, Any]]  # `random_states` of each rank
    components: dict[str, Any]  # the state of each `manager.Component`, by name
    best: dict[str, Any]  # the state of `manager.BestCheckpoint`
    identity: dict[str, Any]  # `compatibility.run_identity`, which a resumed run must share

    def write(self, folder: Path) -> None:
        """Writes `folder` atomically, on one process. Raises an OSError on a full disk, a ValueError as `_stored`."""
        state = {f.name: _stored(getattr(self, f.name), f.name) for f in fields(self) if f.name != "weights"}
        with write_folder_atomically(folder) as tmp_dir:
            with open(tmp_dir / _STATE, "wb") as file:
                torch.save(state, file)
            save_file({name: tensor.contiguous() for name, tensor in self.weights.items()}, tmp_dir / _WEIGHTS)
            write_manifest(tmp_dir, stop_tokens=self.identity.get("policy", {}).get("stop_tokens", ()))

    @classmethod
    def read(cls, folder: Path) -> "Checkpoint":
        """Reads a checkpoint; raises as `verify_files`."""
        verify_files(folder)
        committed = committed_path(folder)
        with open(committed / _STATE, "rb") as file:
            state = torch.load(file, map_location="cpu", weights_only=True)
        return cls(load_file(committed / _WEIGHTS), **state)

    def restore(self, engine: Engine, scheduler: Any, rank: int) -> None:
        """Restores weights, optimizer and schedule in place, and the random states of `rank` if the run had it."""
        engine.load_weights(self.weights)
        engine.load_optimizer_state(self.optimizer)
        scheduler.load_state_dict(self.scheduler)
        if rank < len(self.rng):
            set_random_states(self.rng[rank])


def write_manifest(folder: Path, *, stop_tokens: Sequence[int] = ()) -> None:
    """Writes manifest.json with sizes and hashes of `FILES`, all of which must be in `folder`, and the ids that end the
    policy's answers.
    """
    files = {name: {"bytes": (folder / name).stat().st_size, "sha256": _hash(folder / name)} for name in FILES}
    manifest = FORMAT | {"files": files, "stop_tokens": stop_tokens}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2), encoding="utf-8")


def verify_files(folder: Path, hashed: Collection[str] = FILES) -> None:
    """Checks the sizes of all files of a checkpoint, and the hashes of those in `hashed`. Raises a ValueError that
    names the file, for a folder that is missing, incomplete, damaged or not a checkpoint.
    """
    committed = committed_path(folder)
    if not committed.is_dir():
        raise ValueError(f"checkpoint {folder} is no folder; name an existing checkpoint-<step> folder")
    try:
        manifest = json.loads((committed / "manifest.json").read_text(encoding="utf-8"))
        written_format = {key: manifest[key] for key in FORMAT}
        entries = {name: manifest["files"][name] for name in FILES}
        files = {name: (int(entry["bytes"]), str(entry["sha256"])) for name, entry in entries.items()}
    except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise ValueError(f"{folder} has no readable manifest.json of a checkpoint; {_REMEDY}") from error
    if written_format != FORMAT:
        found = f"{folder}/manifest.json has {shown(written_format)}, not {FORMAT}"
        raise ValueError(f"{found}; install the version that wrote it")
    for name, (size, digest) in files.items():
        path, problem = committed / name, ""
        if not path.is_file():
            problem = "is missing"
        elif (size_now := path.stat().st_size) != size:
            problem = f"is damaged: it has {size_now} bytes instead of {size}"
        elif name in hashed and _hash(path) != digest:
            problem = "is damaged: its content has changed"
        if problem:
            raise ValueError(f"checkpoint file {folder / name} {problem}; {_REMEDY}")


def _hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Reads only the weights of a checkpoint; raises as `verify_files`."""
    verify_files(folder, [_WEIGHTS])
    return load_file(committed_path(folder) / _WEIGHTS)


def check_fits(folder: Path, saved: Checkpoint, engine: Engine) -> None:
    """Raises a ValueError that names the first difference between the checkpoint `saved`, read from `folder`, and the
    engine: in names, shapes and types of weights, or in the optimizer's groups.
    """
    _check_same(folder, "tensor", _shapes_and_types(saved.weights), _shapes_and_types(engine.weights()))
    _check_same(folder, "optimizer group", _groups(saved.optimizer), _groups(engine.optimizer_state()))


@torch.no_grad()
def restore_models(folder: Path, actor_critic: ActorCritic) -> None:
    """Copies the weights of the checkpoint `folder` into `actor_critic`, built as in the run that wrote it, and the
    tokens that end an answer. Raises as `verify_files`, and a ValueError for weights of other models.
    """
    saved = read_weights(folder)
    targets = actor_critic.state_dict()
    # Frozen weights are not saved, and the model may have been loaded in another type.
    saved_shapes = {name: tuple(tensor.shape) for name, tensor in saved.items()}
    target_shapes = {name: tuple(tensor.shape) for name, tensor in targets.items() if name in saved}
    _check_same(folder, "tensor", saved_shapes, target_shapes)
    for name, tensor in saved.items():
        targets[name].copy_(tensor)
    manifest = json.loads((committed_path(folder) / "manifest.json").read_text(encoding="utf-8"))
    actor_critic.policy.stop_token_ids = tuple(manifest["stop_tokens"])


def checkpoint_bytes(trained: Iterable[Tensor], *, adamw: bool) -> int:
    """The least number of bytes of a checkpoint: the `trained` parameters in float32 or wider and, with `adamw`, two
    moments of each. Without `adamw`, that of the final models.
    """
    weights = sum(tensor.numel() * max(4, tensor.element_size()) for tensor in trained)
    return weights * (3 if adamw else 1)


def _stored(value: Any, name: str) -> Any:
    """`value` as plain values and tensors, which `torch.load(weights_only=True)` can read. Raises a ValueError for any
    other object in it, where `name` is the place of `value`.
    """
    if value is None or type(value) is bytes:
        return value
    if isinstance(value, str):
        # As below; str(value) would be the name of an Enum.
        return str.__str__(value)
    for kind in (bool, int, float):
        if isinstance(value, kind):
            # NumPy's float64 is a float, but torch.load refuses it.
            return kind(value)
    if isinstance(value, Tensor):
        # torch.save would write the whole storage of a view.
        return value.detach().clone() if value.untyped_storage().nbytes() > value.nbytes else value.detach()
    if isinstance(value, list | tuple):
        entries = [_stored(entry, f"{name}/{i}") for i, entry in enumerate(value)]
        return entries if isinstance(value, list) else tuple(entries)
    if isinstance(value, Mapping):
        return {_stored(key, f"{name}/{key}"): _stored(entry, f"{name}/{key}") for key, entry in value.items()}
    raise ValueError(f"{name} is {value!r}, which a checkpoint cannot hold; use plain values or tensors")


def _shapes_and_types(weights: Mapping[str, Tensor]) -> dict[str, str]:
    return {name: f"{t.dtype} {tuple(t.shape)}".removeprefix("torch.") for name, t in weights.items()}


def _groups(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    groups = enumerate(optimizer["param_groups"])
    return {str(i): {"parameters": len(group["params"]), "settings": sorted(group)} for i, group in groups}


def _check_same(folder: Path, what: str, saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    if first := next(differences(what, saved, here), None):
        raise ValueError(f"checkpoint {folder} does not match this run: {first}; use its run's models and optimizer")
