"""`PPOConfig`, the options of a training run: validated once, then frozen.

Options that also exist in `transformers.TrainingArguments` or in AlpacaFarm keep their name and meaning. A step is one
rollout plus the updates on it, as in `max_steps` and `save_steps`; but `warmup_steps` and AlpacaFarm's
`step_batch_size` and `step_per_device_batch_size` mean optimizer steps. Nothing here depends on models, devices or the
number of processes.
"""

import os
from dataclasses import dataclass
from typing import Literal

from pydantic import JsonValue

from alpaca_ppo.config.checks import check_combinations
from alpaca_ppo.config.fields import argument, when
from alpaca_ppo.config.learning_options import HAS_WARMUP, LearningOptions, WarmupSteps, chosen_rate
from alpaca_ppo.registry import ADV_ESTIMATORS

_TEACHER = when("teacher_model_name_or_path")
CRITIC_RATE_RATIO = 3
"""The default learning rate of a critic with its own optimizer steps, divided by the policy's."""
CACHED_CRITIC_RATE = 3e-4
"""The default learning rate of a critic that is a small transformer of its own."""


@dataclass(frozen=True)
class PPOConfig(LearningOptions):
    """Everything that `PPOTrainer` needs besides models, data and rewards. `RunOptions` and `LearningOptions`, which it
    inherits from, hold most of the options.

    Raises:
        ValueError: for a value outside its range, or for options that contradict each other.
    """

    reference: str = argument("auto", group="Policy and reference models")
    """Reference policy: auto (adapter_off with LoRA, otherwise copy), adapter_off, copy, copy_offloaded (in host
    memory), none, or a path or hub id."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type in which the policy is loaded; bfloat16 needs LoRA."""
    load_in_4bit: bool = False
    """Load the policy's base in 4 bits; needs LoRA, CUDA and bitsandbytes."""
    teacher_model_name_or_path: str | None = None
    """Teacher of an on-policy distillation, with the policy's tokenizer: a folder, a hub id, or the address of a vLLM
    server that has it; null = none."""
    teacher_coef: float = argument(1.0, gt=0, needs=_TEACHER)
    """Weight, in the reward of each token, of its log-prob under the teacher minus that under the policy."""
    teacher_dtype: Literal["float32", "bfloat16", "4bit"] = argument("float32", needs=_TEACHER)
    """Data type of the teacher's weights; 4bit needs CUDA and bitsandbytes."""
    teacher_offloaded: bool = argument(False, needs=_TEACHER)
    """Keep the teacher in host memory outside of its own pass."""
    trust_remote_code: bool = False
    """Run code that comes with a model, reward models included."""
    model_init_kwargs: dict[str, JsonValue] | None = None
    """Further arguments of from_pretrained for policy, critic and reference, such as {attn_implementation: sdpa}."""

    learning_rate: float | None = argument(None, ge=0, group="Optimizer")
    """Learning rate of AdamW; null = 1e-6, and ten times that for adapters."""
    lr_scheduler_type: Literal[
        "constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial", "inverse_sqrt"
    ] = "linear"
    """Schedule of transformers.get_scheduler; a finished run can be made longer only with constant,
    constant_with_warmup and inverse_sqrt."""
    warmup_steps: WarmupSteps = argument(0, needs=HAS_WARMUP)
    """Optimizer steps of warm-up, or, below 1, their share of all; constant has none."""
    weight_decay: float = argument(0.0, ge=0)
    """Weight decay of AdamW, on weight matrices only."""
    adam_beta1: float = argument(0.9, ge=0, lt=1)
    """First beta of AdamW."""
    adam_beta2: float = argument(0.999, ge=0, lt=1)
    """Second beta of AdamW."""
    adam_epsilon: float = argument(1e-8, gt=0)
    """Epsilon of AdamW; AlpacaFarm's 1e-5 nearly halves the step of a 7B model with a gradient of norm 1."""
    max_grad_norm: float = argument(1.0, gt=0)
    """Maximum norm of the policy's gradient, without the critic's; larger ones are clipped."""
    max_skipped_updates: int = argument(0, ge=0)
    """How many optimizer steps with a loss or gradient that is not finite a run skips; one more ends it."""

    bf16: bool = argument(False, group="Devices and memory")
    """Forward passes in bfloat16; the optimizer keeps float32 weights."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""
    padding_free: Literal["auto", True, False] = "auto"
    """Whether rows are laid end to end without padding: where the model allows it (auto), always (true; an error if
    policy, critic or reference does not allow it, while reward models are padded then), or never (false)."""
    logprob_chunk_size: int = argument(1024, ge=1)
    """Tokens whose logits are in memory at once."""
    use_cpu: bool = False
    """Train on the CPU even if a GPU is available."""
    deepspeed: str | None = None
    """DeepSpeed configuration file (JSON, ZeRO stage 1, 2 or 3) for a run under accelerate launch or torchrun."""
    fsdp: bool = False
    """Shard weights, gradients and optimizer state over the processes by FSDP2; --accelerate_config fsdp does too."""
    ddp_timeout: int = argument(1800, ge=1)
    """Seconds that a process waits for the others; must exceed the slowest reward computation."""

    def __post_init__(self) -> None:
        if isinstance(self.report_to, str):
            object.__setattr__(self, "report_to", [self.report_to])
        super().__post_init__()
        # A reward function may change the current folder.
        object.__setattr__(self, "output_dir", os.path.abspath(self.output_dir))
        check_combinations(self)

    @property
    def eval_strategy(self) -> str:
        """For callbacks, as `transformers.TrainingArguments.eval_strategy`: "steps" or "no"."""
        return "steps" if self.eval_steps else "no"

    @property
    def responses_per_step(self) -> int:
        return self.rollout_batch_size * self.num_return_sequences

    @property
    def longest_row(self) -> int:
        return self.query_len + self.response_len

    @property
    def micro_batch_tokens(self) -> int:
        return self.max_tokens_per_micro_batch or self.step_per_device_batch_size * self.longest_row

    @property
    def separate_critic_steps(self) -> bool:
        """Whether policy and critic are trained in separate optimizer steps, which a shared backbone does not allow."""
        asked = self.critic_epochs is not None or self.critic_step_batch_size is not None
        possible = self.uses_critic and self.critic_layout != "shared"
        return possible and (asked or self.critic_layout == "cached")

    @property
    def num_critic_epochs(self) -> int:
        """Passes of the critic over a rollout; those of `critic_layout: auto` are known when it has been chosen."""
        if not self.separate_critic_steps or self.critic_epochs is None:
            return self.ppo_epochs
        automatic = 8 if self.critic_layout == "cached" else 4
        return automatic if self.critic_epochs == "auto" else self.critic_epochs

    def critic_rate(self, *, has_adapter: bool) -> float:
        """The learning rate of the critic of a policy that has an adapter or not."""
        if self.critic_learning_rate is not None:
            return self.critic_learning_rate
        if self.critic_layout == "cached":
            return CACHED_CRITIC_RATE
        # All weights of a separate critic are trained, whatever those of the policy.
        rate = chosen_rate(self.learning_rate, has_adapter=has_adapter and self.critic_layout != "separate")
        return rate * (CRITIC_RATE_RATIO if self.separate_critic_steps else 1)

    @property
    def critic_batch_rows(self) -> int:
        """Responses in an optimizer step that trains the critic."""
        return self.critic_step_batch_size or self.step_batch_size

    @property
    def uses_critic(self) -> bool:
        return bool(ADV_ESTIMATORS.trait(self.adv_estimator, "needs_critic"))
