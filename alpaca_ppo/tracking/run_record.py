"""`run.yaml`: everything that repeats a run, in the form that `--config` reads.

At the top level it has the options of `ScriptArguments`, `LoraArguments` and `PPOConfig`; the mapping `provenance` says
where the run came from. Objects that the run was given in memory are named there, and refused by `config.run_file`.
Credentials are left out.
"""

import importlib.metadata
import inspect
import os
import platform
import shlex
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import torch
from accelerate import Accelerator
from datasets import Dataset

from alpaca_ppo.config.credentials import without_credential_arguments, without_credentials
from alpaca_ppo.config.fields import options_of
from alpaca_ppo.config.git_state import git_state, package_commit
from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.config.provenance import Provenance
from alpaca_ppo.config.run_file import IN_MEMORY
from alpaca_ppo.config.script_arguments import LoraArguments, ScriptArguments

_PACKAGES = (
    "alpaca_ppo", "torch", "transformers", "accelerate", "peft", "datasets", "tokenizers", "safetensors", "numpy",
    "deepspeed", "bitsandbytes",
)  # fmt: skip
# They say what this start did with the folder, and would delete or continue the run that its own file repeats.
_OF_THIS_START = {"overwrite_output_dir": False, "resume_from_checkpoint": None}
_NO_OPTION = (
    "processing_class", "reward_processing_classes", "metric_processing_classes", "callbacks", "optimizers",
    "accelerator",
)  # fmt: skip


@dataclass(frozen=True)
class RunRecord:
    """What `run.yaml` holds beyond the run's `PPOConfig`.

    Attributes:
        options: of `ScriptArguments` and `LoraArguments`, and those of `PPOConfig` that are not as in the run's own.
        in_memory: what the run was given as objects, by the argument of `PPOTrainer`, described.
        command: how the run was started.
    """

    options: Mapping[str, Any]
    in_memory: Mapping[str, str] = field(default_factory=dict)
    command: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of_command(cls, provenance: Provenance) -> "RunRecord":
        """The record of a run that a command started from options alone."""
        launcher = provenance.launcher
        return cls(
            provenance.options(),
            command={
                "command_line": _shell(provenance.command_line),
                "launcher": None if launcher is None else _shell(launcher),
                "presets": list(provenance.presets),
                "config_files": list(provenance.config_files),
            },
        )

    @classmethod
    def of_objects(cls, trainer_class: type, given: Mapping[str, Any]) -> "RunRecord":
        """The record of a run that a Python program started: names where it gave names, and the others described.

        Args:
            trainer_class: of the trainer.
            given: the arguments of its constructor, by name.
        """
        options = {
            name: option.default
            for kind in (ScriptArguments, LoraArguments)
            for name, option in options_of(kind).items()
        }
        in_memory: dict[str, str] = {}
        if not trainer_class.__module__.startswith("alpaca_ppo."):
            in_memory["trainer_class"] = _name(trainer_class)
        for name, option in (
            ("model", "model_name_or_path"),
            ("value_model", "value_model_name_or_path"),
            ("ref_model", "reference"),
        ):
            if isinstance(given[name], str):
                options[option] = given[name]
            elif given[name] is not None:
                in_memory[name] = _described(given[name])
        _add_rewards(options, in_memory, given["reward_funcs"], given["args"].reward_weights)
        if metrics := _named_functions(in_memory, "metric_funcs", given["metric_funcs"]):
            options["metric_funcs"] = [name for _, name in metrics]
        _add_environments(options, in_memory, given)
        named_sets = given["eval_dataset"] if isinstance(given["eval_dataset"], Mapping) else {}
        sets = {f"eval_dataset[{name}]": dataset for name, dataset in named_sets.items()}
        for name, dataset in {
            "train_dataset": given["train_dataset"],
            "eval_dataset": given["eval_dataset"],
            **sets,
        }.items():
            if dataset is not None and not isinstance(dataset, Mapping):
                in_memory[name] = _described(dataset)
        if given["peft_config"] is not None:
            lora = _lora_arguments(given["peft_config"])
            if lora is None:
                in_memory["peft_config"] = _described(given["peft_config"])
            else:
                options |= vars(lora)
        for name in _NO_OPTION:
            objects = [each for each in _listed(given[name]) if each is not None]
            if objects:
                in_memory[name] = ", ".join(map(_described, objects))
        return cls(options, in_memory, {"command_line": _shell(sys.argv), "launcher": None})

    def config(self, args: PPOConfig) -> dict[str, Any]:
        """All options of the run as plain values, without credentials."""
        whole = {**self.options, **asdict(args), **{k: v for k, v in self.options.items() if k in vars(args)}}
        cleaned: dict[str, Any] = without_credentials({**whole, **_OF_THIS_START})
        return cleaned

    def provenance(self, accelerator: Accelerator, *, resumed_step: int | None = None) -> dict[str, Any]:
        """Where the run came from, as plain values without credentials.

        Args:
            accelerator: of the run.
            resumed_step: completed steps of the checkpoint from which the run goes on; None or less than 1 = a new run.
        """
        found = {
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            **self.command,
            "folder": str(Path.cwd()),
            "resumed_after_step": resumed_step if resumed_step and resumed_step > 0 else None,
            "git": git_state(Path.cwd()),
            "package_commit": package_commit(),
            "versions": _versions(),
            "hardware": _hardware(accelerator),
            IN_MEMORY: dict(self.in_memory),
        }
        cleaned: dict[str, Any] = without_credentials(found)
        return cleaned


def function_name(function: Any) -> str | None:
    """How `function` is imported, as "module:function" or "file.py:function"; None if it cannot be.

    A module that belongs to no package is named by its file, because another program may not find it by its name. A
    function of the program itself cannot be imported: that would run the program.
    """
    return _import_name(function) if inspect.isfunction(function) else None


def _import_name(function: Any) -> str | None:
    """That of a function or a class."""
    if not (inspect.isfunction(function) or inspect.isclass(function)):
        return None
    module, name = sys.modules.get(function.__module__), function.__qualname__
    # One that is defined inside another function has a dotted name.
    if module is None or function.__module__ == "__main__" or vars(module).get(name) is not function:
        return None
    file = vars(module).get("__file__")
    if file is None or vars(module).get("__package__") or _is_installed(Path(file)):
        return f"{function.__module__}:{name}"
    path = Path(file).resolve()
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{shown}:{name}"


def _add_rewards(
    options: dict[str, Any], in_memory: dict[str, str], given: Any, weights: Sequence[float] | None
) -> None:
    """Adds the reward sources to `options`, models before functions as the command takes them, and the weights in that
    order; objects go to `in_memory` by their place.
    """
    names: dict[str, list[tuple[int, str]]] = {"reward_model_name_or_path": [], "reward_funcs": []}
    for place, name in _named_functions(in_memory, "reward_funcs", given):
        is_function = name.rpartition(":")[2].isidentifier() and ":" in name
        names["reward_funcs" if is_function else "reward_model_name_or_path"].append((place, name))
    options |= {option: [name for _, name in found] or None for option, found in names.items()}
    order = [place for found in names.values() for place, _ in found]
    if weights is not None and order != sorted(order) and len(weights) >= len(order):
        options["reward_weights"] = [weights[place] for place in order] + list(weights[len(order) :])


def _add_environments(options: dict[str, Any], in_memory: dict[str, str], given: Mapping[str, Any]) -> None:
    """Adds tools, environments and the parser of tool calls to `options`; objects go to `in_memory`."""
    options["tools"] = [name for _, name in _named_functions(in_memory, "tools", given["tools"])] or None
    parsers = _named_functions(in_memory, "tool_call_parser", given["tool_call_parser"])
    options["tool_call_parser"] = parsers[0][1] if parsers else None
    factories = given["environment_factory"]
    named = factories if isinstance(factories, Mapping) else {"": factories}
    options["environments"] = []
    for key, factory in named.items():
        if (name := _import_name(factory)) is not None:
            options["environments"].append(f"{key}={name}" if key else name)
        elif factory is not None:
            in_memory[f"environment_factory[{key}]" if key else "environment_factory"] = _described(factory)
    options["environments"] = options["environments"] or None


def _named_functions(in_memory: dict[str, str], argument: str, given: Any) -> list[tuple[int, str]]:
    """Place and name of those in `given` that have a name; adds the others to `in_memory`."""
    named = []
    for place, source in enumerate(_listed(given)):
        name = source if isinstance(source, str) else function_name(source)
        if name is not None:
            named.append((place, name))
        elif source is not None:
            in_memory[f"{argument}[{place}]"] = _described(source)
    return named


def _lora_arguments(peft_config: Any) -> LoraArguments | None:
    """The options of LoRA that make the same `peft.LoraConfig`; None if there are none."""
    if type(peft_config).__name__ != "LoraConfig":
        return None
    targets = peft_config.target_modules
    try:
        lora = LoraArguments(
            use_peft=True,
            lora_r=peft_config.r,
            lora_alpha=peft_config.lora_alpha,
            lora_target_modules=None if isinstance(targets, str) or targets is None else sorted(targets),
        )
    # PEFT allows what the options do not, such as a fraction as lora_alpha.
    except ValueError:
        return None
    made = lora.peft_config(peft_config.task_type or "CAUSAL_LM").to_dict()
    same = {**made, "task_type": None} == {**peft_config.to_dict(), "task_type": None}
    return lora if same else None


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _name(defined: Any) -> str:
    return f"{defined.__module__}.{defined.__qualname__}"


def _described(value: Any) -> str:
    """One line that says which object `value` is."""
    if inspect.isroutine(value) or inspect.isclass(value):
        return _name(value)
    name = type(value).__name__
    if isinstance(value, Dataset):
        return f"{name} of {len(value)} rows with the columns {', '.join(value.column_names)}"
    # transformers' models and tokenizers have it.
    origin = vars(value).get("name_or_path") if hasattr(value, "__dict__") else None
    return f"{name}, loaded from {origin}" if origin else name


def _is_installed(file: Path) -> bool:
    places = sysconfig.get_paths()
    return any(file.is_relative_to(places[key]) for key in ("purelib", "platlib", "stdlib"))


def _shell(words: Sequence[str]) -> str:
    return shlex.join(without_credential_arguments(list(words)))


@cache
def _versions() -> dict[str, str]:
    """The versions of Python and of the packages that a run depends on, of those that are installed."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _hardware(accelerator: Accelerator) -> dict[str, Any]:
    """The processes of the run, and the machine of the main one."""
    plugin = accelerator.state.deepspeed_plugin
    device = accelerator.device
    found: dict[str, Any] = {
        "processes": accelerator.num_processes,
        "distributed": accelerator.distributed_type.value,
        "zero_stage": None if plugin is None else plugin.zero_stage,
        "mixed_precision": accelerator.mixed_precision,
        "device": device.type,
    }
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
        found["gpus_of_machine"] = torch.cuda.device_count()
        found["cuda"] = torch.version.cuda
    return found | {
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
    }
