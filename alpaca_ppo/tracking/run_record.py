"""`run.yaml`: everything that repeats a run, in the form that `--config` reads, without credentials.

Options stand at the top level; the mapping `provenance` says where the run came from. Objects that the run was given in
memory are named there, and refused by `config.run_file`.
"""

import importlib.metadata
import inspect
import platform
import shlex
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import torch
from datasets import Dataset

from alpaca_ppo.config import LoraArguments, PPOConfig, ScriptArguments
from alpaca_ppo.config.checks import REFERENCES
from alpaca_ppo.config.credentials import without_credential_arguments, without_credentials
from alpaca_ppo.config.fields import options_of
from alpaca_ppo.config.git_state import git_commit, package_commit
from alpaca_ppo.config.parser import ParsedOptions
from alpaca_ppo.config.run_file import IN_MEMORY, OPTIONS_OF_ARGUMENT

_PACKAGES = (
    "alpaca_ppo", "torch", "transformers", "accelerate", "peft", "datasets", "tokenizers", "safetensors", "numpy",
    "deepspeed", "bitsandbytes",
)  # fmt: skip
# As they were at this start, these options would delete or continue the run instead of repeating it.
_NOT_REPEATED = {"overwrite_output_dir": False, "resume_from_checkpoint": None}
_LISTS = ("metric_funcs", "tools")


@dataclass(frozen=True)
class RunRecord:
    """What `run.yaml` holds beyond the run's `PPOConfig`.

    Attributes:
        options: those of `ScriptArguments` and `LoraArguments`, and of `PPOConfig` where they replace the run's.
        in_memory: descriptions of the objects that the run was given, by the argument of `PPOTrainer`.
        command: how the program was started, for `provenance`.
    """

    options: Mapping[str, Any]
    in_memory: Mapping[str, str] = field(default_factory=dict)
    command: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of_command(cls, parsed: ParsedOptions, launcher: Sequence[str] | None) -> "RunRecord":
        """Returns the record of a run that a command started; `launcher` is the command line of its launcher, such as
        torchrun.
        """
        script, lora = parsed.instances[:2]
        command = {
            "command_line": _shell(sys.argv),
            "launcher": None if launcher is None else _shell(launcher),
            "presets": list(parsed.presets),
            "config_files": list(parsed.config_files),
        }
        return cls({**vars(script), **vars(lora)}, command=command)

    @classmethod
    def of_objects(cls, trainer_class: type, given: Mapping[str, Any]) -> "RunRecord":
        """Returns the record of a run whose trainer was constructed with the arguments `given`: what has a name becomes
        an option, other objects are described.
        """
        kinds = (ScriptArguments, LoraArguments)
        options = {name: option.default for kind in kinds for name, option in options_of(kind).items()}
        in_memory: dict[str, str] = {}
        if not trainer_class.__module__.startswith("alpaca_ppo."):
            in_memory["trainer_class"] = _described(trainer_class)
        for argument, value in given.items():
            if argument == "args":
                continue
            option = next(iter(OPTIONS_OF_ARGUMENT.get(argument, ())), None)
            names = {} if option is None else _names(value)
            for key, entry in _entries(value):
                if key not in names:
                    in_memory[argument if key is None else f"{argument}[{key}]"] = _described(entry)
            if option == "reward_funcs":
                # Beside a source without a name, which no option can hold, the weights stay in the run's order.
                weights = given["args"].reward_weights if len(names) == len(_entries(value)) else None
                options |= _reward_options(list(names.values()), weights)
            elif option == "environments":
                options[option] = [name if key is None else f"{key}={name}" for key, name in names.items()] or None
            elif option is not None and names:
                options[option] = list(names.values()) if option in _LISTS else next(iter(names.values()))
        model = given["model"]
        if isinstance(model, torch.nn.Module):
            options["dtype"] = "bfloat16" if next(model.parameters()).dtype == torch.bfloat16 else "float32"
            if given["ref_model"] is None and given["args"].reference in {*REFERENCES} - {"none"}:
                in_memory["reference"] = in_memory["model"]
        return cls(options, in_memory, {"command_line": _shell(sys.argv), "launcher": None})

    def config(self, args: PPOConfig) -> dict[str, Any]:
        """Returns all options of the run as plain values, without credentials; `options` stand first, and win."""
        options = {**self.options, **asdict(args), **self.options, **_NOT_REPEATED}
        return cast(dict[str, Any], without_credentials(options))

    def provenance(self, hardware: Mapping[str, Any], *, resumed_step: int = 0) -> dict[str, Any]:
        """Returns where the run came from and its hardware, without credentials; `resumed_step` is the checkpoint's."""
        versions = {"python": platform.python_version()}
        for name in _PACKAGES:
            # Some may not be installed.
            with suppress(importlib.metadata.PackageNotFoundError):
                versions[name] = importlib.metadata.version(name)
        provenance = {
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            **self.command,
            "folder": str(Path.cwd()),
            "resumed_after_step": resumed_step if resumed_step > 0 else None,
            "git": git_commit(Path.cwd()),
            "package_commit": package_commit(),
            "versions": versions,
            "hardware": dict(hardware),
            IN_MEMORY: dict(self.in_memory),
        }
        return cast(dict[str, Any], without_credentials(provenance))


def import_name(defined: Any) -> str | None:
    """Returns how a function or a class is imported, as "module:name" or "file.py:name"; None if it cannot be.

    A module outside packages is named by its file, because another program may not find it by its name. What the
    program itself defines cannot be imported: that would run the program.
    """
    if not (inspect.isfunction(defined) or inspect.isclass(defined)) or defined.__module__ == "__main__":
        return None
    module, name = sys.modules.get(defined.__module__), defined.__qualname__
    # What is defined inside a function has a dotted name, which the module lacks.
    if module is None or vars(module).get(name) is not defined:
        return None
    file = vars(module).get("__file__")
    installed = [sysconfig.get_paths()[key] for key in ("purelib", "stdlib")]
    if file is None or vars(module).get("__package__") or any(Path(file).is_relative_to(place) for place in installed):
        return f"{defined.__module__}:{name}"
    path = Path(file).resolve()
    return f"{path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}:{name}"


def _entries(value: Any) -> list[tuple[Any, Any]]:
    """Returns the entries of a list or mapping with their indices or keys; a single object has the key None."""
    if isinstance(value, Mapping):
        entries = list(value.items())
    elif isinstance(value, list | tuple):
        entries = list(enumerate(value))
    else:
        entries = [(None, value)]
    return [(key, entry) for key, entry in entries if entry is not None]


def _names(value: Any) -> dict[Any, str]:
    """Returns the names of those `_entries` that have one, by their keys."""
    names = {key: entry if isinstance(entry, str) else import_name(entry) for key, entry in _entries(value)}
    return {key: name for key, name in names.items() if name is not None}


def _reward_options(names: Sequence[str], weights: Sequence[float] | None) -> dict[str, Any]:
    """Returns the options that name the reward sources, and their weights in the command's order, models first."""
    functions = [i for i, name in enumerate(names) if ":" in name and name.rpartition(":")[2].isidentifier()]
    models = [i for i in range(len(names)) if i not in functions]
    options: dict[str, Any] = {
        "reward_model_name_or_path": [names[i] for i in models] or None,
        "reward_funcs": [names[i] for i in functions] or None,
    }
    order = [*models, *functions]
    if weights is not None and order != sorted(order) and len(weights) >= len(order):
        options["reward_weights"] = [weights[i] for i in order] + list(weights[len(order) :])
    return options


def _described(value: Any) -> str:
    """Returns one line that says which object `value` is."""
    if inspect.isroutine(value) or inspect.isclass(value):
        return f"{value.__module__}.{value.__qualname__}"
    name = type(value).__name__
    if isinstance(value, Dataset):
        return f"{name} of {len(value)} rows with the columns {', '.join(value.column_names)}"
    # Of transformers' models and tokenizers.
    origin = vars(value).get("name_or_path") if hasattr(value, "__dict__") else None
    return f"{name}, loaded from {origin}" if origin else name


def _shell(words: Sequence[str]) -> str:
    return shlex.join(without_credential_arguments(list(words)))
