"""`Checkpoint`: all that a run resumes from, as if it had never stopped, and its files.

The model's weights are stored as safetensors, everything else in a file that `torch.load(weights_only=True)` reads,
with a manifest of sizes and hashes. One process writes. Finding, verifying and deleting checkpoint folders is in
`directory`, the models that `from_pretrained` loads in `export`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from alpaca_ppo.atomic_io import write_folder_atomically
from alpaca_ppo.checkpoint.compatibility import differences
from alpaca_ppo.checkpoint.directory import FILES, verify_files, write_manifest
from alpaca_ppo.distributed.engine import Engine
from alpaca_ppo.distributed.random_states import set_random_states
from alpaca_ppo.models import ActorCritic

_WEIGHTS, _STATE = FILES


@dataclass
class Checkpoint:
    """What a checkpoint holds: tensors and plain values (None, bool, int, float, str, list, tuple, dict)."""

    weights: dict[str, Tensor]
    """The tensors of the model, by name."""
    optimizer: dict[str, Any]
    scheduler: dict[str, Any]
    rng: list[dict[str, Any]]
    """`random_states` of each rank."""
    components: dict[str, Any]
    """The state of each other part of the run, by name."""
    best: dict[str, Any]
    """The best checkpoint so far."""
    identity: dict[str, Any]
    """What a resumed run must share with the one that wrote this."""

    def write(self, folder: Path) -> None:
        """Writes the checkpoint's `folder` atomically.

        Raises:
            ValueError: for a value that is neither plain nor a tensor.
            OSError: when the disk is full.
        """
        state = {f.name: _stored(getattr(self, f.name), f.name) for f in fields(self) if f.name != "weights"}
        with write_folder_atomically(folder) as tmp_dir:
            with open(tmp_dir / _STATE, "wb") as file:
                torch.save(state, file)
            save_file({name: tensor.contiguous() for name, tensor in self.weights.items()}, tmp_dir / _WEIGHTS)
            write_manifest(tmp_dir)

    @classmethod
    def read(cls, folder: Path) -> "Checkpoint":
        """Reads a checkpoint that is whole.

        Raises:
            ValueError: for a folder that is missing, incomplete, damaged or not a checkpoint; names the file.
        """
        verify_files(folder)
        with open(folder / _STATE, "rb") as file:
            state = torch.load(file, map_location="cpu", weights_only=True)
        return cls(load_file(folder / _WEIGHTS), **state)

    def restore(self, trained: Engine, scheduler: Any, rank: int) -> None:
        """Restores weights, optimizer and schedule in place, and the random states of `rank` if it was there."""
        trained.load_weights(self.weights)
        trained.load_optimizer_state(self.optimizer)
        scheduler.load_state_dict(self.scheduler)
        if rank < len(self.rng):
            set_random_states(self.rng[rank])


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The weights of a checkpoint, without the rest.

    Raises:
        ValueError: as `Checkpoint.read`.
    """
    verify_files(folder, [_WEIGHTS])
    return load_file(folder / _WEIGHTS)


def check_fits(folder: Path, saved: Checkpoint, engine: Engine) -> None:
    """Checks that the checkpoint `saved`, read from `folder`, has weights of the names, shapes and types of the
    engine's, and an optimizer state with the same number of parameters and names of settings in each group.

    Raises:
        ValueError: names the first difference.
    """

    def kinds(weights: Mapping[str, Tensor]) -> dict[str, str]:
        return {name: f"{t.dtype} {tuple(t.shape)}".removeprefix("torch.") for name, t in weights.items()}

    def groups(optimizer: Mapping[str, Any]) -> dict[str, Any]:
        found = enumerate(optimizer["param_groups"])
        return {str(i): {"parameters": len(group["params"]), "settings": sorted(group)} for i, group in found}

    _check_same(folder, "tensor", kinds(saved.weights), kinds(engine.weights()))
    _check_same(folder, "optimizer group", groups(saved.optimizer), groups(engine.optimizer_state()))


@torch.no_grad()
def restore_models(folder: Path, actor_critic: ActorCritic) -> None:
    """Copies the weights of the checkpoint `folder` into `actor_critic`, built as the run built it, without a trainer.

    Raises:
        ValueError: when the folder is not a complete checkpoint, or is one of other models.
    """
    saved, own = read_weights(folder), actor_critic.state_dict()
    # The model has what was frozen in the run too, and may have been loaded in another type.
    shapes = ({name: tuple(t.shape) for name, t in tensors.items() if name in saved} for tensors in (saved, own))
    _check_same(folder, "tensor", *shapes)
    for name, tensor in saved.items():
        own[name].copy_(tensor)


def checkpoint_bytes(trained: Iterable[Tensor], *, adamw: bool) -> int:
    """The least number of bytes that a checkpoint of the `trained` parameters has.

    The run trains in float32 or wider. AdamW (`adamw`) adds two moments for each weight; of another optimizer only the
    weights count, and the same number is what the final models need at least.
    """
    weights = sum(tensor.numel() * max(4, tensor.element_size()) for tensor in trained)
    return weights * (3 if adamw else 1)


def _stored(value: Any, name: str) -> Any:
    """`value` as it is saved: plain values and tensors. Of the memory that a tensor is a part of, only that part."""
    if value is None:
        return value
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            # Numbers of NumPy are floats too, but of a type that is not read again.
            return kind(value)
    if isinstance(value, Tensor):
        return value.detach().clone() if value.untyped_storage().nbytes() > value.nbytes else value.detach()
    if isinstance(value, list | tuple):
        entries = [_stored(entry, f"{name}/{i}") for i, entry in enumerate(value)]
        return entries if isinstance(value, list) else tuple(entries)
    if isinstance(value, Mapping):
        return {key: _stored(entry, f"{name}/{key}") for key, entry in value.items()}
    raise ValueError(
        f"a checkpoint cannot hold {name} = {value!r}, a {type(value).__name__}; use plain values or tensors"
    )


def _check_same(folder: Path, what: str, saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    if found := list(differences(what, saved, here)):
        raise ValueError(
            f"checkpoint {folder} does not match this run: {found[0]}; use the models and the optimizer of the "
            "checkpoint's run"
        )
