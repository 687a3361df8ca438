"""Models without weights, built from configurations: what a run will train, before anything is loaded."""

import copy
from typing import Any

import torch
from peft import LoraConfig, PeftModel, inject_adapter_in_model
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel

from alpaca_ppo.adapters import is_adapter, read_policy_adapter
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
        value_start: the classifier or critic that the critic starts from, by name or in memory; None = the policy.
        peft_config: adapters to train on `model`; None = none.
        args: the configuration.
    """
    if isinstance(model, ActorCritic):
        return [parameter for parameter in model.parameters() if parameter.requires_grad]
    base, adapters = model, peft_config
    if isinstance(model, PeftModel):
        base, adapters = model.get_base_model(), model.peft_config[model.active_adapter]
    elif isinstance(model, str) and is_adapter(model):
        adapters = read_policy_adapter(model)
        base = str(adapters.base_model_name_or_path)
    # The critic's backbone, before adapters are added to the policy.
    policy = skeleton(base, args) if isinstance(base, str) else base
    critic: list[Tensor] = []
    if args.uses_critic and args.critic_layout == "separate" and policy is not None:
        critic = _backbone(policy if value_start is None else value_start, args)
    if policy is None or adapters is None:
        return critic + ([] if policy is None else list(policy.parameters()))
    trained = _adapter_parameters(policy, adapters, args)
    return critic + trained * (2 if args.uses_critic and args.critic_layout == "adapter" else 1)


def _backbone(model: str | PreTrainedModel, args: PPOConfig) -> list[Tensor]:
    found = skeleton(model, args, AutoModel) if isinstance(model, str) else model.base_model
    return [] if found is None else list(found.parameters())


def _adapter_parameters(policy: PreTrainedModel, config: Any, args: PPOConfig) -> list[Tensor]:
    if not isinstance(config, LoraConfig):
        return []
    config = copy.deepcopy(config)
    # Shapes are the same however the weights start, and some ways need the base's weights.
    config.init_lora_weights, config.inference_mode, config.use_dora = False, False, False
    try:
        with remote_code(str(policy.config.name_or_path), trust=args.trust_remote_code):
            frozen = _on_meta(AutoModelForCausalLM, policy.config, args).requires_grad_(False)
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            inject_adapter_in_model(config, frozen)
    except ValueError:
        return []
    return [parameter for parameter in frozen.parameters() if parameter.requires_grad]


def _on_meta(auto_class: Any, config: Any, args: PPOConfig) -> nn.Module:
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        model: nn.Module = auto_class.from_config(config, trust_remote_code=args.trust_remote_code)
    return model
