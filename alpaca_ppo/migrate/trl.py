"""Translates TRL's GRPOConfig and PPOConfig, and reads the scripts that make them.

Read are the literal arguments of one GRPOConfig or PPOConfig and of the other calls in defaults.yaml, also through
variables that are assigned once, and the attributes that are set on the configuration straight after it was made.
Whatever else a script does with it may change a setting, and is refused.
"""

import ast
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, NoReturn

from alpaca_ppo.config.foreign_names import CONFIG_SECTIONS, TRAINER_SECTIONS, find_foreign_name
from alpaca_ppo.migrate.translation import Translation, defaults, is_not_learned

_KINDS = ("GRPOConfig", "PPOConfig")
# Calls that leave a configuration as it is.
_READERS = ("GRPOTrainer", "PPOTrainer", "print", "info", "debug", "warning", "str", "repr", "get_peft_model")


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
    """A script of TRL, in which `use` is the only node that names the configuration's class, `kind`."""

    def __init__(self, text: str) -> None:
        self._lines = text.split("\n")
        self.nodes: list[Any] = list(ast.walk(ast.parse(text)))
        self.parents: dict[ast.AST | None, Any] = {
            child: node for node in self.nodes for child in ast.iter_child_nodes(node)
        }
        imports = [node for node in self.nodes if isinstance(node, ast.ImportFrom)]
        real_names = {alias.asname: alias.name for node in imports for alias in node.names if alias.asname}
        annotations, bound = set[ast.AST](), list[str]()
        for node in self.nodes:
            if isinstance(node, ast.Name):
                node.id = real_names.get(node.id, node.id)
                bound += [node.id] * (not isinstance(node.ctx, ast.Load))
            # Parameters, imports, functions and classes have names as well.
            names = (getattr(node, field, None) for field in ("arg", "name", "asname"))
            bound += [name for name in names if isinstance(name, str) and not isinstance(node, ast.keyword)]
            for part in (getattr(node, "annotation", None), getattr(node, "returns", None)):
                annotations |= {*ast.walk(part)} if part else set()
        self._bound = Counter(bound)
        self._read = Counter(n.id for n in self.nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load))
        self._values: dict[str, ast.expr] = {}
        for node in self.nodes:
            self._values |= {target.id: node.value for target in _targets(node) if isinstance(target, ast.Name)}
        uses = [node for node in self.nodes if _name(node) in _KINDS and node not in annotations]
        if not uses:
            raise ValueError("the script makes neither a GRPOConfig nor a PPOConfig of TRL; give the one that does")
        own: list[ast.stmt] = [node for node in self.nodes if isinstance(node, ast.ClassDef) and node.name in _KINDS]
        kinds = {*_KINDS, *(name for name, real_name in real_names.items() if real_name in _KINDS)}
        others = [node for node in imports if not (node.module or "").startswith("trl")]
        own += [node for node in others if kinds & {alias.asname or alias.name for alias in node.names}]
        for other in [*own, *uses[1:]]:
            self._refuse(other)
        self.use, self.kind = uses[0], _name(uses[0])
        made = self.parents[self.use]
        self.is_parsed = not (isinstance(made, ast.Call) and made.func is self.use)

    def _refuse(self, node: ast.AST) -> NoReturn:
        while not isinstance(node, ast.stmt):
            node = self.parents[node]
        line = self._lines[node.lineno - 1].strip()
        remedy = "give a script that makes one GRPOConfig or PPOConfig of TRL, and only trains with it"
        raise ValueError(f"line {node.lineno}, `{line}`, may change a setting; {remedy}")

    def resolve(self, node: ast.expr) -> ast.expr:
        """The value of a variable that is assigned once, and that nothing else can change; other nodes unchanged."""
        if not isinstance(node, ast.Name) or self._bound[node.id] != 1 or node.id not in self._values:
            return node
        value = self._values[node.id]
        is_fixed = isinstance(value, ast.Constant | ast.UnaryOp | ast.Name) or self._read[node.id] == 1
        return value if is_fixed else node

    def arguments(self) -> dict[str, ast.expr]:
        """The arguments of the calls in defaults.yaml, and the attributes that are set on the configuration."""
        arguments, variable = dict[str, ast.expr](), ""
        for function, positional in defaults("calls").items():
            calls = [node for node in self.nodes if isinstance(node, ast.Call) and _called(node) == function]
            # Which of several datasets it trains on is not known.
            for call in calls if function != "load_dataset" or len(calls) == 1 else ():
                if call is not calls[0] or (function in _KINDS and call.args[1:]):
                    self._refuse(call)
                arguments |= self._call_arguments(call, positional)
                if function.endswith("Config"):
                    variable, statement = self._variable(call)
                    arguments |= self._attributes(variable, statement, is_made=True)
        if self.is_parsed:
            variable, statement = self._parsed()
            arguments |= self._attributes(variable, statement, is_made=False)
        trained = arguments.pop("args", self.use)
        if self.use not in ast.walk(trained) and _name(trained) != variable:
            self._refuse(trained)
        if any(_called(node) in ("LoraConfig", "get_peft_model") for node in self.nodes):
            arguments["peft_config"] = ast.Constant(True)
        return arguments

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

    def _variable(self, call: ast.Call) -> tuple[str, ast.AST]:
        """The variable that a call sets, with the statement; empty if the call is an argument of the trainer."""
        parent = self.parents[call]
        statement = self.parents[parent] if isinstance(parent, ast.keyword) else parent
        if isinstance(statement, ast.Expr) or _called(statement) in _READERS:
            return "", statement
        targets = _targets(statement)
        if len(targets) != 1 or not isinstance(targets[0], ast.Name):
            self._refuse(call)
        return targets[0].id, statement

    def _parsed(self) -> tuple[str, ast.AST]:
        """The variable to which a parser of command lines gives the configuration, and the statement."""
        container = self.parents[self.use]
        is_listed = isinstance(container, ast.Tuple | ast.List)
        # Each fills in the values that a command line does not have.
        calls = [node for node in self.nodes if re.match("parse_(?!args$)|set_defaults", _called(node))]
        if not (is_listed or _called(container) in ("TrlParser", "HfArgumentParser")) or len(calls) != 1:
            self._refuse(self.use)
        parent, index = self.parents[calls[0]], container.elts.index(self.use) if is_listed else 0
        is_assigned = isinstance(parent, ast.Assign) and isinstance(parent.targets[0], ast.Tuple)
        names = [_name(target) for target in parent.targets[0].elts] if is_assigned else []
        # `main(*parser.parse_args_and_config())`
        names = self._parameters(self.parents[parent]) if isinstance(parent, ast.Starred) else names
        if index >= len(names) or calls[0].args or not _called(calls[0]).startswith("parse_args_"):
            self._refuse(calls[0])
        return names[index], parent

    def _parameters(self, call: ast.AST) -> list[str]:
        """The parameters of a function of the script that is called."""
        functions = [n for n in self.nodes if isinstance(n, ast.FunctionDef) and n.name == _called(call)]
        return [argument.arg for function in functions[:1] for argument in function.args.args]

    def _attributes(self, variable: str, statement: ast.AST, *, is_made: bool) -> dict[str, ast.expr]:
        """The attributes of `variable` that are set straight after `statement` made it, or that change no training.

        Raises:
            ValueError: if anything else is done with it than to read its attributes, and to train with it.
        """
        body = list(ast.iter_child_nodes(self.parents[statement])) if is_made and variable else [statement]
        later = body[body.index(statement) + 1 :]
        straight = set(takewhile(lambda node: _set_attribute(node, variable), later))
        attributes: dict[str, ast.expr] = {}
        for node in self.nodes:
            if not (_name(node) == variable and isinstance(node, ast.Name)) and not self._is_of_trainer(node):
                continue
            parent = self.parents[node]
            setter = self.parents[parent] if isinstance(parent, ast.Attribute) else parent
            attribute = _set_attribute(setter, variable)
            if attribute and (setter in straight or is_not_learned(find_foreign_name(attribute, CONFIG_SECTIONS))):
                is_augmented = isinstance(setter, ast.AugAssign)
                attributes[attribute] = ast.BinOp(parent, setter.op, setter.value) if is_augmented else setter.value
            elif statement not in (parent, self.parents.get(parent)) and not self._only_reads(node):
                self._refuse(node)
        return attributes

    def _is_of_trainer(self, node: ast.AST) -> bool:
        """Whether it is `trainer.args`, or a trainer in a place where it may be changed."""
        parent = self.parents.get(node)
        if isinstance(node, ast.Attribute):
            return node.attr == "args"
        if not isinstance(node, ast.Name) or not _called(self._values.get(node.id)).endswith("Trainer"):
            return False
        is_read = isinstance(parent, ast.Call | ast.keyword | ast.FormattedValue) and not self._parameters(parent)
        is_read |= isinstance(parent, ast.Attribute) and isinstance(parent.ctx, ast.Load)
        return isinstance(node.ctx, ast.Load) and (not is_read or _called(parent) == "setattr")

    def _only_reads(self, node: ast.AST) -> bool:
        parent = self.parents[node]
        outer = self.parents[parent]
        if isinstance(parent, ast.Attribute):
            is_changed = isinstance(outer, ast.Attribute | ast.Subscript) or getattr(outer, "func", None) is parent
            return isinstance(parent.ctx, ast.Load) and not is_changed
        call = outer if isinstance(parent, ast.keyword) else parent
        # A function of the script whose parameter has the same name.
        position = call.args.index(node) if isinstance(call, ast.Call) and node in call.args else None
        is_passed = position is not None and self._parameters(call)[position : position + 1] == [_name(node)]
        return isinstance(parent, ast.FormattedValue) or _called(call) in _READERS or is_passed


def _targets(statement: Any) -> list[ast.expr]:
    """What an assignment sets; empty if the statement is none."""
    if isinstance(statement, ast.Assign):
        return statement.targets
    return [statement.target] if isinstance(statement, ast.AugAssign | ast.AnnAssign) and statement.value else []


def _set_attribute(statement: ast.AST, variable: str) -> str:
    """The attribute of `variable` that a statement sets; empty if it is none."""
    targets = _targets(statement)
    is_set = len(targets) == 1 and isinstance(targets[0], ast.Attribute) and _name(targets[0].value) == variable
    return targets[0].attr if is_set else ""


def _name(node: ast.AST | None) -> str:
    """The last part of a name; empty if `node` is none."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _called(node: ast.AST | None) -> str:
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
