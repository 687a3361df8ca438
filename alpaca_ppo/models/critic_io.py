"""A critic as a folder: the backbone as transformers saves it, and beside it the settings and weights of its head.

This form is for heads that a sequence classifier cannot hold, and for architectures without such a classifier.
`checkpoint.export` calls it and makes the writing atomic.
"""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import TaskType
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel

from alpaca_ppo.adapters.adapter_set import AdapterSet, adapter_tensors, load_peft_model
from alpaca_ppo.adapters.files import adapter_base, is_adapter, lora_config, read_adapter
from alpaca_ppo.damaged_files import loading
from alpaca_ppo.models.actor_critic import Critic
from alpaca_ppo.models.critic_head import CriticHead, build_head
from alpaca_ppo.models.loading import load_complete
from alpaca_ppo.models.policy import disable_dropout
from alpaca_ppo.registry import CRITIC_HEADS
from alpaca_ppo.remote_code import has_remote_code

HEAD_SETTINGS, HEAD_WEIGHTS = "critic_head.json", "critic_head.safetensors"
_REMEDY = "copy the folder again from the run that saved it (final/value)"


def is_critic_folder(name: str) -> bool:
    """Whether `name` is a folder that `load_critic` reads."""
    return (Path(name) / HEAD_SETTINGS).is_file()


def write_critic(folder: Path, head: CriticHead, backbone: PreTrainedModel) -> None:
    """Writes `backbone` (the critic's own, or the policy's) and the kind, settings and weights of `head` into
    `folder`.
    """
    if has_remote_code(backbone):
        # Its code is saved too, under the class that `load_critic` loads.
        backbone.register_for_auto_class("AutoModel")
    backbone.save_pretrained(folder)
    _write_head(folder, head)


def write_critic_adapter(folder: Path, adapters: AdapterSet, name: str, head: CriticHead) -> None:
    """Writes the adapter `name` on the policy's base, and `head`, into `folder`."""
    config = adapters.config_of(name)
    config.inference_mode = True
    config.base_model_name_or_path = adapters.model.config.name_or_path
    tensors = adapter_tensors(adapters, name)
    score = head.score_weight()
    if score is not None:
        # What PEFT writes for a sequence classifier whose `score` was trained together with the adapter.
        config.task_type = TaskType.SEQ_CLS
        config.modules_to_save = [*(config.modules_to_save or []), "score"]
        tensors["base_model.model.score.weight"] = score.detach().cpu()
    else:
        _write_head(folder, head)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(str(folder))


def _write_head(folder: Path, head: CriticHead) -> None:
    save_file({name: tensor.cpu().contiguous() for name, tensor in head.state_dict().items()}, folder / HEAD_WEIGHTS)
    settings = {**head.spec(), "hidden_size": head.hidden_size}
    (folder / HEAD_SETTINGS).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def load_critic(
    folder: str,
    *,
    risk_level: str | float = "neutral",
    trust_remote_code: bool = False,
    arguments: Mapping[str, Any] | None = None,
) -> Critic:
    """The critic that a run saved in `folder` (`final/value`), in float32, dropout off.

    `critic.head(critic.backbone(input_ids).last_hidden_state.flatten(0, 1))` gives values, means and predictions.

    Args:
        folder: of the critic.
        risk_level: what the head reads as the value; see `CriticHead`. The run's own level is not stored.
        trust_remote_code: run code that comes with the model.
        arguments: further ones of `from_pretrained`, for the backbone.

    Raises:
        ValueError: when `folder` does not hold a critic of this form or is damaged, when its kind is not registered,
            when it comes with code that it may not run, for a text that is no risk level, and for a risk level of a
            critic that has none.
    """
    if not is_critic_folder(folder):
        raise ValueError(
            f"{folder} has no {HEAD_SETTINGS}; a scalar critic is a sequence classifier, load it with "
            "AutoModelForSequenceClassification, or give it as value_model"
        )
    head = load_head(folder)
    if risk_level != "neutral" and not head.distributional:
        raise ValueError(
            f"risk_level is {risk_level!r}, but the {head.kind!r} critic of {folder} has no distribution to read it "
            "from; leave it out"
        )
    head.risk_level = risk_level
    own = dict(arguments or {})
    if is_adapter(folder):
        field = f"the critic {folder}"
        base_name = adapter_base(field, lora_config(read_adapter(field, folder), field))
        base = load_complete(AutoModelForCausalLM, base_name, trust_remote_code=trust_remote_code, **own)
        backbone: Any = load_peft_model(field, base, folder).merge_and_unload().base_model
    else:
        backbone = load_complete(AutoModel, folder, trust_remote_code=trust_remote_code, **own)
    disable_dropout(backbone)
    return Critic(head, backbone)


def load_head(folder: str) -> CriticHead:
    """The head of the critic in `folder` (`is_critic_folder`), in float32.

    Raises:
        ValueError: when it is damaged, or its kind is not registered.
    """
    path = Path(folder) / HEAD_SETTINGS
    with loading(f"no critic can be loaded from {folder!r}", folder, _REMEDY):
        settings = dict(json.loads(path.read_text(encoding="utf-8")))
    if missing := sorted({"kind", "hidden_size"} - settings.keys()):
        raise ValueError(f"{path} has no {' and no '.join(missing)}; {_REMEDY}")
    kind, hidden_size = settings.pop("kind"), settings.pop("hidden_size")
    if type(hidden_size) is not int or hidden_size < 1:
        raise ValueError(f"{path} has hidden_size {hidden_size!r}, which must be an integer of 1 or more; {_REMEDY}")
    if not isinstance(kind, str) or kind not in CRITIC_HEADS.names:
        raise ValueError(
            f"{folder} holds a critic of the kind {kind!r}, which is not registered ({', '.join(CRITIC_HEADS.names)} "
            "are); name the file that registers it in import_modules, or import it before"
        )
    head_class: type[CriticHead] = CRITIC_HEADS.get(kind)
    with loading(f"{path} has settings that a critic of the kind {kind!r} cannot have", folder, _REMEDY):
        head = build_head(partial(head_class.from_settings, settings), hidden_size, torch.float32)
    weights = Path(folder) / HEAD_WEIGHTS
    with loading(f"{weights} cannot be loaded as the weights of the critic's head", folder, _REMEDY):
        head.load_state_dict(load_file(weights))
    return head
