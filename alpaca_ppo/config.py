"""The arguments of a run: parsed from a YAML file and flags, validated once, frozen.

Names that `transformers.TrainingArguments` has keep its meaning, AlpacaFarm's keep theirs. A step is one rollout and
the updates on it: `logging_steps`, `save_steps` and `eval_steps` count those. Nothing here knows models, devices or
the number of processes.
"""

import dataclasses
import sys
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import yaml
from transformers import HfArgumentParser

LOSS_AGG_MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
KL_ESTIMATORS = ("k1", "abs", "k2", "k3", "k1_clamped")


def _arg(default: Any, help: str) -> Any:
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata={"help": help})
    return dataclasses.field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class PPOConfig:
    """Everything that `PPOTrainer` needs besides models, data and rewards.

    Raises:
        ValueError: for a value out of its range or two values that clash; the message names the fields, the values
            and the remedy.
    """

    output_dir: str = _arg("outputs/ppo", "Folder of checkpoints, final models, metrics.jsonl and logs.")
    run_name: str | None = _arg(None, "Name of the run for the trackers; the output folder's name by default.")
    seed: int = _arg(42, "Seed of the prompt order, the sampling and the mini-batches.")
    report_to: list[str] = _arg(["tensorboard"], "Accelerate trackers, or none.")
    logging_steps: int = _arg(1, "Steps between two reports to the trackers; metrics.jsonl gets every step.")
    save_steps: int = _arg(0, "Steps between two checkpoints; 0 = none but the final model.")
    save_total_limit: int | None = _arg(None, "Newest checkpoints to keep; null = all.")
    eval_steps: int = _arg(0, "Steps between two evaluations; 0 = before and after training only.")
    num_logged_rollouts: int = _arg(8, "Rows of each step written to rollouts/ with their per-token numbers; 0 = none.")
    push_to_hub: bool = _arg(False, "Upload final/policy at the end.")
    hub_model_id: str | None = _arg(None, "Repository to push to.")

    query_len: int = _arg(192, "Longest prompt, in tokens.")
    response_len: int = _arg(300, "Longest response, in tokens.")
    prompt_column: str = _arg("prompt", "Dataset column that holds the prompt (text or messages).")
    prompt_template: str | None = _arg(
        None, "Named template or format string over the dataset's columns, instead of a prompt column."
    )
    overlong_prompts: str = _arg("drop", "Prompts over query_len: drop (counted) or error.")
    total_epochs: int | None = _arg(None, "Passes over the prompts; 1 if total_episodes is not set either.")
    total_episodes: int | None = _arg(None, "Prompts to sample in all, instead of total_epochs.")

    rollout_batch_size: int = _arg(128, "Prompts a step, over all processes.")
    rollout_per_device_batch_size: int = _arg(32, "Responses a process samples or scores at once.")
    step_batch_size: int = _arg(64, "Responses an optimizer step trains on, over all processes.")
    step_per_device_batch_size: int = _arg(8, "Responses in a micro-batch.")
    ppo_epochs: int = _arg(2, "Passes over a rollout.")
    num_return_sequences: int = _arg(1, "Responses sampled for each prompt.")

    temperature: float = _arg(1.0, "Of sampling and of every log-probability.")
    generation_backend: str = _arg("decode", "decode, or generate for models whose cache cannot drop rows.")
    truncate_tokens: list[str] | None = _arg(
        None, "Further stop tokens, each one token of the vocabulary (text or id)."
    )
    truncate_after: int = _arg(0, "truncate_tokens stop a response only from this many tokens on.")
    penalty_reward_value: float | None = _arg(None, "Score of a response that hit no stop token; null = keep its own.")
    eval_do_sample: bool = _arg(False, "Evaluate sampled responses instead of greedy ones.")
    eval_top_p: float | None = _arg(None, "Nucleus sampling in evaluation.")
    eval_top_k: int | None = _arg(None, "Top-k sampling in evaluation.")

    reward_weights: list[float] | None = _arg(None, "Weight of each reward source; null = 1 each.")
    whiten_rewards: bool = _arg(False, "Scale shaped rewards to unit variance before the advantages (AlpacaFarm).")
    whiten_advantages: bool = _arg(True, "Whiten the advantages over the step's rollouts.")
    gamma: float = _arg(1.0, "Discount per token.")
    lam: float = _arg(0.95, "Lambda of GAE.")
    cliprange: float = _arg(0.2, "Clip range of the policy ratio.")
    cliprange_high: float | None = _arg(None, "Upper clip range where it differs (clip-higher).")
    clip_ratio_c: float | None = _arg(None, "Dual clip: bound of the ratio where the advantage is negative.")
    loss_agg_mode: str = _arg("token-mean", f"How token losses become one: {', '.join(LOSS_AGG_MODES)}.")
    cliprange_value: float | None = _arg(0.2, "Clip range of the value; null = no clipping.")
    vf_coef: float = _arg(0.1, "Weight of the value loss.")
    kl_coef: float = _arg(0.05, "Weight of the KL penalty in the reward (its first value under a controller).")
    kl_estimator: str = _arg("k1", f"KL estimator in the reward: {', '.join(KL_ESTIMATORS)} (AlpacaFarm's).")
    kl_controller: str = _arg("fixed", "fixed, proportional (AlpacaFarm) or horizon (Ziegler et al.).")
    target_kl: float = _arg(6.0, "KL of a sequence that the controllers aim at, in nats.")
    k_beta: float = _arg(0.1, "Gain of the proportional controller.")
    kl_horizon: int = _arg(10000, "Horizon of the horizon controller, in responses.")

    critic_layout: str = _arg("separate", "separate (own backbone) or shared (a head on the policy's).")
    init_value_with_reward: bool = _arg(
        False, "Start the critic from the reward model instead of the policy with a zero head."
    )

    learning_rate: float = _arg(1e-6, "Of AdamW.")
    lr_scheduler_type: str = _arg("constant", "Any schedule of transformers.get_scheduler.")
    warmup_steps: int = _arg(0, "Optimizer steps of warm-up.")
    weight_decay: float = _arg(0.0, "Of the weight matrices.")
    adam_beta1: float = _arg(0.9, "Of AdamW.")
    adam_beta2: float = _arg(0.999, "Of AdamW.")
    adam_epsilon: float = _arg(1e-5, "Of AdamW (AlpacaFarm's value).")
    max_grad_norm: float = _arg(1.0, "Gradient norm is clipped to this.")
    gradient_checkpointing: bool = _arg(False, "Recompute activations in the backward pass.")
    bf16: bool = _arg(False, "Forward passes in bfloat16 (weights stay float32).")
    use_cpu: bool = _arg(False, "Stay on the CPU even where a GPU is.")
    logprob_chunk_size: int = _arg(1024, "Tokens whose logits are in memory at once.")

    def __post_init__(self) -> None:
        _check_types(self)
        for names, holds, remedy in _RANGES:
            for name in names.split():
                value = getattr(self, name)
                if value is not None and not holds(value):
                    raise ValueError(f"{name} is {value!r}; it must be {remedy}")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} is {getattr(self, name)!r}; choose one of {', '.join(choices)}")
        self._check_combinations()

    @property
    def responses_per_step(self) -> int:
        """Responses of a full step: prompts times samples."""
        return self.rollout_batch_size * self.num_return_sequences

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
        if self.kl_controller == "horizon" and self.responses_per_step >= 5 * self.kl_horizon:
            shortest = self.responses_per_step // 5 + 1
            raise ValueError(
                f"kl_horizon is {self.kl_horizon}: a step could turn kl_coef negative; use {shortest} or more"
            )
        if self.push_to_hub and not self.hub_model_id:
            raise ValueError("push_to_hub is True but hub_model_id is not set; name the repository to push to")
        if not self.eval_do_sample and (self.eval_top_p is not None or self.eval_top_k is not None):
            given = f"eval_top_p ({self.eval_top_p}) and eval_top_k ({self.eval_top_k})"
            raise ValueError(f"{given} act on sampled responses only; set eval_do_sample: true or null them")
        if self.truncate_after and not self.truncate_tokens:
            raise ValueError(
                f"truncate_after is {self.truncate_after} but truncate_tokens is not set; name them or use 0"
            )


@dataclass(frozen=True)
class ScriptArguments:
    """What `examples/train_ppo.py` loads: models, rewards and data.

    Raises:
        ValueError: when a required name is missing.
    """

    model_name_or_path: str = _arg("", "Policy to start from: a hub id or a folder.")
    ref_model_name_or_path: str | None = _arg(None, "Reference policy; a frozen copy of the policy by default.")
    value_model_name_or_path: str | None = _arg(None, "Critic to start from (a sequence classifier with one label).")
    reward_model_name_or_path: list[str] | None = _arg(None, "Reward models (sequence classifiers with one label).")
    reward_funcs: list[str] | None = _arg(None, "Reward functions, module:function or file.py:function.")
    dataset_name: str = _arg("", "Prompts: a hub id, a folder, or a jsonl, csv or parquet file.")
    dataset_config: str | None = _arg(None, "Configuration of a hub dataset.")
    dataset_train_split: str = _arg("train", "Split to train on.")
    eval_dataset_name: str | None = _arg(
        None, "Held-out prompts in a dataset of their own; else dataset_test_split of dataset_name."
    )
    dataset_test_split: str | None = _arg(
        None, "Split to evaluate on; null = none, or the only one of eval_dataset_name."
    )
    trust_remote_code: bool = _arg(False, "Run code that comes with a model.")
    resume_from_checkpoint: str | None = _arg(None, "A checkpoint folder, or true for the newest of output_dir.")

    def __post_init__(self) -> None:
        _check_types(self)
        for name in ("model_name_or_path", "dataset_name"):
            if not getattr(self, name):
                raise ValueError(f"{name} is not set; give --{name} or put it in the --config file")
        if not self.reward_model_name_or_path and not self.reward_funcs:
            raise ValueError("no reward: give --reward_model_name_or_path, --reward_funcs module:function, or both")


def _check_types(arguments: Any) -> None:
    for name, hint in typing.get_type_hints(type(arguments)).items():
        value = getattr(arguments, name)
        accepted = tuple(typing.get_origin(kind) or kind for kind in typing.get_args(hint) or (hint,))
        if typing.get_origin(hint) is list:
            accepted = (list,)
        if float in accepted:
            accepted += (int,)
        # bool is a subclass of int, but `rollout_batch_size: true` is a mistake.
        if not isinstance(value, accepted) or (isinstance(value, bool) and bool not in accepted):
            wanted = " or ".join(kind.__name__ for kind in accepted if kind is not type(None))
            raise ValueError(f"{name} is {value!r}, a {type(value).__name__}; it must be {wanted}")


_RANGES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (
        "logging_steps query_len response_len total_epochs total_episodes rollout_batch_size "
        "rollout_per_device_batch_size step_batch_size "
        "step_per_device_batch_size ppo_epochs num_return_sequences logprob_chunk_size save_total_limit eval_top_k "
        "kl_horizon",
        lambda v: v >= 1,
        "at least 1",
    ),
    ("seed save_steps eval_steps num_logged_rollouts truncate_after warmup_steps", lambda v: v >= 0, "0 or more"),
    (
        "temperature cliprange cliprange_high cliprange_value target_kl k_beta max_grad_norm adam_epsilon",
        lambda v: isfinite(v) and v > 0,
        "a positive number",
    ),
    ("kl_coef vf_coef learning_rate weight_decay", lambda v: isfinite(v) and v >= 0, "0 or more"),
    ("k_beta", lambda v: v < 5, "below 5, or one step could make kl_coef negative"),
    ("gamma lam", lambda v: 0 <= v <= 1, "between 0 and 1"),
    ("cliprange", lambda v: v < 1, "below 1, or the ratio's lower bound would be negative"),
    ("clip_ratio_c", lambda v: isfinite(v) and v > 1, "above 1, or null"),
    ("eval_top_p", lambda v: 0 < v <= 1, "above 0 and at most 1"),
    ("adam_beta1 adam_beta2", lambda v: 0 <= v < 1, "at least 0 and below 1"),
    ("penalty_reward_value", isfinite, "a finite number, or null"),
    ("reward_weights", lambda v: len(v) > 0 and all(isfinite(w) for w in v), "a list of finite numbers, or null"),
)
_CHOICES: dict[str, tuple[str, ...]] = {
    "overlong_prompts": ("drop", "error"),
    "generation_backend": ("decode", "generate"),
    "loss_agg_mode": LOSS_AGG_MODES,
    "kl_estimator": KL_ESTIMATORS,
    "kl_controller": ("fixed", "proportional", "horizon"),
    "critic_layout": ("separate", "shared"),
}


def parse_args(types: Sequence[type], argv: Sequence[str] | None = None) -> tuple[Any, ...]:
    """One instance of each dataclass in `types`, from `--config run.yaml` and flags; a flag wins over the file.

    Args:
        types: dataclasses with distinct field names.
        argv: the command line without the program's name; `sys.argv[1:]` by default.

    Raises:
        ValueError: when the file is missing, is no mapping, or has a key that none of `types` has; and what the
            dataclasses raise.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    arguments = [part for text in arguments for part in text.split("=", 1 if text.startswith("--config=") else 0)]
    parser = HfArgumentParser(list(types), allow_abbrev=False)  # type: ignore[arg-type]
    given: dict[str, Any] = {}
    if "--config" in arguments:
        at = arguments.index("--config")
        if at + 1 == len(arguments):
            raise ValueError("--config names no file; give the path of a YAML file")
        given = read_yaml(arguments[at + 1])
        del arguments[at : at + 2]
    known = {f.name: f for cls in types for f in dataclasses.fields(cls)}
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ValueError(
            f"unknown keys in the --config file: {', '.join(unknown)}; known are {', '.join(sorted(known))}"
        )
    parser.set_defaults(**{key: _as_declared(known[key], value) for key, value in given.items()})
    parsed: tuple[Any, ...] = tuple(parser.parse_args_into_dataclasses(arguments, look_for_args_file=False))
    return parsed


def read_yaml(path: str) -> dict[str, Any]:
    """The mapping that the YAML file at `path` holds.

    Raises:
        ValueError: when there is no such file or it holds something else.
    """
    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.safe_load(file)
    except FileNotFoundError as error:
        raise ValueError(f"--config {path}: there is no such file") from error
    if not isinstance(content, dict):
        raise ValueError(f"--config {path} holds {type(content).__name__}; it must map argument names to values")
    return content


def _as_declared(field: "dataclasses.Field[Any]", value: Any) -> Any:
    """YAML reads 1e-5 as text: brings it to the number that the field declares, and a single value to a list."""
    declared = str(field.type).removeprefix("<class '").removesuffix("'>")
    if isinstance(value, str) and ("int" in declared or "float" in declared) and "str" not in declared:
        try:
            return float(value) if "float" in declared else int(value)
        except ValueError as error:
            # argparse would convert it too, but end the program with its usage text.
            raise ValueError(f"{field.name} is {value!r} in the --config file; it must be {declared}") from error
    if "list" in declared and value is not None and not isinstance(value, list):
        return [value]
    return value
