"""Translates the values of TRL's GRPOConfig and PPOConfig (1.12), with the defaults that these have.

What one value alone decides is in the table of names (`config.foreign_names`). Here are the batch sizes and units that
follow from several.
"""

import json
import math
from collections.abc import Collection, Mapping
from typing import Any

from alpaca_ppo.config.foreign_names import CONFIG_SECTIONS, find_foreign_name
from alpaca_ppo.config.keyword_checks import NOT_IN_MODEL_INIT_KWARGS
from alpaca_ppo.migrate.translation import OPTIONS, Translation

_SHARED_DEFAULTS = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 3,
    "max_steps": -1,
    "lr_scheduler_type": "linear",
    "warmup_steps": 0,
    "gradient_checkpointing": True,
    "logging_steps": 10,
    "save_strategy": "steps",
    "save_steps": 500,
    "eval_strategy": "no",
    "report_to": "none",
    "max_grad_norm": 1.0,
}
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "GRPOConfig": _SHARED_DEFAULTS
    | {
        "learning_rate": 1e-6,
        "num_generations": 8,
        "max_completion_length": 512,
        "temperature": 1.0,
        "beta": 0.0,
        "num_iterations": 1,
        "epsilon": 0.2,
        "loss_type": "dapo",
        "scale_rewards": "group",
    },
    "PPOConfig": _SHARED_DEFAULTS
    | {
        "learning_rate": 3e-6,
        "num_mini_batches": 1,
        "num_ppo_epochs": 4,
        "response_length": 53,
        "temperature": 0.7,
        "local_rollout_forward_batch_size": 64,
        "kl_coef": 0.05,
        "cliprange": 0.2,
        "cliprange_value": 0.2,
        "vf_coef": 0.1,
        "gamma": 1.0,
        "lam": 0.95,
    },
}
"""TRL's defaults that matter to the result, or differ from those here."""

_SECTIONS = {
    "GRPOConfig": tuple(s for s in CONFIG_SECTIONS if s != "PPOConfig"),
    "PPOConfig": tuple(s for s in CONFIG_SECTIONS if s != "GRPOConfig"),
}
_SCHEDULES_WITHOUT_ARGUMENTS = {
    "cosine_with_min_lr": "cosine",
    "cosine_warmup_with_min_lr": "cosine",
    "warmup_stable_decay": "constant_with_warmup",
    "reduce_lr_on_plateau": "constant",
}
"""For schedules that need arguments or a metric: the nearest that does not."""


def translate_trl(kind: str, given: Mapping[str, Any], source: str, *, num_processes: int = 1) -> Translation:
    """The options here that train as TRL would.

    Args:
        kind: "GRPOConfig" or "PPOConfig", TRL's class.
        given: names and values that were given to it; the others have TRL's defaults.
        source: what is translated, for the first line of the output.
        num_processes: processes of the run, by which TRL multiplies the batch sizes of a device.

    Raises:
        ValueError: for a batch size that is no positive number, or that TRL refuses too.
    """
    result = Translation(source)
    values = {**DEFAULTS[kind], **given}
    for name, value in values.items():
        entry = find_foreign_name(name, _SECTIONS[kind])
        if entry is None:
            if name in OPTIONS:
                result.set(name, value)
            else:
                result.lost.append(f"{name} ({value!r}): no option of TRL 1.12 has this name")
        elif name in given or entry.same or entry.values:
            result.record(entry, name, value)
    result.set("bf16", bool(values.get("bf16", not values.get("fp16"))), "TRL's default" if "bf16" not in given else "")
    steps = _grpo(result, values, num_processes) if kind == "GRPOConfig" else _ppo(result, values, num_processes)
    if kind == "GRPOConfig":
        _length(result, values, given, steps)
    else:
        _length_of_ppo(result, values, given)
    _intervals(result, values, steps if kind == "GRPOConfig" else 1)
    _optimizer(result, values, given, 1 if kind == "GRPOConfig" else steps)
    _models(result, values)
    _spelled(result)
    result.finish()
    return result


def _grpo(result: Translation, values: Mapping[str, Any], processes: int) -> int:
    """Batch sizes, loss and KL of GRPO; returns the optimizer steps on a rollout."""
    per_device, accumulation = (
        _count(values, "per_device_train_batch_size"),
        _count(values, "gradient_accumulation_steps"),
    )
    group, passes = _count(values, "num_generations"), _count(values, "num_iterations")
    optimizer_batch = per_device * processes * accumulation
    generated = values.get("generation_batch_size")
    per_generation = values.get("steps_per_generation") or accumulation
    completions = generated or per_device * processes * per_generation
    how = f"generation_batch_size {completions}" if generated else f"{per_device} * {processes} * {per_generation}"
    if completions % group:
        raise ValueError(
            f"a generation has {how} = {completions} completions, which num_generations ({group}) does not divide, and "
            "TRL refuses it; set num_processes to that of the run, or change per_device_train_batch_size"
        )
    if completions < optimizer_batch:
        completions, how = optimizer_batch, f"{how}, but an optimizer step needs {optimizer_batch}: {optimizer_batch}"
    result.set("rollout_batch_size", completions // group, f"prompts: {how} completions / num_generations {group}")
    result.set("step_batch_size", optimizer_batch, f"responses: {per_device} * {processes} processes * {accumulation}")
    result.set("step_per_device_batch_size", per_device, "per_device_train_batch_size")
    sampled = max(group, completions // processes)
    result.set("rollout_per_device_batch_size", sampled, "a process samples its part of the generation at once, as TRL")
    if "max_prompt_length" not in values:
        result.set("query_len", 512, "TRL does not limit it: check that no prompt is longer, as it would be dropped")
    if values["eval_strategy"] != "no":
        result.set("eval_do_sample", True, "TRL evaluates as it trains, on sampled responses")
        result.set("eval_num_samples", values.get("num_generations_eval") or group, "num_generations_eval")
    _grpo_loss(result, values)
    beta = values["beta"]
    result.set("use_kl_in_reward", False, "TRL's GRPOTrainer has the KL in the loss, if at all")
    if beta:
        result.set("use_kl_loss", True, "beta is not 0")
        result.set("kl_loss_coef", beta, "beta")
        if values.get("use_bias_correction_kl", True):
            result.lost.append(
                "use_bias_correction_kl (True, TRL's default): the KL in the loss is not multiplied by the ratio; "
                "kl_loss_type: k3+ has an unbiased gradient too, while the policy is the one that sampled"
            )
    else:
        result.set("reference", "none", "beta is 0, so there is no reference")
    return math.ceil(completions / optimizer_batch) * passes


def _grpo_loss(result: Translation, values: Mapping[str, Any]) -> None:
    result.options.setdefault("adv_estimator", "grpo")
    loss, high = result.options.get("policy_loss", "clip"), values.get("epsilon_high")
    if values["scale_rewards"] == "batch":
        result.lost.append(
            "scale_rewards (batch): reinforce_plus_plus_baseline divides by the standard deviation of all advantages, "
            "TRL by that of all rewards"
        )
    if values.get("multi_objective_aggregation") == "normalize_then_sum":
        result.set("adv_estimator", "gdpo", "multi_objective_aggregation: normalize_then_sum")
    if loss == "gspo" and result.options["loss_agg_mode"] != "seq-mean-token-mean":
        result.set(
            "loss_agg_mode", "seq-mean-token-mean", "the only mode of gspo; TRL would average as its loss_type says"
        )
    if loss == "cispo":
        result.set("cliprange", 0.99, "CISPO bounds importance weights from above only")
        if high is not None and high > 1:
            result.set("cliprange_high", high - 1, f"1 + cliprange_high is TRL's epsilon_high, {high}")
        else:
            result.lost.append(
                f"epsilon_high ({high}) with loss_type cispo: TRL bounds the weights by it, and a bound of 1 or less "
                "makes every weight the same; set cliprange_high to a bound above 1, less 1 (ScaleRL: 4)"
            )
    elif loss == "sapo":
        result.options.pop("cliprange", None)
    elif high is not None:
        result.set("cliprange_high", high)
    if result.options.get("clip_ratio_c") is not None and loss != "clip":
        result.lost.append(f"delta ({result.options.pop('clip_ratio_c')}): policy_loss {loss} has no such bound")


def _ppo(result: Translation, values: Mapping[str, Any], processes: int) -> int:
    """Batch sizes and rewards of PPO; returns the optimizer steps on a rollout."""
    per_device, accumulation = (
        _count(values, "per_device_train_batch_size"),
        _count(values, "gradient_accumulation_steps"),
    )
    parts, batch = _count(values, "num_mini_batches"), per_device * accumulation * processes
    if (per_device * accumulation) % parts:
        raise ValueError(
            f"num_mini_batches is {parts}, which does not divide per_device_train_batch_size * "
            f"gradient_accumulation_steps ({per_device * accumulation}), and TRL refuses it; change one of them"
        )
    micro = min(per_device, per_device * accumulation // parts)
    step = min(batch, micro * accumulation * processes)
    how = f"{per_device} * {processes} processes * {accumulation}"
    result.set("rollout_batch_size", batch, f"prompts: {how}")
    result.set("step_batch_size", step, f"TRL steps after {accumulation} micro-batches of {micro} on each process")
    result.set("step_per_device_batch_size", micro, "per_device_train_batch_size, or the smaller mini-batch")
    result.set("query_len", 512, "TRL does not limit it: check that no prompt is longer, as it would be dropped")
    result.set("old_policy", "rollout", "TRL takes the log-probabilities of its generation")
    if values.get("missing_eos_penalty") is not None:
        result.set(
            "penalty_reward_value", -values["missing_eos_penalty"], "replaces the score; TRL subtracts the penalty"
        )
    if values.get("stop_token_id") is not None:
        result.set("truncate_tokens", [values["stop_token_id"]], "stop_token_id")
    if (path := values.get("reward_model_path")) is not None:
        result.set("reward_model_name_or_path", [path], "reward_model_path")
        result.set("init_value_with_reward", True, "TRL's script starts the critic from the reward model")
    return math.ceil(batch / step) * values["num_ppo_epochs"]


def _length(result: Translation, values: Mapping[str, Any], given: Collection[str], optimizer_steps: int) -> None:
    """How long GRPO trains: TRL's `max_steps` win over epochs."""
    result.settle("max_steps", "num_train_epochs")
    if values["max_steps"] <= 0:
        _epochs(result, values)
        return
    how = f"PPO steps: {values['max_steps']} optimizer steps / {optimizer_steps} of a rollout"
    result.set("max_steps", math.ceil(values["max_steps"] / optimizer_steps), how if optimizer_steps > 1 else "")
    if "num_train_epochs" in given:
        _not_read(result, "max_steps decides how long the run is, in TRL too", "num_train_epochs")


def _length_of_ppo(result: Translation, values: Mapping[str, Any], given: Collection[str]) -> None:
    """How long PPO trains: TRL's `total_episodes` win over epochs, and its trainer reads no other length."""
    result.settle("max_steps", "num_train_epochs", "num_total_batches")
    unread = [name for name in ("max_steps", "num_total_batches") if name in given]
    _not_read(result, "TRL's PPOTrainer runs for total_episodes or num_train_epochs and reads no other length", *unread)
    if not values.get("total_episodes"):
        _epochs(result, values)
    elif "num_train_epochs" in given:
        _not_read(result, "total_episodes decides how long the run is, in TRL too", "num_train_epochs")


def _epochs(result: Translation, values: Mapping[str, Any]) -> None:
    epochs = math.ceil(values["num_train_epochs"])
    rounded = f", rounded up from {values['num_train_epochs']}" if epochs != values["num_train_epochs"] else ""
    result.set("total_epochs", epochs, f"num_train_epochs{rounded}")


def _not_read(result: Translation, reason: str, *names: str) -> None:
    if names:
        result.unneeded.setdefault(reason, []).extend(names)


def _intervals(result: Translation, values: Mapping[str, Any], optimizer_steps: int) -> None:
    """Steps between two reports, checkpoints and evaluations, which count rollouts here."""
    for name, strategy in (("logging_steps", "steps"), ("save_steps", None), ("eval_steps", None)):
        strategy = strategy or values.get(name.replace("_steps", "_strategy"), "no")
        given = values.get(name) or values["logging_steps"]
        if strategy == "no":
            result.set(name, 0, f'{name.replace("_steps", "_strategy")}: "no"')
        elif strategy != "steps" or given < 1:
            result.set(name, 10, "TRL's value counts epochs or is a share of the run: choose the PPO steps between two")
        else:
            how = (
                f"TRL's {given} optimizer steps / {optimizer_steps} of a rollout" if optimizer_steps > 1 else "rollouts"
            )
            result.set(name, max(1, round(given / optimizer_steps)), how)
    if values.get("metric_for_best_model") is not None or values.get("load_best_model_at_end"):
        result.settle("metric_for_best_model")
        best = result.options.pop("load_best_model_at_end", False)
        result.to_do.append(
            f"metric_for_best_model{' with load_best_model_at_end: true' if best else ''}: choose a name in "
            "docs/metrics.md, such as eval/scores (with eval_steps)"
        )


def _optimizer(result: Translation, values: Mapping[str, Any], given: Mapping[str, Any], factor: int) -> None:
    """Schedule and warm-up; `factor` is how many optimizer steps one of TRL's scheduler steps is."""
    schedule, warmup = str(values["lr_scheduler_type"]), values.get("warmup_steps") or 0
    # transformers' warmup_steps win over its warmup_ratio.
    share = warmup if 0 < warmup < 1 else 0 if warmup else values.get("warmup_ratio") or 0
    if nearest := _SCHEDULES_WITHOUT_ARGUMENTS.get(schedule):
        result.lost.append(
            f"lr_scheduler_type ({schedule}): it needs arguments (lr_scheduler_kwargs) or a metric; {nearest} is the "
            "nearest without, and PPOTrainer(optimizers=(optimizer, scheduler)) takes any other"
        )
        schedule = nearest
    result.set("lr_scheduler_type", schedule, "TRL's default" if "lr_scheduler_type" not in given else "")
    result.settle("warmup_steps", "warmup_ratio")
    if schedule == "constant":
        asked = [name for name in ("warmup_steps", "warmup_ratio") if given.get(name)]
        _not_read(result, "lr_scheduler_type constant has no warm-up, in TRL neither", *asked)
    elif share:
        result.set("warmup_steps", share, "a share of the run's optimizer steps")
    elif warmup:
        result.set("warmup_steps", int(warmup * factor), f"{warmup} * {factor} optimizer steps" if factor > 1 else "")


def _models(result: Translation, values: Mapping[str, Any]) -> None:
    """The dtype of the policy, LoRA and its quantization, the seed and the trackers."""
    kwargs = _model_init_kwargs(result, values)
    dtype = kwargs.get("dtype", kwargs.get("torch_dtype", values.get("dtype", values.get("torch_dtype"))))
    result.options.pop("dtype", None)
    if dtype is not None and "bfloat16" in str(dtype):
        if values.get("use_peft"):
            result.set("dtype", "bfloat16", "dtype of the frozen base")
        else:
            result.unneeded.setdefault("weights train in float32; bf16: true makes the passes bfloat16", []).append(
                "dtype"
            )
    for name in ("lora_target_modules", "reward_funcs", "reward_model_name_or_path"):
        if isinstance(result.options.get(name), str):
            result.options[name] = [result.options[name]]
    if result.options.get("lora_target_modules") == ["all-linear"]:
        result.set("lora_target_modules", None, "every linear layer")
    if not result.options.get("use_peft"):
        for name in [n for n in result.options if n.startswith("lora_")]:
            del result.options[name]
    if result.options.get("push_to_hub") and not result.options.get("hub_model_id"):
        result.set("push_to_hub", False, "set hub_model_id to the repository, and this to true")
    if (trackers := result.options.get("report_to")) is not None:
        result.set("report_to", [trackers] if isinstance(trackers, str) else trackers)


def _model_init_kwargs(result: Translation, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Sets the options for TRL's `model_init_kwargs`, those for its dtype excepted; returns what was given."""
    result.settle("model_init_kwargs")
    kwargs: Mapping[str, Any] = values.get("model_init_kwargs") or {}
    kept: dict[str, Any] = {}
    for name, value in kwargs.items():
        if name in ("dtype", "torch_dtype") or value is None:
            continue
        if name in ("attn_implementation", "trust_remote_code", "load_in_4bit"):
            result.set(name, value, "model_init_kwargs")
        elif name == "quantization_config" and isinstance(value, Mapping) and value.get("load_in_4bit"):
            result.set("load_in_4bit", True, "quantization_config in model_init_kwargs, with fixed settings")
        elif name == "use_cache":
            _not_read(result, "the sampler keeps a KV cache, and updates have none", "use_cache in model_init_kwargs")
        elif name in NOT_IN_MODEL_INIT_KWARGS:
            result.lost.append(f"{name} in model_init_kwargs ({value}): {NOT_IN_MODEL_INIT_KWARGS[name]}")
        elif _is_plain(value):
            kept[name] = value
        else:
            result.to_do.append(
                f"{name} in model_init_kwargs ({value}): give it as text, a number, a list or a mapping"
            )
    if kept:
        result.set("model_init_kwargs", kept)
    return kwargs


def _is_plain(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def _spelled(result: Translation) -> None:
    """What the checks here need: whole numbers where TRL takes floats, and options that fit together."""
    if result.options.get("load_in_4bit") and "vf_coef" in result.options:
        result.set("critic_layout", "adapter", "a 4-bit base cannot be copied for the critic")
        result.options.pop("init_value_with_reward", None)
    if not isinstance(result.options.get("deepspeed", ""), str):
        del result.options["deepspeed"]
        result.to_do.append("deepspeed: write the configuration into a JSON file, and name it here")
    for name in ("save_total_limit",):
        if result.options.get(name) == 0:
            result.options[name] = None
    for name, value in result.options.items():
        kinds = OPTIONS[name].kinds
        if isinstance(value, float) and float not in kinds and int in kinds:
            result.options[name] = math.ceil(value)


def _count(values: Mapping[str, Any], name: str) -> int:
    value = values[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} is {value!r}; give it as a whole number of at least 1, which batch sizes follow from")
    return value
