"""Translates TRL's GRPOConfig and PPOConfig, and reads the scripts that make them.

Read are the literal arguments of one GRPOConfig or PPOConfig and of the other calls in defaults.yaml, also through
variables that are assigned once, and the attributes that are set on the configuration straight after it was made.
Whatever else may change a setting is refused: it is not followed what a variable or an attribute belongs to.
"""

import ast
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from alpaca_ppo.config.foreign_names import CONFIG_SECTIONS, TRAINER_SECTIONS, find_foreign_name
from alpaca_ppo.migrate.translation import Translation, defaults, is_not_learned

_KINDS = ("GRPOConfig", "PPOConfig")
# Calls that leave a configuration as it is, and calls that may change one.
_READERS = ("GRPOTrainer", "PPOTrainer", "print", "info", "debug", "warning", "str", "repr", "get_peft_model")
_CHANGERS = (
    r"(?s)(?:dataclasses\.|copy\.)?replace\(.*|(?:setattr|vars|exec|.*__setattr__)\(.*"
    r"|.*\.(?:set_(?:defaults|training|optimizer|lr_scheduler|dataloader)|parse_(?:dict|yaml_file|json_file))\(.*"
    r"|.*\.parse_args_(?:into_dataclasses|and_config)\((?!\)|return_|fail_).*"
)


def read_script(text: str) -> tuple[dict[str, object], dict[str, str]]:
    """The arguments that the Python script `text` gives TRL: the values of literals, and the expressions of others.

    Raises:
        ValueError: unless it makes one configuration, of which all settings are known.
    """
    script = _Script(text)
    arguments = script.arguments()
    rewards = script.resolve(arguments.pop("reward_funcs", ast.List([])))
    sources = rewards.elts if isinstance(rewards, ast.List) else [rewards]
    functions = [f"rewards.py:{source.id}" for source in sources if isinstance(source, ast.Name)]
    given: dict[str, object] = {"reward_funcs": functions} if functions else {}
    unread: dict[str, str] = {}
    # What is not the name of a function is a reward model.
    if models := [source for source in sources if not isinstance(source, ast.Name)]:
        arguments["reward_model_name_or_path"] = ast.List(models)
    arguments.pop("processing_class", None)
    for name, node in arguments.items():
        value = script.resolve(node)
        if isinstance(value, ast.Call) and value.args and _called(value) == "from_pretrained":
            value = script.resolve(value.args[0])
        try:
            given[name] = ast.literal_eval(value)
        except (ValueError, TypeError):
            unread[name] = ast.unparse(node)
    if script.kind == "PPOConfig" and "num_ppo_epochs" not in unread:
        # Tells PPO's configuration from GRPO's also where it has no other name of its own.
        given.setdefault("num_ppo_epochs", defaults("PPOConfig")["num_ppo_epochs"])
    return given, unread


class _Script:
    """A script of TRL: its nodes, and the variables that are assigned once."""

    def __init__(self, text: str) -> None:
        self._lines = text.split("\n")
        self.nodes: list[Any] = list(ast.walk(ast.parse(text)))
        imports = [node for node in self.nodes if isinstance(node, ast.ImportFrom)]
        real_names = {alias.asname: alias.name for node in imports for alias in node.names if alias.asname}
        bound, values, annotations = list[str](), dict[str, ast.expr](), set[ast.AST]()
        for node in self.nodes:
            if isinstance(node, ast.Name):
                node.id = real_names.get(node.id, node.id)
                bound += [node.id] * (not isinstance(node.ctx, ast.Load))
            # Parameters, imports, functions and classes have names as well.
            names = (getattr(node, field, None) for field in ("arg", "name", "asname"))
            bound += [name for name in names if isinstance(name, str) and not isinstance(node, ast.keyword)]
            values |= {target.id: node.value for target in _targets(node) if isinstance(target, ast.Name)}
            for part in (getattr(node, "annotation", None), getattr(node, "returns", None)):
                annotations |= {*ast.walk(part)} if part else set()
        self._read = Counter(n.id for n in self.nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load))
        self._once = {name: value for name, value in values.items() if bound.count(name) == 1}
        uses = [node for node in self.nodes if _name(node) in _KINDS and node not in annotations]
        if not uses:
            raise ValueError("the script makes neither a GRPOConfig nor a PPOConfig of TRL; give the one that does")
        kinds = {*_KINDS, *(name for name, real_name in real_names.items() if real_name in _KINDS)}
        others: list[Any] = [alias for n in imports if not (n.module or "").startswith("trl") for alias in n.names]
        classes = [node for node in self.nodes if isinstance(node, ast.ClassDef)]
        own = [n for n in [*others, *classes] if (getattr(n, "asname", None) or n.name) in kinds]
        for other in [*own, *uses[1:]]:
            self._refuse(other)
        self.kind = _name(uses[0])
        # Given to a parser of command lines, or called.
        parsed = [n for n in self.nodes if isinstance(n, ast.Tuple | ast.List) and uses[0] in n.elts]
        parsed += [
            n for n in self.nodes if re.fullmatch("TrlParser|HfArgumentParser", _called(n)) and uses[0] in n.args
        ]
        made = [node for node in self.nodes if isinstance(node, ast.Call) and node.func is uses[0]]
        if not parsed and not made:
            self._refuse(uses[0])
        self._made: Any = made[0] if made else None

    def _refuse(self, node: Any) -> NoReturn:
        line = self._lines[node.lineno - 1].strip()
        remedy = "give a script that makes one GRPOConfig or PPOConfig of TRL, and only trains with it"
        raise ValueError(f"line {node.lineno}, `{line}`, may change a setting; {remedy}")

    def resolve(self, node: ast.expr) -> ast.expr:
        """The value of a variable that is assigned once, and that nothing else can change; other nodes unchanged."""
        value = self._once.get(node.id, node) if isinstance(node, ast.Name) else node
        is_fixed = isinstance(value, ast.Constant | ast.UnaryOp | ast.Name) or self._read[_name(node)] == 1
        return value if is_fixed else node

    def arguments(self) -> dict[str, ast.expr]:
        """The arguments of the calls in defaults.yaml, and the attributes that are set on what they make."""
        arguments: dict[str, ast.expr] = {}
        for function, positional in defaults("calls").items():
            calls = [node for node in self.nodes if _called(node) == function]
            # Which of several datasets it trains on is not known.
            for call in calls if function != "load_dataset" or len(calls) == 1 else ():
                if call is not calls[0] or (call is self._made and call.args[1:]):
                    self._refuse(call)
                arguments |= self._call_arguments(call, positional)
                if function in ("LoraConfig", "get_peft_model"):
                    arguments["peft_config"] = ast.Constant(True)
        trained, variable = arguments.pop("args", self._made), ""
        if self._made and trained is not self._made:
            variable = _name(trained)
            if self._once.get(variable) is not self._made:
                self._refuse(trained)
        variables = [variable, *(name for name, value in self._once.items() if value is self._made)]
        return arguments | self._attributes({name for name in variables if name})

    def _call_arguments(self, call: ast.Call, positional: Sequence[str]) -> dict[str, ast.expr]:
        arguments = dict(zip(positional, call.args, strict=False))
        for keyword in call.keywords:
            value = self.resolve(keyword.value)
            if keyword.arg:
                arguments[keyword.arg] = keyword.value
            elif isinstance(value, ast.Call) and _called(value) == "dict" and not value.args:
                arguments |= self._call_arguments(value, ())
            elif isinstance(value, ast.Dict) and None not in value.keys:
                names = [str(ast.literal_eval(key)) for key in value.keys if isinstance(key, ast.Constant)]
                arguments |= dict(zip(names, value.values, strict=True))
            else:
                self._refuse(keyword.value)
        if any(isinstance(argument, ast.Starred) for argument in call.args):
            self._refuse(call)
        return arguments

    def _attributes(self, variables: set[str]) -> dict[str, ast.expr]:
        """The attributes that are set straight after the configuration is made, and those that change no training.

        Raises:
            ValueError: for others, whatever they belong to; and for calls that may change a setting.
        """
        attributes, settled = dict[str, ast.expr](), set[ast.AST]()
        bodies = [getattr(n, field, None) for n in self.nodes for field in ("body", "orelse", "finalbody")]
        for body in (body for body in bodies if isinstance(body, list)):
            is_straight = False
            for statement in body:
                target: Any = _targets(statement)[0] if len(_targets(statement)) == 1 else None
                is_attribute = isinstance(target, ast.Attribute)
                is_straight = is_straight and is_attribute and _name(target.value) in variables
                if is_attribute and (is_straight or not _is_learned(target.attr)):
                    op, value = getattr(statement, "op", None), statement.value
                    attributes[target.attr] = ast.BinOp(target, op, value) if op else value
                    settled.add(target)
                is_straight |= bool(variables) and getattr(statement, "value", None) is self._made
        for node in self.nodes:
            is_set = isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load) and _is_learned(node.attr)
            given = [*node.args, *(k.value for k in node.keywords)] if isinstance(node, ast.Call) else []
            is_passed = _called(node) not in _READERS and any(_name(value) in variables for value in given)
            is_changer = isinstance(node, ast.Call) and re.fullmatch(_CHANGERS, ast.unparse(node))
            if (is_set and node not in settled) or is_passed or is_changer or _name(node) == "__dict__":
                self._refuse(node)
        return attributes


def _is_learned(attribute: str) -> bool:
    """Whether it is a setting of TRL that may change what is learned."""
    entry = find_foreign_name(attribute, ("script", *CONFIG_SECTIONS[:-1]))
    return attribute == "args" or (entry is not None and not is_not_learned(entry))


def _targets(statement: Any) -> list[Any]:
    """What an assignment sets; empty if the statement is none."""
    if isinstance(statement, ast.Assign):
        return statement.targets
    return [statement.target] if isinstance(statement, ast.AugAssign | ast.AnnAssign) and statement.value else []


def _name(node: Any) -> str:
    """The last part of a name; empty if `node` is none."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _called(node: Any) -> str:
    """The last part of the name of the function that is called; empty if `node` is no call."""
    return _name(node.func) if isinstance(node, ast.Call) else ""


def translate_trl(source: str, given: Mapping[str, Any], unread: Mapping[str, str], processes: int) -> Translation:
    """The options that train as TRL would.

    Args:
        source: the name of the translated file.
        given: TRL's names with their values, from the file and from flags.
        unread: of the script's arguments that are no literals, the expressions by name.
        processes: of the TRL run; 0 = `num_processes` in `given`, or 1.
    """
    kind = "PPOConfig" if {*defaults("names")["of PPO"]} & {*given, *unread} else "GRPOConfig"
    result = Translation(f"TRL's {kind} in {source}", given, kind)
    values, options = result.values, result.options
    sections = ["script", *(section for section in CONFIG_SECTIONS if section == kind or section not in _KINDS)]
    result.take(sections)
    _leave_unread(result, unread, sections)
    is_grpo = kind == "GRPOConfig"
    updates = (_grpo if is_grpo else _ppo)(result, processes or result.count("num_processes"))
    # A step of TRL is an optimizer step in GRPOTrainer, but a rollout in PPOTrainer, where it counts warm-up so too.
    steps_per_rollout, updates_per_step = (updates, 1) if is_grpo else (1, updates)
    if is_grpo and values["max_steps"] > 0:
        rollouts = math.ceil(values["max_steps"] / updates)
        result.set("max_steps", rollouts, f"{values['max_steps']} / {updates} of a rollout")
    elif not options.get("total_episodes"):
        result.set("total_epochs", math.ceil(values["num_train_epochs"]), "num_train_epochs")
    _set_intervals(result, steps_per_rollout=steps_per_rollout)
    if (warmup := values.get("warmup_steps") or 0) >= 1:
        result.set("warmup_steps", int(warmup * updates_per_step), f"{warmup} * {updates_per_step} optimizer steps")
    if not values.get("push_to_hub"):
        options.pop("hub_model_id", None)
    result.comments |= defaults("comments of a script")
    result.finish()
    # In a YAML file, they are names alone, such as `accuracy`, or with their module, such as `my_rewards.accuracy`.
    for i, function in enumerate(options.get("reward_funcs") or []):
        if ":" not in function:
            module, _, name = function.rpartition(".")
            options["reward_funcs"][i] = f"{module or 'rewards.py'}:{name}"
    return result


def _leave_unread(result: Translation, unread: Mapping[str, str], sections: Sequence[str]) -> None:
    """Lists the names in `unread` as not taken, unless a flag or another name sets the option.

    Raises:
        ValueError: for one without a flag that may change what is learned.
    """
    for name, expression in unread.items():
        entry = find_foreign_name(name, sections)
        # If TRL has a default for this name, that has set the option.
        is_set = entry and entry.same and entry.ours[0] in result.options and name not in defaults(result.section)
        if name not in result.given and entry and entry.ours and not (is_set or is_not_learned(entry)):
            raise ValueError(f"{name} is `{expression}`, which is no literal; give its value as a flag after the file")
        if name not in result.given and not is_set:
            in_trainer = find_foreign_name(name, TRAINER_SECTIONS)
            remedy = in_trainer.advice(expression) if in_trainer else "give its value as a flag after the file"
            result.leave(name, f"`{expression}` is no literal; {remedy}")


def _set_intervals(result: Translation, *, steps_per_rollout: int) -> None:
    """Sets the rollouts between two logs, checkpoints or evaluations."""
    for name in ("logging_steps", "save_steps", "eval_steps"):
        strategy = result.values.get(name.replace("_steps", "_strategy"), "steps")
        interval = result.values.get(name) or result.values["logging_steps"]
        if strategy == "no":
            result.set(name, 0)
        elif strategy != "steps" or interval < 1:
            result.set(name, 10, "TRL's value counts epochs or is a share of the run: choose the rollouts between two")
        else:
            result.set(name, max(1, round(interval / steps_per_rollout)), f"rollouts: {interval} / {steps_per_rollout}")


def _grpo(result: Translation, processes: int) -> int:
    """Sets batch sizes, upper clip range and KL; returns the optimizer steps on a rollout."""
    group = result.count("num_generations")
    device_batch = result.count("per_device_train_batch_size")
    accumulation = result.count("gradient_accumulation_steps")
    per_generation = result.values.get("steps_per_generation") or accumulation
    batch = device_batch * processes * accumulation
    generated = result.values.get("generation_batch_size") or device_batch * processes * per_generation
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
