"""A critic as a folder: the backbone as transformers saves it, and its head beside it.

For heads that a sequence classifier cannot hold, and for architectures without such a classifier. What writes a folder
all or nothing is not here (`export`).
"""

import json
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel, TaskType
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel

from alpaca_ppo.adapters.adapter_set import AdapterSet, adapter_tensors
from alpaca_ppo.adapters.files import is_adapter
from alpaca_ppo.models.actor_critic import Critic
from alpaca_ppo.models.critic_heads import CriticHead, make_head
from alpaca_ppo.models.policy import disable_dropout

HEAD_SETTINGS, HEAD_WEIGHTS = "critic_head.json", "critic_head.safetensors"


def is_critic_folder(name: str) -> bool:
    """Whether `name` is a folder that `load_critic` reads."""
    return (Path(name) / HEAD_SETTINGS).is_file()


def write_critic(folder: Path, head: CriticHead, backbone: PreTrainedModel) -> None:
    """Writes the head's kind, support and weights and `backbone` (the critic's own, or the policy's) into `folder`."""
    backbone.save_pretrained(folder)
    _write_head(folder, head)


def write_critic_adapter(folder: Path, adapters: AdapterSet, name: str, head: CriticHead) -> None:
    """Writes the adapter `name` of the policy's base and `head` into `folder`."""
    config = adapters.config_of(name)
    config.inference_mode = True
    config.base_model_name_or_path = adapters.model.config.name_or_path
    tensors = adapter_tensors(adapters, name)
    if head.kind == "scalar":
        # What PEFT writes for a sequence classifier whose head was trained beside the adapter.
        config.task_type = TaskType.SEQ_CLS
        config.modules_to_save = [*(config.modules_to_save or []), "score"]
        tensors["base_model.model.score.weight"] = head.get_parameter("weight").detach().cpu()
    else:
        _write_head(folder, head)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(str(folder))


def _write_head(folder: Path, head: CriticHead) -> None:
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
    how = {"dtype": torch.float32, "use_safetensors": True, "trust_remote_code": trust_remote_code}
    if is_adapter(folder):
        base = AutoModelForCausalLM.from_pretrained(PeftConfig.from_pretrained(folder).base_model_name_or_path, **how)
        backbone: Any = PeftModel.from_pretrained(base, folder).merge_and_unload().base_model
    else:
        backbone = AutoModel.from_pretrained(folder, **how)
    disable_dropout(backbone)
    return Critic(head, backbone)
