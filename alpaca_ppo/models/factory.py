"""Policy and critic, built from the arguments of the trainer's constructor and the configuration.

What each argument may be, and which of them exclude each other, is checked here; `loading` does the loading. The
reference is made in `reference`.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel

from alpaca_ppo.adapters import adapter_set
from alpaca_ppo.adapters.adapter_set import POLICY, VALUE, AdapterSet
from alpaca_ppo.adapters.files import read_policy_adapter
from alpaca_ppo.config.fields import options_of
from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.models.actor_critic import ActorCritic, Critic
from alpaca_ppo.models.critic_heads import CriticHead, ScalarHead, build_head
from alpaca_ppo.models.loading import ModelSource, is_causal_lm, load_causal_lm
from alpaca_ppo.models.policy import Policy, disable_dropout
from alpaca_ppo.models.reference import copy_without_adapters
from alpaca_ppo.models.saved_critic import has_adapter, has_reader, load_value_model, name_of, start_on_policy
from alpaca_ppo.models.state_reader import StateReader, captured_outputs, decoder_layers
from alpaca_ppo.models.trial import Trial, fit_rows
from alpaca_ppo.registry import CRITIC_HEADS

LAYERS_TO_READER = 10
"""With `critic_layout: auto`, a critic is cached if the policy's layers have at least this many times its weights: its
eight passes then cost less than a single one through a backbone of its own."""


def build_actor_critic(
    policy: PreTrainedModel | AdapterSet,
    *,
    critic_layout: str | None,
    value_model: PreTrainedModel | Critic | None = None,
    head: Callable[[int], CriticHead] = ScalarHead,
    reader: Callable[[PreTrainedModel], StateReader] = StateReader,
) -> ActorCritic:
    """The policy with a critic in the layout `critic_layout`.

    Args:
        policy: the model to train, or a frozen one with adapters; not copied.
        critic_layout: `separate` (the backbone of `value_model`, or a copy of the policy's without adapters), `adapter`
            (an adapter on the policy's base model), `shared` (the policy's hidden states), `cached` (a `reader` of
            them), or None for no critic.
        value_model: a `Critic`, or a causal language model of any size or a sequence classifier with one label, whose
            backbone the critic takes, and the `score` if the head can start from it; not copied.
        head: makes the critic's head of the hidden size: a head's class, or a `functools.partial` of one.
        reader: makes the reader of a `cached` critic for the policy: `StateReader`, or a `functools.partial` of it.

    Raises:
        ValueError: for another layout; if `value_model` is given in a layout other than `separate`, or is a `Critic` of
            another layout or with another head; for `adapter`, if the policy has none.
    """
    if critic_layout != "separate" and value_model is not None:
        raise ValueError(f"value_model is given, but critic_layout is {critic_layout!r}; drop it, or use separate")
    if critic_layout not in ("separate", "adapter", "shared", "cached", None):
        raise ValueError(f"critic_layout is {critic_layout!r}; choose separate, adapter, shared, cached or None")
    wrapped = Policy(policy.model, policy) if isinstance(policy, AdapterSet) else Policy(policy)
    if critic_layout is None:
        return ActorCritic(wrapped, None)
    if isinstance(value_model, Critic):
        if value_model.layout != "separate":
            raise ValueError(f"value_model is a {value_model.layout} critic; set critic_layout: {value_model.layout}")
        head(value_model.head.hidden_size).check_like(value_model.head)
        return ActorCritic(wrapped, value_model)
    dtype = wrapped.model.dtype
    if critic_layout == "separate":
        source = copy_without_adapters(wrapped) if value_model is None else value_model
        return ActorCritic(wrapped, _separate_critic(source, head, dtype))
    if critic_layout == "cached":
        read = reader(wrapped.model).to(torch.promote_types(dtype, torch.float32))
        return ActorCritic(wrapped, Critic(build_head(head, read.width, dtype), None, reader=read))
    if critic_layout == "adapter":
        adapters = wrapped.adapters
        if adapters is None:
            raise ValueError("critic_layout is 'adapter', but the policy has no adapters; pass peft_config")
        if start := adapters.starting_point:
            adapters.copy(start, VALUE, trainable=True)
        else:
            adapters.add(VALUE, adapters.config_of(POLICY), trainable=True)
    critic_head = build_head(head, wrapped.head.weight.size(1), dtype)
    return ActorCritic(wrapped, Critic(critic_head, None, has_adapter=critic_layout == "adapter"))


def _separate_critic(source: Any, head: Callable[[int], CriticHead], policy_dtype: torch.dtype) -> Critic:
    """A critic with the backbone of `source`, whose head starts from its `score` if it can."""
    # The whole backbone is trained, so it needs float32 even if the policy's frozen base is in half precision.
    backbone = source.base_model.to(torch.promote_types(policy_dtype, torch.float32))
    if is_causal_lm(source):
        return Critic(build_head(head, source.get_output_embeddings().weight.size(1), policy_dtype), backbone)
    score: Tensor = source.get_parameter("score.weight").detach()
    critic_head = build_head(head, score.size(1), policy_dtype)
    critic_head.load_score_weight(score)
    return Critic(critic_head, backbone)


def first_reward_model(reward_funcs: Any) -> str | PreTrainedModel | None:
    """The first reward source that is a model (a path, an id, or a model in memory), or None."""
    sources = reward_funcs if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
    models = (s for s in sources if isinstance(s, PreTrainedModel) or (isinstance(s, str) and ":" not in s))
    return next(models, None)


def with_chosen_layout(args: PPOConfig, model: ActorCritic) -> PPOConfig:
    """Returns `args` with the critic's layout in `model` in the place of `critic_layout: auto`."""
    if model.critic is None or args.critic_layout != "auto":
        return args
    return replace(args, critic_layout=model.critic.layout)


def _choose_layout(policy: PreTrainedModel, critic_start: ModelSource | None, args: PPOConfig) -> str:
    """The critic's layout for `critic_layout: auto`; a ValueError if options ask for another than `critic_start`."""
    options, names = options_of(PPOConfig), ("load_in_4bit", "critic_layers", "critic_width", "critic_depth")
    asked = [name for name in names if getattr(args, name) != options[name].default]
    if isinstance(critic_start, str) and has_reader(critic_start):
        return "cached"
    if critic_start is not None and asked:
        problem = f"{asked[0]} is {getattr(args, asked[0])}, which asks for a cached critic, but the critic starts from"
        remedy = f"leave value_model and init_value_with_reward out, or {asked[0]}"
        raise ValueError(f"{problem} {name_of(critic_start)}, which is none; {remedy}")
    if asked:
        return "cached"
    if critic_start is not None or states_problem(policy) is not None:
        return "separate"
    with torch.device("meta"):
        reader = _make_reader(args)(policy)
    reader_weights = sum(parameter.numel() for parameter in reader.parameters())
    layer_weights = sum(parameter.numel() for layer in decoder_layers(policy) for parameter in layer.parameters())
    return "cached" if layer_weights >= LAYERS_TO_READER * reader_weights else "separate"


def _try_states(model: PreTrainedModel) -> str | None:
    """Why no critic can read the states of `model`, or None."""
    layers, size = decoder_layers(model), model.config.get_text_config().hidden_size
    ids = torch.zeros((1, 2), dtype=torch.long, device=model.device)
    with captured_outputs(layers) as outputs:
        model.base_model(input_ids=ids, use_cache=False)
    wrong = [tuple(output.shape) for output in outputs if output.shape != (1, 2, size)]
    if wrong or len(outputs) != len(layers):
        return f"the layers of {type(model).__name__} do not return a state of {size} numbers for each token"
    return None


_states_trial = Trial(_try_states)


def states_problem(model: PreTrainedModel) -> str | None:
    """Why no cached critic can read `model`, or None; None too for a model without weights, which cannot be tried."""
    return None if model.device.type == "meta" else _states_trial(model)


def make_actor_critic(
    model: ModelSource | ActorCritic,
    value_model: ModelSource | None,
    reward_funcs: Any,
    peft_config: Any,
    args: PPOConfig,
) -> ActorCritic:
    """The policy and critic that `args` describe; `model` itself if it is an `ActorCritic`.

    Raises:
        ValueError: when arguments exclude each other or lack what they need; when an `ActorCritic` differs from `args`;
            for adapters that this package cannot handle; when the critic's starting point does not fit the policy; for
            a model with fewer positions than prompt and response, or that needs padding with `padding_free: true`.
    """
    for_loading = {"load_in_4bit": args.load_in_4bit, "model_init_kwargs": args.model_init_kwargs}
    if not isinstance(model, str) and (given := [name for name, value in for_loading.items() if value]):
        raise ValueError(f"{given[0]} is given, but model is a {type(model).__name__}; give its folder or hub id")
    adapted = model.policy.adapters if isinstance(model, ActorCritic) else peft_config or has_adapter(model)
    if args.reward_adapter is not None and not adapted:
        raise ValueError(f"reward_adapter is {args.reward_adapter!r}, but the policy has no adapters; give peft_config")
    make_head = partial(CRITIC_HEADS.get(args.critic).from_config, args)
    if isinstance(model, ActorCritic):
        _check_actor_critic(model, value_model, peft_config, make_head, args)
        return _prepare(model, args)
    critic_start = _critic_start(value_model, reward_funcs, args)
    policy = _load_policy(model, peft_config, args)
    language_model = policy.model if isinstance(policy, AdapterSet) else policy
    layout: str | None = args.critic_layout if args.uses_critic else None
    if layout == "auto":
        layout = _choose_layout(language_model, critic_start, args)
    if layout == "cached" and (problem := states_problem(language_model)) is not None:
        raise ValueError(f"the critic is cached, but {problem}; set critic_layout: separate or shared")
    backbone_start = None
    if critic_start is not None and layout == "separate":
        backbone_start = load_value_model(critic_start, language_model, args)
    with torch.random.fork_rng():
        # Random weights of the critic's head and adapter must be the same on every rank.
        torch.manual_seed(args.seed)
        built = build_actor_critic(
            policy, critic_layout=layout, value_model=backbone_start, head=make_head, reader=_make_reader(args)
        )
        if critic_start is not None and backbone_start is None:
            start_on_policy(built, critic_start, args)
    return _prepare(built, args)


def _check_actor_critic(
    model: ActorCritic, value_model: Any, peft_config: Any, make_head: Callable[[int], CriticHead], args: PPOConfig
) -> None:
    """Raises a ValueError if `model` is not what `args` describe, or an argument gives what it already holds."""
    parts = {"peft_config": peft_config, "value_model": value_model}
    parts["init_value_with_reward"] = args.init_value_with_reward or None
    if given := [name for name, value in parts.items() if value is not None]:
        raise ValueError(f"model is an ActorCritic, which holds adapters and critic; leave {', '.join(given)} out")
    layout = None if model.critic is None else model.critic.layout
    needed = args.critic_layout if args.uses_critic else None
    if layout != needed and (layout is None or needed != "auto"):
        raise ValueError(f"model is an ActorCritic with critic_layout {layout!r}, the options need {needed!r}")
    if model.critic is not None:
        with torch.random.fork_rng():
            make_head(model.critic.head.hidden_size).check_like(model.critic.head)
            if model.critic.reader is not None:
                _make_reader(args)(model.policy.model).check_like(model.critic.reader)


def _make_reader(args: PPOConfig) -> Callable[[PreTrainedModel], StateReader]:
    return partial(StateReader, layers=args.critic_layers, width=args.critic_width, depth=args.critic_depth)


def _critic_start(value_model: ModelSource | None, reward_funcs: Any, args: PPOConfig) -> ModelSource | None:
    """What the critic starts from: `value_model`, the first reward model, or None."""
    if value_model is not None and not args.uses_critic:
        raise ValueError(f"value_model is given, but adv_estimator {args.adv_estimator!r} has no critic; leave it out")
    if not args.init_value_with_reward:
        return value_model
    if value_model is not None:
        raise ValueError("value_model is given and init_value_with_reward is True; leave one of them out")
    reward_model = first_reward_model(reward_funcs)
    if reward_model is None:
        raise ValueError("init_value_with_reward is True, but no reward source is a model; set it to False")
    return reward_model


def _load_policy(model: Any, peft_config: Any, args: PPOConfig) -> PreTrainedModel | AdapterSet:
    """The policy to train: `model` with all its weights; or adapters on a frozen base, if it is an adapter or
    `peft_config` asks for one.
    """
    if peft_config is not None and has_adapter(model):
        raise ValueError(f"model {name_of(model)!r} is an adapter; leave peft_config (--use_peft) out, or merge it")
    if isinstance(model, PeftModel):
        return adapter_set.from_peft_model(model)
    adapter = read_policy_adapter(model) if has_adapter(model) else None
    language_model = load_causal_lm(
        model if adapter is None else str(adapter.base_model_name_or_path),
        trust_remote_code=args.trust_remote_code,
        dtype=getattr(torch, args.dtype),
        load_in_4bit=args.load_in_4bit,
        arguments=args.model_init_kwargs,
    )
    if adapter is not None:
        return adapter_set.load_adapters(language_model, model)
    if peft_config is not None:
        with torch.random.fork_rng():
            # The same weights on every rank.
            torch.manual_seed(args.seed)
            return adapter_set.add_policy_adapter(language_model, peft_config)
    if language_model.dtype in (torch.float16, torch.bfloat16) or args.load_in_4bit:
        kind = "4-bit" if args.load_in_4bit else language_model.dtype
        raise ValueError(f"{kind} weights cannot all be trained; use LoRA, or dtype: float32 with bf16: true")
    return language_model


def _prepare(built: ActorCritic, args: PPOConfig) -> ActorCritic:
    """Sets `built` up for the run's rows in place and returns it: without dropout, with the critic's risk level and
    gradient checkpointing. Raises as `check_lengths` and `padding_reason`.
    """
    disable_dropout(built)
    _prepare_backbone(built.policy, built.policy.model, args, owner="model")
    critic = built.critic
    if critic is not None:
        critic.head.risk_level = args.risk_level
        if critic.reader is not None:
            critic.backbone = None  # `load_critic` gives one beside the reader; here it reads the policy
        if critic.backbone is not None:
            _prepare_backbone(critic, critic.backbone, args, owner="critic")
    return built


def _prepare_backbone(reader: Policy | Critic, backbone: Any, args: PPOConfig, *, owner: str) -> None:
    fit_rows(reader, backbone, args, owner=owner)
    if args.gradient_checkpointing:
        # Newer transformers also have activation_checkpointing_enable; 5.17, which must work too, has only this.
        backbone.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
