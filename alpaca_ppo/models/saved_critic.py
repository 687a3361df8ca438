"""A critic as a folder (`final/value`), and what a new critic can start from (`value_model`): such a folder, a sequence
classifier with one label, or a causal language model of any size.

The folder holds the critic's backbone as transformers saves it, or its adapter as PEFT does (of a `shared` or `cached`
critic the policy's), the head, and the reader of a cached one. `checkpoint.export` makes the writing atomic.
"""

import copy
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel

from alpaca_ppo.adapters.adapter_set import POLICY, VALUE, describe, load_peft_model, warn_of_other_base
from alpaca_ppo.adapters.files import WEIGHTS, adapter_base, is_adapter, read_value_adapter, weights_file
from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.models.actor_critic import ActorCritic, Critic
from alpaca_ppo.models.critic_heads import CriticHead, build_head
from alpaca_ppo.models.loading import ModelSource, is_causal_lm, load_causal_lm, load_complete, load_sequence_classifier
from alpaca_ppo.models.policy import Policy, check_architecture, disable_dropout
from alpaca_ppo.models.state_reader import StateReader
from alpaca_ppo.registry import CRITIC_HEADS
from alpaca_ppo.saved_models import has_remote_code, loading

HEAD_SETTINGS, HEAD_WEIGHTS = "critic_head.json", "critic_head.safetensors"
READER_SETTINGS, READER_WEIGHTS = "critic_reader.json", "critic_reader.safetensors"
_REMEDY = "copy the folder again from the run that saved it (final/value)"


def is_critic_folder(name: str) -> bool:
    """Whether `name` is a folder that `write_critic` wrote."""
    return (Path(name) / HEAD_SETTINGS).is_file()


def has_reader(name: str) -> bool:
    """Whether `name` is a folder that `write_critic` wrote of a cached critic."""
    return (Path(name) / READER_SETTINGS).is_file()


def has_adapter(model: Any) -> bool:
    """Whether `model` is a model in memory with adapters of PEFT, or the name of such an adapter."""
    return isinstance(model, PeftModel) or (isinstance(model, str) and is_adapter(model))


def name_of(model: Any) -> str:
    """A model's name for errors: its class if it is in memory."""
    return model if isinstance(model, str) else type(model).__name__


def write_critic(folder: Path, actor_critic: ActorCritic) -> None:
    """Writes the critic's head and any reader into `folder`, and the backbone or adapter whose states they read."""
    policy, critic = actor_critic.policy, actor_critic.critic
    assert critic is not None
    if critic.backbone is None and policy.adapters is not None:
        name = VALUE if critic.has_adapter else POLICY
        config = policy.adapters.config_of(name)
        config.inference_mode = True
        config.base_model_name_or_path = policy.model.config.name_or_path
        config.save_pretrained(str(folder))
        save_file(policy.adapters.tensors_of(name), folder / WEIGHTS, metadata={"format": "pt"})
    else:
        backbone: Any = policy.model.base_model if critic.backbone is None else critic.backbone
        if has_remote_code(backbone):
            # Its code is saved too, under the class that `load_critic` loads.
            backbone.register_for_auto_class("AutoModel")
        backbone.save_pretrained(folder)
    _write_part(critic.head, critic.head.spec(), folder, HEAD_SETTINGS, HEAD_WEIGHTS)
    if critic.reader is not None:
        _write_part(critic.reader, critic.reader.settings(), folder, READER_SETTINGS, READER_WEIGHTS)


def _write_part(part: nn.Module, settings: Mapping[str, Any], folder: Path, settings_file: str, file: str) -> None:
    save_file({name: tensor.cpu().contiguous() for name, tensor in part.state_dict().items()}, folder / file)
    (folder / settings_file).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def load_critic(folder: str, *, trust_remote_code: bool = False, arguments: Mapping[str, Any] | None = None) -> Critic:
    """The critic that a run saved in `folder` (`final/value`), in float32, dropout off. Its risk level is not stored:
    set `critic.head.risk_level`. `arguments` are further ones of the backbone's `from_pretrained`.

    `critic.head(critic.backbone(input_ids).last_hidden_state.flatten(0, 1))` gives values, means and predictions. A
    `cached` critic reads responses beside their policy: `ActorCritic(Policy(model), critic)` gives their values.

    Raises:
        ValueError: when `folder` does not hold a critic or is damaged, when its kind is not registered, and when it
            comes with code without `trust_remote_code`.
    """
    head = _load_head(folder)
    load: Any = partial(load_complete, trust_remote_code=trust_remote_code, **(arguments or {}))
    if is_adapter(folder):
        base = load(AutoModelForCausalLM, adapter_base(f"value_model {folder}", read_value_adapter(folder)))
        backbone: Any = load_peft_model("value_model", base, folder).merge_and_unload().base_model
    else:
        backbone = load(AutoModel, folder)
    disable_dropout(backbone)
    return Critic(head, backbone, reader=_load_reader(folder, backbone) if has_reader(folder) else None)


def _load_head(folder: str) -> CriticHead:
    """The head in a critic's folder; raises as `load_critic`."""
    with loading(f"no critic can be loaded from {folder!r}", folder, _REMEDY):
        settings = dict(json.loads((Path(folder) / HEAD_SETTINGS).read_text(encoding="utf-8")))
        kind, hidden_size = settings.pop("kind"), settings.pop("hidden_size")
    if kind not in CRITIC_HEADS.names:
        raise ValueError(f"{folder} has a critic {kind!r}, which is not registered; name its file in import_modules")
    with loading(f"no critic {kind!r} can be loaded from {folder!r}", folder, _REMEDY):
        head = build_head(partial(CRITIC_HEADS.get(kind), **settings), hidden_size, torch.float32)
        head.load_state_dict(load_file(Path(folder) / HEAD_WEIGHTS))
    return head


def _load_reader(folder: str, backbone: PreTrainedModel) -> StateReader:
    """The reader in a critic's folder that `has_reader`, for the layers of `backbone`; raises as `load_critic`."""
    with loading(f"no critic can be loaded from {folder!r}", folder, _REMEDY):
        reader = StateReader(backbone, **json.loads((Path(folder) / READER_SETTINGS).read_text(encoding="utf-8")))
        reader.load_state_dict(load_file(Path(folder) / READER_WEIGHTS))
    return reader


def load_value_model(value_model: ModelSource, policy: PreTrainedModel, args: PPOConfig) -> Any:
    """The `Critic`, sequence classifier or language model that a critic with a backbone starts from, trainable. It
    shares no weights with another model.

    Raises:
        ValueError: for an adapter, a vocabulary smaller than the policy's, and as `load_critic`, `load_causal_lm`,
            `load_sequence_classifier` and `check_architecture`.
    """
    options: Any = {"trust_remote_code": args.trust_remote_code, "arguments": args.model_init_kwargs}
    if has_adapter(value_model):
        remedy = "set critic_layout: adapter, or merge it into its base"
        raise ValueError(f"value_model {name_of(value_model)!r} is an adapter; {remedy}")
    if isinstance(value_model, str) and is_critic_folder(value_model):
        start: Any = load_critic(value_model, **options)
    else:
        # The critic is trained; a reward model or policy that is the same object must not change.
        source: Any = value_model if isinstance(value_model, str) else copy.deepcopy(value_model)
        if is_causal_lm(source, trust_remote_code=args.trust_remote_code):
            start = load_causal_lm(source, **options)
            check_architecture(start, "critic")
        else:
            start = load_sequence_classifier(source, **options)
    language_model: Any = start.backbone if isinstance(start, Critic) else start
    vocabulary, needed = language_model.config.get_text_config().vocab_size, policy.config.get_text_config().vocab_size
    # Larger is fine: models of one tokenizer pad their embeddings differently.
    if vocabulary < needed:
        problem = f"the critic's vocabulary ({vocabulary}) is smaller than the policy's ({needed})"
        raise ValueError(f"{problem}; start it from another")
    return start.requires_grad_(True)


def start_on_policy(built: ActorCritic, value_model: ModelSource, args: PPOConfig) -> None:
    """Loads the critic in the folder `value_model`, its head, reader and any adapter, into that of `built`, which has
    no backbone. A `shared` or `cached` critic needs the policy that it was saved with.

    Raises:
        ValueError: when `value_model` is not a critic of the same layout, has another head, or adapts or reads another
            policy than that of `built`.
    """
    assert built.critic is not None and built.critic.backbone is None
    adapters, layout = built.policy.adapters, built.critic.layout
    if not (
        isinstance(value_model, str)
        and is_critic_folder(value_model)
        and is_adapter(value_model) == (adapters is not None)
        and has_reader(value_model) == (built.critic.reader is not None)
    ):
        run = f"a run with critic_layout {layout!r} and {'adapters' if adapters else 'no adapters'}"
        problem = f"value_model {name_of(value_model)!r} is not the final/value of {run}"
        raise ValueError(f"{problem}; use one, or leave value_model out")
    head = _load_head(value_model)
    built.critic.head.check_like(head)
    built.critic.head.load_state_dict(head.state_dict())
    if built.critic.reader is not None:
        reader = _load_reader(value_model, built.policy.model)
        built.critic.reader.check_like(reader)
        built.critic.reader.load_state_dict(reader.state_dict())
    if adapters is not None and built.critic.has_adapter:
        adapters.load(VALUE, "value_model", value_model, read_value_adapter(value_model), trainable=True)
    elif different := _differences_from_policy(value_model, built.policy, args):
        problem = f"value_model {value_model!r} reads another policy ({different[0]} differs)"
        raise ValueError(f"{problem}; take final/policy beside it")


def _differences_from_policy(value_model: str, policy: Policy, args: PPOConfig) -> list[str]:
    """Names of what differs between `policy` and the one whose states a saved critic reads."""
    if policy.adapters is None:
        saved: Any = load_value_model(value_model, policy.model, args).backbone
        return _different_tensors(saved.state_dict(), policy.model.base_model.state_dict())
    config = read_value_adapter(value_model)
    warn_of_other_base(value_model, config, policy.adapters.model)
    saved_adapter = load_file(weights_file("value_model", value_model))
    different = _different_tensors(saved_adapter, policy.adapters.tensors_of(POLICY))
    if describe(config) != describe(policy.adapters.config_of(POLICY)):
        different.append("the adapter's configuration")
    return different


def _different_tensors(saved: Mapping[str, Tensor], policy: Mapping[str, Tensor]) -> list[str]:
    """The names of tensors that are not in both, or not equal."""
    return [key for key in [*policy, *saved] if not _equal(saved.get(key), policy.get(key))]


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two tensors are equal in the narrower of their dtypes, in which the models may have been saved."""
    if one is None or other is None:
        return False
    dtype = min(one.dtype, other.dtype, key=lambda kind: kind.itemsize)
    return torch.equal(one.cpu().to(dtype), other.cpu().to(dtype))
