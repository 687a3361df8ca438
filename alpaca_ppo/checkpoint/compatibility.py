"""What a resumed run must have in common with its checkpoint: configuration, prompts, tokenizer, models and rewards.

Models and rewards are compared by what the run started from, through their `fingerprints`. Names and shapes of the
weights are compared where they are loaded (`serialization`).
"""

import hashlib
import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION

from alpaca_ppo.adapters import POLICY, REWARD, VALUE
from alpaca_ppo.adapters.adapter_set import adapter_tensors
from alpaca_ppo.adapters.checks import belongs_to
from alpaca_ppo.checkpoint.fingerprints import callable_identity, model_fingerprint, model_state, tensors_fingerprint
from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.data import PromptDataset
from alpaca_ppo.distributed.schedules import StepCounts
from alpaca_ppo.environments.episodes import Environments
from alpaca_ppo.models import ActorCritic, AdapterReference, CopiedReference, Policy, Reference
from alpaca_ppo.rewards import AdapterClassifier, FunctionReward, ModelReward, RewardScorer

_FREE_TO_CHANGE = """
ignore_changes output_dir run_name report_to logging_steps save_steps
overwrite_output_dir load_best_model_at_end
save_total_limit metric_for_best_model greater_is_better eval_steps num_logged_rollouts hub_model_id
total_epochs total_episodes max_steps
rollout_per_device_batch_size step_per_device_batch_size gradient_checkpointing use_cpu
logprob_chunk_size deepspeed ddp_timeout max_kl_to_ref max_skipped_updates
eval_top_p eval_temperature eval_num_samples eval_success_above eval_success_by
eval_answer_func eval_best_of_by eval_opponent eval_judge
tool_timeout
trust_remote_code reward_retries failed_rewards
mismatch_action entropy_logging_steps max_tokens_per_micro_batch padding_free
num_inspected_prompts report report_token_mb stop_on print_samples_every
""".split()
# They name models and weigh rewards: `start_identity` has what they stand for, so that a folder may be moved.
_COMPARED_BY_CONTENT = ["reference", "reward_adapter", "reward_weights"]
# A model's location, origin and outputs. transformers changes some of these fields when it saves a model.
_NO_ARCHITECTURE = """
_name_or_path transformers_version architectures auto_map use_cache dtype id2label label2id output_attentions
output_hidden_states
""".split()
_REMEDIES = {
    "args": "change it back, or start a new run in another output_dir",
    "tokenizer": "pass the tokenizer of the checkpoint's run as processing_class",
    "policy": "use the model of the checkpoint's run",
    "critic": "use the critic of the checkpoint's run",
    "peft_config": "use the adapter's settings of the checkpoint's run",
    "train_dataset": "use the rows of the checkpoint's run, in the same order, or set ignore_changes: [data]",
    "weights": (
        "use the models that the checkpoint's run started from (the reference may be a copy of its starting policy), "
        "or set ignore_changes: [model]"
    ),
    "rewards": (
        "use the reward sources of the checkpoint's run, in the same order and with the same reward_weights, or set "
        "ignore_changes: [reward]"
    ),
    "environments": "use the environments and tools of the checkpoint's run, or set ignore_changes: [reward]",
    "lr_schedule": (
        "the schedule of lr_scheduler_type spreads the learning rate over the whole run, so keep total_epochs, "
        "total_episodes, max_steps and the number of prompts, or start a new run in another output_dir"
    ),
}
_NAMES = {
    "weights.policy": "the starting policy",
    "weights.reference": "the reference",
    "weights.critic": "the frozen part of the critic",
    "lr_schedule.optimizer_steps": "the number of optimizer steps",
    "lr_schedule.critic_optimizer_steps": "the number of the critic's optimizer steps",
}
_MOST_NAMED = 5


def start_identity(
    actor_critic: ActorCritic, reference: Reference | None, scorer: RewardScorer, environments: Environments | None
) -> dict[str, Any]:
    """The models, rewards and environments that a run starts from, as plain values.

    Call it before the weights are wrapped or sharded, and before those of a checkpoint are loaded. Of policy and
    critic, the weights that are trained are left out: they come from the checkpoint, and what else is built from them,
    a copied reference, is compared itself.
    """
    weights = _frozen_policy(actor_critic.policy) | {"reference": _reference_identity(reference)}
    critic = {} if actor_critic.critic is None else dict(actor_critic.critic.named_parameters())
    if frozen := {name: parameter for name, parameter in critic.items() if not parameter.requires_grad}:
        weights["critic"] = f"weights {tensors_fingerprint(frozen)}"
    sources = zip(scorer.sources, scorer.weights, strict=True)
    identity: dict[str, Any] = {"weights": weights}
    identity["rewards"] = [_source_identity(source) | {"weight": w} for source, w in sources]
    # Without environments the entry is left out.
    return identity | ({} if environments is None else {"environments": _kinds_identity(environments)})


def _kinds_identity(environments: Environments) -> dict[str, Any]:
    """The class of each environment, and the tools that it is given, in a dictionary by its name."""
    return {
        kind.name: {
            "environment": callable_identity(kind.environment_class),
            "tools": [callable_identity(tool.function) for tool in kind.tools if tool.function is not None],
        }
        for kind in environments.kinds.values()
    }


def _frozen_policy(policy: Policy) -> dict[str, str]:
    """The part of the policy that is not trained, under the entry `policy`; nothing if all of it is."""
    named = policy.model.named_parameters(remove_duplicate=False)
    left_out = {name for name, parameter in named if parameter.requires_grad or belongs_to(REWARD, name)}
    frozen = {name: tensor for name, tensor in model_state(policy.model).items() if name not in left_out}
    return {"policy": f"weights {tensors_fingerprint(frozen)}"} if frozen else {}


def _reference_identity(reference: Reference | None) -> str:
    if isinstance(reference, CopiedReference):
        return f"weights {model_fingerprint(reference.policy.model)}"
    if isinstance(reference, AdapterReference):
        return f"the policy with {'no adapter' if reference.adapter is None else 'the adapter it started from'}"
    return "none" if reference is None else type(reference).__name__


def _source_identity(source: FunctionReward | ModelReward) -> dict[str, Any]:
    if isinstance(source, FunctionReward):
        return {"name": source.name, "function": callable_identity(source.function)}
    model: Any = source.model
    identity = {"name": source.name, "config": architecture(model.config)}
    identity["tokenizer"] = tokenizer_identity(source.tokenizer)
    if isinstance(model, AdapterClassifier):
        tensors = model_state(model) | adapter_tensors(model.adapters, REWARD)
        return identity | {"adapter": f"weights {tensors_fingerprint(tensors)}, {model.adapters.describe(REWARD)}"}
    return identity | {"model": f"{type(model).__name__} with weights {model_fingerprint(model)}"}


def run_identity(
    args: PPOConfig,
    train_prompts: PromptDataset,
    processing_class: Any,
    actor_critic: ActorCritic,
    *,
    start: Mapping[str, Any],
    optimizer_steps: StepCounts | None,
) -> dict[str, Any]:
    """Everything that affects the numbers of a run and is not in its checkpoints, as plain values.

    Fields of `args`, tokenizer, training prompts with their columns, architectures, for adapters their configuration,
    and `start`, the run's `start_identity`. A changed field must be rejected because it would take effect only in part
    (the optimizer's state, for example, has the old learning rate). `optimizer_steps`, of the whole run, are included
    if a learning rate depends on them; pass None if the schedule is not the one that `args` names.
    """
    policy = actor_critic.policy
    identity: dict[str, Any] = {"tokenizer": tokenizer_identity(processing_class)}
    identity["policy"] = architecture(policy.model.config)
    if policy.model.generation_config is not None:
        identity["policy"]["stop_tokens"] = policy.model.generation_config.eos_token_id
    backbone: Any = None if actor_critic.critic is None else actor_critic.critic.backbone
    if backbone is not None:
        identity["critic"] = architecture(backbone.config)
    if policy.adapters is not None:
        identity["peft_config"] = settings = policy.adapters.describe(POLICY)
        # A critic that another run saved brings an adapter of its own kind.
        has_adapter = actor_critic.critic is not None and actor_critic.critic.has_adapter
        if has_adapter and (of_critic := policy.adapters.describe(VALUE)) != settings:
            identity["peft_config"] = f"{settings}, the critic's {of_critic}"
    left_out = [*_FREE_TO_CHANGE, *_COMPARED_BY_CONTENT]
    identity["args"] = {name: value for name, value in asdict(args).items() if name not in left_out}
    if optimizer_steps is not None and (lengths := schedule_lengths(args, optimizer_steps)):
        identity["lr_schedule"] = lengths
    return identity | {"train_dataset": data_identity(train_prompts), **start}


def schedule_lengths(args: PPOConfig, optimizer_steps: StepCounts) -> dict[str, int]:
    """The optimizer steps over which a learning rate is spread: the policy's, and the critic's if they are others."""
    # A warm-up that is a share of the steps is one of the run's length, too.
    spread = depends_on_length(args.lr_scheduler_type) or 0 < args.warmup_steps < 1
    lengths = {"optimizer_steps": optimizer_steps.policy} if spread else {}
    critic = optimizer_steps.critic
    warmup = args.warmup_steps if args.critic_lr_warmup_steps is None else args.critic_lr_warmup_steps
    if critic and critic not in lengths.values() and (depends_on_length(args.lr_scheduler_type) or 0 < warmup < 1):
        lengths["critic_optimizer_steps"] = critic
    return lengths


def depends_on_length(lr_scheduler_type: str) -> bool:
    """Whether transformers' learning-rate schedule of that name is a function of the run's number of steps."""
    schedules: dict[str, Any] = {kind.value: function for kind, function in TYPE_TO_SCHEDULER_FUNCTION.items()}
    # The name is not checked here: a schedule that the user passes in `optimizers` replaces it.
    schedule = schedules.get(lr_scheduler_type)
    return schedule is not None and "num_training_steps" in inspect.signature(schedule).parameters


def check_identity(folder: Path, saved: Mapping[str, Any], here: Mapping[str, Any], args: PPOConfig) -> None:
    """Checks that the checkpoint `folder` is of this run, as far as `args` do not allow a change.

    Args:
        folder: of the checkpoint.
        saved: its entries, those of `run_identity` among them.
        here: the `run_identity` of this run.
        args: of this run.

    Raises:
        ValueError: names everything that differs, with both values and what to do.
    """
    kinds = {"train_dataset": "data", "weights": "model", "rewards": "reward", "environments": "reward"}
    faults = []
    for entry in here:
        ignored = kinds.get(entry) in (args.ignore_changes or ())
        differences = [] if ignored else _differences(entry, saved.get(entry), here[entry])
        if differences:
            more = len(differences) - _MOST_NAMED
            named = [*differences[:_MOST_NAMED], *([f"and {more} more"] if more > 0 else [])]
            faults.append(f"{', '.join(named)}; {_REMEDIES[entry]}")
    if faults:
        raise ValueError(f"checkpoint {folder} does not match this run: {'. Also, '.join(faults)}")


def _differences(entry: str, saved: Any, here: Any) -> list[str]:
    """What differs between two values of the identity's `entry`, each with both values."""
    if entry == "rewards":
        return _source_differences(saved or [], here)
    old, new = ({} if value is None else _flat({entry: value}) for value in (saved, here))
    return [
        f"{_NAMES.get(name, f'entry {name}')} is {old.get(name, 'absent')} in the checkpoint and "
        f"{new.get(name, 'absent')} here"
        for name in dict.fromkeys([*new, *old])
        if old.get(name) != new.get(name)
    ]


def _source_differences(saved: Sequence[Mapping[str, Any]], here: Sequence[Mapping[str, Any]]) -> list[str]:
    differences = []
    for number, (then, now) in enumerate(zip_longest(saved, here, fillvalue=None)):
        if then is None or now is None:
            name, place = (now or then or {})["name"], "in the checkpoint" if then is None else "here"
            differences.append(f"reward source {number} ({name}) is absent {place}")
            continue
        # The name of a model is that of its folder, which may be moved.
        old, new = (_flat({key: value for key, value in source.items() if key != "name"}) for source in (then, now))
        label = f"reward source {number} ({now['name']})"
        differences += [
            f"the {key} of {label} is {old.get(key, 'absent')} in the checkpoint and {new.get(key, 'absent')} here"
            for key in dict.fromkeys([*new, *old])
            if old.get(key) != new.get(key)
        ]
    return differences


def data_identity(prompts: PromptDataset) -> dict[str, Any]:
    """The number of prompts, and a hash of their token ids and columns in dataset order."""
    return {"prompts": len(prompts), "fingerprint": prompts.fingerprint}


def eval_identity(eval_prompts: Mapping[str, PromptDataset]) -> dict[str, Any] | None:
    """The `data_identity` of each eval set by its name, of a set without a name itself; None without eval sets."""
    found = {name: data_identity(prompts) for name, prompts in eval_prompts.items()}
    return found.get("", found) or None


def tokenizer_identity(processing_class: Any) -> dict[str, Any]:
    """Hashes of vocabulary and chat template, and the special tokens by name."""
    return {
        "vocabulary": _hash(sorted(processing_class.get_vocab().items())),
        "special_tokens": {name: str(token) for name, token in processing_class.special_tokens_map.items()},
        "chat_template": processing_class.chat_template and _hash(processing_class.chat_template),
    }


def architecture(config: PreTrainedConfig) -> dict[str, Any]:
    """The fields of a model's configuration that affect its outputs, as plain values."""
    fields = {"model_type": config.model_type}
    fields |= {name: value for name, value in config.to_dict().items() if name not in _NO_ARCHITECTURE}
    plain: dict[str, Any] = json.loads(json.dumps(fields, default=str))
    return plain


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, default=str).encode()).hexdigest()[:16]


def _flat(entries: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The leaves of nested mappings under dotted names, such as policy.hidden_size."""
    flat: dict[str, Any] = {}
    for name, value in entries.items():
        nested = isinstance(value, Mapping) and value
        flat |= _flat(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": value}
    return flat
