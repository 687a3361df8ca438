"""Translates TRL's GRPOConfig and PPOConfig, and reads the scripts that make one.

Read are the literal arguments of the calls in defaults.yaml, also through variables that are assigned once. A script
makes one configuration and trains with it; what may change a setting in another way is refused by its line.
"""

import ast
import math
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from alpaca_ppo.config.foreign_names import CONFIG_SECTIONS, TRAINER_SECTIONS, find_foreign_name
from alpaca_ppo.migrate.translation import Translation, defaults, is_learned

_KINDS, _SECTIONS = ("GRPOConfig", "PPOConfig"), ("script", *CONFIG_SECTIONS[:-1])
_REMEDY = "write all settings as literals into one GRPOConfig(...) or PPOConfig(...), or into a YAML file"


def read_script(text: str) -> tuple[dict[str, object], dict[str, str]]:
    """The arguments that the Python script `text` gives TRL: the values of literals, and the expressions of others.

    Raises:
        ValueError: unless it makes one configuration, which only its trainer gets.
    """
    script = _Script(text)
    arguments = script.arguments()
    made = script.configuration(arguments.pop("args", ast.Constant(None)))
    rewards = script.resolve(arguments.pop("reward_funcs", ast.List([])))
    sources = rewards.elts if isinstance(rewards, ast.List) else [rewards]
    functions = [f"rewards.py:{source.id}" for source in sources if isinstance(source, ast.Name)]
    given, unread = dict[str, object]({"reward_funcs": functions} if functions else {}), dict[str, str]()
    # What is not the name of a function is a reward model.
    if models := [source for source in sources if not isinstance(source, ast.Name)]:
        arguments["reward_model_name_or_path"] = ast.List(models)
    arguments.pop("processing_class", None)
    for name, node in arguments.items():
        value = script.resolve(node)
        if isinstance(value, ast.Call) and value.args and _name(value.func) == "from_pretrained":
            value = script.resolve(value.args[0])
        try:
            given[name] = ast.literal_eval(value)
        except (ValueError, TypeError):
            unread[name] = ast.unparse(node)
    if made == "PPOConfig" and "num_ppo_epochs" not in unread:
        # Tells PPO's configuration from GRPO's also where it has no other name of its own.
        given.setdefault("num_ppo_epochs", defaults("PPOConfig")["num_ppo_epochs"])
    return given, unread


class _Script:
    """The nodes of a script except for the names of arguments, what it imports from TRL, and its variables' values."""

    def __init__(self, text: str) -> None:
        self._lines, nodes = text.split("\n"), list[Any](ast.walk(ast.parse(text)))
        self._nodes = [node for node in nodes if not isinstance(node, ast.keyword)]
        # A relative import, with a level, is of the script's own modules.
        imports = [n for n in nodes if isinstance(n, ast.Import | ast.ImportFrom) and not getattr(n, "level", 0)]
        names = [(alias, f"{getattr(node, 'module', alias.name)}.") for node in imports for alias in node.names]
        self._imported = {n: n.asname or n.name.split(".")[0] for n, module in names if module.startswith("trl.")}
        # They give no name of the script a value.
        self._read = {n for n in nodes if n in self._imported or isinstance(getattr(n, "ctx", None), ast.Load)}
        self._values: dict[str, Any] = {}
        for node in nodes:
            match node:
                case ast.Assign([ast.Name(name)], value) | ast.AnnAssign(ast.Name(name), value=ast.expr() as value):
                    self._values[name] = value

    def _refuse(self, node: Any) -> NoReturn:
        line = self._lines[node.lineno - 1].strip()
        raise ValueError(f"line {node.lineno}, `{line}`, is more than migrate reads: {_REMEDY}")

    def _called(self, node: Any) -> str:
        """TRL's name, or the last part of the name, of the function that is called; empty if `node` is no call."""
        name = _name(node.func) if isinstance(node, ast.Call) else ""
        return next((alias.name for alias, local_name in self._imported.items() if local_name == name), name)

    def _mentions(self, name: str) -> list[Any]:
        """The variables, imports, functions, classes and parameters with this name."""
        fields = ("id", "asname", "name", "arg")
        return [node for node in self._nodes if name in [getattr(node, field, None) for field in fields]]

    def resolve(self, node: ast.expr) -> ast.expr:
        """The value of a variable that is assigned once, and that nothing else can change; other nodes unchanged."""
        mentions, value = self._mentions(getattr(node, "id", "")), self._values.get(getattr(node, "id", ""), node)
        # A list can be changed wherever else it is mentioned; its assignment and this use are two mentions.
        is_fixed = isinstance(value, ast.Constant | ast.UnaryOp) or len(mentions) == 2
        return value if is_fixed and len([n for n in mentions if n not in self._read]) == 1 else node

    def arguments(self) -> dict[str, ast.expr]:
        """The arguments of the calls in defaults.yaml."""
        arguments: dict[Any, ast.expr] = {}
        for function, positional in defaults("calls").items():
            calls = [node for node in self._nodes if self._called(node) == function]
            # Which of several datasets it trains on is not known.
            for call in calls if function != "load_dataset" or len(calls) == 1 else ():
                keywords = {keyword.arg: keyword.value for keyword in call.keywords}
                is_open = None in keywords or ast.Starred in map(type, call.args)
                if call is not calls[0] or is_open or (function in _KINDS and call.args[1:]):
                    self._refuse(call)
                arguments |= dict(zip(positional, call.args, strict=False)) | keywords
                arguments |= {"peft_config": ast.Constant(True)} if function in ("LoraConfig", "get_peft_model") else {}
        return arguments

    def configuration(self, trained: Any) -> str:
        """The class of the configuration that the trainer gets as `trained`, by its variable or directly.

        Raises:
            ValueError: if it is not TRL's, or something may change it.
        """
        variable, nodes, names = getattr(trained, "id", ""), self._nodes, defaults("names")
        made: Any = self._values.get(variable, trained)
        if self._called(made) not in _KINDS or re.split(r"\W", ast.unparse(made))[0] not in self._imported.values():
            raise ValueError("no trainer of TRL gets a GRPOConfig or PPOConfig that is made here; write a YAML file")
        read = [n.value for n in nodes if isinstance(n, ast.FormattedValue) or _name(n) in names["readable"]]
        read += [value for n in nodes if self._called(n) == "print" for value in n.args]
        # The first mention that is none of these is the assignment.
        refused = [n for n in self._mentions(variable) if n not in [trained, *read]][1:]
        # The script may define the classes anew, and another module's `*` may hold any name.
        classes = {re.split(r"\W", ast.unparse(n))[0] for n in nodes if self._called(n) in names["classes"]}
        refused += [n for name in (*classes, "*") for n in self._mentions(name) if n not in self._read]
        # An attribute, whatever it belongs to: the configuration and the trainer may have other names.
        refused += [n for n in nodes if _name(n) in names["setters"] or getattr(n, "attr", "") == "args"]
        attributes = [n for n in nodes if isinstance(n, ast.Attribute) and n not in self._read]
        refused += [n for n in attributes if is_learned(find_foreign_name(n.attr, _SECTIONS))]
        if refused:
            self._refuse(refused[0])
        return self._called(made)


def _name(node: Any) -> str:
    """The last part of a name; empty if `node` is none."""
    return getattr(node, "attr", getattr(node, "id", ""))


def translate_trl(source: str, given: Mapping[str, Any], unread: Mapping[str, str], processes: int) -> Translation:
    """The options that train as TRL would.

    Args:
        source: the name of the translated file.
        given: TRL's names with their values, from the file and from flags.
        unread: of the script's arguments that are no literals, the expressions by name.
        processes: of the TRL run; 0 = `num_processes` in `given`, or 1.

    Raises:
        ValueError: for one of `unread` without a flag that may change what is learned; for a value that does not fit.
    """
    kind = "PPOConfig" if {*defaults("names")["of PPO"]} & {*given, *unread} else "GRPOConfig"
    result = Translation(f"TRL's {kind} in {source}", given, kind)
    values, options = result.values, result.options
    sections = ["script", *(section for section in CONFIG_SECTIONS if section == kind or section not in _KINDS)]
    result.take(sections)
    for name, expression in unread.items():
        entry = find_foreign_name(name, sections)
        # If TRL has a default for this name, that has set the option.
        is_set = entry and entry.same and entry.ours[0] in options and name not in defaults(kind)
        if name not in result.given and not is_set and is_learned(entry):
            raise ValueError(f"{name} is `{expression}`, which is no literal; give its value as a flag after the file")
        if name not in result.given and not is_set:
            in_trainer = find_foreign_name(name, TRAINER_SECTIONS)
            remedy = in_trainer.advice(expression) if in_trainer else "give its value as a flag after the file"
            result.leave(name, f"`{expression}` is no literal; {remedy}")
    is_grpo = kind == "GRPOConfig"
    values["num_processes"] = processes or values["num_processes"]
    updates = (_grpo if is_grpo else _ppo)(result, result.count("num_processes"))
    # A step of TRL is an optimizer step in GRPOTrainer, but a rollout in PPOTrainer, where it counts warm-up so too.
    steps_per_rollout, updates_per_step = (updates, 1) if is_grpo else (1, updates)
    if is_grpo and values["max_steps"] > 0:
        rollouts = math.ceil(values["max_steps"] / updates)
        result.set("max_steps", rollouts, f"{values['max_steps']} / {updates} of a rollout")
    elif not options.get("total_episodes"):
        result.set("total_epochs", math.ceil(values["num_train_epochs"]), "num_train_epochs")
    # The rollouts between two logs, checkpoints or evaluations.
    for name in ("logging_steps", "save_steps", "eval_steps"):
        strategy = values.get(name.replace("_steps", "_strategy"), "steps")
        interval = values.get(name) or values["logging_steps"]
        # YAML reads `no` as false; logging_steps may not be 0.
        if strategy in ("no", False):
            if name != "logging_steps":
                result.set(name, 0)
        elif strategy != "steps" or interval < 1:
            result.set(name, 10, "TRL's value counts epochs or is a share of the run: choose the rollouts between two")
        else:
            result.set(name, max(1, round(interval / steps_per_rollout)), f"rollouts: {interval} / {steps_per_rollout}")
    if (warmup := values.get("warmup_steps") or 0) >= 1:
        result.set("warmup_steps", int(warmup * updates_per_step), f"{warmup} * {updates_per_step} optimizer steps")
    if (repository := options.pop("hub_model_id", None)) and values.get("push_to_hub"):
        result.set("hub_model_id", repository)
    result.comments |= defaults("comments of a script")
    result.finish()
    # In a YAML file, they are names alone, such as `accuracy`, or with their module, such as `my_rewards.accuracy`.
    for i, function in enumerate(options.get("reward_funcs") or []):
        if ":" not in function:
            module, _, name = function.rpartition(".")
            options["reward_funcs"][i] = f"{module or 'rewards.py'}:{name}"
    return result


def _grpo(result: Translation, processes: int) -> int:
    """Sets batch sizes, upper clip range and KL; returns the optimizer steps on a rollout."""
    group = result.count("num_generations")
    device_batch = result.count("per_device_train_batch_size")
    accumulation = result.count("gradient_accumulation_steps")
    per_generation = result.values.get("steps_per_generation") or accumulation
    batch = device_batch * processes * accumulation
    generated = result.values.get("generation_batch_size") or device_batch * processes * per_generation
    if generated % group:
        problem = f"a generation of {generated} completions is not a multiple of num_generations ({group})"
        raise ValueError(f"{problem}; give --num_processes, or change per_device_train_batch_size")
    completions = max(generated, batch)
    result.set("rollout_batch_size", completions // group, f"prompts: {completions} completions / {group}")
    result.set("step_batch_size", batch, f"responses: {device_batch} * {processes} processes * {accumulation}")
    result.set("step_per_device_batch_size", device_batch)
    result.set("rollout_per_device_batch_size", max(group, completions // processes), "a process samples all at once")
    result.set("kl_coef", 0.0, "TRL has the KL in the loss")
    is_cispo = result.options.get("policy_loss") == "cispo"
    epsilon_high = result.values.get("epsilon_high") or 0.0
    if epsilon_high and not is_cispo:
        result.set("cliprange_high", epsilon_high)
    elif is_cispo and epsilon_high > 1:
        result.set("cliprange_high", epsilon_high - 1, "TRL's epsilon_high bounds the ratio itself")
    elif is_cispo:
        result.leave("epsilon_high", "CISPO needs a bound above 1: set cliprange_high to it, less 1 (ScaleRL: 4)")
    return math.ceil(completions / batch) * result.count("num_iterations")


def _ppo(result: Translation, processes: int) -> int:
    """Sets batch sizes and rewards; returns the optimizer steps on a rollout."""
    device_batch = result.count("per_device_train_batch_size")
    accumulation = result.count("gradient_accumulation_steps")
    prompts_per_process = device_batch * accumulation
    micro_batch = max(1, min(device_batch, prompts_per_process // result.count("num_mini_batches")))
    batch = prompts_per_process * processes
    step = min(prompts_per_process, micro_batch * accumulation) * processes
    result.set("rollout_batch_size", batch, f"prompts: {device_batch} * {processes} processes * {accumulation}")
    comment = f"TRL steps after {accumulation} micro-batches of {micro_batch} on each process"
    result.set("step_batch_size", step, comment)
    result.set("step_per_device_batch_size", micro_batch)
    if penalty := result.values.get("missing_eos_penalty"):
        result.set("penalty_reward_value", -penalty, "replaces the score; TRL subtracts the penalty")
    if result.values.get("reward_model_path"):
        result.set("init_value_with_reward", True, "TRL's script starts the critic from the reward model")
    return math.ceil(batch / step) * result.count("num_ppo_epochs")
