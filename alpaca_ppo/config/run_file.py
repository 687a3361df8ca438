"""What a configuration file may hold besides options: a run's own record, `run.yaml`, which repeats the run.

It is written by `tracking.run_record`. Its mapping `provenance` says where the run came from, and is no option; of it,
only the objects that the run was given in memory are read, because a file cannot bring them back.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from alpaca_ppo.config.credentials import removed_in
from alpaca_ppo.config.script_arguments import LoraArguments, ScriptArguments

PROVENANCE = "provenance"
IN_MEMORY = "in_memory"
OPTIONS_IN_PLACE = {
    "model": ("model_name_or_path",),
    "value_model": ("value_model_name_or_path",),
    "peft_config": ("use_peft",),
    "reward_funcs": ("reward_funcs", "reward_model_name_or_path", "reward_url", "reward_adapter"),
    "train_dataset": ("dataset_name",),
    "metric_funcs": ("metric_funcs",),
    "eval_dataset": ("eval_dataset_name", "dataset_test_split", "eval_datasets"),
    "ref_model": ("reference",),
    "tools": ("tools",),
    "environment_factory": ("environments",),
    "tool_call_parser": ("tool_call_parser",),
}
"""Options that name what an argument of `PPOTrainer` may be given as an object. The others have none."""


@dataclass(frozen=True)
class Provenance:
    """What a command knows of a run beyond its `PPOConfig`.

    Attributes:
        command_line: the words of the command that this process runs, the program first.
        launcher: the command line of what started this process (torchrun, accelerate, `alpaca-ppo train` with several
            processes); None if it was started directly.
        presets: names of the presets that were read, in order.
        config_files: paths of the YAML files that were read, in order, as given.
        script: models, rewards and data.
        lora: the options of LoRA.
    """

    command_line: tuple[str, ...]
    launcher: tuple[str, ...] | None
    presets: tuple[str, ...]
    config_files: tuple[str, ...]
    script: ScriptArguments
    lora: LoraArguments

    def options(self) -> dict[str, Any]:
        """The options of `script` and `lora` by name, as a YAML file of a run holds them."""
        return {**vars(self.script), **vars(self.lora)}


def without_provenance(content: Mapping[str, Any]) -> dict[str, Any]:
    """The options in `content`, the mapping of a configuration file."""
    return {name: value for name, value in content.items() if name != PROVENANCE}


def check_run_files(
    contents: Mapping[str, Mapping[str, Any]], *, given: Mapping[str, Any], needed: Collection[str] | None = None
) -> None:
    """Checks that configuration files which are runs' own lack nothing that is not set elsewhere.

    Args:
        contents: what each file holds, by its name, in order; later ones replace the options of earlier ones.
        given: options that are set on the command line, and replace those of the files.
        needed: arguments of `PPOTrainer` that the command needs; None = all.

    Raises:
        ValueError: for a file of a run that was given objects in memory which no option replaces, and for a
            credential that was left out of the file; names them and the remedy.
    """
    replaced = set(given)
    for source, content in reversed(list(contents.items())):
        provenance = content.get(PROVENANCE)
        in_memory = provenance.get(IN_MEMORY) if isinstance(provenance, Mapping) else None
        lost: list[str] = []
        options: dict[str, None] = {}
        for name, what in in_memory.items() if isinstance(in_memory, Mapping) else ():
            # One of several reward functions is reward_funcs[1].
            argument = str(name).partition("[")[0]
            in_place = OPTIONS_IN_PLACE.get(argument, ())
            if replaced.isdisjoint(in_place) and (needed is None or argument in needed):
                lost.append(f"{name} = {what}")
                options |= {f"--{option}": None for option in in_place[:1]}
        if lost:
            remedy = f"Give {', '.join(options)}" if options else f"Delete those lines of {PROVENANCE}.{IN_MEMORY}"
            raise ValueError(
                f"--config {source} is of a run that was given objects in a Python program, which no file can bring "
                f"back: {'; '.join(lost)}. {remedy}, or run that program again"
            )
        given_here = without_provenance(content)
        if removed := [found for k in given_here if k not in replaced for found in removed_in(given_here[k], str(k))]:
            raise ValueError(
                f"--config {source} lacks a credential in {', '.join(removed)}, which a run does not write down; give "
                f"it as an option (--{removed[0].partition('.')[0]} ...), or put it into a copy of the file"
            )
        replaced |= {name for name, value in given_here.items() if value not in (None, "")}
