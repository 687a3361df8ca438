"""What a resumed run must have in common with its checkpoint: configuration, prompts, tokenizer, models and rewards.

Models and rewards are compared by the `fingerprints` of what the run started from; names and shapes of weights in
`serialization`.
"""

import dataclasses
import inspect
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, SchedulerType
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION

from alpaca_ppo.adapters.adapter_set import POLICY, REWARD, VALUE, describe
from alpaca_ppo.adapters.checks import belongs_to
from alpaca_ppo.checkpoint.fingerprints import callable_identity, model_state, short_hash, tensors_fingerprint
from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.data import PromptDataset
from alpaca_ppo.distributed.optimizer import StepCounts
from alpaca_ppo.environments.episodes import Environments
from alpaca_ppo.models import ActorCritic, AdapterReference, CopiedReference, Reference
from alpaca_ppo.rewards import AdapterClassifier, FunctionReward, ModelReward, RewardScorer

# Options that a resumed run may change.
FREE_TO_CHANGE = frozenset(
    """
    output_dir overwrite_output_dir run_name report_to hub_model_id logging_steps num_logged_rollouts
    num_inspected_prompts report stop_on save_steps save_total_limit load_best_model_at_end metric_for_best_model
    greater_is_better ignore_changes eval_steps eval_temperature eval_top_p eval_top_k eval_num_samples
    eval_success_above eval_success_by eval_opponent eval_judge
    total_epochs total_episodes max_steps stop_at max_kl_to_ref max_skipped_updates
    rollout_per_device_batch_size step_per_device_batch_size max_tokens_per_micro_batch gradient_checkpointing
    padding_free logprob_chunk_size use_cpu deepspeed fsdp ddp_timeout
    tool_timeout trust_remote_code reward_retries failed_rewards mismatch_action
    vllm_python vllm_urls vllm_gpu_memory_utilization teacher_offloaded
    """.split()
)
# Options that name folders, which may be moved: `start_identity` has what the folders hold.
_COMPARED_BY_CONTENT = {"reference", "reward_adapter", "reward_weights", "teacher_model_name_or_path"}
# Location, origin and outputs of a model. transformers changes some when it saves the model.
_NOT_ARCHITECTURE = """
_name_or_path transformers_version architectures auto_map use_cache dtype id2label label2id output_attentions
output_hidden_states
""".split()
# For an entry of an identity, the name in `ignore_changes` that allows it to change.
_IGNORED_BY = {"train_dataset": "data", "weights": "model", "rewards": "reward", "environments": "reward"}
_MAX_NAMED, _ABSENT = 5, "absent"


def start_identity(
    actor_critic: ActorCritic,
    reference: Reference | None,
    teacher: Any,
    scorer: RewardScorer,
    environments: Environments | None,
) -> dict[str, Any]:
    """The models, rewards and environments that a run starts from, as plain values.

    To be called before weights are wrapped, sharded, or loaded from a checkpoint. Trained weights are left out, because
    they come from the checkpoint; a copied reference is included.
    """
    rewards = {}
    for i, (source, weight) in enumerate(zip(scorer.sources, scorer.weights, strict=True)):
        rewards[str(i)] = {**_source_identity(source), "weight": weight}
    kinds = {}
    for kind in () if environments is None else environments.kinds.values():
        tools = [callable_identity(tool.function) for tool in kind.tools if tool.function is not None]
        kinds[kind.name] = {"environment": callable_identity(kind.environment_class), "tools": tools}
    if teacher is not None:
        is_here = isinstance(teacher, CopiedReference)
        weights = tensors_fingerprint(model_state(teacher.policy.model)) if is_here else "of a server"
        rewards["teacher"] = {"weights": weights}
    return {"weights": _frozen_weights(actor_critic, reference), "rewards": rewards, "environments": kinds}


def _frozen_weights(actor_critic: ActorCritic, reference: Reference | None) -> dict[str, str]:
    """Fingerprints of the weights that are not trained, without reward models."""
    model, critic = actor_critic.policy.model, actor_critic.critic
    parameters = model.named_parameters(remove_duplicate=False)
    left_out = {name for name, parameter in parameters if parameter.requires_grad or belongs_to(REWARD, name)}
    frozen_policy = {name: tensor for name, tensor in model_state(model).items() if name not in left_out}
    critic_parameters = [] if critic is None else critic.named_parameters()
    frozen_critic = {name: parameter for name, parameter in critic_parameters if not parameter.requires_grad}
    frozen: dict[str, dict[str, Any]] = {"starting_policy": frozen_policy, "frozen_critic": frozen_critic}
    fingerprints = {role: tensors_fingerprint(tensors) for role, tensors in frozen.items() if tensors}
    return {"reference": _reference_identity(reference), **fingerprints}


def _reference_identity(reference: Reference | None) -> str:
    if isinstance(reference, CopiedReference):
        return f"weights {tensors_fingerprint(model_state(reference.policy.model))}"
    if isinstance(reference, AdapterReference):
        return f"the policy with {'no adapter' if reference.adapter is None else 'the adapter it started from'}"
    return "none" if reference is None else type(reference).__name__


def _source_identity(source: FunctionReward | ModelReward) -> dict[str, Any]:
    if isinstance(source, FunctionReward):
        return {"function": callable_identity(source.function)}
    model: Any = source.model
    tensors, kind = model_state(model), type(model).__name__
    if isinstance(model, AdapterClassifier):
        tensors |= model.adapters.tensors_of(REWARD)
        kind = describe(model.adapters.config_of(REWARD))
    return {
        "config": architecture(model.config),
        "tokenizer": tokenizer_identity(source.tokenizer),
        "model": f"{kind} with weights {tensors_fingerprint(tensors)}",
    }


def run_identity(
    args: PPOConfig,
    train_prompts: PromptDataset,
    processing_class: Any,
    actor_critic: ActorCritic,
    *,
    start: Mapping[str, Any],
    optimizer_steps: StepCounts | None,
) -> dict[str, Any]:
    """What a run and its resumption must share, as plain values: all that affects the numbers of a run but is not in
    its checkpoints, and options such as the learning rate, whose old value a resumed run would restore.

    Args:
        start: `start_identity`.
        optimizer_steps: of the whole run; None with a user's schedule.
    """
    policy, critic = actor_critic.policy, actor_critic.critic
    identity: dict[str, Any] = {"tokenizer": tokenizer_identity(processing_class)}
    identity["policy"] = architecture(policy.model.config)
    identity["policy"]["stop_tokens"] = [*policy.stop_token_ids]
    backbone: Any = None if critic is None else critic.backbone
    if backbone is not None:
        identity["critic"] = architecture(backbone.config)
    if policy.adapters is not None:
        # The adapter of a critic that another run saved may differ from the policy's.
        roles = [POLICY, VALUE] if critic is not None and critic.has_adapter else [POLICY]
        identity["peft_config"] = {role: describe(policy.adapters.config_of(role)) for role in roles}
    not_compared = FREE_TO_CHANGE | _COMPARED_BY_CONTENT
    identity["args"] = {name: value for name, value in dataclasses.asdict(args).items() if name not in not_compared}
    if optimizer_steps is not None:
        identity["lr_scheduler_type"] = schedule_lengths(args, optimizer_steps)
    identity["train_dataset"] = {"prompts": len(train_prompts), "fingerprint": train_prompts.fingerprint}
    return {**identity, **start}


def schedule_lengths(args: PPOConfig, optimizer_steps: StepCounts) -> dict[str, int]:
    """The optimizer steps of policy and critic if the schedule or a warm-up depends on them, else an empty mapping."""
    schedule: Any = TYPE_TO_SCHEDULER_FUNCTION[SchedulerType(args.lr_scheduler_type)]
    schedule_depends = "num_training_steps" in inspect.signature(schedule).parameters
    warmup_depends = any(0 < warmup < 1 for warmup in (args.warmup_steps, args.critic_lr_warmup_steps or 0))
    if not schedule_depends and not warmup_depends:
        return {}
    return {"optimizer_steps": optimizer_steps.policy, "critic_optimizer_steps": optimizer_steps.critic}


def check_identity(folder: Path, saved: Mapping[str, Any], here: Mapping[str, Any], args: PPOConfig) -> None:
    """Raises a ValueError if `saved`, the `run_identity` in the checkpoint `folder`, differs from `here`, this run's,
    in more than `args.ignore_changes` allow.
    """
    found: dict[str, list[str]] = {}
    for entry in dict.fromkeys([*here, *saved]):
        # `metrics`, which only a checkpoint has, is compared by `run_log.check_metrics`.
        if entry != "metrics" and _IGNORED_BY.get(entry) not in (args.ignore_changes or []):
            found[entry] = [*differences(entry, saved.get(entry, _ABSENT), here.get(entry, _ABSENT))]
    if changes := [change for of_entry in found.values() for change in of_entry]:
        more = f" and {len(changes) - _MAX_NAMED} more differences" if len(changes) > _MAX_NAMED else ""
        kinds = [kind for entry, kind in _IGNORED_BY.items() if found.get(entry)]
        ignore = f"set ignore_changes: [{', '.join(dict.fromkeys(kinds))}], " if kinds else ""
        problem = f"does not match this run: {', '.join(changes[:_MAX_NAMED])}{more}"
        remedy = f"change it back, {ignore}or start a new run in another output_dir"
        raise ValueError(f"checkpoint {folder} {problem}; {remedy}")


def differences(name: str, saved: Any, here: Any) -> Iterator[str]:
    """The dotted name and both values of each entry that differs between two values or nested mappings."""
    if isinstance(saved, Mapping) and isinstance(here, Mapping):
        for key in dict.fromkeys([*here, *saved]):
            yield from differences(f"{name}.{key}", saved.get(key, _ABSENT), here.get(key, _ABSENT))
    elif saved != here:
        then, now = ("present" if isinstance(value, Mapping) else value for value in (saved, here))
        yield f"{name} is {then} in the checkpoint and {now} here"


def tokenizer_identity(processing_class: Any) -> dict[str, Any]:
    """Hashes of vocabulary and chat template, and the special tokens by name."""
    template = processing_class.chat_template
    return {
        "vocabulary": short_hash(json.dumps(sorted(processing_class.get_vocab().items()))),
        "special_tokens": {name: str(token) for name, token in processing_class.special_tokens_map.items()},
        "chat_template": template and short_hash(json.dumps(template)),
    }


def architecture(config: PreTrainedConfig) -> dict[str, Any]:
    """The fields of a model's configuration that affect its outputs, as plain values."""
    fields = {name: value for name, value in config.to_dict().items() if name not in _NOT_ARCHITECTURE}
    return dict(json.loads(json.dumps({"model_type": config.model_type, **fields}, default=str)))
