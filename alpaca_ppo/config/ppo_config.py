"""`PPOConfig`, the arguments of a run: validated once, frozen.

Names that `transformers.TrainingArguments` has keep its meaning, AlpacaFarm's keep theirs. A step is one rollout and
the updates on it: `logging_steps`, `save_steps` and `eval_steps` count those. Nothing here knows models, devices or
the number of processes. Parsing is in `arguments`, what each value may be in `validation`.
"""

from dataclasses import dataclass
from typing import Any

from alpaca_ppo.config.checks import (
    ADV_ESTIMATORS,
    KL_ESTIMATORS,
    LOSS_AGG_MODES,
    argument,
    check_algorithm,
    check_limits,
    check_types,
)


@dataclass(frozen=True)
class PPOConfig:
    """Everything that `PPOTrainer` needs besides models, data and rewards.

    Raises:
        ValueError: for a value out of its range or two values that clash; the message names the fields, the values
            and the remedy.
    """

    output_dir: str = argument("outputs/ppo", "Folder of checkpoints, final models, metrics.jsonl and logs.")
    run_name: str | None = argument(None, "Name of the run for the trackers; the output folder's name by default.")
    seed: int = argument(42, "Seed of the prompt order, the sampling and the mini-batches.")
    report_to: list[str] = argument(["tensorboard"], "Accelerate trackers, or none.")
    logging_steps: int = argument(1, "Steps between two reports to the trackers; metrics.jsonl gets every step.")
    save_steps: int = argument(0, "Steps between two checkpoints; 0 = none but the final model.")
    ignore_data_change: bool = argument(
        False, "Resume although the training data differ from the checkpoint's; the steps left take the new rows."
    )
    save_total_limit: int | None = argument(
        None, "Checkpoints to keep, the newest and the best among them (both, where it is 1); null = all."
    )
    metric_for_best_model: str | None = argument(
        None, "Metric that tells the best checkpoint, such as eval/scores; null = none is kept for being the best."
    )
    greater_is_better: bool = argument(True, "Whether a higher metric_for_best_model is the better one.")
    eval_steps: int = argument(0, "Steps between two evaluations; 0 = before and after training only.")
    num_logged_rollouts: int = argument(
        8, "Rows of each step written to rollouts/ with their per-token numbers; 0 = none."
    )
    trust_remote_code: bool = argument(False, "Run code that comes with a model, the reward models included.")
    push_to_hub: bool = argument(False, "Upload final/policy at the end.")
    hub_model_id: str | None = argument(None, "Repository to push to.")

    query_len: int = argument(192, "Longest prompt, in tokens.")
    response_len: int = argument(300, "Longest response, in tokens.")
    prompt_column: str = argument("prompt", "Dataset column that holds the prompt (text or messages).")
    prompt_template: str | None = argument(
        None, "Named template or format string over the dataset's columns, instead of a prompt column."
    )
    overlong_prompts: str = argument("drop", "Prompts over query_len: drop (counted) or error.")
    total_epochs: int | None = argument(None, "Passes over the prompts; 1 if total_episodes is not set either.")
    total_episodes: int | None = argument(None, "Prompts to sample in all, instead of total_epochs.")

    rollout_batch_size: int = argument(128, "Prompts a step, over all processes.")
    rollout_per_device_batch_size: int = argument(32, "Responses a process samples or scores at once.")
    step_batch_size: int = argument(64, "Responses an optimizer step trains on, over all processes.")
    step_per_device_batch_size: int = argument(8, "Responses in a micro-batch.")
    ppo_epochs: int = argument(2, "Passes over a rollout.")
    num_return_sequences: int = argument(1, "Responses sampled for each prompt.")

    temperature: float = argument(1.0, "Of sampling and of every log-probability.")
    generation_backend: str = argument("decode", "decode, or generate for models whose cache cannot drop rows.")
    truncate_tokens: list[str | int] | None = argument(
        None, "Further stop tokens, each one token of the vocabulary: its text or its id (a flag of digits is an id)."
    )
    truncate_after: int = argument(0, "truncate_tokens stop a response only from this many tokens on.")
    penalty_reward_value: float | None = argument(
        None, "Score of a response that hit no stop token; null = keep its own."
    )
    eval_do_sample: bool = argument(False, "Evaluate sampled responses instead of greedy ones.")
    eval_top_p: float | None = argument(None, "Nucleus sampling in evaluation.")
    eval_top_k: int | None = argument(None, "Top-k sampling in evaluation.")

    reward_weights: list[float] | None = argument(None, "Weight of each reward source; null = 1 each.")
    whiten_rewards: bool = argument(False, "Scale shaped rewards to unit variance before the advantages (AlpacaFarm).")
    whiten_advantages: bool = argument(True, "Whiten the advantages of gae over the step's rollouts.")
    adv_estimator: str = argument(
        "gae",
        f"{', '.join(ADV_ESTIMATORS)}. All but gae do without a critic; the group ones need num_return_sequences.",
    )
    gamma: float = argument(1.0, "Discount per token.")
    lam: float = argument(0.95, "Lambda of gae.")
    cliprange: float = argument(0.2, "Clip range of the policy ratio.")
    cliprange_high: float | None = argument(None, "Upper clip range where it differs (clip-higher).")
    policy_loss: str = argument("clip", "clip (PPO) or gspo (the sequence's ratio is clipped).")
    clip_ratio_c: float | None = argument(None, "Dual clip: bound of the ratio where the advantage is negative.")
    loss_agg_mode: str = argument("token-mean", f"How token losses become one: {', '.join(LOSS_AGG_MODES)}.")
    cliprange_value: float | None = argument(0.2, "Clip range of a scalar critic's value; null = no clipping.")
    vf_coef: float = argument(0.1, "Weight of the value loss.")
    entropy_coef: float = argument(0.0, "Weight of the entropy bonus.")
    use_kl_in_reward: bool = argument(True, "Penalise the KL to the reference in the reward.")
    kl_coef: float = argument(0.05, "Weight of the KL penalty in the reward (its first value under a controller).")
    kl_estimator: str = argument("k1", f"KL estimator in the reward: {', '.join(KL_ESTIMATORS)}.")
    kl_controller: str = argument("fixed", "fixed, proportional (AlpacaFarm) or horizon (Ziegler et al.).")
    target_kl: float = argument(6.0, "KL of a sequence that the controllers aim at, in nats.")
    k_beta: float = argument(0.1, "Gain of the proportional controller.")
    kl_horizon: int = argument(10000, "Horizon of the horizon controller, in responses.")

    use_kl_loss: bool = argument(
        False, "Add the KL to the reference to the loss; beside the one in the reward, or alone."
    )
    kl_loss_coef: float = argument(0.001, "Weight of the KL in the loss.")
    kl_loss_type: str = argument("k3", "KL estimator in the loss, of the same names. k1 has no gradient on average.")
    target_kl_stop: float | None = argument(
        None, "End a step's updates when the approximate KL of policy and old policy, in nats a token, passes this."
    )
    max_kl_to_ref: float | None = argument(
        None, "End the run, with a checkpoint, when a step's objective/kl_sum_seq passes this."
    )
    old_policy: str = argument(
        "recompute", "recompute (the trainer's own pass), rollout (the sampler's log-probs) or correct (weighted)."
    )
    rollout_correction_level: str = argument("token", "old_policy correct: weights of tokens, or of a sequence.")
    rollout_correction_threshold: float = argument(2.0, "old_policy correct: largest weight; .inf = none.")
    rollout_correction_normalize: bool = argument(False, "old_policy correct: divide the weights by their mean.")

    critic: str = argument("scalar", "scalar, c51, quantile or iqn.")
    num_quantiles: int = argument(32, "Quantiles of the quantile and iqn critics.")
    quantile_huber_kappa: float = argument(1.0, "Where the quantile and iqn losses turn from square to linear.")
    num_atoms: int = argument(51, "Atoms of the c51 critic.")
    c51_v_min: float = argument(-10.0, "Least return that the c51 critic tells apart.")
    c51_v_max: float = argument(10.0, "Greatest return that the c51 critic tells apart.")
    iqn_embedding_dim: int = argument(64, "Cosines of the iqn critic.")
    risk_level: str = argument(
        "neutral", "What GAE reads of a distributional critic: neutral (the mean), or the mean of a lower tail (0.1)."
    )
    critic_warmup_steps: int = argument(
        0, "First steps in which the critic learns and the policy stands still; the schedule counts them."
    )
    critic_learning_rate: float | None = argument(None, "Of the critic's parameters; null = learning_rate.")
    critic_layout: str = argument(
        "separate", "separate (own backbone), shared (a head on the policy's) or adapter (a second one on its base)."
    )
    init_value_with_reward: bool = argument(
        False, "Start the critic from the reward model (a distributional one from its backbone) instead of the policy."
    )

    reference: str = argument(
        "auto",
        "auto (adapter_off with LoRA, else copy), adapter_off, copy, copy_offloaded (in host memory), none, or a path "
        "or hub id.",
    )
    dtype: str = argument("float32", "Of a policy that is loaded: float32, or bfloat16 with LoRA.")
    load_in_4bit: bool = argument(False, "Load the policy's base in 4 bits (CUDA and bitsandbytes; with LoRA).")
    reward_adapter: str | None = argument(
        None, "Reward adapter (folder or hub id) on the policy's base, as train_reward_model.py --use_peft writes it."
    )
    merge_on_save: bool = argument(False, "Write final/merged, the adapter merged into its base, too.")

    learning_rate: float = argument(1e-6, "Of AdamW.")
    lr_scheduler_type: str = argument("constant", "Any schedule of transformers.get_scheduler.")
    warmup_steps: int = argument(0, "Optimizer steps of warm-up.")
    weight_decay: float = argument(0.0, "Of the weight matrices.")
    adam_beta1: float = argument(0.9, "Of AdamW.")
    adam_beta2: float = argument(0.999, "Of AdamW.")
    adam_epsilon: float = argument(1e-5, "Of AdamW (AlpacaFarm's value).")
    max_grad_norm: float = argument(1.0, "Gradient norm is clipped to this.")
    max_skipped_updates: int = argument(
        0, "Optimizer steps that a run may skip because a loss or gradient is not finite; one more ends it."
    )
    gradient_checkpointing: bool = argument(False, "Recompute activations in the backward pass.")
    bf16: bool = argument(False, "Forward passes in bfloat16; the optimizer keeps float32 weights.")
    use_cpu: bool = argument(False, "Stay on the CPU even where a GPU is.")
    deepspeed: str | None = argument(
        None, "DeepSpeed configuration (JSON) for a run under accelerate launch or torchrun; ZeRO stage 1, 2 or 3."
    )
    ddp_timeout: int = argument(
        1800, "Seconds that a process waits for the others before it gives up: longer than the slowest reward takes."
    )
    ds3_gather_for_generation: bool = argument(
        True, "Under ZeRO 3, hold the whole policy on every device while it samples; false gathers layer by layer."
    )
    logprob_chunk_size: int = argument(1024, "Tokens whose logits are in memory at once.")

    def __post_init__(self) -> None:
        number: Any = self.risk_level
        if isinstance(number, (int, float)) and not isinstance(number, bool):
            object.__setattr__(self, "risk_level", str(self.risk_level))
        check_types(self)
        check_limits(self)
        check_algorithm(self)
        self._check_combinations()

    @property
    def responses_per_step(self) -> int:
        """Responses of a full step: prompts times samples."""
        return self.rollout_batch_size * self.num_return_sequences

    @property
    def risk_alpha(self) -> float | None:
        """The tail that `risk_level` names; None for the mean."""
        return None if self.risk_level == "neutral" else float(self.risk_level)

    @property
    def uses_critic(self) -> bool:
        """Whether the advantages need a critic."""
        return self.adv_estimator == "gae"

    def _check_combinations(self) -> None:
        if self.total_epochs is not None and self.total_episodes is not None:
            raise ValueError(
                f"total_epochs ({self.total_epochs}) and total_episodes ({self.total_episodes}) are both set; null "
                f"one of them"
            )
        if self.step_batch_size > self.responses_per_step:
            raise ValueError(
                f"step_batch_size ({self.step_batch_size}) is larger than the responses of a step, rollout_batch_size "
                f"* num_return_sequences = {self.responses_per_step}; set it to {self.responses_per_step} or less"
            )
        if self.num_return_sequences > self.rollout_per_device_batch_size:
            raise ValueError(
                f"num_return_sequences ({self.num_return_sequences}) is larger than rollout_per_device_batch_size "
                f"({self.rollout_per_device_batch_size}); a prompt's samples are drawn together, so raise the latter"
            )
        if self.kl_controller == "horizon" and self.responses_per_step >= 5 * self.kl_horizon:
            shortest = self.responses_per_step // 5 + 1
            raise ValueError(
                f"kl_horizon is {self.kl_horizon}: a step could turn kl_coef negative; use {shortest} or more"
            )
        self._check_best_metric()
        if self.push_to_hub and not self.hub_model_id:
            raise ValueError("push_to_hub is True but hub_model_id is not set; name the repository to push to")
        if not self.eval_do_sample and (self.eval_top_p is not None or self.eval_top_k is not None):
            given = f"eval_top_p ({self.eval_top_p}) and eval_top_k ({self.eval_top_k})"
            raise ValueError(f"{given} act on sampled responses only; set eval_do_sample: true or null them")
        if self.truncate_after and not self.truncate_tokens:
            raise ValueError(
                f"truncate_after is {self.truncate_after} but truncate_tokens is not set; name them or use 0"
            )

    def _check_best_metric(self) -> None:
        metric = self.metric_for_best_model
        if metric is None:
            return
        if self.save_steps == 0:
            raise ValueError(
                f"metric_for_best_model is {metric!r} but save_steps is 0, so there are no checkpoints to choose from; "
                "set save_steps, or null metric_for_best_model"
            )
        if metric.startswith("eval/") and (self.eval_steps == 0 or self.save_steps % self.eval_steps):
            raise ValueError(
                f"metric_for_best_model is {metric!r}, but save_steps ({self.save_steps}) is no multiple of eval_steps "
                f"({self.eval_steps}), so some checkpoints would not be evaluated; set eval_steps to {self.save_steps}"
            )
