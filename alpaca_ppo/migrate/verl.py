"""verl's ppo_trainer.yaml and the overrides of its command line: what follows from several values there."""

import math
import re
from collections.abc import Sequence
from typing import Any

import yaml

from alpaca_ppo.config.foreign_names import flattened
from alpaca_ppo.migrate.translation import Translation

SECTION = "ppo_trainer.yaml"
_ACTOR, _ROLLOUT, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"


def read_overrides(arguments: Sequence[str]) -> dict[str, Any]:
    """Keys and values of hydra's arguments, `key=value`, `+key=value` and `~key`; the values are read as YAML.

    Raises:
        ValueError: for an argument that is none of these.
    """
    values: dict[str, Any] = {}
    for argument in arguments:
        key, equals, text = argument.lstrip("+~").partition("=")
        if not re.fullmatch(r"[\w.@/]+", key) or not (equals or argument.startswith("~")):
            raise ValueError(f"{argument!r} is no override of hydra; write key=value, such as data.seed=1")
        values |= flattened({key: yaml.safe_load(text) if text else None})
    return values


def translate_verl(result: Translation) -> None:
    """Sets the options that train as verl would with the values of `result`.

    Raises:
        ValueError: for a batch size that is no positive number.
    """
    result.take([SECTION])
    _algorithm(result)
    _sizes(result)
    _warmup(result)
    _data_and_models(result)


def _algorithm(result: Translation) -> None:
    values, options = result.values, result.options
    if options.get("adv_estimator") == "grpo" and values.get("algorithm.norm_adv_by_std_in_grpo") is False:
        result.set("adv_estimator", "grpo_no_std", "norm_adv_by_std_in_grpo: false")
    if options.get("adv_estimator", "gae") == "gae":
        result.set("vf_coef", 1.0, "verl's value loss has no weight")
    in_reward, in_loss = values["algorithm.use_kl_in_reward"], values[f"{_ACTOR}.use_kl_loss"]
    if not in_reward:
        result.set("kl_coef", 0.0, "use_kl_in_reward is false")
    if not in_loss:
        result.drop("kl_loss_coef")
    if not in_reward and not in_loss:
        result.set("reference", "none", "neither use_kl_in_reward nor use_kl_loss")
    options.setdefault("old_policy", "recompute")
    if not any(value for key, value in values.items() if re.search(r"overlong_buffer(_cfg)?\.enable$", key)):
        result.drop("overlong_buffer_len")


def _sizes(result: Translation) -> None:
    values, options = result.values, result.options
    group, prompts = result.count(f"{_ROLLOUT}.n"), result.count("data.train_batch_size")
    mini = result.count(f"{_ACTOR}.ppo_mini_batch_size")
    result.set(
        "step_batch_size", min(mini, prompts) * group, f"responses: ppo_mini_batch_size {mini} * rollout.n {group}"
    )
    if values.get(f"{_ACTOR}.use_dynamic_bsz"):
        tokens = values.get(f"{_ACTOR}.ppo_max_token_len_per_gpu", 16384)
        result.set("max_tokens_per_micro_batch", max(tokens, options["query_len"] + options["response_len"]))
    forward = values.get(f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu") or 32
    result.set("rollout_per_device_batch_size", max(forward, group), "sampled and scored at once: memory alone")
    if options.get("max_steps"):
        result.drop("total_epochs")
    for key, name in (("trainer.save_freq", "save_steps"), ("trainer.test_freq", "eval_steps")):
        result.set(name, max(0, values.get(key, 0)))


def _warmup(result: Translation) -> None:
    """Schedules: verl's scheduler steps once a rollout, ours once an optimizer step."""
    values, options, optim = result.values, result.options, f"{_ACTOR}.optim"
    per_rollout = math.ceil(options["rollout_batch_size"] * values[f"{_ROLLOUT}.n"] / options["step_batch_size"])
    per_rollout *= options["ppo_epochs"]
    schedule = values.get(f"{optim}.lr_scheduler_type") or values.get(f"{optim}.warmup_style") or "constant"
    for name, prefix in (("warmup_steps", optim), ("critic_lr_warmup_steps", "critic.optim")):
        steps, share = values.get(f"{prefix}.lr_warmup_steps", 0), values.get(f"{prefix}.lr_warmup_steps_ratio", 0)
        comment = f"{steps} rollouts * {per_rollout} optimizer steps" if steps > 0 else "a share of the run"
        if steps > 0 or share > 0:
            result.set(name, steps * per_rollout if steps > 0 else share, comment)
            schedule = "constant_with_warmup" if schedule == "constant" else schedule
        elif name != "warmup_steps":
            result.set(name, 0)
    result.set("lr_scheduler_type", schedule)


def _data_and_models(result: Translation) -> None:
    values, options = result.values, result.options
    for key, name in (("data.train_files", "dataset_name"), ("data.val_files", "eval_dataset_name")):
        files = values.get(key) or []
        if len(files if isinstance(files, list) else [files]) == 1:
            result.set(name, files[0] if isinstance(files, list) else files, key)
    result.set("bf16", True, "passes in bfloat16, as verl's")
    if rank := values.get(f"{_MODEL}.lora_rank"):
        result.set("use_peft", True, "lora_rank")
        result.set("lora_r", rank)
        options.setdefault("lora_alpha", 16)
    logger = values.get("trainer.logger", [])
    trackers = [name for name in (logger if isinstance(logger, list) else [logger]) if name != "console"]
    result.set("report_to", trackers or ["none"])
    parts = values.get("trainer.project_name", "verl_examples"), values.get("trainer.experiment_name", "gsm8k")
    result.options.setdefault("output_dir", "checkpoints/{}/{}".format(*parts))
