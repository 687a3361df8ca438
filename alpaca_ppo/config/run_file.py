"""A run's own record, `run.yaml`, as a configuration file, which repeats the run. `tracking.run_record` writes it.

Its mapping `provenance` is no option. Of it, only the list of objects that the run got in memory is read, because a
file cannot bring them back.
"""

from collections.abc import Collection, Mapping
from typing import Any

import yaml

from alpaca_ppo.config.credentials import REMOVED

PROVENANCE = "provenance"
IN_MEMORY = "in_memory"
OPTIONS_OF_ARGUMENT = {
    "model": ("model_name_or_path",),
    "value_model": ("value_model_name_or_path",),
    "ref_model": ("reference",),
    "peft_config": ("use_peft", "lora_r", "lora_alpha", "lora_target_modules"),
    "reward_funcs": ("reward_funcs", "reward_model_name_or_path", "reward_url", "reward_adapter"),
    "metric_funcs": ("metric_funcs",),
    "train_dataset": ("dataset_name", "dataset_config", "dataset_train_split"),
    "eval_dataset": ("eval_dataset_name", "dataset_test_split", "eval_datasets"),
    "tools": ("tools",),
    "environment_factory": ("environments",),
    "tool_call_parser": ("tool_call_parser",),
}
"""For each argument of `PPOTrainer`, the options that stand for it; errors propose the first."""
# For each object that a run had in memory, likewise. `reference` is the `model` where the KL is measured to it.
_OPTIONS_OF_OBJECT = OPTIONS_OF_ARGUMENT | {"reference": ("model_name_or_path", "reference")}


def check_run_files(
    contents: Mapping[str, Mapping[str, Any]], *, given: Mapping[str, Any], needed: Collection[str] | None = None
) -> None:
    """Checks that no file is the record of a run with objects or credentials that it cannot hold, unless options that
    are set later replace them.

    Args:
        contents: the mapping in each file; later files replace the options of earlier ones.
        given: the options on the command line, which replace those of the files.
        needed: the arguments of `PPOTrainer` that the command needs; None = all.
    """
    replaced = set(given)
    for source, content in reversed(list(contents.items())):
        lost: list[str] = []
        flags: dict[str, None] = {}
        for name, what in ((content.get(PROVENANCE) or {}).get(IN_MEMORY) or {}).items():
            # One of several reward functions is reward_funcs[1].
            argument = name.partition("[")[0]
            options = _OPTIONS_OF_OBJECT.get(argument, ())
            if replaced.isdisjoint(options) and (needed is None or argument in needed):
                lost.append(f"{name} = {what}")
                if options:
                    flags[f"--{options[0]}"] = None
        if lost:
            remedy = f"Give {', '.join(flags)}" if flags else f"Delete those lines of {PROVENANCE}.{IN_MEMORY}"
            problem = "is of a run that was given objects in a Python program, which no file can bring back"
            raise ValueError(f"--config {source} {problem}: {'; '.join(lost)}. {remedy}, or run that program again")
        values = {name: value for name, value in content.items() if name != PROVENANCE}
        # As YAML, where a value that aliases repeat many times stands once.
        texts = {name: yaml.safe_dump(value, width=1e9) for name, value in values.items() if name not in replaced}
        if removed := [name for name, text in texts.items() if REMOVED in text]:
            problem = f"lacks a credential in {', '.join(removed)}, which a run does not write down"
            raise ValueError(f"--config {source} {problem}; give it as an option (--{removed[0]} ...)")
        replaced |= {name for name, value in values.items() if value not in (None, "")}
