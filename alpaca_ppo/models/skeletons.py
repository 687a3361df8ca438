"""Models without weights, built from configurations: what a run will train, before anything is loaded."""

import copy
from typing import Any

import torch
from peft import LoraConfig, PeftModel, inject_adapter_in_model
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel

from alpaca_ppo.adapters import is_adapter, read_policy_adapter
from alpaca_ppo.adapters.files import weight_shapes
from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.damaged_files import loading
from alpaca_ppo.models.actor_critic import ActorCritic
from alpaca_ppo.remote_code import remote_code


def skeleton(name: str, args: PPOConfig, auto_class: Any = AutoModelForCausalLM) -> Any:
    """The model `name` on the meta device; None if there is none, or a damaged one.

    Loading it later reports the error.
    """
    try:
        with remote_code(name, trust=args.trust_remote_code), loading(name, name, "check the folder"):
            config = AutoConfig.from_pretrained(name, trust_remote_code=args.trust_remote_code)
            return _on_meta(auto_class, config, args)
    except ValueError:
        return None


def trained_parameters(model: Any, value_start: Any, peft_config: Any, args: PPOConfig) -> list[Tensor]:
    """The parameters that a run trains, apart from the critic's head, on the meta device where nothing is loaded yet.

    A model that cannot be read, or adapters that do not fit it, count as nothing: loading them later reports the error.

    Args:
        model: as the trainer takes it: a path or hub id, a model, a `PeftModel` or an `ActorCritic`.
        value_start: the language model, classifier or critic that the critic starts from, by name or in memory; None =
            the policy.
        peft_config: adapters to train on `model`; None = none.
        args: the configuration.
    """
    if isinstance(model, ActorCritic):
        return _trainable(model)
    base, adapters = model, peft_config
    if isinstance(model, PeftModel):
        base, adapters = model.get_base_model(), model.peft_config[model.active_adapter]
    elif isinstance(model, str) and is_adapter(model):
        adapters = read_policy_adapter(model)
        base = str(adapters.base_model_name_or_path)
    # The critic's backbone, before adapters are added to the policy.
    policy = skeleton(base, args) if isinstance(base, str) else base
    if policy is not None and adapters is not None and not isinstance(base, str):
        # A base in memory may be frozen, and have adapters in it already; a critic that is copied from it is trained.
        policy = _rebuilt(policy, args)
    separate = args.uses_critic and args.critic_layout == "separate"
    critic: list[Tensor] = []
    if separate and policy is not None:
        critic = _trainable(policy.base_model) if value_start is None else _backbone(value_start, args)
    if policy is None or adapters is None:
        return critic + ([] if policy is None else _trainable(policy))
    trained = _adapter_parameters(policy, adapters)
    if not args.uses_critic or args.critic_layout != "adapter":
        return critic + trained
    return trained + (trained if value_start is None else _saved_adapter(value_start))


def _backbone(value_start: str | PreTrainedModel | PeftModel, args: PPOConfig) -> list[Tensor]:
    """All parameters: a critic that starts from a model of its own trains the whole backbone, frozen or not."""
    if isinstance(value_start, PeftModel):
        return []
    found = skeleton(value_start, args, AutoModel) if isinstance(value_start, str) else value_start.base_model
    return [] if found is None else list(found.parameters())


def _saved_adapter(value_start: Any) -> list[Tensor]:
    if not isinstance(value_start, str) or not is_adapter(value_start):
        return []
    try:
        shapes = weight_shapes("value_model", value_start)
    except ValueError:
        return []
    return [torch.empty(shape, device="meta") for shape in shapes.values()]


def _trainable(model: nn.Module) -> list[Tensor]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _rebuilt(model: PreTrainedModel, args: PPOConfig) -> Any:
    try:
        with remote_code(str(model.config.name_or_path), trust=args.trust_remote_code):
            return _on_meta(AutoModelForCausalLM, model.config, args)
    except ValueError:
        return None


def _adapter_parameters(policy: nn.Module, config: Any) -> list[Tensor]:
    if not isinstance(config, LoraConfig):
        return []
    config = copy.deepcopy(config)
    # Shapes are the same however the weights start, and some ways need the base's weights.
    config.init_lora_weights, config.inference_mode, config.use_dora = False, False, False
    policy.requires_grad_(False)
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            inject_adapter_in_model(config, policy)
    except ValueError:
        return []
    return _trainable(policy)


def _on_meta(auto_class: Any, config: Any, args: PPOConfig) -> nn.Module:
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        model: nn.Module = auto_class.from_config(config, trust_remote_code=args.trust_remote_code)
    return model
