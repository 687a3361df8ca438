"""TRL's scripts, and its GRPOConfig and PPOConfig: the batch sizes, lengths and units here that follow from several
values there.

A script is not executed: what the trainer, `load_dataset`, `from_pretrained` and `LoraConfig` get is named as TRL's own
script arguments are, so that the table of names says what it is here. A name that is assigned once stands for what it
is assigned, and an attribute that is set on the configuration for an argument of it.
"""

import ast
import math
from collections.abc import Iterator, Mapping
from typing import Any

from alpaca_ppo.config.foreign_names import CONFIG_SECTIONS, TRAINER_SECTIONS, find_foreign_name
from alpaca_ppo.migrate.translation import Translation, defaults

_KINDS = ("GRPOConfig", "PPOConfig")
_OF_PPO = {"num_ppo_epochs", "response_length", "num_mini_batches", "kl_coef", "reward_model_path"}
_MICRO_BATCHES = ("per_device_train_batch_size", "gradient_accumulation_steps")
_MODELS = {"model": "model_name_or_path", "ref_model": "reference", "value_model": "value_model_name_or_path"}
_LORA = {"r": "lora_r", "target_modules": "lora_target_modules", "task_type": "lora_task_type"}
_DATASETS = {
    "train_dataset": ("dataset_name", "dataset_config", "dataset_train_split"),
    "eval_dataset": ("eval_dataset_name", "", "dataset_test_split"),
}
_CHANGING = {"map", "filter", "select", "rename_column", "rename_columns", "train_test_split", "take"}
_SCHEDULES = ("linear", "cosine", "constant", "constant_with_warmup", "polynomial")
"""Those that need no arguments."""


class Script:
    """A Python script of TRL.

    Attributes:
        kind: "GRPOConfig" or "PPOConfig".
        given: the literal arguments.
        unread: the source of those that are no literals.
        notes: what else there is to say about an argument.

    Raises:
        SyntaxError: if it is no valid Python.
        ValueError: if it names neither configuration.
    """

    def __init__(self, text: str) -> None:
        nodes = list(ast.walk(ast.parse(text)))
        calls = {_called(node): node for node in nodes if isinstance(node, ast.Call)}
        kinds = [kind for kind in _KINDS if kind in calls] or [kind for kind in _KINDS if kind in text]
        if not kinds:
            raise ValueError("the script makes neither a GRPOConfig nor a PPOConfig of TRL; give the one that does")
        self.kind, made = kinds[0], calls.get(kinds[0])
        self.given: dict[str, object] = {}
        self.unread: dict[str, str] = {}
        self.notes: list[tuple[str, str]] = []
        self._assigned: dict[str, list[ast.expr]] = {}
        arguments = _arguments(made, "output_dir")
        for assignment in [node for node in nodes if isinstance(node, ast.Assign)]:
            for target in assignment.targets:
                if isinstance(target, ast.Name):
                    self._assigned.setdefault(target.id, []).append(assignment.value)
                elif isinstance(target, ast.Attribute) and made and self._once(target.value) is made:
                    arguments[target.attr] = assignment.value
        imports = {
            a.asname or a.name: f"{n.module}:{a.name}" for n in nodes if isinstance(n, ast.ImportFrom) for a in n.names
        }
        positional = ("model", "reward_funcs", "args", "train_dataset") if self.kind == "GRPOConfig" else ()
        for name, node in _arguments(calls.get(self.kind.replace("Config", "Trainer")), *positional).items():
            if name in _MODELS:
                arguments[_MODELS[name]] = next(self._sources(node, "from_pretrained"), {}).get(0, node)
            elif name in _DATASETS:
                self._dataset(name, node, arguments)
            elif name in ("reward_funcs", "reward_model"):
                self._rewards(name, self._once(node), imports)
            elif name == "peft_config":
                self.given["use_peft"] = True
                adapter = _arguments(self._once(node)).items()
                arguments |= {_LORA.get(each, each): value for each, value in adapter} if adapter else {name: node}
            elif name not in ("args", "processing_class"):
                entry = find_foreign_name(name, TRAINER_SECTIONS)
                self.notes.append(
                    (name, entry.advice(ast.unparse(node)) if entry else "pass it to PPOTrainer in a script")
                )
        for name, node in arguments.items():
            try:
                self.given[name] = ast.literal_eval(self._once(node))
            except (ValueError, TypeError):
                self.unread[name] = ast.unparse(node)

    def _dataset(self, name: str, node: ast.expr, arguments: dict[str, ast.expr]) -> None:
        dataset, config, split = _DATASETS[name]
        loaded: dict[Any, ast.expr] = next(self._sources(node, "load_dataset"), {0: node})
        found = {dataset: loaded.get("data_files", loaded.get(0)), config: loaded.get(1, loaded.get("name"))}
        found[split] = loaded.get("part", loaded.get("split"))
        arguments |= {key: value for key, value in found.items() if key and value is not None}
        if changes := [_called(call) for call in self._origins(node) if _called(call) in _CHANGING]:
            self.notes.append((name, f"the script changes its rows ({', '.join(changes)}): save them as jsonl"))

    def _rewards(self, name: str, node: ast.expr, imports: dict[str, str]) -> None:
        functions, models = [], []
        for source in node.elts if isinstance(node, ast.List | ast.Tuple) else [node]:
            model = next(self._sources(source, "from_pretrained"), {}).get(0, source)
            if isinstance(model, ast.Constant):
                models.append(model.value)
            elif isinstance(source, ast.Name) and source.id in imports:
                functions.append(imports[source.id])
            elif isinstance(source, ast.Name) and source.id not in self._assigned:
                functions.append(f"rewards.py:{source.id}")
                self.notes.append(
                    (name, f"copy {source.id} into rewards.py, because importing the script would run it")
                )
            else:
                self.unread["reward_model_name_or_path"] = ast.unparse(source)
        found = {"reward_funcs": functions, "reward_model_name_or_path": models}
        self.given |= {key: value for key, value in found.items() if value}

    def _once(self, node: ast.expr) -> ast.expr:
        """What a name that is assigned once stands for; another expression as it is."""
        assigned = self._assigned.get(node.id, []) if isinstance(node, ast.Name) else []
        return assigned[0] if len(assigned) == 1 else node

    def _origins(self, node: ast.expr) -> Iterator[ast.AST]:
        """The expressions from which `node` comes, through all that its names are assigned."""
        to_read, seen = [node], set[str]()
        for expression in to_read:
            for inner in ast.walk(expression):
                yield inner
                if isinstance(inner, ast.Name) and inner.id not in seen:
                    seen.add(inner.id)
                    to_read += self._assigned.get(inner.id, [])

    def _sources(self, node: ast.expr, function: str) -> Iterator[dict[Any, ast.expr]]:
        """The arguments of the calls of `function` from which `node` comes, by position and name, and as "part" what it
        takes of their result.
        """
        part = {}
        for inner in self._origins(node):
            if isinstance(inner, ast.Subscript) and getattr(inner.value, "id", "") in self._assigned:
                part = {"part": inner.slice}
            elif isinstance(inner, ast.Call) and _called(inner) == function:
                positional: dict[Any, ast.expr] = dict(enumerate(inner.args))
                yield positional | _arguments(inner) | part


def _called(node: ast.AST) -> str:
    """The last part of the name of what a call calls; empty for anything else."""
    function = node.func if isinstance(node, ast.Call) else None
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _arguments(call: ast.expr | None, *positional: str) -> dict[str, ast.expr]:
    """The arguments of a call by name, and those of `**` by their source."""
    if not isinstance(call, ast.Call):
        return {}
    named = {keyword.arg or f"**{ast.unparse(keyword.value)}": keyword.value for keyword in call.keywords}
    return {**dict(zip(positional, call.args, strict=False)), **named}


def translate_trl(file: str, given: Mapping[str, Any], script: Script | None, processes: int) -> Translation:
    """The options that train as TRL would with the names and values in `given`, in a run of so many `processes`.

    Args:
        file: what the user calls the source.
        given: of a script and its flags, or of a file.
        script: the script, for what it says beside literals.
        processes: by which TRL multiplies the batch sizes of a device.

    Raises:
        ValueError: for a batch size that is no positive number, or that TRL refuses too.
    """
    kind = script.kind if script else "PPOConfig" if _OF_PPO & set(given) else "GRPOConfig"
    result = Translation(f"TRL's {kind} in {file}", given, kind)
    values, options, is_grpo = result.values, result.options, kind == "GRPOConfig"
    result.take([section for section in CONFIG_SECTIONS if section == kind or section not in _KINDS])
    steps = (_grpo if is_grpo else _ppo)(result, processes)
    # TRL's PPOTrainer counts rollouts, and its scheduler steps once for each of them.
    per_rollout, per_scheduled = (steps, 1) if is_grpo else (1, steps)
    if is_grpo and values["max_steps"] > 0:
        result.set("max_steps", math.ceil(values["max_steps"] / steps), f"{values['max_steps']} / {steps} of a rollout")
    elif not options.get("total_episodes"):
        result.set("total_epochs", math.ceil(values["num_train_epochs"]), "num_train_epochs")
    for name in ("logging_steps", "save_steps", "eval_steps"):
        strategy = values.get(name.replace("_steps", "_strategy"), "steps")
        every = values.get(name) or values["logging_steps"]
        if strategy == "no":
            result.set(name, 0)
        elif strategy != "steps" or every < 1:
            result.set(name, 10, "TRL's value counts epochs or is a share of the run: choose the rollouts between two")
        else:
            result.set(name, max(1, round(every / per_rollout)), f"rollouts: {every} / {per_rollout}")
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
    if not values.get("push_to_hub"):
        result.drop("hub_model_id")
    if "query_len" not in options:
        result.set("query_len", 512, "TRL has no limit; a longer prompt is dropped")
    result.finish()
    for name, source in script.unread.items() if script else ():
        # An option that another name has set is known, unless that was TRL's default.
        if name not in given and (name in defaults(kind) or not options.get(name)):
            how = f"give --{name} VALUE after the file" if name.isidentifier() else "give its entries as flags after it"
            result.leave(name, f"`{source}` is no literal; {how}")
    for name, reason in script.notes if script else ():
        result.leave(name, reason)
    return result


def _grpo(result: Translation, processes: int) -> int:
    """Batch sizes, loss and KL; returns the optimizer steps on a rollout."""
    values, group = result.values, result.count("num_generations")
    device_batch, accumulation = map(result.count, _MICRO_BATCHES)
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


def _ppo(result: Translation, processes: int) -> int:
    """Batch sizes and rewards; returns the optimizer steps on a rollout."""
    device_batch, accumulation = map(result.count, _MICRO_BATCHES)
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
