"""TRL's GRPOConfig and PPOConfig: the batch sizes, lengths and units here that follow from several values there."""

import math

from alpaca_ppo.config.foreign_names import CONFIG_SECTIONS
from alpaca_ppo.migrate.translation import Translation

_SCHEDULES = ("linear", "cosine", "constant", "constant_with_warmup", "polynomial")
"""Those that need no arguments."""


def translate_trl(result: Translation, processes: int) -> None:
    """Sets the options that train as TRL would with the values of `result`, of a run of so many `processes`.

    Raises:
        ValueError: for a batch size that is no positive number, or that TRL refuses too.
    """
    values, options, is_grpo = result.values, result.options, result.section == "GRPOConfig"
    other = "PPOConfig" if is_grpo else "GRPOConfig"
    result.take([section for section in CONFIG_SECTIONS if section != other])
    device_batch, accumulation = (
        result.count("per_device_train_batch_size"),
        result.count("gradient_accumulation_steps"),
    )
    steps = (_grpo if is_grpo else _ppo)(result, device_batch, accumulation, processes)
    # TRL's PPOTrainer counts rollouts, and its scheduler steps once for each of them.
    per_rollout, per_scheduled = (steps, 1) if is_grpo else (1, steps)
    if is_grpo and values["max_steps"] > 0:
        result.set("max_steps", math.ceil(values["max_steps"] / steps), f"{values['max_steps']} / {steps} of a rollout")
    elif not options.get("total_episodes"):
        result.set("total_epochs", math.ceil(values["num_train_epochs"]), "num_train_epochs")
    for name in ("logging_steps", "save_steps", "eval_steps"):
        strategy = values.get(name.replace("_steps", "_strategy"), "steps")
        given = values.get(name) or values["logging_steps"]
        if strategy == "no":
            result.set(name, 0)
        elif strategy != "steps" or given < 1:
            result.set(name, 10, "TRL's value counts epochs or is a share of the run: choose the rollouts between two")
        else:
            result.set(name, max(1, round(given / per_rollout)), f"rollouts: {given} / {per_rollout}")
    schedule, warmup = str(values["lr_scheduler_type"]), values.get("warmup_steps") or values.get("warmup_ratio") or 0
    if schedule not in _SCHEDULES:
        result.leave("lr_scheduler_type", "it needs arguments or a metric; the nearest without is taken")
        schedule = "cosine" if "cosine" in schedule else "constant_with_warmup"
    result.set("lr_scheduler_type", schedule)
    if schedule != "constant" and warmup >= 1:
        result.set("warmup_steps", int(warmup * per_scheduled), f"{warmup} * {per_scheduled} optimizer steps")
    elif schedule != "constant" and warmup:
        result.set("warmup_steps", warmup, "a share of the run")
    if options.get("lora_target_modules") == "all-linear":
        result.drop("lora_target_modules")
    if "query_len" not in options:
        result.set("query_len", 512, "TRL has no limit; a longer prompt is dropped")


def _grpo(result: Translation, device_batch: int, accumulation: int, processes: int) -> int:
    """Batch sizes, loss and KL; returns the optimizer steps on a rollout."""
    values, group = result.values, result.count("num_generations")
    per_generation = values.get("steps_per_generation") or accumulation
    batch = device_batch * processes * accumulation
    generated = values.get("generation_batch_size") or device_batch * processes * per_generation
    if generated % group:
        raise ValueError(
            f"a generation of {generated} completions is not a multiple of num_generations ({group}), so TRL refuses; "
            "give --num_processes, or change per_device_train_batch_size"
        )
    completions = max(generated, batch)
    result.set("rollout_batch_size", completions // group, f"prompts: {completions} completions / {group}")
    result.set("step_batch_size", batch, f"responses: {device_batch} * {processes} processes * {accumulation}")
    result.set("step_per_device_batch_size", device_batch)
    result.set("rollout_per_device_batch_size", max(group, completions // processes), "a process samples all at once")
    result.set("kl_coef", 0.0, "TRL has the KL in the loss")
    if beta := values["beta"]:
        result.set("kl_loss_coef", beta, "beta")
    else:
        result.set("reference", "none", "beta is 0")
    cispo, high = result.options.get("policy_loss") == "cispo", values.get("epsilon_high") or 0.0
    if high and not cispo:
        result.set("cliprange_high", high)
    elif cispo and high > 1:
        result.set("cliprange_high", high - 1, "TRL's epsilon_high bounds the ratio itself")
    elif cispo:
        result.leave("epsilon_high", "CISPO needs a bound above 1: set cliprange_high to it, less 1 (ScaleRL: 4)")
    return math.ceil(completions / batch) * result.count("num_iterations")


def _ppo(result: Translation, device_batch: int, accumulation: int, processes: int) -> int:
    """Batch sizes and rewards; returns the optimizer steps on a rollout."""
    values, parts, prompts = result.values, result.count("num_mini_batches"), device_batch * accumulation
    if prompts % parts:
        raise ValueError(
            f"num_mini_batches is {parts}, which does not divide per_device_train_batch_size * "
            f"gradient_accumulation_steps ({prompts}), and TRL refuses it; change one of them"
        )
    micro = min(device_batch, prompts // parts)
    batch, step = prompts * processes, min(prompts, micro * accumulation) * processes
    result.set("rollout_batch_size", batch, f"prompts: {device_batch} * {processes} processes * {accumulation}")
    result.set("step_batch_size", step, f"TRL steps after {accumulation} micro-batches of {micro} on each process")
    result.set("step_per_device_batch_size", micro)
    result.set("old_policy", "rollout", "TRL takes the log-probabilities of its generation")
    if penalty := values.get("missing_eos_penalty"):
        result.set("penalty_reward_value", -penalty, "replaces the score; TRL subtracts the penalty")
    if (token := values.get("stop_token_id")) is not None:
        result.set("truncate_tokens", [token], "stop_token_id")
    if path := values.get("reward_model_path"):
        result.set("reward_model_name_or_path", [path], "reward_model_path")
        result.set("init_value_with_reward", True, "TRL's script starts the critic from the reward model")
    return math.ceil(batch / step) * result.count("num_ppo_epochs")
