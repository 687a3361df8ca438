"""Builds the trainer's parts from the configuration: prompts, schedule, sampling parameters, rewards, environments.

The models are built in `models.factory`, the accelerator in `distributed.accelerator`.
"""

from collections.abc import Mapping
from typing import Any

import torch
from datasets import Dataset

from alpaca_ppo.adapters.files import read_reward_adapter
from alpaca_ppo.config.names import model_folder
from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.control_tokens import ControlTokens
from alpaca_ppo.data import PromptDataset, PromptForm, prepare_prompts
from alpaca_ppo.data.schedule import PromptSchedule
from alpaca_ppo.environments.conversation import Conversation
from alpaca_ppo.environments.episode import EpisodeSettings
from alpaca_ppo.environments.episodes import Environments, kind_of
from alpaca_ppo.environments.kinds import NoEnvironment
from alpaca_ppo.environments.tool_calls import ToolCallParser
from alpaca_ppo.evaluation.settings import check_set_names
from alpaca_ppo.generation import StopStrings, resolve_stop_tokens, resolve_truncate_tokens, resolve_turn_end
from alpaca_ppo.generation.responses import SamplingParams
from alpaca_ppo.models import ActorCritic
from alpaca_ppo.models.loading import check_token_ids, load_processing_class
from alpaca_ppo.models.policy import use_torch_activations
from alpaca_ppo.models.trial import packing_problem
from alpaca_ppo.rewards import AdapterClassifier, FailureHandling, ModelReward, RewardScorer, build_reward
from alpaca_ppo.trainer.preflight import REWARD_ADAPTER, Kinds


def make_prompts(dataset: Any, processing_class: Any, args: PPOConfig, kinds: Kinds) -> PromptDataset:
    """The tokenized prompts of `dataset`, which show the tools of `kinds`; overlong ones are dropped or raise an error
    (`overlong_prompts`). Prompts are blank where environments make them: without a dataset or the prompt column.

    Raises:
        ValueError: see `prepare_prompts`; also for a truncate token that is not in the tokenizer's vocabulary, for no
            dataset with several environments or without `max_steps`, and for a column that a `reset` requires and no
            row has.
    """
    resolve_truncate_tokens(processing_class, args.truncate_tokens or ())
    blank: Any = [{"role": "user", "content": ""}] if processing_class.chat_template else ""
    if dataset is None:
        if not any(kind.environment_class is not NoEnvironment for kind in kinds.values()):
            raise ValueError(
                "train_dataset is None; pass the prompts, or an environment_factory whose reset returns them"
            )
        if len(kinds) > 1:
            raise ValueError(
                f"environment_factory names {list(kinds)}, but train_dataset is None, so nothing says which prompt is "
                "whose; pass a dataset with a column environment"
            )
        if args.max_steps is None:
            raise ValueError("train_dataset is None, but max_steps is null; set max_steps to the length of the run")
        (name,) = kinds
        row = {args.prompt_column: blank, **({} if name is None else {"environment": name})}
        dataset = Dataset.from_list([row] * args.rollout_batch_size)
    elif kinds and isinstance(dataset, Dataset) and not (args.prompt_template or args.user_template):
        if not {args.prompt_column, "instruction"} & {*dataset.column_names}:
            dataset = dataset.add_column(args.prompt_column, [blank] * len(dataset))
    if isinstance(dataset, Dataset):
        for kind in kinds.values():
            kind.reset_arguments(dict.fromkeys([*dataset.column_names, "prompt"]), 0)
    trusted = args.control_tokens_from != "template"
    return prepare_prompts(
        dataset,
        processing_class,
        query_len=args.query_len,
        form=PromptForm.of(args),
        overlong=args.overlong_prompts,
        tools_of=(lambda row: [tool.schema for tool in kind_of(kinds, row).tools]) if kinds else None,
        control_tokens=None if trusted else ControlTokens(processing_class),
    )


def make_eval_prompts(dataset: Any, processing_class: Any, args: PPOConfig, kinds: Kinds) -> dict[str, PromptDataset]:
    """The tokenized prompts of each eval set by its name, which is empty for a dataset that is given without one.

    Raises:
        ValueError: see `prepare_prompts`, with the set's name; also for a name that no metric can have.
    """
    if dataset is None:
        return {}
    if not isinstance(dataset, Mapping):
        return {"": make_prompts(dataset, processing_class, args, kinds)}
    check_set_names(dataset)
    prompts = {}
    for name, rows in dataset.items():
        try:
            prompts[name] = make_prompts(rows, processing_class, args, kinds)
        except ValueError as error:
            raise ValueError(f"eval set {name!r}: {error}") from error
    return prompts


def build_scorer(sources: Any, tokenizers: Any, args: PPOConfig, device: torch.device, **options: Any) -> RewardScorer:
    """The scorer of functions and models, which are moved to `device`; `options` are those of `build_reward`.

    Raises:
        ValueError: see `build_reward`.
    """
    scorer = build_reward(
        sources,
        reward_processing_classes=tokenizers,
        batch_size=args.rollout_per_device_batch_size,
        dtype=getattr(torch, args.dtype),
        trust_remote_code=args.trust_remote_code,
        failure_handling=FailureHandling(args.reward_retries, mask_rows=args.failed_rewards == "mask"),
        padding_free=bool(args.padding_free),
        **options,
    )
    return scorer.to(device)


def make_schedule(num_prompts: int, args: PPOConfig) -> PromptSchedule:
    """The prompts of each step; one epoch if none of `total_epochs`, `total_episodes` and `max_steps` is set."""
    lengths = (args.total_epochs, args.total_episodes, args.max_steps)
    return PromptSchedule(
        num_prompts,
        args.rollout_batch_size,
        seed=args.seed,
        total_epochs=1 if lengths == (None, None, None) else args.total_epochs,
        total_episodes=args.total_episodes,
        num_steps=args.max_steps,
    )


def make_sampling_params(
    actor_critic: ActorCritic, processing_class: Any, args: PPOConfig, *, chat: bool
) -> SamplingParams:
    """How the policy is sampled in training.

    Args:
        actor_critic: policy and critic.
        processing_class: the policy's tokenizer.
        args: of the run.
        chat: whether there are prompts that are messages. What ends a turn in the chat template then ends a response.

    Raises:
        ValueError: when no token stops a response, when the tokenizer does not allow `stop_strings`, or when it has
            tokens without an embedding in the model.
    """
    policy: Any = actor_critic.policy.model
    check_token_ids(policy, processing_class)
    truncate = resolve_truncate_tokens(processing_class, args.truncate_tokens or ())
    turn_end = resolve_turn_end(processing_class, args.chat_template_kwargs) if chat else None
    # A turn end among truncate_tokens ends a response from truncate_after on, as the user wants.
    extra = () if turn_end is None or turn_end in truncate else (turn_end,)
    stop = resolve_stop_tokens(processing_class, policy.generation_config, extra)
    pad = processing_class.pad_token_id
    return SamplingParams(
        max_new_tokens=args.response_len,
        temperature=args.temperature,
        # Masks come from lengths, so any id can stand for padding.
        pad_token_id=pad if pad is not None else stop[0],
        stop_token_ids=stop,
        truncate_token_ids=truncate,
        truncate_after=args.truncate_after,
        stop_strings=(
            StopStrings(args.stop_strings, processing_class, vocab_size=actor_critic.policy.head.out_features)
            if args.stop_strings
            else None
        ),
        num_return_sequences=args.num_return_sequences,
    )


def make_scorer(
    reward_funcs: Any, tokenizers: Any, args: PPOConfig, device: torch.device, kinds: Kinds
) -> RewardScorer:
    """The reward sources with their weights; reward models are moved to `device`. A reward adapter is added later, once
    its base is loaded (`add_reward_adapter`); its weight is the last one. So are the rewards of environments.

    Raises:
        ValueError: for an invalid source, a wrong number of weights, no source at all, or a reward adapter that cannot
            be read or has no tokenizer. The reward adapter is checked before any model is loaded.
    """
    given = [] if reward_funcs is None else reward_funcs
    given, weights = given if isinstance(given, (list, tuple)) else [given], args.reward_weights
    if args.reward_adapter is not None:
        if weights is not None and len(weights) != len(given) + 1:
            raise ValueError(
                f"reward_weights has {len(weights)} numbers for {len(given)} reward_funcs and a reward_adapter; give "
                "one each, the adapter's last"
            )
        weights = weights and weights[:-1] or None
        model_folder("reward_adapter", args.reward_adapter, part=None, writes_text=False)
        read_reward_adapter(args.reward_adapter)
        _reward_tokenizer(args)
    elif not given and not any(kind.rewards for kind in kinds.values()):
        raise ValueError(
            "there is no reward: reward_funcs is empty, and no environment has get_reward or reply; pass reward_funcs, "
            "or give the environment a method get_reward"
        )
    scorer = build_scorer(given, tokenizers, args, device, reward_weights=weights)
    for source in scorer.sources:
        if isinstance(source, ModelReward):
            use_torch_activations(source.model)
    return scorer


def _reward_tokenizer(args: PPOConfig) -> Any:
    trust = args.trust_remote_code
    return load_processing_class(str(args.reward_adapter), trust_remote_code=trust, field="reward_adapter")


def add_reward_adapter(scorer: RewardScorer, actor_critic: ActorCritic, args: PPOConfig, device: torch.device) -> None:
    """Adds the reward source `args.reward_adapter` on the policy's base, and moves its head to `device`.

    Raises:
        ValueError: when the reward adapter does not fit the base, or its tokenizer has tokens without an embedding.
    """
    if args.reward_adapter is None:
        return
    adapters = actor_critic.policy.adapters
    assert adapters is not None, "make_actor_critic rejects a reward adapter without a policy adapter"
    tokenizer = _reward_tokenizer(args)
    check_token_ids(adapters.model, tokenizer, f"the tokenizer of reward_adapter {args.reward_adapter}")
    model: Any = AdapterClassifier(
        adapters,
        args.reward_adapter,
        pad_token_id=tokenizer.pad_token_id,
        # Known since the policy's trial, while the layers hold no other adapters and before an engine shards them.
        padding_free=bool(args.padding_free) and packing_problem(adapters.model) is None,
    )
    size, padding_free = args.rollout_per_device_batch_size, bool(args.padding_free)
    source = ModelReward(model, tokenizer, name=REWARD_ADAPTER, batch_size=size, padding_free=padding_free)
    source.to(device)
    scorer.add(source, 1.0 if args.reward_weights is None else args.reward_weights[-1])


def make_environments(
    kinds: Kinds,
    tool_call_parser: ToolCallParser | None,
    processing_class: Any,
    sampling_params: SamplingParams,
    args: PPOConfig,
    *,
    messages: bool,
) -> Environments | None:
    """What answers the policy, or None without tools and environments.

    Args:
        kinds: of environments.
        tool_call_parser: of the user; None = the tokenizer's own, or JSON.
        processing_class: the policy's tokenizer.
        sampling_params: of the run.
        args: of the run.
        messages: whether the prompts are messages.

    Raises:
        ValueError: when tools or replies cannot be written in the conversation.
    """
    if not kinds:
        return None
    conversation = Conversation(
        processing_class,
        messages=messages,
        chat_template_kwargs=args.chat_template_kwargs,
        stop_token_ids=(*sampling_params.stop_token_ids, *sampling_params.truncate_token_ids),
        control_tokens_from=args.control_tokens_from,
    )
    for kind in kinds.values():
        if kind.answers:
            schemas = [tool.schema for tool in kind.tools]
            conversation.check(schemas, replies=kind.has_reply, max_turns=args.max_turns)
    return Environments(kinds, EpisodeSettings(conversation, args, tool_call_parser))
