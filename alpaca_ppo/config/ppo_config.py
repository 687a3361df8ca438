"""`PPOConfig`, the options of a training run: validated once, then frozen.

Options that also exist in `transformers.TrainingArguments` or in AlpacaFarm keep their name and meaning. One step is
one rollout plus the updates on it; `logging_steps`, `save_steps`, `eval_steps` and `critic_warmup_steps` count such
steps. `warmup_steps` counts optimizer steps, and the "step" in AlpacaFarm's names `step_batch_size` and
`step_per_device_batch_size` is an optimizer step too. Bounds are declared with each field; combinations are checked in
`checks`. Nothing here depends on models, devices or the number of processes.
"""

from dataclasses import dataclass
from typing import Any, Literal

from alpaca_ppo.config.checks import check_combinations
from alpaca_ppo.config.fields import argument, check_fields, shown
from alpaca_ppo.config.run_options import RunOptions
from alpaca_ppo.registry import (
    ADV_ESTIMATORS,
    CRITIC_HEADS,
    GENERATION_BACKENDS,
    KL_ESTIMATORS,
    POLICY_LOSSES,
    LossAggMode,
    RolloutCorrectionLevel,
)


@dataclass(frozen=True)
class PPOConfig(RunOptions):
    """Everything that `PPOTrainer` needs besides models, data and rewards; the options of the run are in `RunOptions`.

    Raises:
        ValueError: for a value outside its range, or for two options that contradict each other; the message names the
            fields, their values and the remedy.
    """

    query_len: int = argument(192, "Maximum length of a prompt, in tokens.", at_least=1, group="Prompts")
    overlong_prompts: Literal["drop", "error"] = argument(
        "drop", "What to do with prompts longer than query_len: drop and count them, or raise an error."
    )
    prompt_column: str = argument("prompt", "Dataset column that holds the prompt, as text or messages.")
    prompt_template: str | None = argument(
        None, "Named template or format string over the dataset's columns, used instead of prompt_column."
    )
    total_epochs: int | None = argument(
        None, "Passes over the prompts; null = 1, unless total_episodes is set.", at_least=1
    )
    total_episodes: int | None = argument(
        None, "Number of prompts to sample in the whole run, instead of total_epochs.", at_least=1
    )

    rollout_batch_size: int = argument(
        128, "Prompts per step, over all processes.", at_least=1, group="Batch sizes and epochs"
    )
    num_return_sequences: int = argument(1, "Responses sampled for each prompt.", at_least=1)
    rollout_per_device_batch_size: int = argument(32, "Responses that a process samples or scores at once.", at_least=1)
    step_batch_size: int = argument(64, "Responses per optimizer step, over all processes.", at_least=1)
    step_per_device_batch_size: int = argument(
        8,
        "Responses per micro-batch of an optimizer step, where a single process pads them; otherwise it only sets the "
        "default of max_tokens_per_micro_batch.",
        at_least=1,
    )
    max_tokens_per_micro_batch: int | None = argument(
        None,
        "Tokens (prompt and response) per micro-batch of an optimizer step, on one device; null = "
        "step_per_device_batch_size * (query_len + response_len).",
        at_least=1,
    )
    ppo_epochs: int = argument(2, "Passes over each step's rollouts.", at_least=1)

    response_len: int = argument(300, "Maximum length of a response, in tokens.", at_least=1, group="Generation")
    temperature: float = argument(1.0, "Temperature of the sampling and of every log-probability.", above=0)
    generation_backend: str = argument(
        "auto",
        "How responses are sampled: slots decodes rollout_per_device_batch_size rows at once and gives the places of "
        "ended rows to waiting prompts; decode finishes one batch before the next; auto takes slots, or decode where "
        "the model or sharded parameters do not allow them; generate is for models whose KV cache cannot drop rows.",
        registry=GENERATION_BACKENDS,
    )
    cuda_graphs: bool = argument(
        True, "On a GPU, capture decode steps in CUDA graphs; the KV cache then stays allocated between rollouts."
    )
    compile_decoding: bool = argument(
        False, "Compile decode steps: minutes for each shape; on a CPU, steps of one row become 1.6 to 3 times as fast."
    )
    truncate_tokens: list[str | int] | None = argument(
        None, "Additional stop tokens: the text or the id of one token each (on the command line, digits are an id)."
    )
    truncate_after: int = argument(
        0, "Number of tokens that a response must have before truncate_tokens can stop it.", at_least=0
    )

    reward_weights: list[float] | None = argument(None, "Weight of each reward source; null = 1 each.", group="Rewards")
    reward_adapter: str | None = argument(
        None,
        "LoRA reward model (folder or hub id) on the policy's base, as train_reward_model.py --use_peft writes it.",
    )
    reward_retries: int = argument(0, "Times that a reward function is called again after it has raised.", at_least=0)
    reward_retry_pause: float = argument(
        1.0,
        "Seconds before the first retry; each further pause is twice as long as the one before, up to a day.",
        at_least=0,
        at_most=86400,
    )
    failed_rewards: Literal["error", "drop"] = argument(
        "error",
        "A response whose reward function raises (after the retries) or returns no finite score: error ends the run; "
        "drop leaves the response out of the step and counts it.",
    )
    score_chunk_prompts: int | None = argument(
        None,
        "Prompts whose responses, all samples of each, are scored in one call; reward functions are then called in "
        "another thread as soon as those are finished, while others are sampled. null = all prompts of the process at "
        "once, after the sampling.",
        at_least=1,
    )
    penalty_reward_value: float | None = argument(
        None, "Score of a response that ends without a stop token; null = its own score."
    )
    whiten_rewards: bool = argument(
        False, "Scale the shaped rewards to unit variance before the advantages are estimated (AlpacaFarm)."
    )

    adv_estimator: str = argument(
        "gae",
        "Advantage estimator. gae needs a critic; estimators that compare responses need num_return_sequences > 1.",
        registry=ADV_ESTIMATORS,
        group="Advantages",
    )
    gamma: float = argument(1.0, "Discount per token.", at_least=0, at_most=1)
    lam: float = argument(0.95, "Lambda of GAE.", at_least=0, at_most=1)
    whiten_advantages: bool = argument(True, "Whiten GAE's advantages over the step's rollouts.")

    policy_loss: str = argument(
        "clip",
        "Policy loss: clip is PPO's; gspo clips the ratio of a whole sequence.",
        registry=POLICY_LOSSES,
        group="Policy loss",
    )
    cliprange: float = argument(0.2, "Clip range of the policy ratio.", above=0, below=1)
    cliprange_high: float | None = argument(
        None, "Upper clip range (clip-higher); null = cliprange on both sides.", above=0
    )
    clip_ratio_c: float | None = argument(
        None, "Dual clip: bound of the ratio where the advantage is negative; null = none.", above=1
    )
    loss_agg_mode: LossAggMode = argument("token-mean", "How the losses of tokens are averaged into one loss.")
    entropy_coef: float = argument(0.0, "Weight of the entropy bonus.", at_least=0)
    old_policy: Literal["auto", "recompute", "rollout", "correct"] = argument(
        "auto",
        "Source of the old log-probabilities: recompute runs the trainer's forward pass, rollout takes the sampler's, "
        "correct recomputes and weights the loss by the ratio of the two. auto recomputes, and in float32 takes the "
        "sampler's once the two have agreed.",
    )
    mismatch_check_steps: int = argument(
        50,
        "With old_policy auto: steps between two that recompute all the same, to compare sampler and trainer.",
        at_least=1,
    )
    rollout_correction_level: RolloutCorrectionLevel = argument(
        "token", "With old_policy correct: one weight per token, or one per sequence."
    )
    rollout_correction_threshold: float = argument(
        2.0, "With old_policy correct: upper limit of a weight; .inf = no limit.", above=0, allow_inf=True
    )
    rollout_correction_normalize: bool = argument(False, "With old_policy correct: divide the weights by their mean.")
    mismatch_action: Literal["stop", "warn", "ignore"] = argument(
        "stop",
        "If the log-probabilities of sampler and trainer differ by so much that an update would be meaningless: stop "
        "(with old_policy correct, warn), warn once, or ignore, which neither warns nor stops; old_policy auto "
        "still compares.",
    )
    target_kl_stop: float | None = argument(
        None,
        "End a step's updates when the approximate KL of the policy to the old policy, in nats per token, exceeds "
        "this.",
        above=0,
    )

    use_kl_in_reward: bool = argument(
        True, "Subtract the KL to the reference policy from the reward.", group="KL to the reference policy"
    )
    kl_coef: float = argument(
        0.05, "Weight of the KL in the reward; the initial value if a controller adapts it.", at_least=0
    )
    kl_estimator: str = argument("k1", "KL estimator in the reward.", registry=KL_ESTIMATORS)
    kl_controller: Literal["fixed", "proportional", "horizon"] = argument(
        "fixed", "How kl_coef follows the observed KL: fixed, proportional (AlpacaFarm) or horizon (arXiv:1909.08593)."
    )
    target_kl: float = argument(
        6.0,
        "Target of the KL controllers, in nats per sequence. It does not stop the updates early, as target_kl does in "
        "Stable-Baselines3: that is target_kl_stop.",
        above=0,
    )
    k_beta: float = argument(
        0.1,
        "Gain of the proportional controller; must be below 5, or a single step could make kl_coef negative.",
        above=0,
        below=5,
    )
    kl_horizon: int = argument(10000, "Horizon of the horizon controller, in responses.", at_least=1)
    use_kl_loss: bool = argument(
        False, "Add the KL to the reference policy to the loss, with or without a KL in the reward."
    )
    kl_loss_coef: float = argument(0.001, "Weight of the KL in the loss.", at_least=0)
    kl_loss_type: str = argument(
        "k3",
        "KL estimator in the loss: not abs or k1_clamped, whose gradient jumps where the policy equals the reference. "
        "The gradient of k1 is zero in expectation.",
        registry=KL_ESTIMATORS,
    )
    max_kl_to_ref: float | None = argument(
        None, "Save a checkpoint and end the run when a step's objective/kl_sum_seq exceeds this.", above=0
    )

    critic: str = argument(
        "scalar",
        "Critic head: scalar predicts the mean return, the others a distribution of returns.",
        registry=CRITIC_HEADS,
        group="Critic",
    )
    critic_layout: Literal["separate", "shared", "adapter"] = argument(
        "separate",
        "separate = the critic has its own backbone; shared = a head on the policy's backbone; adapter = a second LoRA "
        "adapter on the policy's base.",
    )
    vf_coef: float = argument(0.1, "Weight of the value loss.", at_least=0)
    cliprange_value: float | None = argument(
        0.2, "Clip range of the scalar critic's values; null = no clipping.", above=0
    )
    critic_learning_rate: float | None = argument(
        None, "Learning rate of the critic; null = learning_rate.", at_least=0
    )
    critic_weight_decay: float | None = argument(
        None, "Weight decay of the critic's weight matrices; null = weight_decay.", at_least=0
    )
    critic_adam_beta1: float | None = argument(
        None, "First beta of AdamW for the critic; null = adam_beta1.", at_least=0, below=1
    )
    critic_adam_beta2: float | None = argument(
        None, "Second beta of AdamW for the critic; null = adam_beta2.", at_least=0, below=1
    )
    critic_adam_epsilon: float | None = argument(None, "Epsilon of AdamW for the critic; null = adam_epsilon.", above=0)
    critic_max_grad_norm: float | None = argument(
        None, "Maximum norm of the critic's gradient, which is clipped on its own; null = max_grad_norm.", above=0
    )
    critic_warmup_steps: int = argument(
        0,
        "Number of initial PPO steps in which only the critic is trained; the learning-rate schedule counts them.",
        at_least=0,
    )
    init_value_with_reward: bool = argument(
        False,
        "Initialize the critic from the reward model (a distributional one from its backbone) instead of the policy.",
    )
    num_quantiles: int = argument(32, "Quantiles of the quantile and iqn critics.", at_least=1)
    quantile_huber_kappa: float = argument(
        1.0, "Error at which the loss of the quantile and iqn critics turns from quadratic to linear.", above=0
    )
    num_atoms: int = argument(51, "Atoms of the c51 critic.", at_least=2)
    c51_v_min: float = argument(-10.0, "Lowest return in the c51 critic's support.")
    c51_v_max: float = argument(10.0, "Highest return in the c51 critic's support.")
    iqn_embedding_dim: int = argument(64, "Cosine features of the iqn critic.", at_least=1)
    risk_level: str = argument(
        "neutral",
        "What GAE takes from a distributional critic: neutral = the mean; a number such as 0.1 = the mean of that "
        "lower tail (CVaR).",
    )

    reference: str = argument(
        "auto",
        "Reference policy: auto (adapter_off with LoRA, otherwise copy), adapter_off, copy, copy_offloaded (kept in "
        "host memory), none, or a path or hub id.",
        group="Policy and reference models",
    )
    dtype: Literal["float32", "bfloat16"] = argument(
        "float32", "Data type in which the policy is loaded; bfloat16 needs LoRA."
    )
    load_in_4bit: bool = argument(False, "Load the policy's base in 4 bits; needs LoRA, CUDA and bitsandbytes.")
    trust_remote_code: bool = argument(False, "Run code that comes with a model, reward models included.")

    learning_rate: float = argument(1e-6, "Learning rate of AdamW.", at_least=0, group="Optimizer")
    optim: Literal["adamw_torch_fused", "adamw_torch"] = argument(
        "adamw_torch_fused",
        "Implementation of AdamW, by transformers' names: adamw_torch_fused updates everything in one pass (on CPU and "
        "CUDA), adamw_torch is torch's default. A resumed run keeps its checkpoint's.",
    )
    lr_scheduler_type: str = argument(
        "constant",
        "Schedule by its name in transformers.get_scheduler. Only constant, constant_with_warmup and inverse_sqrt let "
        "a finished run be made longer.",
    )
    warmup_steps: int = argument(0, "Optimizer steps of warm-up.", at_least=0)
    weight_decay: float = argument(0.0, "Weight decay of AdamW, on weight matrices only.", at_least=0)
    adam_beta1: float = argument(0.9, "First beta of AdamW.", at_least=0, below=1)
    adam_beta2: float = argument(0.999, "Second beta of AdamW.", at_least=0, below=1)
    adam_epsilon: float = argument(
        1e-8,
        "Epsilon of AdamW. Gradients not far above it are damped: 1e-5 (AlpacaFarm's value) nearly halves the step of "
        "a 7B model whose gradient has the norm 1.",
        above=0,
    )
    max_grad_norm: float = argument(
        1.0,
        "Maximum norm of the policy's gradient; larger ones are clipped. The critic's norm is not part of it.",
        above=0,
    )
    max_skipped_updates: int = argument(
        0,
        "Optimizer steps that a run may skip because a loss or gradient is not finite; one more ends the run.",
        at_least=0,
    )

    bf16: bool = argument(
        False, "Forward passes in bfloat16; the optimizer keeps float32 weights.", group="Devices and memory"
    )
    gradient_checkpointing: bool = argument(False, "Recompute activations in the backward pass to save memory.")
    padding_free: Literal["auto", True, False] = argument(
        "auto",
        "Rows of a forward pass are laid end to end without padding: where the model allows it (auto), always (an "
        "error where policy, critic or reference does not; reward models are padded then), or never.",
    )
    logprob_chunk_size: int = argument(1024, "Tokens whose logits are in memory at once.", at_least=1)
    kept_logits_gib: float = argument(
        1.0,
        "Most GiB of a micro-batch's logits that are kept for the backward pass, which recomputes the others; 1 holds "
        "those of 3,500 tokens in bfloat16 at a vocabulary of 150,000. 0 saves memory and changes no number.",
        at_least=0,
    )
    use_cpu: bool = argument(False, "Train on the CPU even if a GPU is available.")
    deepspeed: str | None = argument(
        None,
        "DeepSpeed configuration file (JSON, ZeRO stage 1, 2 or 3) for a run under accelerate launch or torchrun.",
    )
    ds3_gather_for_generation: bool = argument(
        True, "Under ZeRO 3, gather the whole policy on every device for sampling; false gathers one layer at a time."
    )
    ddp_timeout: int = argument(
        1800,
        "Seconds that a process waits for the others before it fails; must exceed the slowest reward computation.",
        at_least=1,
    )

    def __post_init__(self) -> None:
        risk_level: Any = self.risk_level
        if isinstance(risk_level, int | float) and not isinstance(risk_level, bool):
            object.__setattr__(self, "risk_level", shown(risk_level))
        if isinstance(self.report_to, str):
            object.__setattr__(self, "report_to", [self.report_to])
        check_fields(self)
        check_combinations(self)

    @property
    def responses_per_step(self) -> int:
        """Responses of a full step: prompts times responses per prompt."""
        return self.rollout_batch_size * self.num_return_sequences

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens that a micro-batch may have: `max_tokens_per_micro_batch` or its default."""
        default = self.step_per_device_batch_size * (self.query_len + self.response_len)
        return self.max_tokens_per_micro_batch or default

    @property
    def risk_alpha(self) -> float | None:
        """The lower tail that `risk_level` names, as a probability; None for the mean."""
        return None if self.risk_level == "neutral" else float(self.risk_level)

    @property
    def uses_critic(self) -> bool:
        """Whether the advantage estimator needs a critic."""
        return bool(ADV_ESTIMATORS.trait(self.adv_estimator, "needs_critic"))
