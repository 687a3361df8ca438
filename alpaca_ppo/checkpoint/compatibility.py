"""What a resumed run must have in common with its checkpoint: configuration, prompts, tokenizer and models.

Names and shapes of the weights are compared where they are loaded (`serialization`). Rewards are not compared, because
the behaviour of a function cannot be.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from transformers import PreTrainedConfig

from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.data import PromptDataset
from alpaca_ppo.models import ActorCritic

_FREE_TO_CHANGE = """
ignore_data_change output_dir run_name report_to logging_steps save_steps save_total_limit metric_for_best_model
greater_is_better eval_steps num_logged_rollouts push_to_hub hub_model_id total_epochs total_episodes
rollout_per_device_batch_size step_per_device_batch_size gradient_checkpointing use_cpu logprob_chunk_size deepspeed
ddp_timeout ds3_gather_for_generation max_kl_to_ref merge_on_save max_skipped_updates eval_do_sample eval_top_p
eval_top_k trust_remote_code reward_retries reward_retry_pause failed_rewards
""".split()
# A model's location, origin and outputs. transformers changes some of these fields when it saves a model.
_NO_ARCHITECTURE = """
_name_or_path transformers_version architectures auto_map use_cache dtype id2label label2id output_attentions
output_hidden_states
""".split()
REMEDIES = {
    "args": "change it back, or start a new run in another output_dir",
    "tokenizer": "pass the tokenizer of the checkpoint's run as processing_class",
    "policy": "use the model of the checkpoint's run",
    "critic": "use the critic of the checkpoint's run",
    "train_dataset": "use the rows of the checkpoint's run, in the same order, or set ignore_data_change: true",
}
"""Advice for an entry of `run_identity` that differs."""


def run_identity(
    args: PPOConfig, train_prompts: PromptDataset, processing_class: Any, actor_critic: ActorCritic
) -> dict[str, Any]:
    """Everything that affects the numbers of a run and is not in its checkpoints, as plain values.

    Fields of `args`, tokenizer, training prompts with their columns, architectures, and for adapters their
    configuration and frozen base. A changed field must be rejected because it would take effect only in part (the
    optimizer's state, for example, has the old learning rate).
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
        identity |= {"peft_config": policy.adapters.describe(), "frozen weights": policy.adapters.fingerprint()}
    identity["args"] = {name: value for name, value in asdict(args).items() if name not in _FREE_TO_CHANGE}
    return identity | {"train_dataset": data_identity(train_prompts)}


def expected_identity(identity: Mapping[str, Any], args: PPOConfig) -> dict[str, Any]:
    """The entries of `identity` that a checkpoint must share before a run with `args` may resume from it."""
    ignored = {"train_dataset"} if args.ignore_data_change else set()
    return {name: value for name, value in identity.items() if name not in ignored}


def data_identity(prompts: PromptDataset) -> dict[str, Any]:
    """The number of prompts, and a hash of their token ids and columns in dataset order."""
    return {"prompts": len(prompts), "fingerprint": prompts.fingerprint}


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
