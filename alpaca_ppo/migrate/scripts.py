"""Reads the literal arguments of the known calls of a TRL script, without executing it: `Script`.

What the trainer, `load_dataset`, `from_pretrained` and `LoraConfig` get is named as TRL's own script arguments are, so
that the table of names says what it is here. A name that is assigned once stands for what it is assigned, and an
attribute that is set on the configuration for an argument of it.
"""

import ast
from collections.abc import Iterator
from typing import Any

from alpaca_ppo.config.foreign_names import TRAINER_SECTIONS, find_foreign_name

_KINDS = ("GRPOConfig", "PPOConfig")
_MODELS = {"model": "model_name_or_path", "ref_model": "reference", "value_model": "value_model_name_or_path"}
_LORA = {"r": "lora_r", "target_modules": "lora_target_modules", "task_type": "lora_task_type"}
_DATASETS = {
    "train_dataset": ("dataset_name", "dataset_config", "dataset_train_split"),
    "eval_dataset": ("eval_dataset_name", "", "dataset_test_split"),
}
_CHANGING = {"map", "filter", "select", "rename_column", "rename_columns", "train_test_split", "take"}


class Script:
    """A Python script of TRL.

    Attributes:
        kind: "GRPOConfig" or "PPOConfig".
        given: the literal arguments.
        lines: where the arguments stand.
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
        self.lines: dict[str, int] = {}
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
            self.lines[name] = node.lineno
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
            self.lines[name] = node.lineno
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
