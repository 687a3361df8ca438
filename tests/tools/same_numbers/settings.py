"""The trainings whose numbers are compared: plain settings, which need neither torch nor the package.

Their names are those of the working tree. A commit that has an older name for a configuration field gets that one, by
RENAMED_FIELDS. Models, prompts and rewards are in `inputs`, the subclasses in `trainers`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

RENAMED_FIELDS: dict[str, str] = {}
"""Old name of a field of PPOConfig to its name in the working tree."""
LIKE_EARLIER: dict[str, Any] = {"padding_free": False, "num_inspected_prompts": 0, "report": False}
"""Fields with the values at which a run does what commits without the field did; those are not given it."""

COMMON: dict[str, Any] = {
    "query_len": 6,
    "response_len": 6,
    "truncate_tokens": ["w20", *range(21, 28)],
    "rollout_batch_size": 10,
    "rollout_per_device_batch_size": 4,
    "step_batch_size": 4,
    "step_per_device_batch_size": 3,
    "total_episodes": 30,
    "learning_rate": 3e-3,
    "kl_coef": 0.05,
    "generation_backend": "slots",
    "old_policy": "recompute",
    # Defaults of earlier commits.
    "adam_epsilon": 1e-5,
    "critic_epochs": None,
    "kl_controller": "fixed",
    "lr_scheduler_type": "constant",
    "num_logged_rollouts": 100,
    "logprob_chunk_size": 8,
    "report_to": ["none"],
    "use_cpu": True,
}
"""Three steps of ten prompts, each of two passes over step batches of 4, 4 and 2 rows; micro-batches of at most 3. A
random model takes one of the stop tokens at one place in seven, so responses are of all lengths.
"""


@dataclass(frozen=True)
class Run:
    """One small training."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    """Of PPOConfig, over COMMON; {inputs} in a text stands for the folder of what the run finds on disk."""
    model: str = "llama"
    """One of `inputs.ARCHITECTURES`; or folder (a path to the llama), or adapter (a llama with a trained adapter)."""
    lora: bool = False
    reward: str = "even"
    """One of `inputs.reward_sources`."""
    trainer: str = "PPOTrainer"
    """PPOTrainer, or a subclass in `trainers`."""
    eval_prompts: int = 0
    stop: str | None = None
    """How the first processes end, from whose checkpoint new ones go on: step (after the second one), or signal (by
    SIGTERM, in the update of the second step)."""
    processes: int = 1


_GROUPS = {"num_return_sequences": 2, "rollout_batch_size": 5, "total_episodes": 15}
_GSPO = {"policy_loss": "gspo", "loss_agg_mode": "seq-mean-token-mean", "cliprange": 0.01}
_CUT_WEIGHTS = {"old_policy": "correct", "bf16": True, "rollout_correction_threshold": 1.0}
_SEQUENCE_WEIGHTS = {"rollout_correction_level": "sequence"}
_EVALUATED = {"eval_steps": 1, "eval_temperature": 1.0, "eval_top_k": 20, "eval_top_p": 0.9}
_SCHEDULE = {"lr_scheduler_type": "cosine", "warmup_steps": 3, "weight_decay": 0.1}
_RESUMED = {**_SCHEDULE, "save_steps": 1, "kl_controller": "proportional", "target_kl": 0.1}
_ADAPTERS = {"critic_layout": "adapter"}
_ONE_ROW = {"step_per_device_batch_size": 1}
_ZERO = {
    stage: {"deepspeed": f"{{inputs}}/zero{stage}.json", "ppo_epochs": 1, "rollout_batch_size": 6, "total_episodes": 18}
    for stage in (1, 2, 3)
}

RUNS: dict[str, Run] = {
    # Critics, their layouts and what is read of them.
    "scalar": Run({**_SCHEDULE, "eval_steps": 1, "save_steps": 2}, eval_prompts=3),
    "c51": Run({"critic": "c51", "value_support": [-4.0, 8.0], "num_atoms": 11}),
    "quantile": Run({"critic": "quantile", "num_atoms": 8, "risk_level": 0.25}),
    "iqn": Run({"critic": "iqn", "num_atoms": 8, "risk_level": 0.5, "critic_layout": "shared"}),
    "shared": Run({"critic_layout": "shared", "cliprange_value": None, "gamma": 0.9}),
    "warmup": Run({"critic_pretraining_steps": 1, "critic_learning_rate": 5e-3, "weight_decay": 0.1}),
    "warmup_shared": Run({"critic_pretraining_steps": 1, "critic_layout": "shared", "weight_decay": 0.1}),
    "value_from_reward": Run({"init_value_with_reward": True, "reward_weights": [0.5, 2.0]}, reward="model"),
    # Estimators of the advantage.
    "grpo": Run({**_GROUPS, "adv_estimator": "grpo", "kl_loss_type": "k2", "kl_loss_coef": 0.3}),
    "grpo_no_std": Run({**_GROUPS, "adv_estimator": "grpo_no_std"}),
    "rloo": Run({**_GROUPS, "adv_estimator": "rloo", "loss_agg_mode": "seq-mean-token-sum-norm"}),
    "opo": Run({**_GROUPS, "adv_estimator": "opo"}),
    "reinforce_plus_plus": Run({"adv_estimator": "reinforce_plus_plus", "gamma": 0.9}),
    "reinforce_plus_plus_baseline": Run({**_GROUPS, "adv_estimator": "reinforce_plus_plus_baseline"}),
    "remax": Run({"adv_estimator": "remax"}),
    "gae_of_groups": Run(
        {"num_return_sequences": 2, "rollout_batch_size": 7, "total_episodes": 21, "lam": 0.8, "temperature": 0.7}
    ),
    # Losses and penalties.
    "gspo": Run({**_GSPO, "kl_estimator": "k1_clamped"}),
    "dual_clip": Run({"clip_ratio_c": 1.05, "cliprange": 0.05, "cliprange_high": 0.1, "max_grad_norm": 0.1}),
    "kl_k3_proportional": Run({"kl_estimator": "k3", "kl_controller": "proportional", "target_kl": 0.1}),
    "kl_abs_horizon": Run({"kl_estimator": "abs", "kl_controller": "horizon", "target_kl": 0.1, "kl_horizon": 50}),
    "kl_loss": Run({"kl_coef": 0.0, "kl_loss_coef": 0.3}),
    "kl_twice": Run({"kl_loss_coef": 0.3, "kl_loss_type": "k1+", "kl_estimator": "k3+"}),
    "no_reference": Run({"reference": "none", "kl_coef": 0.0}),
    "entropy": Run({"entropy_coef": 0.1, "loss_agg_mode": "seq-mean-token-sum"}),
    "whitened_rewards": Run({"whiten_rewards": True, "whiten_advantages": False}),
    "kl_stop": Run({"target_kl_stop": 1e-3, "ppo_epochs": 3}),
    "kl_bound": Run({"max_kl_to_ref": 1e-3, "kl_estimator": "k2"}, eval_prompts=3),
    "old_policy_rollout": Run({"old_policy": "rollout", "reference": "copy_offloaded"}),
    "old_policy_correct": Run(_CUT_WEIGHTS),
    "old_policy_correct_sequence": Run({**_CUT_WEIGHTS, **_SEQUENCE_WEIGHTS}),
    # Sampling, prompts and rewards.
    "generate": Run({"generation_backend": "generate", "rollout_per_device_batch_size": 3}),
    "truncated": Run({"truncate_after": 2, "penalty_reward_value": -1.0}),
    "template": Run({"prompt_template": "w5 {prompt} w6", "query_len": 5}, reward="column"),
    "token_rewards": Run({"reward_weights": [0.5, 1.0]}, reward="tokens"),
    "evaluated_by_samples": Run(_EVALUATED, eval_prompts=5),
    "best_checkpoint": Run(
        {"eval_steps": 1, "save_steps": 1, "save_total_limit": 1, "metric_for_best_model": "eval/scores"},
        eval_prompts=5,
    ),
    # Architectures and precisions.
    "gpt2_shared": Run({"critic_layout": "shared"}, model="gpt2"),
    "gemma3": Run({"truncate_tokens": None}, model="gemma3"),
    "mixtral": Run(model="mixtral"),
    "bf16_c51": Run({"bf16": True, "critic": "c51", "value_support": [-4.0, 8.0]}),
    # Adapters.
    "lora_separate": Run({"critic_layout": "separate"}, lora=True),
    "lora_shared": Run({"critic_layout": "shared"}, lora=True),
    "lora_adapter": Run({**_ADAPTERS, "gradient_checkpointing": True, "critic_pretraining_steps": 1}, lora=True),
    "lora_bfloat16_base": Run({**_ADAPTERS, "dtype": "bfloat16", "bf16": True}, model="folder", lora=True),
    "trained_adapter": Run({**_ADAPTERS, "reference": "copy"}, model="adapter"),
    "reward_adapter": Run({**_ADAPTERS, "reward_adapter": "{inputs}/reward_adapter"}, lora=True),
    # Subclasses.
    "own_hooks": Run(trainer="OwnHooks"),
    "own_loss": Run({"gradient_checkpointing": True}, trainer="OwnLoss"),
    "skipped_updates": Run({"max_skipped_updates": 2}, trainer="SometimesNaN"),
    # Ended and resumed.
    "resumed": Run({**_RESUMED, "critic_pretraining_steps": 1}, stop="step", eval_prompts=3),
    "resumed_lora_iqn": Run({**_RESUMED, **_ADAPTERS, "critic": "iqn", "num_atoms": 4}, lora=True, stop="step"),
    "resumed_within_a_step": Run(_RESUMED, trainer="OwnLoss", stop="signal"),
    # Two processes. One rank has no prompt in the last step of `ddp` and `zero3`.
    "ddp": Run({"total_episodes": 11}, processes=2, eval_prompts=3),
    "ddp_rloo": Run({**_GROUPS, **_ONE_ROW, "adv_estimator": "rloo", "old_policy": "correct"}, processes=2),
    "ddp_lora": Run({**_ADAPTERS, **_ONE_ROW, "gradient_checkpointing": True}, lora=True, processes=2),
    "ddp_resumed": Run({**_RESUMED, "critic_pretraining_steps": 1}, stop="step", processes=2),
    "zero1": Run({**_ZERO[1], "critic_pretraining_steps": 1}, processes=2),
    # With a checkpoint, whose weights are float32: those of final/ are bfloat16 here, and would hide small changes.
    "zero2_bf16": Run({**_ZERO[2], **_ONE_ROW, "bf16": True, "critic": "c51", "save_steps": 3}, processes=2),
    "zero3": Run({**_ZERO[3], "total_episodes": 7}, reward="model", processes=2),
    "zero3_evaluated": Run(_ZERO[3], processes=2, eval_prompts=3),
    "zero3_lora_resumed": Run({**_RESUMED, **_ADAPTERS, **_ZERO[3]}, lora=True, stop="step", processes=2),
}
