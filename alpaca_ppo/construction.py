"""What the trainer's constructor assembles: accelerator, tokenizer, prompts, rewards and run log, each from plain
arguments.

Kept apart from `trainer.py` so that the loop can be read on its own. Models are in `model_construction`.
"""

from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin, InitProcessGroupKwargs
from peft import PeftModel
from transformers import AutoTokenizer, PreTrainedModel, TrainerState

from alpaca_ppo.batching import PromptSchedule
from alpaca_ppo.config import PPOConfig
from alpaca_ppo.data import PromptDataset, prepare_prompts
from alpaca_ppo.deepspeed_setup import deepspeed_plugin, load_whole, wants_deepspeed
from alpaca_ppo.generation import resolve_stop_tokens, resolve_truncate_tokens
from alpaca_ppo.kl_controllers import KLController, make_kl_controller
from alpaca_ppo.models import ActorCritic, AdapterClassifier, Reference, check_reward_adapter
from alpaca_ppo.preflight import check_places, check_positions, check_reward_token_ids, check_token_ids
from alpaca_ppo.rewards import ModelReward, RewardScorer, build_reward
from alpaca_ppo.rollouts import RolloutCollector, Sampling
from alpaca_ppo.tracking import RunLog


def make_accelerator(args: PPOConfig, accelerator: Accelerator | None = None) -> Accelerator:
    """An Accelerator that does what `args` says, however the program was started; the user's own if it agrees.

    It counts micro-batches by itself: `sync_with_dataloader=False`, or the last prompts of an epoch would end every
    accumulation early.

    It is the first thing that the constructor makes, so `args` is checked here against what is outside it.

    Raises:
        ValueError: when the user's accelerator computes in another precision than `args` names, or has trackers that
            were not started; when this process has an accelerator of other settings; for a tracker that is not
            installed, or an `output_dir` that cannot be a folder.
    """
    check_places(args)
    if accelerator is not None:
        return _checked(accelerator, args)
    plugin = deepspeed_plugin(args.deepspeed) if wants_deepspeed(args.deepspeed) else None
    on_cpu = args.use_cpu or not torch.cuda.is_available()
    if plugin is not None:
        _check_deepspeed(plugin.zero_stage, args)
    # With DeepSpeed and without a GPU, Accelerate finds no backend, and every process believes it is alone.
    backend: dict[str, Any] = {"backend": "gloo"} if plugin is not None and on_cpu else {}
    try:
        made = Accelerator(
            # Accelerate takes True for "no DeepSpeed"; without it and a GPU, processes would not find each other.
            cpu=on_cpu and plugin is None,
            mixed_precision="bf16" if args.bf16 else "no",
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1, sync_with_dataloader=False),
            deepspeed_plugin=plugin,
            kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=args.ddp_timeout), **backend)],
        )
        load_whole()
        return made
    except ValueError as error:
        # Accelerate keeps one state a process: a second trainer, in a notebook for instance, cannot have another.
        raise ValueError(
            f"bf16 is {args.bf16} and use_cpu {args.use_cpu}, but this process has an Accelerator of other settings; "
            "use the same settings, or a new process"
        ) from error


def _check_deepspeed(stage: int, args: PPOConfig) -> None:
    if args.use_cpu and torch.cuda.is_available():
        raise ValueError(
            "use_cpu is True and DeepSpeed is on, which takes the GPU it finds; hide the GPU instead: start with "
            "CUDA_VISIBLE_DEVICES= DS_ACCELERATOR=cpu, or leave use_cpu out"
        )
    check_four_bit(stage, args)


def check_four_bit(stage: int, args: PPOConfig) -> None:
    """Checks that ZeRO leaves weights of 4 bits whole.

    Raises:
        ValueError: under stage 3.
    """
    if args.load_in_4bit and stage == 3:
        raise ValueError(
            "load_in_4bit is True, but ZeRO 3 would divide the weights without their scales; use ZeRO 1 or 2, or "
            "dtype: bfloat16"
        )


def _checked(accelerator: Accelerator, args: PPOConfig) -> Accelerator:
    if args.bf16 != (accelerator.mixed_precision == "bf16"):
        raise ValueError(
            f"bf16 is {args.bf16} but the accelerator's mixed_precision is {accelerator.mixed_precision!r}; "
            "make them agree"
        )
    if accelerator.log_with and not accelerator.trackers:
        raise ValueError(
            f"the accelerator has log_with {[str(name) for name in accelerator.log_with]} but its trackers "
            "were not started; call accelerator.init_trackers(...) first, or name them in report_to instead"
        )
    if args.deepspeed is not None:
        raise ValueError(
            f"deepspeed is {args.deepspeed!r}, but the accelerator is your own; give it a DeepSpeedPlugin of that file "
            "and leave deepspeed out, or leave accelerator out"
        )
    load_whole()
    return accelerator


def load_processing_class(
    model: str | PreTrainedModel | PeftModel | ActorCritic,
    *,
    trust_remote_code: bool = False,
    field: str = "model_name_or_path",
) -> Any:
    """The tokenizer that belongs to `model`, which `field` of the run names.

    Raises:
        ValueError: when the model in memory does not say where it came from, or there is no tokenizer.
    """
    if isinstance(model, ActorCritic):
        model = model.policy.model
    name = model if isinstance(model, str) else model.config.name_or_path
    if not name:
        raise ValueError(
            "processing_class is None and the model has no name to load a tokenizer from; pass "
            "processing_class=tokenizer"
        )
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"no tokenizer can be loaded from {name!r} ({error}); check {field}: an existing folder with the "
            "tokenizer's files, or a hub id within reach"
        ) from error


def make_prompts(dataset: Any, processing_class: Any, args: PPOConfig) -> PromptDataset:
    """The tokenised prompts of `dataset`, over-long ones dropped or refused as `args` says.

    Raises:
        ValueError: as `prepare_prompts`, and for a truncate token that the tokenizer does not have: no model is loaded
            yet.
    """
    resolve_truncate_tokens(processing_class, args.truncate_tokens or ())
    return prepare_prompts(
        dataset,
        processing_class,
        query_len=args.query_len,
        prompt_column=args.prompt_column,
        prompt_template=args.prompt_template,
        overlong=args.overlong_prompts,
    )


def make_schedule(num_prompts: int, args: PPOConfig) -> PromptSchedule:
    """Which prompts each step takes; one epoch where `args` names neither epochs nor episodes."""
    epochs = 1 if args.total_epochs is None and args.total_episodes is None else args.total_epochs
    return PromptSchedule(
        num_prompts, args.rollout_batch_size, seed=args.seed, total_epochs=epochs, total_episodes=args.total_episodes
    )


def make_sampling(policy: PreTrainedModel, processing_class: Any, args: PPOConfig) -> Sampling:
    """How the policy is sampled in training.

    Raises:
        ValueError: when nothing stops a response, prompt and response may be longer than the model's positions, or the
            tokenizer has tokens that the model has not.
    """
    check_positions(policy.config, args)
    check_token_ids(policy, processing_class)
    stop = resolve_stop_tokens(processing_class, policy.generation_config)
    truncate = resolve_truncate_tokens(processing_class, args.truncate_tokens or ())
    pad = processing_class.pad_token_id
    return Sampling(
        max_new_tokens=args.response_len,
        temperature=args.temperature,
        # Masks come from lengths, so any id can stand for padding.
        pad_token_id=pad if pad is not None else stop[0],
        stop_token_ids=stop,
        truncate_token_ids=truncate,
        truncate_after=args.truncate_after,
        num_return_sequences=args.num_return_sequences,
        backend=args.generation_backend,
    )


def make_scorer(reward_funcs: Any, tokenizers: Any, args: PPOConfig, device: torch.device) -> RewardScorer:
    """The reward sources, weighted as `args` says; models among them are put on `device`. A reward adapter comes later
    (`add_reward_adapter`), when there is a base to put it on; its weight is the last.

    Raises:
        ValueError: for a source that cannot be one, numbers of weights that do not agree, and a reward adapter that is
            none or has no tokenizer: no model is loaded yet.
    """
    weights = args.reward_weights
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
            return RewardScorer([], [])
    return build_reward(
        reward_funcs,
        reward_weights=weights,
        reward_processing_classes=tokenizers,
        batch_size=args.rollout_per_device_batch_size,
        dtype=getattr(torch, args.dtype),
        device=device,
        trust_remote_code=args.trust_remote_code,
    )


def _reward_tokenizer(args: PPOConfig) -> Any:
    name, trust = args.reward_adapter, args.trust_remote_code
    return load_processing_class(str(name), trust_remote_code=trust, field="reward_adapter")


def add_reward_adapter(scorer: RewardScorer, actor_critic: ActorCritic, args: PPOConfig, device: torch.device) -> None:
    """Adds the reward source that `args.reward_adapter` names, on the policy's base, which will be on `device`.

    Raises:
        ValueError: when the reward adapter is none, of another base, or with tokens that the base has not.
    """
    if args.reward_adapter is None:
        return
    adapters = actor_critic.policy.adapters
    assert adapters is not None, "make_actor_critic refuses a reward adapter without a policy's"
    tokenizer = _reward_tokenizer(args)
    check_reward_token_ids(adapters.model, tokenizer, args.reward_adapter)
    model: Any = AdapterClassifier(adapters, args.reward_adapter, pad_token_id=tokenizer.pad_token_id)
    source = ModelReward(model, tokenizer, name="reward_adapter", batch_size=args.rollout_per_device_batch_size)
    source.to(device)
    scorer.add(source, 1.0 if args.reward_weights is None else args.reward_weights[-1])


def make_run_log(accelerator: Accelerator, args: PPOConfig, **resumed: Any) -> RunLog:
    """What the run leaves on disk and tells the trackers; `resumed` as of `RunLog`."""
    return RunLog(
        accelerator,
        output_dir=args.output_dir,
        report_to=args.report_to,
        run_name=args.run_name,
        config=asdict(args),
        **resumed,
    )


def make_state(schedule: PromptSchedule, accelerator: Accelerator) -> TrainerState:
    """The state that callbacks see, before the first step."""
    return TrainerState(max_steps=schedule.num_steps, is_world_process_zero=accelerator.is_main_process)


def make_collector(
    reference: Reference | None, scorer: RewardScorer, accelerator: Accelerator, processing_class: Any, args: PPOConfig
) -> RolloutCollector:
    """What takes prompts to scored and evaluated rows on one rank."""
    return RolloutCollector(
        reference=reference,
        scorer=scorer,
        processing_class=processing_class,
        penalty=args.penalty_reward_value,
        chunk_size=args.logprob_chunk_size,
        per_device_batch_size=args.rollout_per_device_batch_size,
        accelerator=accelerator,
    )


def evaluation_sampling(sampling: Sampling, args: PPOConfig) -> Sampling:
    """How the policy is sampled in evaluation: one response a prompt, greedy unless `eval_do_sample`."""
    return replace(
        sampling,
        num_return_sequences=1,
        do_sample=args.eval_do_sample,
        top_k=args.eval_top_k,
        top_p=args.eval_top_p,
    )


def make_kl(args: PPOConfig) -> KLController:
    """The controller of the KL penalty's weight."""
    return make_kl_controller(
        args.kl_controller,
        kl_coef=args.kl_coef,
        target_kl=args.target_kl,
        k_beta=args.k_beta,
        horizon=args.kl_horizon,
    )
