"""Translates verl's ppo_trainer.yaml, and reads hydra's overrides."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from alpaca_ppo.config.foreign_names import flattened
from alpaca_ppo.migrate.translation import Translation

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def read_overrides(arguments: Sequence[str]) -> dict[str, Any]:
    """Keys and values of hydra's arguments: `key=value`, `+key=value` and `~key`."""
    values: dict[str, Any] = {}
    for argument in arguments:
        key, equals, text = argument.lstrip("+~").partition("=")
        if not re.fullmatch(r"[\w.@/]+", key) or not (equals or argument.startswith("~")):
            raise ValueError(f"{argument!r} is no override of hydra; write key=value, such as data.seed=1")
        # YAML has no text that begins with @, which verl reads from that file, or with a command of the shell.
        values |= flattened({key: text if text.startswith(("@", "`")) else yaml.safe_load(text)})
    return values


def translate_verl(source: str, given: Mapping[str, Any]) -> Translation:
    """The options that train as verl would with the keys and values in `given`; `source` is what the user gave."""
    result = Translation(f"verl's configuration ({source})", given, "ppo_trainer.yaml")
    values, options = result.values, result.options
    result.take(["ppo_trainer.yaml"])
    if options.get("adv_estimator") == "grpo" and values.get("algorithm.norm_adv_by_std_in_grpo") is False:
        result.set("adv_estimator", "grpo_no_std", "norm_adv_by_std_in_grpo: false")
    if not options["kl_coef"] and not options["kl_loss_coef"]:
        result.set("reference", "none", "neither use_kl_in_reward nor use_kl_loss")
    is_overlong = any(value for key, value in values.items() if re.search(r"overlong_buffer(_cfg)?\.enable$", key))
    if not (is_overlong and options.get("overlong_buffer_len")):
        options.pop("overlong_buffer_len", None)
    # Without its own value, the upper clip range is not that of clip_ratio_low.
    if f"{_ACTOR}.clip_ratio_low" in values:
        options.setdefault("cliprange_high", values[f"{_ACTOR}.clip_ratio"])
    if "dynamic_sampling" in options and (batches := values["algorithm.filter_groups.max_num_gen_batches"] or 0) > 0:
        result.set("dynamic_sampling", batches - 1, f"max_num_gen_batches: {batches}, with the first")
    group, prompts = result.count(f"{_ROLLOUT}.n"), result.count("data.train_batch_size")
    mini_batch = result.count(f"{_ACTOR}.ppo_mini_batch_size")
    step = min(mini_batch, prompts) * group
    result.set("step_batch_size", step, f"responses: ppo_mini_batch_size {mini_batch} * rollout.n {group}")
    lengths = result.count("data.max_prompt_length") + result.count("data.max_response_length")
    if values.get(f"{_ACTOR}.use_dynamic_bsz"):
        result.set("max_tokens_per_micro_batch", max(result.count(f"{_ACTOR}.ppo_max_token_len_per_gpu"), lengths))
    forward_batch = values[f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu"] or 32
    result.set("rollout_per_device_batch_size", max(forward_batch, group), "sampled and scored at once: memory alone")
    # The optimizer steps on a rollout.
    updates = math.ceil(options["rollout_batch_size"] * group / step) * result.count(f"{_ACTOR}.ppo_epochs")
    if options.get("max_steps"):
        options.pop("total_epochs", None)
    # verl's scheduler steps once a rollout, ours once an optimizer step.
    for name, optim in (("warmup_steps", f"{_ACTOR}.optim"), ("critic_lr_warmup_steps", "critic.optim")):
        if (steps := values[f"{optim}.lr_warmup_steps"] or 0) > 0:
            result.set(name, steps * updates, f"{steps} rollouts * {updates} optimizer steps")
        if options[name] and options["lr_scheduler_type"] == "constant":
            result.set("lr_scheduler_type", "constant_with_warmup")
    for key, name in (("data.train_files", "dataset_name"), ("data.val_files", "eval_dataset_name")):
        files = values.get(key) or []
        files = files if isinstance(files, list) else [files]
        if len(files) == 1:
            result.set(name, str(files[0]))
    if options.get("lora_r"):
        result.set("use_peft", True, "lora_rank")
    if values.get("actor_rollout_ref.model.lora.rank"):
        result.set("lora_alpha", values.get("actor_rollout_ref.model.lora.alpha", 32), "lora.alpha, 32 by default")
    logger = values.get("trainer.logger") or []
    loggers = logger if isinstance(logger, list) else [logger]
    result.set("report_to", [name for name in loggers if name != "console"] or ["none"])
    names = (values.get("trainer.project_name", "verl_examples"), values.get("trainer.experiment_name", "gsm8k"))
    # A name that only a run decides is left out here, and is listed.
    known = [name for name in map(str, names) if not re.search("[$`]", name)]
    options.setdefault("output_dir", "/".join(["checkpoints", *known]))
    result.finish()
    rewards = [value for key, value in given.items() if key.endswith(("_function.path", "_model.enable"))]
    managers = [str(value) for key, value in given.items() if re.search(r"reward_manager(\.name)?$", key) and value]
    has_own_manager = not all(name.startswith(("naive", "batch", "dapo", "prime")) for name in managers)
    has_own_reward = has_own_manager or any(value not in (None, False) for value in rewards)
    if "gsm8k" in options["dataset_name"] and not has_own_reward:
        result.set("reward_funcs", ["examples.rewards.gsm8k:correctness"], "verl's own rule for gsm8k")
    return result
