"""What a configuration file may hold besides options: a run's own record, `run.yaml`, which repeats the run.

It is written by `tracking.run_record`. Its mapping `provenance` says where the run came from, and is no option; of it,
only the objects that the run was given in memory are read, because a file cannot bring them back.
"""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from alpaca_ppo.config.credentials import removed_in

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
MODELS = frozenset({"model", "value_model", "peft_config"})
"""The arguments of `PPOTrainer` that decide which weights a run trains."""
MEASURED = frozenset({
    "trainer_class", "eval_dataset", "reward_funcs", "metric_funcs", "reward_processing_classes",
    "metric_processing_classes", "ref_model", "tools", "environment_factory", "tool_call_parser",
})  # fmt: skip
"""Those that decide what an evaluation of a given model measures."""
_FUNCTIONS = ("reward_funcs", "metric_funcs", "tools", "environments", "tool_call_parser")
_PATHS = (
    "model_name_or_path", "value_model_name_or_path", "reward_model_name_or_path", "reward_adapter", "reference",
    *_FUNCTIONS, "import_modules", "dataset_name", "eval_dataset_name", "deepspeed",
)  # fmt: skip
_FILES = (".py", ".json", ".jsonl", ".csv", ".parquet")


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
        ValueError: for a file of a run that was given objects in memory which no option replaces, for a credential
            that was left out of the file, and for a relative path that leads nowhere in this folder, but did in that
            of the run; names them and the remedy.
    """
    replaced = set(given)
    for source, content in reversed(list(contents.items())):
        provenance = content.get(PROVENANCE)
        in_memory = provenance.get(IN_MEMORY) if isinstance(provenance, Mapping) else None
        _check_in_memory(in_memory if isinstance(in_memory, Mapping) else {}, source, replaced, needed)
        options = without_provenance(content)
        removed = [found for key in options if key not in replaced for found in removed_in(options[key], str(key))]
        if removed:
            raise ValueError(
                f"--config {source} lacks a credential in {', '.join(removed)}, which a run does not write down; give "
                f"it as an option (--{removed[0].partition('.')[0]} ...), or put it into a copy of the file"
            )
        if isinstance(provenance, Mapping):
            _check_paths({k: v for k, v in options.items() if k not in replaced}, source, provenance.get("folder"))
        replaced |= {name for name, value in options.items() if value not in (None, "")}


def _check_paths(options: Mapping[str, Any], source: str, folder: Any) -> None:
    """Refuses relative paths that lead nowhere from here, if the run was in another `folder`."""
    if not isinstance(folder, str) or Path(folder) == Path.cwd():
        return
    gone = [
        f"{name}: {path}"
        for name, path in _relative_paths(options)
        if not Path(path).exists() and ((Path(folder) / path).exists() or path.endswith(_FILES))
    ]
    if gone:
        raise ValueError(
            f"--config {source} is of a run that was started in {folder}, from which its relative paths count, and "
            f"{Path.cwd()} has no {'; '.join(gone)}. Start the command in {folder}, or give the paths as options"
        )


def _relative_paths(options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name in _PATHS:
        value = options.get(name)
        for entry in value if isinstance(value, list) else [value]:
            path = entry
            if isinstance(entry, str) and name in _FUNCTIONS:
                path = entry.rpartition("=")[2].rpartition(":")[0]
            if isinstance(path, str) and path and not Path(path).is_absolute():
                yield name, path


def _check_in_memory(
    in_memory: Mapping[str, Any], source: str, given: Collection[str], needed: Collection[str] | None
) -> None:
    missing: dict[str, Any] = {}
    for name, what in in_memory.items():
        # One of several reward functions is reward_funcs[1].
        argument = str(name).partition("[")[0]
        replaced = any(option in given for option in OPTIONS_IN_PLACE.get(argument, ()))
        if not replaced and (needed is None or argument in needed):
            missing[str(name)] = what
    if not missing:
        return
    options = [OPTIONS_IN_PLACE.get(name.partition("[")[0], ("",))[0] for name in missing]
    remedies = (
        [f"give {', '.join(dict.fromkeys(f'--{option}' for option in options if option))}"] if any(options) else []
    )
    if without := [name for name, option in zip(missing, options, strict=True) if not option]:
        remedies.append(f"to run without {' and '.join(without)}, delete those lines from {PROVENANCE}.{IN_MEMORY}")
    raise ValueError(
        f"--config {source} is of a run that was given objects in a Python program, which no file can bring back: "
        f"{'; '.join(f'{name} = {what}' for name, what in missing.items())}. {_sentence('; '.join(remedies))}, or run "
        "that program again"
    )


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
