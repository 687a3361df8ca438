"""What a script gives to TRL's trainer besides the configuration: model, rewards, data and LoRA."""

import ast
import os
from pathlib import Path
from typing import Any

from alpaca_ppo.config.foreign_names import TRAINER_SECTIONS, find_foreign_name
from alpaca_ppo.migrate.scripts import Script, Unknown, called
from alpaca_ppo.migrate.translation import Translation

FILL_IN = "FILL_IN"
"""The value of a required option that the translation does not know."""

_LORA = {
    "r": "lora_r",
    "lora_alpha": "lora_alpha",
    "target_modules": "lora_target_modules",
}
_PASSED_ON = {"args", "processing_class", "callbacks", "optimizers", "reward_processing_classes", "config", "tokenizer"}
_CHANGING = (
    "map", "filter", "select", "shuffle", "rename_column", "rename_columns", "remove_columns", "select_columns",
    "add_column", "train_test_split", "take", "skip",
)  # fmt: skip


def add_trainer_arguments(result: Translation, script: Script, path: Path) -> None:
    """Adds what the trainer of `script` gets to `result`; what cannot be read from it becomes something to do."""
    # The critic may start from the reward model, so that comes first.
    for name, node in sorted(script.trainer.items(), key=lambda item: not item[0].startswith("reward_")):
        if name in ("model", "policy"):
            _add_model(result, script, node)
        elif name in ("reward_funcs", "reward_model"):
            _add_rewards(result, script, node, path)
        elif name in ("train_dataset", "eval_dataset"):
            _add_dataset(result, script, name, node)
        elif name == "peft_config":
            _add_lora(result, script, node)
        elif name in ("value_model", "ref_model"):
            _add_other_model(result, script, name, node)
        elif name in _PASSED_ON:
            if name in ("callbacks", "optimizers"):
                result.to_do_in_yaml.append(
                    f"{name}: pass them to PPOTrainer in a script of your own, as to TRL's trainer"
                )
        elif (entry := find_foreign_name(name, TRAINER_SECTIONS)) is not None:
            result.record(entry, name, ast.unparse(node))
            if entry.ours:
                result.to_do.append(f"{name}: {entry.how}")
        else:
            result.lost.append(f"{name} ({ast.unparse(node)}): PPOTrainer has no such argument")


def uses_lora(script: Script) -> bool:
    """Whether the trainer of `script` gets an adapter that the script itself describes."""
    node = script.trainer.get("peft_config")
    if isinstance(node, ast.Name):
        node = script.names.assigned.get(node.id)
    return called(node) == "LoraConfig" if node is not None else False


def default_test_split(result: Translation) -> None:
    """Sets the split that TRL's ScriptArguments evaluate on by default, where there are evaluations."""
    known = ("dataset_test_split", "eval_dataset_name")
    if result.options.get("eval_steps") and not any(result.options.get(name) for name in known):
        result.set("dataset_test_split", "test", "TRL's default")


def require_names(result: Translation) -> None:
    """Gives the required options that are still unknown a value that says so."""
    for name in ("model_name_or_path", "dataset_name"):
        if not result.options.get(name):
            result.set(name, FILL_IN, "not known from the file that was translated")
    if result.options.get("dataset_test_split") and not result.options.get("eval_steps"):
        result.options.pop("dataset_test_split")


def _add_model(result: Translation, script: Script, node: ast.expr) -> None:
    known, name = result.options.get("model_name_or_path"), _loaded_from(script, node)
    if name is None and known is None:
        result.to_do_in_yaml.append(f"model_name_or_path: {ast.unparse(node)}, which the script alone knows")
    result.set("model_name_or_path", name or known or FILL_IN)
    if name is not None and known not in (None, name):
        result.comments["model_name_or_path"] = (
            f"the trainer's model; the script reads model_name_or_path ({known}) too"
        )


def _add_other_model(result: Translation, script: Script, name: str, node: ast.expr) -> None:
    path = _loaded_from(script, node)
    if isinstance(node, ast.Constant) and node.value is None:
        return
    if name == "ref_model" and path != result.options.get("model_name_or_path"):
        result.set("reference", path or "auto", "ref_model")
    if name == "value_model" and path and not result.options.get("init_value_with_reward"):
        if [path] == result.options.get("reward_model_name_or_path"):
            result.set("init_value_with_reward", True, "value_model and reward_model are loaded from the same folder")
        else:
            result.set("value_model_name_or_path", path, "value_model")


def _loaded_from(script: Script, node: ast.expr) -> str | None:
    """The path or id of a model: a string, or the first argument of `from_pretrained`."""
    for _ in range(10):
        if isinstance(node, ast.Name) and node.id in script.names.assigned:
            node = script.names.assigned[node.id]
    if called(node) == "from_pretrained" and isinstance(node, ast.Call) and node.args:
        node = node.args[0]
    try:
        value = script.names.value(node)
    except Unknown:
        return None
    return value if isinstance(value, str) else None


def _add_rewards(result: Translation, script: Script, node: ast.expr, path: Path) -> None:
    if result.options.get("reward_model_name_or_path"):
        return
    if isinstance(node, ast.Name) and isinstance(script.names.assigned.get(node.id), ast.List):
        node = script.names.assigned[node.id]
    functions, models, own, of_trl = [], [], [], []
    for source in node.elts if isinstance(node, ast.List | ast.Tuple) else [node]:
        if isinstance(source, ast.Name) and source.id in script.names.functions:
            functions.append(f"{_from_here(path) if script.guarded else 'rewards.py'}:{source.id}")
            own.append(source.id)
        elif isinstance(source, ast.Name) and source.id in script.names.imports:
            functions.append(script.names.imports[source.id])
            of_trl += [source.id] if functions[-1].startswith("trl.") else []
        elif (model := _loaded_from(script, source)) is not None:
            models.append(model)
        else:
            result.to_do_in_yaml.append(f"reward_funcs: {ast.unparse(source)}, which the script alone knows")
    if own:
        move = f"move {' and '.join(own)} into rewards.py in this folder, with all that they use"
        result.to_do_in_yaml.append(
            f"reward_funcs: importing {path.name} imports all that it imports, TRL too; to do without, {move}, and "
            f"write rewards.py:{own[0]}"
            if script.guarded
            else f"reward_funcs: {move}: importing {path.name} would train with TRL"
        )
    if of_trl:
        result.to_do.append(f"reward_funcs: {' and '.join(of_trl)} need TRL installed, or copy them into rewards.py")
    if functions:
        result.set("reward_funcs", functions)
    if models:
        result.set("reward_model_name_or_path", models)
    if functions and models and result.options.get("reward_weights"):
        result.to_do_in_yaml.append("reward_weights: in a run from YAML, the weights of reward models come first")
    if not functions and not models:
        result.set("reward_funcs", ["rewards.py:reward"], "your reward function")


def _from_here(path: Path) -> str:
    """`path` as it is named from the current folder, from where a run reads it."""
    return os.path.relpath(path) if path.resolve().is_relative_to(Path.cwd()) else str(path)


def _add_dataset(result: Translation, script: Script, name: str, node: ast.expr) -> None:
    option, split_option = {
        "train_dataset": ("dataset_name", "dataset_train_split"),
        "eval_dataset": ("eval_dataset_name", "dataset_test_split"),
    }[name]
    loaded, split, changes = _load_dataset(script, node)
    if loaded is None:
        if isinstance(node, ast.Constant) or (name == "eval_dataset" and not result.options.get("eval_steps")):
            return
        if name == "eval_dataset" or "dataset_name" not in result.options:
            result.set(option, FILL_IN)
            split = ', or name a part of the dataset (dataset_test_split: "train[-100:]")'
            result.to_do_in_yaml.append(
                f"{option}: {ast.unparse(node)} is made by the script: save its rows as jsonl"
                f"{split if name == 'eval_dataset' else ''}, or keep a script and pass {name} to PPOTrainer (--python)"
            )
        return
    dataset, config = loaded
    if name == "train_dataset" or dataset != result.options.get("dataset_name"):
        result.set(option, dataset)
        if config:
            result.set("dataset_config" if name == "train_dataset" else "eval_dataset_config", config)
    if split:
        result.set(split_option, split)
    if changes:
        result.to_do_in_yaml.append(
            f"{option}: the script changes the rows ({', '.join(changes)}): use prompt_template or prompt_column, save "
            "the changed rows as jsonl, or keep a script and pass the dataset to PPOTrainer (--python)"
        )


def _load_dataset(script: Script, node: ast.expr) -> tuple[tuple[str, str | None] | None, str | None, list[str]]:
    """Name and configuration of the dataset that an expression begins with, its split, and the calls that change it."""
    split: str | None = None
    changes: list[str] = []
    # `dataset = dataset.map(...)` reads what the name was assigned before.
    before = {name: list(values) for name, values in script.names.earlier.items()}
    seen: set[str] = set()
    while True:
        if isinstance(node, ast.Name) and node.id in script.names.assigned:
            name, values = node.id, before.get(node.id, [])
            if name in seen and not values:
                break
            node = values.pop() if name in seen else script.names.assigned[name]
            seen.add(name)
        elif isinstance(node, ast.Subscript):
            split = split or _string(script, node.slice)
            node = node.value
        elif isinstance(node, ast.Call) and called(node) in _CHANGING and isinstance(node.func, ast.Attribute):
            changes.insert(0, called(node))
            node = node.func.value
        else:
            break
    if called(node) != "load_dataset" or not isinstance(node, ast.Call):
        return None, split, changes
    given = {k.arg: k.value for k in node.keywords if k.arg} | dict(zip(("path", "name"), node.args, strict=False))
    path = _string(script, given.get("path"))
    if path is None:
        return None, split, changes
    if path in ("json", "csv", "parquet", "text") and "data_files" in given:
        path = _string(script, given["data_files"])
    split = split or _string(script, given.get("split"))
    return (path or FILL_IN, _string(script, given.get("name"))), split, changes


def _add_lora(result: Translation, script: Script, node: ast.expr) -> None:
    if isinstance(node, ast.Name) and node.id in script.names.assigned:
        node = script.names.assigned[node.id]
    if called(node) == "get_peft_config" or (isinstance(node, ast.Constant) and node.value is None):
        return
    if called(node) != "LoraConfig" or not isinstance(node, ast.Call):
        result.to_do_in_yaml.append(
            f"peft_config: {ast.unparse(node)}, which the script alone knows; LoRA is use_peft: true"
        )
        return
    values: dict[str, Any] = {"r": 8, "lora_alpha": 8}
    for keyword in node.keywords:
        try:
            values[str(keyword.arg)] = script.names.value(keyword.value)
        except Unknown as error:
            result.to_do_in_yaml.append(f"{keyword.arg} of LoraConfig: {error}, which the script alone knows")
    result.set("use_peft", True, "peft_config")
    for name, value in values.items():
        if name in _LORA and value is not None:
            every = name == "target_modules" and value == "all-linear"
            if not every:
                listed = name == "target_modules" and isinstance(value, str)
                result.set(_LORA[name], [value] if listed else value)
        elif name == "lora_dropout" and value:
            result.lost.append(f"lora_dropout ({value}): dropout is off everywhere in PPO, also in adapters")
        elif name not in ("task_type", "bias", "lora_dropout") and value is not None:
            result.lost.append(f"{name} ({value}) of LoraConfig: pass it in PPOTrainer(peft_config=...), in a script")


def _string(script: Script, node: ast.expr | None) -> str | None:
    if node is None:
        return None
    try:
        value = script.names.value(node)
    except Unknown:
        return None
    return value if isinstance(value, str) else None
