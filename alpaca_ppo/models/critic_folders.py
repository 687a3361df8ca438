"""A critic as a folder: the backbone as transformers saves it, and its head beside it.

For heads that a sequence classifier cannot hold, and for architectures without such a classifier. What writes a folder
all or nothing is not here (`export`).
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, PreTrainedModel

from alpaca_ppo.models.critic_heads import Critic, CriticHead, make_head
from alpaca_ppo.models.policy import disable_dropout

HEAD_SETTINGS, HEAD_WEIGHTS = "critic_head.json", "critic_head.safetensors"


def is_critic_folder(name: str) -> bool:
    """Whether `name` is a folder that `load_critic` reads."""
    return (Path(name) / HEAD_SETTINGS).is_file()


def write_critic(folder: Path, head: CriticHead, backbone: PreTrainedModel) -> None:
    """Writes the head's kind, support and weights and `backbone` (the critic's own, or the policy's) into `folder`."""
    backbone.save_pretrained(folder)
    save_file({name: tensor.cpu().contiguous() for name, tensor in head.state_dict().items()}, folder / HEAD_WEIGHTS)
    settings = {**head.settings(), "hidden_size": head.hidden_size}
    (folder / HEAD_SETTINGS).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def load_critic(folder: str, *, risk_level: float | None = None, trust_remote_code: bool = False) -> Critic:
    """The critic that a run left in `folder` (`final/value`), in float32, dropout off; its head reads `risk_level`.

    `critic.head(critic.backbone(input_ids).last_hidden_state.flatten(0, 1))` gives values, means and predictions.

    Raises:
        ValueError: when `folder` holds no critic of this form.
    """
    if not is_critic_folder(folder):
        raise ValueError(
            f"{folder} has no {HEAD_SETTINGS}; a scalar critic is a sequence classifier, load it with "
            "AutoModelForSequenceClassification, or give it as value_model"
        )
    settings = json.loads((Path(folder) / HEAD_SETTINGS).read_text(encoding="utf-8"))
    if settings["kind"] != "scalar":
        settings["risk_level"] = risk_level
    head = make_head(**settings)
    head.load_state_dict(load_file(Path(folder) / HEAD_WEIGHTS))
    backbone = AutoModel.from_pretrained(
        folder, dtype=torch.float32, use_safetensors=True, trust_remote_code=trust_remote_code
    )
    disable_dropout(backbone)
    return Critic(head, backbone)
