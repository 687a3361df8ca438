"""`run.yaml`: everything that repeats a run, in the form that `--config` reads.

At the top level it has the options of `ScriptArguments`, `LoraArguments` and `PPOConfig`; the mapping `provenance` says
where the run came from. Objects that the run was given in memory are named there, and refused by `config.run_file`.
Credentials are left out.
"""

import importlib.metadata
import inspect
import platform
import shlex
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from datasets import Dataset

from alpaca_ppo.config.credentials import without_credential_arguments, without_credentials
from alpaca_ppo.config.fields import options_of
from alpaca_ppo.config.git_state import git_commit, package_commit
from alpaca_ppo.config.parser import ParsedOptions
from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.config.run_file import IN_MEMORY, OPTIONS_OF_ARGUMENT
from alpaca_ppo.config.script_arguments import LoraArguments, ScriptArguments

_PACKAGES = (
    "alpaca_ppo", "torch", "transformers", "accelerate", "peft", "datasets", "tokenizers", "safetensors", "numpy",
    "deepspeed", "bitsandbytes",
)  # fmt: skip
# They say what this start did with the folder, and would delete or continue the run that its own file repeats.
_OF_THIS_START = {"overwrite_output_dir": False, "resume_from_checkpoint": None}
_LISTS = ("reward_funcs", "metric_funcs", "tools", "environments")


@dataclass(frozen=True)
class RunRecord:
    """What `run.yaml` holds beyond the run's `PPOConfig`."""

    options: Mapping[str, Any]
    """Of `ScriptArguments` and `LoraArguments`, and those of `PPOConfig` that are not as in the run's own."""
    in_memory: Mapping[str, str] = field(default_factory=dict)
    """What the run was given as objects, by the argument of `PPOTrainer`, described."""
    command: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of_command(cls, parsed: ParsedOptions, launcher: Sequence[str] | None) -> "RunRecord":
        """The record of a run that a command started from options alone.

        Args:
            parsed: the options, of which the first are `ScriptArguments` and `LoraArguments`.
            launcher: the command line of what started this process (torchrun, accelerate, `alpaca-ppo train` with
                several processes); None if it was started directly.
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
        """The record of a run that a Python program started: names where it gave names, and the others described.

        Args:
            trainer_class: of the trainer.
            given: the arguments of its constructor, by name.
        """
        options = {k: o.default for kind in (ScriptArguments, LoraArguments) for k, o in options_of(kind).items()}
        in_memory: dict[str, str] = {}
        if not trainer_class.__module__.startswith("alpaca_ppo."):
            in_memory["trainer_class"] = _described(trainer_class)
        for argument in [name for name in given if name not in ("self", "args")]:
            option, named = next(iter(OPTIONS_OF_ARGUMENT.get(argument, ())), None), list[tuple[str, str]]()
            for place, value in _places(given[argument]):
                name = value if isinstance(value, str) else import_name(value)
                if option is not None and name is not None:
                    named.append((place, name))
                else:
                    in_memory[argument + place] = _described(value)
            if argument == "reward_funcs":
                options |= _rewards(named, given["args"].reward_weights)
            elif option == "environments":
                options[option] = [f"{place[1:-1]}={name}" if place else name for place, name in named] or None
            elif option is not None and named:
                options[option] = [name for _, name in named] if option in _LISTS else named[0][1]
        return cls(options, in_memory, {"command_line": _shell(sys.argv), "launcher": None})

    def config(self, args: PPOConfig) -> dict[str, Any]:
        """All options of the run as plain values, without credentials."""
        whole = {**self.options, **asdict(args), **{k: v for k, v in self.options.items() if k in vars(args)}}
        return cast(dict[str, Any], without_credentials({**whole, **_OF_THIS_START}))

    def provenance(self, hardware: Mapping[str, Any], *, resumed_step: int = 0) -> dict[str, Any]:
        """Where the run came from and what it runs on, as plain values without credentials; `resumed_step` is that of
        the checkpoint from which it goes on.
        """
        versions = {"python": platform.python_version()}
        for name in _PACKAGES:
            # Of those that are installed.
            with suppress(importlib.metadata.PackageNotFoundError):
                versions[name] = importlib.metadata.version(name)
        found = {
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
        return cast(dict[str, Any], without_credentials(found))


def import_name(defined: Any) -> str | None:
    """How a function or a class is imported, as "module:name" or "file.py:name"; None if it cannot be.

    A module that belongs to no package is named by its file, because another program may not find it by its name. What
    the program itself defines cannot be imported: that would run the program.
    """
    if not (inspect.isfunction(defined) or inspect.isclass(defined)) or defined.__module__ == "__main__":
        return None
    module, name = sys.modules.get(defined.__module__), defined.__qualname__
    # One that is defined inside a function has a dotted name.
    if module is None or vars(module).get(name) is not defined:
        return None
    file, installed = vars(module).get("__file__"), [sysconfig.get_paths()[key] for key in ("purelib", "stdlib")]
    if file is None or vars(module).get("__package__") or any(Path(file).is_relative_to(place) for place in installed):
        return f"{defined.__module__}:{name}"
    path = Path(file).resolve()
    return f"{path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}:{name}"


def _places(value: Any) -> Iterator[tuple[str, Any]]:
    """What an argument holds, each with its place such as "[0]" or "[name]"; "" for a single object."""
    if isinstance(value, Mapping | list | tuple):
        entries = value.items() if isinstance(value, Mapping) else enumerate(value)
        yield from ((f"[{key}]", each) for key, each in entries if each is not None)
    elif value is not None:
        yield "", value


def _rewards(named: Sequence[tuple[str, str]], weights: Sequence[float] | None) -> dict[str, Any]:
    """The options of the reward sources, models before functions as the command takes them, and the weights in that
    order.
    """
    is_function = [":" in name and name.rpartition(":")[2].isidentifier() for _, name in named]
    order = sorted(range(len(named)), key=lambda i: is_function[i])
    options: dict[str, Any] = {
        "reward_model_name_or_path": [named[i][1] for i in order if not is_function[i]] or None,
        "reward_funcs": [named[i][1] for i in order if is_function[i]] or None,
    }
    if weights is not None and order != sorted(order) and len(weights) >= len(order):
        options["reward_weights"] = [weights[i] for i in order] + list(weights[len(order) :])
    return options


def _described(value: Any) -> str:
    """One line that says which object `value` is."""
    if inspect.isroutine(value) or inspect.isclass(value):
        return f"{value.__module__}.{value.__qualname__}"
    name = type(value).__name__
    if isinstance(value, Dataset):
        return f"{name} of {len(value)} rows with the columns {', '.join(value.column_names)}"
    # transformers' models and tokenizers have it.
    origin = vars(value).get("name_or_path") if hasattr(value, "__dict__") else None
    return f"{name}, loaded from {origin}" if origin else name


def _shell(words: Sequence[str]) -> str:
    return shlex.join(without_credential_arguments(list(words)))
