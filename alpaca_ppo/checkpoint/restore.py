"""The policy and critic of a checkpoint, without a trainer: `restore_models`."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from alpaca_ppo.atomic_io import StrPath
from alpaca_ppo.checkpoint.directory import FILES, verify_files
from alpaca_ppo.models import ActorCritic


@torch.no_grad()
def restore_models(folder: StrPath, actor_critic: ActorCritic) -> None:
    """Copies the weights of the checkpoint `folder` into `actor_critic`, built as the run built it.

    Raises:
        ValueError: when the folder is not a complete checkpoint, or is one of other models.
    """
    folder = Path(folder)
    verify_files(folder)
    saved, own = load_file(folder / FILES[0]), actor_critic.state_dict()
    strangers = [name for name, tensor in saved.items() if name not in own or own[name].shape != tensor.shape]
    if strangers:
        raise ValueError(
            f"{folder} is a checkpoint of other models: {len(strangers)} of its {len(saved)} tensors, such as "
            f"{strangers[0]}, are not in those that the run's configuration describes; export it with the "
            "configuration that it was trained with"
        )
    for name, tensor in saved.items():
        own[name].copy_(tensor)
