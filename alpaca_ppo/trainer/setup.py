"""Builds the trainer's parts from the configuration: prompts, schedule, sampling parameters, rewards, run log.

The models are built in `models.factory`, the accelerator in `distributed.accelerator`.
"""

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch
from accelerate import Accelerator

from alpaca_ppo.adapters import check_reward_adapter
from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.data import PromptDataset, prepare_prompts
from alpaca_ppo.data.schedule import PromptSchedule
from alpaca_ppo.generation import (
    configured_stop_tokens,
    resolve_stop_tokens,
    resolve_truncate_tokens,
    resolve_turn_end,
)
from alpaca_ppo.generation.sampling_params import SamplingParams
from alpaca_ppo.models import ActorCritic, CopiedReference, Reference
from alpaca_ppo.models.activations import use_torch_activations
from alpaca_ppo.models.loading import load_processing_class
from alpaca_ppo.models.packing_probe import supports_packing
from alpaca_ppo.models.token_checks import (
    check_positions,
    check_reward_token_ids,
    check_same_tokenizer,
    check_token_ids,
)
from alpaca_ppo.ppo import kl_controllers
from alpaca_ppo.ppo.critic_pretraining import CriticPretraining
from alpaca_ppo.ppo.kl_controllers import KLController
from alpaca_ppo.ppo.rollouts import RolloutCollector
from alpaca_ppo.ppo.updates import Updater, planned_steps
from alpaca_ppo.rewards import AdapterClassifier, FailurePolicy, ModelReward, RewardScorer, build_reward
from alpaca_ppo.rewards.scoring import Penalties
from alpaca_ppo.tracking.run_log import RunLog


def check_critic_tokenizer(start: Any, processing_class: Any, args: PPOConfig) -> None:
    """Checks that a critic with a backbone of its own starts from a model with the policy's tokenizer, as far as that
    can be known: of a model in memory it cannot.

    Raises:
        ValueError: see `check_same_tokenizer`.
    """
    if args.uses_critic and args.critic_layout == "separate" and isinstance(start, str):
        check_same_tokenizer(start, processing_class, trust_remote_code=args.trust_remote_code)


def make_prompts(dataset: Any, processing_class: Any, args: PPOConfig, *, privileged: bool = True) -> PromptDataset:
    """The tokenized prompts of `dataset`; overlong ones are dropped or raise an error (`overlong_prompts`).

    Without `privileged` they have no text of `privileged_column`: evaluation runs no critic.

    Raises:
        ValueError: see `prepare_prompts`; also for a truncate token that is not in the tokenizer's vocabulary.
    """
    resolve_truncate_tokens(processing_class, args.truncate_tokens or ())
    return prepare_prompts(
        dataset,
        processing_class,
        query_len=args.query_len,
        prompt_column=args.prompt_column,
        prompt_template=args.prompt_template,
        overlong=args.overlong_prompts,
        privileged_column=args.privileged_column if privileged else None,
        privileged_len=args.privileged_len,
    )


def make_schedule(num_prompts: int, args: PPOConfig) -> PromptSchedule:
    """The prompts of each step; one epoch if neither `total_epochs` nor `total_episodes` is set."""
    epochs = 1 if args.total_epochs is None and args.total_episodes is None else args.total_epochs
    return PromptSchedule(
        num_prompts, args.rollout_batch_size, seed=args.seed, total_epochs=epochs, total_episodes=args.total_episodes
    )


def make_critic_pretraining(
    updater: Updater, schedule: PromptSchedule, args: PPOConfig, *, report: Callable[[str], Any]
) -> CriticPretraining:
    """Which steps pretrain the critic. If they end early, the policy's learning rates are spread over all steps left.

    Args:
        updater: of the run.
        schedule: of its prompts.
        args: of the run.
        report: called with messages for the user.
    """

    def restart_policy(steps: int) -> None:
        updater.schedules.restart_policy(planned_steps(schedule, args, pretraining_steps=steps).policy)

    return CriticPretraining(args, on_early_end=restart_policy, report=report)


def make_sampling_params(
    actor_critic: ActorCritic, processing_class: Any, args: PPOConfig, *, chat: bool, accelerator: Accelerator
) -> SamplingParams:
    """How the policy is sampled in training.

    Args:
        actor_critic: policy and critic.
        processing_class: the policy's tokenizer.
        args: of the run.
        chat: whether there are prompts that are messages. What ends a turn in the chat template then ends a response.
        accelerator: of the run; its main process reports a stop token that only the chat template knows.

    Raises:
        ValueError: when no token stops a response, when prompt and response may exceed the positions of policy or
            critic, or when the tokenizer has tokens without an embedding in the model.
    """
    policy: Any = actor_critic.policy.model
    check_positions(policy.config, args)
    if actor_critic.critic is not None:
        backbone: Any = actor_critic.critic.backbone
        check_positions((policy if backbone is None else backbone).config, args, owner="critic", privileged=True)
    check_token_ids(policy, processing_class)
    truncate = resolve_truncate_tokens(processing_class, args.truncate_tokens or ())
    turn_end = resolve_turn_end(processing_class) if chat else None
    # A turn end among truncate_tokens ends a response from truncate_after on, as the user wants.
    extra = () if turn_end is None or turn_end in truncate else (turn_end,)
    stop = resolve_stop_tokens(processing_class, policy.generation_config, extra)
    for token in set(extra) - configured_stop_tokens(processing_class, policy.generation_config):
        name = processing_class.convert_ids_to_tokens(token)
        accelerator.print(
            f"the chat template ends a turn with {name!r} (id {token}), which is neither the tokenizer's eos nor in "
            "the model's generation_config: it ends responses too. To let responses go on after it, set "
            f"truncate_tokens: [{token}] and truncate_after: {args.response_len} (response_len)"
        )
    pad = processing_class.pad_token_id
    return SamplingParams(
        max_new_tokens=args.response_len,
        temperature=args.temperature,
        # Masks come from lengths, so any id can stand for padding.
        pad_token_id=pad if pad is not None else stop[0],
        stop_token_ids=stop,
        truncate_token_ids=truncate,
        truncate_after=args.truncate_after,
        num_return_sequences=args.num_return_sequences,
        backend=args.generation_backend,
        cuda_graphs=args.cuda_graphs,
        compile_decoding=args.compile_decoding,
    )


def make_scorer(reward_funcs: Any, tokenizers: Any, args: PPOConfig, device: torch.device) -> RewardScorer:
    """The reward sources with their weights; reward models are moved to `device`. A reward adapter is added later, once
    its base is loaded (`add_reward_adapter`); its weight is the last one.

    Raises:
        ValueError: for an invalid source, a wrong number of weights, or a reward adapter that cannot be read or has no
            tokenizer. The reward adapter is checked before any model is loaded.
    """
    weights = args.reward_weights
    policy = FailurePolicy(args.reward_retries, args.reward_retry_pause, drop=args.failed_rewards == "drop")
    if args.reward_adapter is not None:
        if not isinstance(reward_funcs, (list, tuple)):
            reward_funcs = [reward_funcs]
        if weights is not None:
            if len(weights) != len(reward_funcs) + 1:
                raise ValueError(
                    f"reward_weights has {len(weights)} numbers for {len(reward_funcs)} reward_funcs and a "
                    "reward_adapter; give one each, the adapter's last"
                )
            weights = weights[:-1]
        check_reward_adapter(args.reward_adapter)
        _reward_tokenizer(args)
        if not reward_funcs:
            return RewardScorer([], [], policy=policy)
    scorer = build_reward(
        reward_funcs,
        reward_weights=weights,
        reward_processing_classes=tokenizers,
        batch_size=args.rollout_per_device_batch_size,
        dtype=getattr(torch, args.dtype),
        device=device,
        trust_remote_code=args.trust_remote_code,
        policy=policy,
        padding_free=bool(args.padding_free),
    )
    for source in scorer.sources:
        if isinstance(source, ModelReward):
            use_torch_activations(source.model)
    return scorer


def _reward_tokenizer(args: PPOConfig) -> Any:
    name, trust = args.reward_adapter, args.trust_remote_code
    return load_processing_class(str(name), trust_remote_code=trust, field="reward_adapter")


def make_penalties(args: PPOConfig) -> Penalties:
    """What is taken from scores for how a response ends."""
    return Penalties(
        missing_stop=args.penalty_reward_value,
        overlong_buffer_len=args.overlong_buffer_len,
        overlong_factor=args.overlong_penalty_factor,
    )


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
    check_reward_token_ids(adapters.model, tokenizer, args.reward_adapter)
    # Known since the policy's trial, while the layers hold no other adapters and before an engine shards them.
    padding_free = bool(args.padding_free) and supports_packing(adapters.model)
    model: Any = AdapterClassifier(
        adapters, args.reward_adapter, pad_token_id=tokenizer.pad_token_id, padding_free=padding_free
    )
    source = ModelReward(
        model,
        tokenizer,
        name="reward_adapter",
        batch_size=args.rollout_per_device_batch_size,
        padding_free=bool(args.padding_free),
    )
    source.to(device)
    scorer.add(source, 1.0 if args.reward_weights is None else args.reward_weights[-1])


def make_run_log(accelerator: Accelerator, args: PPOConfig, **resumed: Any) -> RunLog:
    """The run's log on disk and in the trackers.

    `resumed` is passed on to `RunLog`: its `resume_step`, `step_ended`, `resume_skipped` and `resume_lines`.
    """
    return RunLog(
        accelerator,
        output_dir=args.output_dir,
        report_to=args.report_to,
        run_name=args.run_name,
        config=asdict(args),
        **resumed,
    )


def begin_run_log(log: RunLog | None, accelerator: Accelerator, args: PPOConfig, **resumed: Any) -> RunLog:
    """The run's log without records of steps that the run will make again; `resumed` is that of `make_run_log`.

    `log` is the one that is open already, because the trainer evaluated or sampled before it trained; or None.
    """
    if log is None:
        return make_run_log(accelerator, args, **resumed)
    log.rewind(**resumed)
    return log


def make_collector(
    reference: Reference | None, scorer: RewardScorer, accelerator: Accelerator, args: PPOConfig
) -> RolloutCollector:
    """The object that samples, evaluates and gathers the rows of a rollout.

    Raises:
        ValueError: when prompt and response may exceed the positions of a copied reference.
    """
    if isinstance(reference, CopiedReference):
        check_positions(reference.policy.model.config, args, owner="reference")
    return RolloutCollector(
        accelerator=accelerator,
        reference=reference,
        scorer=scorer,
        chunk_size=args.logprob_chunk_size,
        per_device_batch_size=args.rollout_per_device_batch_size,
        row_tokens=args.longest_row,
    )


def evaluation_sampling_params(sampling_params: SamplingParams, args: PPOConfig) -> SamplingParams:
    """How the policy is sampled in evaluation: one response per prompt, greedy unless `eval_do_sample`, with the same
    random numbers each time.
    """
    return replace(
        sampling_params,
        seed=args.seed + 1,
        step=0,
        num_return_sequences=1,
        do_sample=args.eval_do_sample,
        top_k=args.eval_top_k,
        top_p=args.eval_top_p,
    )


def make_kl_controller(args: PPOConfig) -> KLController:
    """The controller of the KL penalty's weight."""
    return kl_controllers.make_kl_controller(
        args.kl_controller,
        kl_coef=args.kl_coef,
        target_kl=args.target_kl,
        k_beta=args.k_beta,
        horizon=args.kl_horizon,
    )
