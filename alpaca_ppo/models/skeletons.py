"""Models without weights, built from configurations: what a run will train, before anything is loaded."""

import copy
from typing import Any

import torch
from peft import LoraConfig, PeftModel, inject_adapter_in_model
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from alpaca_ppo.adapters import is_adapter, read_policy_adapter
from alpaca_ppo.adapters.files import weight_shapes
from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.damaged_files import loading
from alpaca_ppo.models.actor_critic import ActorCritic
from alpaca_ppo.models.loading import LOADING_REMEDY
from alpaca_ppo.remote_code import remote_code


def skeleton(name: str, args: PPOConfig, auto_class: Any = AutoModelForCausalLM) -> Any:
    """The model `name` on the meta device.

    Raises:
        ValueError: when there is none, or a damaged one.
    """
    problem = f"no model can be loaded from {name!r}"
    with remote_code(name, trust=args.trust_remote_code), loading(problem, name, LOADING_REMEDY):
        config = AutoConfig.from_pretrained(name, trust_remote_code=args.trust_remote_code)
        return _on_meta(auto_class, config, args)


def trained_parameters(model: Any, value_start: Any, peft_config: Any, args: PPOConfig) -> list[Tensor]:
    """The parameters that a run trains, apart from the critic's head, on the meta device where nothing is loaded yet;
    none if something cannot be read, or does not fit: loading it later reports the error.

    Args:
        model: as the trainer takes it: a path or hub id, a model, a `PeftModel` or an `ActorCritic`.
        value_start: the language model, classifier or critic that the critic starts from, by name or in memory; None =
            the policy.
        peft_config: adapters to train on `model`; None = none.
        args: the configuration.
    """
    if isinstance(model, ActorCritic):
        return _trainable(model)
    try:
        return _trained(model, value_start, peft_config, args)
    except ValueError:
        return []


def _trained(model: Any, value_start: Any, peft_config: Any, args: PPOConfig) -> list[Tensor]:
    base, adapters = model, peft_config
    if isinstance(model, PeftModel):
        base, adapters = model.get_base_model(), model.peft_config[model.active_adapter]
    elif isinstance(model, str) and is_adapter(model):
        adapters = read_policy_adapter(model)
        base = str(adapters.base_model_name_or_path)
    policy = skeleton(base, args) if isinstance(base, str) else base
    if adapters is not None and not isinstance(base, str):
        # A base in memory may be frozen, and have adapters in it already; a critic that is copied from it is trained.
        with remote_code(str(base.config.name_or_path), trust=args.trust_remote_code):
            policy = _on_meta(AutoModelForCausalLM, base.config, args)
    layout = args.critic_layout if args.uses_critic else None
    trained: list[Tensor] = []
    if layout == "separate" and value_start is None:
        # Before adapters are added to the policy.
        trained = _trainable(policy.base_model)
    elif layout == "separate" and not isinstance(value_start, PeftModel):
        # All of it: a critic that starts from a model of its own trains the whole backbone, frozen or not.
        found = skeleton(value_start, args, AutoModel) if isinstance(value_start, str) else value_start.base_model
        trained = list(found.parameters())
    if adapters is not None:
        _inject(policy, adapters)
    own = _trainable(policy)
    if adapters is not None and layout == "adapter" and value_start is None:
        trained = own
    elif layout == "adapter" and isinstance(value_start, str) and is_adapter(value_start):
        shapes = weight_shapes("value_model", value_start).values()
        trained = [torch.empty(shape, device="meta") for shape in shapes]
    return trained + own


def _inject(policy: nn.Module, config: Any) -> None:
    """Adds an adapter to `policy`, and freezes the rest; none if `config` is not LoRA's."""
    policy.requires_grad_(False)
    if not isinstance(config, LoraConfig):
        return
    config = copy.deepcopy(config)
    # Shapes are the same however the weights start, and some ways need the base's weights.
    config.init_lora_weights, config.inference_mode, config.use_dora = False, False, False
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        inject_adapter_in_model(config, policy)


def _trainable(model: nn.Module) -> list[Tensor]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _on_meta(auto_class: Any, config: Any, args: PPOConfig) -> nn.Module:
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        model: nn.Module = auto_class.from_config(config, trust_remote_code=args.trust_remote_code)
    return model
