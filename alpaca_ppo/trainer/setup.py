"""Builds what a trainer is made of from the constructor's arguments and the configuration (`make_parts`).

Models are built in `models.factory`, accelerator and engine in `distributed.accelerator`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from datasets import Dataset
from peft import PeftModel
from transformers import PreTrainedModel, TrainerCallback, TrainerState

from alpaca_ppo.adapters.files import read_reward_adapter
from alpaca_ppo.checkpoint.compatibility import start_identity
from alpaca_ppo.checkpoint.serialization import checkpoint_bytes
from alpaca_ppo.config.checks import REFERENCES
from alpaca_ppo.config.fields import check_needs
from alpaca_ppo.config.names import model_folder
from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.control_tokens import ControlTokens
from alpaca_ppo.data import PromptDataset, PromptForm, introduction, prepare_prompts
from alpaca_ppo.data.loading import columns_of
from alpaca_ppo.data.schedule import PromptSchedule
from alpaca_ppo.distributed.accelerator import make_accelerator
from alpaca_ppo.distributed.preemption import PreemptionHandler
from alpaca_ppo.environments.conversation import Conversation
from alpaca_ppo.environments.episode import EpisodeSettings
from alpaca_ppo.environments.episodes import Environments, kind_of
from alpaca_ppo.environments.kinds import EnvironmentFactory, NoEnvironment, make_kinds
from alpaca_ppo.environments.tool_calls import ToolCallParser
from alpaca_ppo.evaluation.settings import EvaluationSettings, check_set_names
from alpaca_ppo.generation import SamplingParams, make_backend
from alpaca_ppo.generation.stopping import StopStrings, resolve_stop_tokens, resolve_truncate_tokens, resolve_turn_end
from alpaca_ppo.models import ActorCritic, factory
from alpaca_ppo.models.loading import check_same_tokenizer, check_token_ids, load_processing_class
from alpaca_ppo.models.policy import use_torch_activations
from alpaca_ppo.models.reference import make_reference
from alpaca_ppo.models.trial import packing_problem
from alpaca_ppo.ppo.agreements import agree_on_backend, agree_on_padding
from alpaca_ppo.ppo.kl_controllers import KLController
from alpaca_ppo.ppo.metrics import StepRecord
from alpaca_ppo.ppo.mismatch import SamplerCheck
from alpaca_ppo.ppo.rollouts import RolloutCollector
from alpaca_ppo.ppo.teacher import make_teacher
from alpaca_ppo.ppo.updates import Updater, make_updater
from alpaca_ppo.registry import ADV_ESTIMATORS
from alpaca_ppo.rewards import AdapterClassifier, FailureHandling, FunctionReward, ModelReward, RewardScorer
from alpaca_ppo.rewards.build import RewardFunc, build_reward
from alpaca_ppo.tracking.run_log import RunLog
from alpaca_ppo.tracking.run_record import RunRecord
from alpaca_ppo.trainer import preflight
from alpaca_ppo.trainer.preflight import REWARD_ADAPTER, Kinds

_SHOWN_PHASES = {"rollout": "sampling", "score": "scoring", "logprobs": "log-probs"}
"""Names of phases in the progress bar that differ from those in `time/*`."""


@dataclass(frozen=True)
class TrainerArguments:
    """The arguments of `PPOTrainer`, which documents them."""

    model: str | PreTrainedModel | PeftModel | ActorCritic
    reward_funcs: RewardFunc | Sequence[RewardFunc] | None
    args: PPOConfig | None
    train_dataset: Dataset | None
    eval_dataset: Dataset | Mapping[str, Dataset] | None
    processing_class: Any
    value_model: str | PreTrainedModel | None
    ref_model: str | PreTrainedModel | PeftModel | None
    peft_config: Any
    reward_processing_classes: Any
    callbacks: Sequence[TrainerCallback] | None
    optimizers: tuple[torch.optim.Optimizer | None, Any]
    accelerator: Accelerator | None
    metric_funcs: RewardFunc | Sequence[RewardFunc] | None
    metric_processing_classes: Any
    tools: Sequence[Callable[..., Any]] | None
    environment_factory: EnvironmentFactory | Mapping[str, EnvironmentFactory] | None
    tool_call_parser: ToolCallParser | None


@dataclass(frozen=True)
class RunStart:
    """What a run started from, for its records and its checkpoints.

    Attributes:
        record: what run.yaml holds beyond the configuration.
        identity: of models and rewards (`compatibility.start_identity`), which a resumed run must share.
        checkpoint_size: least size of a checkpoint in bytes; if the run saves none, of the final models.
        padding: which models' rows have padding, and why; empty if none has.
        sampler_fallback: why `auto` samples by `model.generate`; empty if it does not.
        has_own_schedule: whether a learning-rate schedule was passed, which replaces `lr_scheduler_type`.
    """

    record: RunRecord
    identity: Mapping[str, Any]
    checkpoint_size: int
    padding: str
    sampler_fallback: str
    has_own_schedule: bool


@dataclass(frozen=True)
class RunParts:
    """What a trainer is made of; `PPOTrainer` documents the attributes."""

    args: PPOConfig
    accelerator: Accelerator
    processing_class: Any
    train_prompts: PromptDataset
    eval_prompts: Mapping[str, PromptDataset]
    schedule: PromptSchedule
    sampling_params: SamplingParams
    environments: Environments | None
    updater: Updater
    collector: RolloutCollector
    sampler_check: SamplerCheck
    kl_controller: KLController
    evaluation: EvaluationSettings
    run_log: RunLog
    state: TrainerState
    start: RunStart


def make_parts(given: TrainerArguments, trainer_class: type, *, samples_itself: bool, scores_itself: bool) -> RunParts:
    """Builds a run. What can be checked without a model is checked before one is loaded.

    Args:
        samples_itself: whether `trainer_class` overrides `_generate`, so that responses may have several turns.
        scores_itself: whether it overrides `_score`, so that reward functions may get other columns than the dataset's.

    Raises:
        ValueError: for arguments that cannot work together.
    """
    args = preflight.check_config_class(given.args)
    record = RunRecord.of_objects(trainer_class, vars(given))
    model, ref_model = model_folder("model", given.model), model_folder("ref_model", given.ref_model)
    value_model = model_folder("value_model", given.value_model, part="value", writes_text=False)
    if args.reference not in REFERENCES:
        args = replace(args, reference=model_folder("reference", args.reference))
    preflight.check_output_dir(args)
    kinds = make_kinds(given.tools, given.environment_factory)
    rewarded = given.reward_funcs or args.reward_adapter or any(kind.rewards for kind in kinds.values())
    if args.teacher_model_name_or_path is not None and not rewarded:
        if not scores_itself and ADV_ESTIMATORS.trait(args.adv_estimator, "needs_greedy_baseline"):
            problem = f"adv_estimator {args.adv_estimator!r} compares scores with those of greedy responses"
            raise ValueError(f"{problem}, and a teacher alone gives none; take reinforce_plus_plus, or add a reward")
        given = replace(given, reward_funcs=teacher_alone)
    evaluation = preflight.evaluation_settings(args, given.reward_funcs, given.metric_funcs, kinds)
    if not scores_itself:
        preflight.check_reward_columns(given, kinds)
    accelerator = make_accelerator(args, given.accelerator)
    device = accelerator.device
    processing_class = given.processing_class or load_processing_class(model, trust_remote_code=args.trust_remote_code)
    train_prompts = make_prompts(given.train_dataset, processing_class, args, kinds)
    for line in introduction(train_prompts, processing_class):
        accelerator.print(line)
    eval_prompts = make_eval_prompts(given.eval_dataset, processing_class, args, kinds)
    for name, prompts in eval_prompts.items():
        if prompts.num_dropped or prompts.num_cut:
            accelerator.print(f"eval set {name}".strip() + f": {prompts}; raise query_len ({args.query_len})")
    chat = any(prompts.are_messages for prompts in (train_prompts, *eval_prompts.values()))
    scorer = make_scorer(given.reward_funcs, given.reward_processing_classes, args, device, kinds)
    metric_scorer = build_scorer(given.metric_funcs, given.metric_processing_classes, args, device, measures=True)
    check_needs(
        args,
        eval_set=bool(eval_prompts),
        reward_functions=bool(scorer.functions or kinds),
        environments_or_tools=bool(kinds) or samples_itself,
        prompts_that_are_messages=chat,
    )
    schedule = PromptSchedule(len(train_prompts), args)

    actor_critic = factory.make_actor_critic(model, value_model, given.reward_funcs, given.peft_config, args)
    if actor_critic.critic is not None and actor_critic.critic.layout == "separate":
        from_reward, trust = args.init_value_with_reward, args.trust_remote_code
        field = "reward_funcs" if from_reward else "value_model"
        critic_start = factory.first_reward_model(given.reward_funcs) if from_reward else value_model
        # The tokenizer of a model in memory is not known.
        if isinstance(critic_start, str):
            remedy = "start the critic from another model"
            check_same_tokenizer(field, critic_start, processing_class, remedy=remedy, trust_remote_code=trust)
    args = factory.with_chosen_layout(args, actor_critic)
    saved = [*actor_critic.parameters()]
    if args.save_steps == 0 and actor_critic.critic is not None and actor_critic.critic.reads_policy:
        # In final/value, the critic lies beside what it reads of the policy.
        saved += actor_critic.policy.model.base_model.parameters()
    trained = (parameter for parameter in saved if parameter.requires_grad)
    checkpoint_size = checkpoint_bytes(trained, adamw=args.save_steps > 0 and given.optimizers[0] is None)
    sampling_params = make_sampling_params(actor_critic, processing_class, args, chat=chat)
    # A model that is saved cannot wait with truncate tokens until `truncate_after`.
    truncate = () if sampling_params.truncate_after else sampling_params.truncate_token_ids
    actor_critic.policy.stop_token_ids = sampling_params.stop_token_ids + truncate
    add_reward_adapter(scorer, actor_critic, args, device)
    parser = given.tool_call_parser
    environments = make_environments(kinds, parser, processing_class, sampling_params, args, messages=chat)
    if environments is not None:
        for name, function in environments.reward_functions():
            scorer.add(FunctionReward(function, name=name), 1.0)
    reference = make_reference(actor_critic, ref_model, args)
    embeddings: Any = actor_critic.policy.model.get_input_embeddings()
    teacher = make_teacher(args, processing_class, vocab_size=embeddings.weight.size(0))
    identity = start_identity(actor_critic, reference, teacher, scorer, environments)

    padding = agree_on_padding(actor_critic, {"reference": reference, "teacher": teacher}, accelerator)
    updater = make_updater(accelerator, actor_critic, given.optimizers, args, schedule)
    multi_turn = environments is not None and environments.answer
    run_log = RunLog(accelerator, args)
    state = TrainerState(max_steps=schedule.num_steps, is_world_process_zero=accelerator.is_main_process)
    collector = RolloutCollector(
        updater.engine,
        args,
        reference,
        teacher,
        scorer,
        metric_scorer,
        make_backend(args.generation_backend, args),
        PreemptionHandler(accelerator),
        pad_token_id=sampling_params.pad_token_id,
        cache=updater.cache,
    )
    fallback = agree_on_backend(collector.backend, updater.engine, multi_turn=multi_turn)
    collector.prepare_frozen_models()
    _connect(collector, state, run_log)
    return RunParts(
        args=args,
        accelerator=accelerator,
        processing_class=processing_class,
        train_prompts=train_prompts,
        eval_prompts=eval_prompts,
        schedule=schedule,
        sampling_params=sampling_params,
        environments=environments,
        updater=updater,
        collector=collector,
        sampler_check=SamplerCheck(collector, multi_turn=multi_turn, report=run_log.message),
        kl_controller=KLController(args.kl_controller, args.kl_coef, target_kl=args.target_kl, horizon=args.kl_horizon),
        evaluation=evaluation,
        run_log=run_log,
        state=state,
        start=RunStart(
            record=record,
            identity=identity,
            checkpoint_size=checkpoint_size,
            padding=padding,
            sampler_fallback=fallback,
            has_own_schedule=given.optimizers[1] is not None,
        ),
    )


def _connect(collector: RolloutCollector, state: TrainerState, run_log: RunLog) -> None:
    """Gives the scorers the state, one place for what functions log, and the bar; lets signals interrupt them."""
    collector.preemption.lockstep = collector.engine.synced_forwards
    collector.metric_scorer.logged = collector.scorer.logged
    for scorer in (collector.scorer, collector.metric_scorer):
        scorer.offer(state)
        scorer.interruptible_call = partial(collector.preemption.part, at_once=True)


def make_step_record(run_log: RunLog) -> StepRecord:
    """An empty record, whose timed phases the progress bar shows."""
    return StepRecord(lambda phase, parts: run_log.bar.phase(_SHOWN_PHASES.get(phase, phase), parts))


def make_prompts(dataset: Any, processing_class: Any, args: PPOConfig, kinds: Kinds) -> PromptDataset:
    """The tokenized prompts of `dataset`, with the tools of `kinds`; `overlong_prompts` says what happens to overlong
    ones. Where environments can make the prompts, a missing dataset or prompt column makes them blank.

    Raises:
        ValueError: see `prepare_prompts`; also for a truncate token that is not in the tokenizer's vocabulary, for no
            dataset unless there are one environment and `max_steps`, and for a missing column that a `reset` requires.
    """
    resolve_truncate_tokens(processing_class, args.truncate_tokens or ())
    blank: Any = [{"role": "user", "content": ""}] if processing_class.chat_template else ""
    makes_prompts = any(kind.environment_class is not NoEnvironment for kind in kinds.values())
    if dataset is None:
        if not makes_prompts:
            raise ValueError("train_dataset is None; pass prompts, or an environment_factory whose reset returns them")
        if len(kinds) > 1:
            raise ValueError(f"environment_factory has {list(kinds)}, so train_dataset needs a column environment")
        if args.max_steps is None:
            raise ValueError("train_dataset is None, but max_steps is null; set max_steps to the length of the run")
        (name,) = kinds
        row = {args.prompt_column: blank}
        if name is not None:
            row["environment"] = name
        dataset = Dataset.from_list([row] * args.rollout_batch_size)
    elif makes_prompts and isinstance(dataset, Dataset) and not (args.prompt_template or args.user_template):
        if not {args.prompt_column, "instruction"} & {*columns_of(dataset)}:
            dataset = dataset.add_column(args.prompt_column, [blank] * len(dataset))
    if isinstance(dataset, Dataset):
        for kind in kinds.values():
            kind.reset_arguments(dict.fromkeys([*columns_of(dataset), "prompt"]), 0)
    trusted = args.control_tokens_from != "template"
    return prepare_prompts(
        dataset,
        processing_class,
        query_len=args.query_len,
        form=PromptForm.of(args),
        overlong=args.overlong_prompts,
        tools_of=(lambda row: kind_of(kinds, row).schemas) if kinds else None,
        control_tokens=None if trusted else ControlTokens(processing_class),
    )


def make_eval_prompts(dataset: Any, processing_class: Any, args: PPOConfig, kinds: Kinds) -> dict[str, PromptDataset]:
    """The tokenized prompts of each eval set by its name, "" for a single dataset.

    Raises:
        ValueError: see `make_prompts`, with the set's name; also for a name that no metric can have.
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
    """The scorer of functions and models, which are moved to `device`; see `build_reward` for `options` and errors."""
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


def make_sampling_params(
    actor_critic: ActorCritic, processing_class: Any, args: PPOConfig, *, chat: bool
) -> SamplingParams:
    """How the policy is sampled in training. If some prompts are messages (`chat`), the chat template's end of a turn
    ends a response.

    Raises:
        ValueError: when no token stops a response, when the tokenizer does not allow `stop_strings`, or when it has
            tokens without an embedding in the model.
    """
    policy: Any = actor_critic.policy.model
    check_token_ids(policy, processing_class)
    truncate = resolve_truncate_tokens(processing_class, args.truncate_tokens or ())
    turn_end = resolve_turn_end(processing_class, args.chat_template_kwargs) if chat else None
    # As one of truncate_tokens it ends a response from truncate_after on.
    extra = () if turn_end is None or turn_end in truncate else (turn_end,)
    stop = resolve_stop_tokens(processing_class, policy.generation_config, extra)
    pad = processing_class.pad_token_id
    strings = None
    if args.stop_strings:
        vocab_size = actor_critic.policy.head.out_features
        strings = StopStrings(args.stop_strings, processing_class, vocab_size=vocab_size)
    return SamplingParams(
        max_new_tokens=args.response_len,
        temperature=args.temperature,
        # Masks come from lengths, so any id can be that of padding.
        pad_token_id=pad if pad is not None else stop[0],
        stop_token_ids=stop,
        truncate_token_ids=truncate,
        truncate_after=args.truncate_after,
        stop_strings=strings,
        num_return_sequences=args.num_return_sequences,
    )


def make_scorer(sources: Any, tokenizers: Any, args: PPOConfig, device: torch.device, kinds: Kinds) -> RewardScorer:
    """The reward sources with their weights; reward models are moved to `device`. The rewards of environments are added
    later, and so is a reward adapter (`add_reward_adapter`), which needs its base; it has the last weight.

    Raises:
        ValueError: for an invalid source, a wrong number of weights, no source at all, or a reward adapter that cannot
            be read or has no tokenizer.
    """
    given = [] if sources is None else sources
    if not isinstance(given, (list, tuple)):
        given = [given]
    weights = args.reward_weights
    if args.reward_adapter is not None:
        if weights is not None:
            if len(weights) != len(given) + 1:
                raise ValueError(f"reward_weights has {len(weights)} numbers; give {len(given) + 1}, the adapter last")
            weights = weights[:-1] or None
        # For their errors, before any model is loaded.
        model_folder("reward_adapter", args.reward_adapter, part=None, writes_text=False)
        read_reward_adapter(args.reward_adapter)
        _reward_tokenizer(args)
    elif not given and not any(kind.rewards for kind in kinds.values()):
        raise ValueError(
            "there is no reward: pass reward_funcs, an environment with a method get_reward or reply, or a teacher"
        )
    scorer = build_scorer(given, tokenizers, args, device, reward_weights=weights)
    for source in scorer.sources:
        if isinstance(source, ModelReward):
            use_torch_activations(source.model)
    return scorer


def teacher_alone(completions: list[Any], **columns: Any) -> list[float]:
    """The reward where everything that is learned comes from a teacher."""
    return [0.0] * len(completions)


def _reward_tokenizer(args: PPOConfig) -> Any:
    trust = args.trust_remote_code
    return load_processing_class(str(args.reward_adapter), trust_remote_code=trust, field="reward_adapter")


def add_reward_adapter(scorer: RewardScorer, actor_critic: ActorCritic, args: PPOConfig, device: torch.device) -> None:
    """Adds the reward source `args.reward_adapter`, if any, with its head on `device`.

    Raises:
        ValueError: when it does not fit the policy's base, or its tokenizer has tokens without an embedding.
    """
    if args.reward_adapter is None:
        return
    adapters = actor_critic.policy.adapters
    assert adapters is not None, "make_actor_critic rejects a reward adapter without a policy adapter"
    tokenizer = _reward_tokenizer(args)
    check_token_ids(adapters.model, tokenizer, f"the tokenizer of reward_adapter {args.reward_adapter}")
    size, padding_free = args.rollout_per_device_batch_size, bool(args.padding_free)
    # Asked now, when the policy's trial has cached the answer: later an engine may shard the layers.
    packs = padding_free and packing_problem(adapters.model) is None
    pad = tokenizer.pad_token_id
    model: Any = AdapterClassifier(adapters, args.reward_adapter, pad_token_id=pad, padding_free=packs)
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
    """What replies to the policy; None without tools and environments. `messages` = whether the prompts are messages.

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
            conversation.check(kind.schemas, replies=kind.has_reply, max_turns=args.max_turns)
    return Environments(kinds, EpisodeSettings(conversation, args, tool_call_parser))
