"""The command line: `parse_args` reads a YAML file and flags into dataclasses, `ScriptArguments` is train_ppo.py's."""

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from transformers import HfArgumentParser

from alpaca_ppo.validation import argument, check_types


@dataclass(frozen=True)
class ScriptArguments:
    """What `examples/train_ppo.py` loads: models, rewards and data.

    Raises:
        ValueError: when a required name is missing.
    """

    model_name_or_path: str = argument("", "Policy to start from: a hub id or a folder.")
    ref_model_name_or_path: str | None = argument(None, "Reference policy; a frozen copy of the policy by default.")
    value_model_name_or_path: str | None = argument(
        None, "Critic to start from (a sequence classifier with one label)."
    )
    reward_model_name_or_path: list[str] | None = argument(None, "Reward models (sequence classifiers with one label).")
    reward_funcs: list[str] | None = argument(None, "Reward functions, module:function or file.py:function.")
    dataset_name: str = argument("", "Prompts: a hub id, a folder, or a jsonl, csv or parquet file.")
    dataset_config: str | None = argument(None, "Configuration of a hub dataset.")
    dataset_train_split: str = argument("train", "Split to train on.")
    eval_dataset_name: str | None = argument(
        None, "Held-out prompts in a dataset of their own; else dataset_test_split of dataset_name."
    )
    dataset_test_split: str | None = argument(
        None, "Split to evaluate on; null = none, or the only one of eval_dataset_name."
    )
    trust_remote_code: bool = argument(False, "Run code that comes with a model.")
    resume_from_checkpoint: str | None = argument(None, "A checkpoint folder, or true for the newest of output_dir.")

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("model_name_or_path", "dataset_name"):
            if not getattr(self, name):
                raise ValueError(f"{name} is not set; give --{name} or put it in the --config file")
        if not self.reward_model_name_or_path and not self.reward_funcs:
            raise ValueError("no reward: give --reward_model_name_or_path, --reward_funcs module:function, or both")


def parse_args(types: Sequence[type], argv: Sequence[str] | None = None) -> tuple[Any, ...]:
    """One instance of each dataclass in `types`, from `--config run.yaml` and flags; a flag wins over the file.

    Args:
        types: dataclasses with distinct field names.
        argv: the command line without the program's name; `sys.argv[1:]` by default.

    Raises:
        ValueError: when the file is missing, is no mapping, or has a key that none of `types` has; and what the
            dataclasses raise.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    arguments = [part for text in arguments for part in text.split("=", 1 if text.startswith("--config=") else 0)]
    parser = HfArgumentParser(list(types), allow_abbrev=False)  # type: ignore[arg-type]
    given: dict[str, Any] = {}
    if "--config" in arguments:
        at = arguments.index("--config")
        if at + 1 == len(arguments):
            raise ValueError("--config names no file; give the path of a YAML file")
        given = read_yaml(arguments[at + 1])
        del arguments[at : at + 2]
    known = {f.name: f for cls in types for f in dataclasses.fields(cls)}
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ValueError(
            f"unknown keys in the --config file: {', '.join(unknown)}; known are {', '.join(sorted(known))}"
        )
    parser.set_defaults(**{key: _as_declared(known[key], value) for key, value in given.items()})
    parsed: tuple[Any, ...] = tuple(parser.parse_args_into_dataclasses(arguments, look_for_args_file=False))
    return parsed


def read_yaml(path: str) -> dict[str, Any]:
    """The mapping that the YAML file at `path` holds.

    Raises:
        ValueError: when there is no such file or it holds something else.
    """
    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.safe_load(file)
    except FileNotFoundError as error:
        raise ValueError(f"--config {path}: there is no such file") from error
    if not isinstance(content, dict):
        raise ValueError(f"--config {path} holds {type(content).__name__}; it must map argument names to values")
    return content


def _as_declared(field: "dataclasses.Field[Any]", value: Any) -> Any:
    """YAML reads 1e-5 as text: brings it to the number that the field declares, and a single value to a list."""
    declared = str(field.type).removeprefix("<class '").removesuffix("'>")
    if isinstance(value, str) and ("int" in declared or "float" in declared) and "str" not in declared:
        try:
            return float(value) if "float" in declared else int(value)
        except ValueError as error:
            # argparse would convert it too, but end the program with its usage text.
            raise ValueError(f"{field.name} is {value!r} in the --config file; it must be {declared}") from error
    if "list" in declared and value is not None and not isinstance(value, list):
        return [value]
    return value
