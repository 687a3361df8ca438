"""Translates verl's ppo_trainer.yaml (0.9 and before) and the overrides of its command line, with verl's defaults."""

import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from alpaca_ppo.config.foreign_names import find_foreign_name, flattened
from alpaca_ppo.migrate.translation import Translation

ACTOR, CRITIC, ROLLOUT = "actor_rollout_ref.actor", "critic", "actor_rollout_ref.rollout"
DEFAULTS: Mapping[str, Any] = {
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "data.train_batch_size": 1024,
    f"{ACTOR}.ppo_mini_batch_size": 256,
    f"{ACTOR}.ppo_epochs": 1,
    f"{ACTOR}.grad_clip": 1.0,
    f"{ACTOR}.clip_ratio": 0.2,
    f"{ACTOR}.clip_ratio_c": 3.0,
    f"{ACTOR}.entropy_coeff": 0.0,
    f"{ACTOR}.use_kl_loss": False,
    f"{ACTOR}.kl_loss_coef": 0.001,
    f"{ACTOR}.kl_loss_type": "low_var_kl",
    f"{ACTOR}.loss_agg_mode": "token-mean",
    f"{ACTOR}.policy_loss.loss_mode": "vanilla",
    f"{ACTOR}.optim.lr": 1e-6,
    f"{ACTOR}.optim.weight_decay": 0.01,
    f"{CRITIC}.optim.lr": 1e-5,
    f"{CRITIC}.optim.weight_decay": 0.01,
    f"{CRITIC}.grad_clip": 1.0,
    f"{CRITIC}.cliprange_value": 0.5,
    f"{ROLLOUT}.n": 1,
    f"{ROLLOUT}.temperature": 1.0,
    "actor_rollout_ref.model.enable_gradient_checkpointing": True,
    "algorithm.adv_estimator": "gae",
    "algorithm.gamma": 1.0,
    "algorithm.lam": 1.0,
    "algorithm.use_kl_in_reward": False,
    "algorithm.kl_penalty": "kl",
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "algorithm.kl_ctrl.type": "fixed",
    "trainer.total_epochs": 30,
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
}
"""verl's defaults that matter to the result, or differ from those here."""

_CRITIC_OPTIONS = ("critic_learning_rate", "critic_max_grad_norm", "critic_pretraining_steps")
_WHOLE = re.compile(r"^\$\{(?:oc\.select:)?\s*([\w.]+)\s*(?:,\s*(.*?))?\}$")


def translate_verl(config: Mapping[str, Any], source: str, *, overrides: Sequence[str] = ()) -> Translation:
    """The options here that train as verl would.

    Args:
        config: the content of its YAML file, nested; empty for a run from overrides alone.
        source: what is translated, for the first line of the output.
        overrides: hydra's arguments of the command line, `a.b.c=value`.

    Raises:
        ValueError: for an override that is none, and for a batch size that is no positive number.
    """
    result = Translation(source)
    given = _resolved(flattened(config) | read_overrides(overrides))
    values = {**DEFAULTS, **given}
    for key, value in values.items():
        entry = find_foreign_name(key, ("ppo_trainer.yaml",))
        if value is None:
            continue
        if entry is None:
            result.lost.append(f"{key} ({value!r}): no option of verl has this name")
        else:
            result.record(entry, key, value)
    _algorithm(result, values)
    _sizes(result, values)
    _optimizer(result, values)
    _data(result, values)
    _models(result, values)
    _rewards(result, values)
    _run(result, values)
    result.finish()
    return result


def read_overrides(arguments: Sequence[str]) -> dict[str, Any]:
    """Keys and values of hydra's arguments, `key=value`, `+key=value` and `~key`; the values are read as YAML.

    Raises:
        ValueError: for an argument that is none of these.
    """
    values: dict[str, Any] = {}
    for argument in arguments:
        key, equals, text = argument.partition("=")
        key = key.lstrip("+")
        if argument.startswith("~"):
            values[key.removeprefix("~")] = None
        elif equals and re.fullmatch(r"[\w.@/]+", key):
            loaded = yaml.safe_load(text) if text else None
            # YAML reads 1e-6 as text.
            values[key] = _number(loaded) if isinstance(loaded, str) else loaded
        else:
            raise ValueError(
                f"{argument!r} is no override of hydra; write key=value, such as data.train_batch_size=256"
            )
    return {path: v for key, value in values.items() for path, v in flattened({key: value}).items()}


def _resolved(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with the references of OmegaConf to other keys followed, and without those that lead nowhere."""
    resolved = {}
    for key, value in values.items():
        seen: set[str] = set()
        while isinstance(value, str) and (found := _WHOLE.match(value)) and value not in seen:
            seen.add(value)
            value = values.get(found[1], yaml.safe_load(found[2]) if found[2] else None)
        if not key.endswith("_target_") and not (isinstance(value, str) and "${" in value) and value != "???":
            resolved[key] = _number(value) if isinstance(value, str) else value
    return resolved


def _algorithm(result: Translation, values: Mapping[str, Any]) -> None:
    options = result.options
    if options.get("adv_estimator") == "grpo" and values.get("algorithm.norm_adv_by_std_in_grpo") is False:
        result.set("adv_estimator", "grpo_no_std", "norm_adv_by_std_in_grpo: false")
    if values.get(f"{ACTOR}.clip_ratio_high") == options["cliprange"]:
        options["cliprange_high"] = None
    loss = options.get("policy_loss", "clip")
    if loss not in ("clip", "dppo"):
        options.pop("clip_ratio_c", None)
    if loss == "sapo":
        options.pop("cliprange_high", None)
        options.pop("cliprange", None)
    if not options["use_kl_in_reward"] and not options["use_kl_loss"]:
        result.set("reference", "none", "neither use_kl_in_reward nor use_kl_loss")
    if not options["use_kl_in_reward"]:
        for name in ("kl_coef", "kl_estimator", "kl_controller", "target_kl", "kl_horizon"):
            options.pop(name, None)
    if not options["use_kl_loss"]:
        options.pop("kl_loss_coef"), options.pop("kl_loss_type", None)
    if options.get("adv_estimator", "gae") == "gae":
        result.set("vf_coef", 1.0, "verl's value loss has no weight")
    else:
        for name in [n for n in options if n.startswith("critic_") or n in ("cliprange_value", "lam")]:
            options.pop(name)
        if options["gamma"] != 1.0 and options["adv_estimator"] != "reinforce_plus_plus":
            options.pop("gamma")
            result.lost.append("algorithm.gamma: an estimator that weights whole responses does not discount")
    rounds = values.get("algorithm.filter_groups.max_num_gen_batches")
    if options.get("dynamic_sampling") and rounds and rounds > 1:
        result.set("max_sampling_rounds", rounds - 1, "max_num_gen_batches without the first")
    if values.get("algorithm.rollout_correction.bypass_mode"):
        result.set("old_policy", "rollout", "bypass_mode")
    result.options.setdefault("old_policy", "recompute")


def _sizes(result: Translation, values: Mapping[str, Any]) -> None:
    processes = _count(values, "trainer.nnodes") * _count(values, "trainer.n_gpus_per_node")
    group, prompts = _count(values, f"{ROLLOUT}.n"), _count(values, "data.train_batch_size")
    mini = _count(values, f"{ACTOR}.ppo_mini_batch_size")
    how = f"responses: ppo_mini_batch_size {mini} prompts * rollout.n {group}" if group > 1 else "ppo_mini_batch_size"
    result.set("rollout_batch_size", prompts, "data.train_batch_size, prompts in both")
    result.set("step_batch_size", min(mini, prompts) * group, how)
    own, epochs = values.get(f"{CRITIC}.ppo_mini_batch_size"), values.get(f"{CRITIC}.ppo_epochs")
    result.options.pop("critic_epochs", None)
    if result.options.get("vf_coef") and ((own or mini) != mini or (epochs or 1) != result.options["ppo_epochs"]):
        result.set("critic_epochs", epochs or result.options["ppo_epochs"], "critic.ppo_epochs")
        result.set(
            "critic_step_batch_size", min(own or mini, prompts) * group, "critic.ppo_mini_batch_size, in responses"
        )
    micro, whole = values.get(f"{ACTOR}.ppo_micro_batch_size_per_gpu"), values.get(f"{ACTOR}.ppo_micro_batch_size")
    if micro is None and whole:
        result.set(
            "step_per_device_batch_size", max(1, whole // processes), f"ppo_micro_batch_size {whole} / {processes} GPUs"
        )
    if values.get(f"{ACTOR}.use_dynamic_bsz"):
        tokens = values.get(f"{ACTOR}.ppo_max_token_len_per_gpu", 16384)
        longest = result.options["query_len"] + result.options["response_len"]
        how = "ppo_max_token_len_per_gpu" if tokens >= longest else "the longest row; ppo_max_token_len_per_gpu is less"
        result.set("max_tokens_per_micro_batch", max(tokens, longest), how)
    forward = values.get(f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu") or 32
    result.set(
        "rollout_per_device_batch_size", max(forward, group), "responses sampled and scored at once: memory alone"
    )
    steps = values.get("trainer.total_training_steps")
    if steps:
        result.options.pop("total_epochs")
        result.set("max_steps", steps, "total_training_steps")
        if values["trainer.total_epochs"] != DEFAULTS["trainer.total_epochs"]:
            result.unneeded["total_training_steps decides how long the run is, in verl too"] = ["trainer.total_epochs"]
    if (length := result.options.get("overlong_buffer_len")) is not None:
        enabled = [
            v for key, v in values.items() if key.endswith(("overlong_buffer.enable", "overlong_buffer_cfg.enable"))
        ]
        if not all(enabled):
            result.options.pop("overlong_buffer_len"), result.options.pop("overlong_penalty_factor", None)
        else:
            result.set("overlong_buffer_len", min(length, result.options["response_len"]))


def _optimizer(result: Translation, values: Mapping[str, Any]) -> None:
    """Schedules: verl's scheduler steps once a rollout, ours once an optimizer step."""
    options = result.options
    per_rollout = math.ceil(options["rollout_batch_size"] * values[f"{ROLLOUT}.n"] / options["step_batch_size"])
    per_rollout *= options["ppo_epochs"]
    prefixes = [(f"{ACTOR}.optim", "warmup_steps", "lr_scheduler_type")]
    if options.get("vf_coef"):
        prefixes.append((f"{CRITIC}.optim", "critic_lr_warmup_steps", "lr_scheduler_type"))
    for prefix, warmup_name, schedule_name in prefixes:
        schedule = values.get(f"{prefix}.lr_scheduler_type") or values.get(f"{prefix}.warmup_style") or "constant"
        steps, share = values.get(f"{prefix}.lr_warmup_steps") or 0, values.get(f"{prefix}.lr_warmup_steps_ratio") or 0
        if schedule == "constant" and (steps > 0 or share > 0):
            schedule = "constant_with_warmup"
        result.set(schedule_name, schedule)
        if steps > 0:
            result.set(warmup_name, steps * per_rollout, f"{steps} rollouts * {per_rollout} optimizer steps")
        elif share > 0:
            result.set(warmup_name, share, "a share of the run's optimizer steps")
        elif warmup_name != "warmup_steps":
            result.set(warmup_name, 0)
        betas = values.get(f"{prefix}.betas")
        if betas:
            own = "critic_" if prefix.startswith(CRITIC) else ""
            result.set(f"{own}adam_beta1", betas[0])
            result.set(f"{own}adam_beta2", betas[1])


def _data(result: Translation, values: Mapping[str, Any]) -> None:
    for key, name in (("data.train_files", "dataset_name"), ("data.val_files", "eval_dataset_name")):
        files = values.get(key)
        if isinstance(files, list) and len(files) > 1:
            result.to_do.append(f"{name}: one file or folder; put {', '.join(map(str, files))} into one")
        if files:
            result.set(name, _path(files[0] if isinstance(files, list) else files), key)
    result.to_do.append(
        "the dataset: rows with the prompt as messages in prompt_column; verl's reward_model (with ground_truth), "
        "data_source and extra_info reach reward functions as keyword arguments"
    )
    for key, name in (
        ("data.train_max_samples", "dataset_train_split"),
        ("data.val_max_samples", "dataset_test_split"),
    ):
        if (count := values.get(key)) is not None and count > 0:
            result.set(name, f"train[:{count}]", key)
    _overlong_prompts(result, values)
    template = _below(values, "data.apply_chat_template_kwargs")
    if template:
        result.set("chat_template_kwargs", template, "apply_chat_template_kwargs")
    if "dataset_name" not in result.options:
        result.set("dataset_name", "FILL_IN")
        result.to_do.append("dataset_name: data.train_files is not given")


def _overlong_prompts(result: Translation, values: Mapping[str, Any]) -> None:
    """What happens to a prompt of more than `query_len` tokens."""
    truncation = values.get("data.truncation", "error")
    result.settle("data.filter_overlong_prompts", "data.truncation")
    if values.get("data.filter_overlong_prompts"):
        result.set("overlong_prompts", "drop", "filter_overlong_prompts")
    elif truncation == "left":
        result.set("overlong_prompts", "truncate", "truncation: left keeps the end of a prompt")
    else:
        result.set("overlong_prompts", "error", "verl's default" if truncation == "error" else "")
        if truncation != "error":
            result.lost.append(
                f"data.truncation ({truncation}): it would cut off what the response continues; overlong_prompts: "
                "truncate keeps the end of a prompt, and drop leaves it out"
            )


def _models(result: Translation, values: Mapping[str, Any]) -> None:
    result.set("bf16", True, "passes in bfloat16, as verl's")
    loading = _below(values, "actor_rollout_ref.model.override_config")
    if attention := loading.pop("attn_implementation", None):
        result.set("attn_implementation", attention)
    if nested := {name: value for name, value in loading.items() if "." in name}:
        result.lost.append(f"override_config ({', '.join(nested)}): load the model yourself, in a script")
    if flat := {name: value for name, value in loading.items() if name not in nested}:
        result.set("model_init_kwargs", flat, "override_config")
    path = values.get("actor_rollout_ref.model.path")
    if path is None:
        result.to_do.append("model_name_or_path: actor_rollout_ref.model.path is not given")
    result.set("model_name_or_path", _path(path or "FILL_IN"))
    critic = values.get(f"{CRITIC}.model.path")
    if critic and critic != path and result.options.get("vf_coef"):
        result.set("value_model_name_or_path", _path(critic), "critic.model.path")
    rank = values.get("actor_rollout_ref.model.lora_rank") or values.get("actor_rollout_ref.model.lora.rank")
    if rank:
        result.set("use_peft", True, "lora_rank")
        result.set("lora_r", rank)
        result.set("lora_alpha", values.get("actor_rollout_ref.model.lora_alpha", 16))
        layers = values.get("actor_rollout_ref.model.target_modules", "all-linear")
        if layers != "all-linear":
            result.set("lora_target_modules", layers if isinstance(layers, list) else [layers])
    else:
        result.options.pop("lora_alpha", None)
    library = values.get("actor_rollout_ref.model.external_lib")
    if library:
        result.set("import_modules", library if isinstance(library, list) else [library])


def _rewards(result: Translation, values: Mapping[str, Any]) -> None:
    path, name = None, "compute_score"
    for prefix in ("custom_reward_function", "reward.custom_reward_function"):
        path, name = values.get(f"{prefix}.path") or path, values.get(f"{prefix}.name") or name
    model = values.get("reward.reward_model.model_path") or values.get("reward_model.model.path")
    enabled = values.get("reward.reward_model.enable") or values.get("reward_model.enable")
    if model and enabled:
        result.set("reward_model_name_or_path", [_path(model)], "a sequence classifier with one label")
    if path:
        result.set("reward_funcs", [f"{_path(path)}:{name}"])
    elif not (model and enabled):
        result.set("reward_funcs", ["rewards.py:compute_score"], "verl chooses a function by data_source: write yours")
    if path or not (model and enabled):
        result.to_do.append(
            "the reward function: def f(prompts, completions, **columns), which returns a number for each completion; "
            "verl calls compute_score(data_source, solution_str, ground_truth, extra_info) for a single one"
        )


def _run(result: Translation, values: Mapping[str, Any]) -> None:
    for key, name in (("trainer.save_freq", "save_steps"), ("trainer.test_freq", "eval_steps")):
        result.set(name, max(0, values.get(key) or 0), f"{key}, in rollouts" if values.get(key) else "")
    logger = values.get("trainer.logger", "console")
    names = [name for name in (logger if isinstance(logger, list) else [logger]) if name != "console"]
    result.set("report_to", names or ["none"], "" if "trainer.logger" in values else "add wandb, as verl's default has")
    if "output_dir" not in result.options:
        parts = (values.get("trainer.project_name", "verl_examples"), values.get("trainer.experiment_name", "gsm8k"))
        result.set("output_dir", "checkpoints/{}/{}".format(*parts), "verl's default_local_dir")
    result.options["output_dir"] = _path(result.options["output_dir"])
    mode = values.get("trainer.resume_mode")
    result.settle("trainer.resume_mode", "trainer.resume_from_path")
    start = values.get("trainer.resume_from_path") if mode == "resume_path" else None
    if start:
        result.set("resume_from_checkpoint", _path(start))
    if mode == "auto":
        result.to_do.append(
            "resume_from_checkpoint: verl resumes by itself (resume_mode: auto); here set it to true to continue an "
            "interrupted run"
        )
    if values.get(f"{ROLLOUT}.val_kwargs.do_sample"):
        temperature = values.get(f"{ROLLOUT}.val_kwargs.temperature")
        if temperature:
            result.set("eval_temperature", temperature)
        for name in ("top_p", "top_k"):
            value = values.get(f"{ROLLOUT}.val_kwargs.{name}")
            if value is not None and 0 < value and not (name == "top_p" and value == 1):
                result.set(f"eval_{name}", value)


def _below(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The values below `prefix`, by the rest of their path; not those that are null or empty mappings."""
    below = {key.removeprefix(f"{prefix}."): value for key, value in values.items() if key.startswith(f"{prefix}.")}
    return {name: value for name, value in below.items() if value not in (None, {})}


def _path(text: Any) -> str:
    return os.path.expanduser(os.path.expandvars(str(text)))


def _number(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _count(values: Mapping[str, Any], key: str) -> int:
    value = values[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{key} is {value!r}; give it as a whole number of at least 1, which batch sizes follow from")
    return value
