"""The command line: `parse_args` reads a YAML file and flags into dataclasses, `ScriptArguments` is train_ppo.py's."""

import argparse
import dataclasses
import re
import sys
import types
import typing
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from peft import LoraConfig
from transformers import HfArgumentParser

from alpaca_ppo.validation import REFERENCES, RIVALS, argument, check_types, members


@dataclass(frozen=True)
class ScriptArguments:
    """What `examples/train_ppo.py` loads: models, rewards and data.

    Raises:
        ValueError: when a required name is missing, a reward function's has not the form of one, or
            `eval_dataset_config` has no dataset.
    """

    model_name_or_path: str = argument("", "Policy to start from: a hub id or a folder.")
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
    eval_dataset_config: str | None = argument(None, "Configuration of eval_dataset_name on the hub.")
    dataset_test_split: str | None = argument(
        None, "Split to evaluate on; null = none, or the only one of eval_dataset_name."
    )
    resume_from_checkpoint: str | None = argument(None, "A checkpoint folder, or true for the newest of output_dir.")

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("model_name_or_path", "dataset_name"):
            if not getattr(self, name):
                raise ValueError(f"{name} is not set; give --{name} or put it in the --config file")
        for spec in self.reward_funcs or []:
            if not spec.rpartition(":")[0] or not spec.rpartition(":")[2].isidentifier():
                raise ValueError(
                    f"reward_funcs holds {spec!r}, which names no function: write module:function or file.py:function; "
                    "a model goes to reward_model_name_or_path"
                )
        if self.eval_dataset_config and not self.eval_dataset_name:
            raise ValueError(
                f"eval_dataset_config is {self.eval_dataset_config!r} but eval_dataset_name is not set; name it, or "
                "leave the former out: dataset_test_split is read with dataset_config"
            )

    def check_names(self, args: Any) -> None:
        """Checks that there is a reward, and that each model's name is a folder, or may be a hub id; whether the hub
        has it shows on loading.

        Args:
            args: the run's `PPOConfig`, which names a reference and a reward adapter.

        Raises:
            ValueError: when there is no reward; else naming the field, its value and the folder that relative paths
                count from.
        """
        if not self.reward_model_name_or_path and not self.reward_funcs and not args.reward_adapter:
            raise ValueError(
                "no reward: give --reward_model_name_or_path, --reward_funcs module:function, --reward_adapter, or "
                "several of them"
            )
        _check_model_name("reference", None if args.reference in REFERENCES else args.reference)
        _check_model_name("reward_adapter", args.reward_adapter)
        for name in ("model_name_or_path", "value_model_name_or_path"):
            _check_model_name(name, getattr(self, name))
        for source in self.reward_model_name_or_path or []:
            _check_model_name("reward_model_name_or_path", source)


@dataclass(frozen=True)
class LoraArguments:
    """LoRA instead of training every weight (arXiv:2106.09685), for train_ppo.py and train_reward_model.py.

    Raises:
        ValueError: for a value out of range, or an option of LoRA without use_peft.
    """

    use_peft: bool = argument(False, "Freeze the base and train LoRA adapters on it.")
    lora_r: int = argument(16, "Rank of the adapters.")
    lora_alpha: int = argument(32, "Scale of the adapters, over the rank.")
    lora_target_modules: list[str] | None = argument(None, "Names of the layers; null = every linear layer.")
    lora_modules_to_save: list[str] | None = argument(None, "Layers that are trained whole, beside the adapters.")
    use_rslora: bool = argument(False, "Scale by the rank's square root (arXiv:2312.03732).")
    use_dora: bool = argument(False, "Train magnitudes apart from directions (arXiv:2402.09353).")

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("lora_r", "lora_alpha"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for field in dataclasses.fields(self)[1:]:
            if not self.use_peft and (value := getattr(self, field.name)) != field.default:
                raise ValueError(f"{field.name} is {value!r} but use_peft is False; set use_peft, or leave it out")

    def peft_config(self, task_type: str) -> Any:
        """The `peft.LoraConfig` of these arguments for `task_type` (CAUSAL_LM or SEQ_CLS), or None without LoRA.

        Dropout is off, as everywhere in PPO.
        """
        if not self.use_peft:
            return None
        return LoraConfig(
            task_type=task_type,
            r=self.lora_r,
            lora_alpha=self.lora_alpha,
            target_modules=self.lora_target_modules or "all-linear",
            modules_to_save=self.lora_modules_to_save,
            use_rslora=self.use_rslora,
            use_dora=self.use_dora,
        )


def _check_model_name(field: str, name: str | None) -> None:
    if name is not None and not Path(name).is_dir() and not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", name):
        raise ValueError(
            f"{field} is {name!r}, no folder (seen from {Path.cwd()}) and no hub id (name or owner/name); check it"
        )


def parse_args(dataclass_types: Sequence[type], argv: Sequence[str] | None = None) -> tuple[Any, ...]:
    """One instance of each dataclass in `dataclass_types`, from `--config run.yaml` and flags; a flag wins over the
    file, and over the file's rival of it (`validation.RIVALS`).

    A flag of a field that may be None takes `null` or `none` for it.

    Args:
        dataclass_types: dataclasses with distinct field names.
        argv: the command line without the program's name; `sys.argv[1:]` by default.

    Raises:
        ValueError: when the file is missing, is no mapping, or has a key that no dataclass has; for a flag that none
            has; and what the dataclasses raise.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    arguments = [part for text in arguments for part in text.split("=", 1 if text.startswith("--config=") else 0)]
    given: dict[str, Any] = {}
    if "--config" in arguments:
        at = arguments.index("--config")
        if at + 1 == len(arguments):
            raise ValueError("--config names no file; give the path of a YAML file")
        given = read_yaml(arguments[at + 1])
        del arguments[at : at + 2]
    fields = {cls: [field.name for field in dataclasses.fields(cls) if field.init] for cls in dataclass_types}
    hints = {name: hint for cls in fields for name, hint in typing.get_type_hints(cls).items() if name in fields[cls]}
    unknown = sorted(set(given) - set(hints))
    if unknown:
        raise ValueError(
            f"unknown keys in the --config file: {', '.join(unknown)}; known are {', '.join(sorted(hints))}"
        )
    values = {name: _as_declared(name, hints[name], value) for name, value in given.items()}
    flags = _read_flags(dataclass_types, hints, arguments)
    for rivals in RIVALS:
        if any(flags.get(name) is not None for name in rivals):
            values |= dict.fromkeys(set(rivals) & set(values))
    values |= flags
    return tuple(cls(**{name: values[name] for name in names if name in values}) for cls, names in fields.items())


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


def _as_declared(name: str, hint: Any, value: Any) -> Any:
    """YAML reads 1e-5 as text: brings it to the number that `hint` declares, and a single value to a list."""
    kinds = [kind for kind in members(hint) if kind is not type(None)]
    if len(kinds) == 1 and typing.get_origin(kinds[0]) is list and value is not None:
        entry = typing.get_args(kinds[0])[0]
        return [_as_declared(name, entry, part) for part in (value if isinstance(value, list) else [value])]
    number = float if float in kinds else int if int in kinds else None
    if not isinstance(value, str) or number is None or str in kinds:
        return value
    try:
        return number(value)
    except ValueError as error:
        raise ValueError(f"{name} is {value!r} in the --config file; it must be {number.__name__}") from error


class _FlagParser(HfArgumentParser):
    """HfArgumentParser that reads `null` and `none` as None for the fields in `nullable`, and the union `str | int`:
    digits are a number.
    """

    def __init__(self, dataclass_types: Sequence[type], *, nullable: Set[str]) -> None:
        # The base class adds all arguments as it is built.
        self.nullable = nullable
        super().__init__(list(dataclass_types), allow_abbrev=False)  # type: ignore[arg-type]

    def add_argument(self, *names: Any, **options: Any) -> Any:
        convert = options.get("type")
        if isinstance(convert, types.UnionType):
            convert = options["type"] = _number_or_text
        if convert is not None and names[0].removeprefix("--") in self.nullable:
            options["type"] = _or_null(convert)
        return super().add_argument(*names, **options)


def _number_or_text(text: str) -> int | str:
    return int(text) if text.isascii() and text.isdigit() else text


def _or_null(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        return None if text.lower() in ("null", "none") else convert(text)

    # argparse says "invalid <name> value".
    read.__name__ = convert.__name__
    return read


def _read_flags(dataclass_types: Sequence[type], hints: dict[str, Any], arguments: list[str]) -> dict[str, Any]:
    """The fields that the command line names, without anyone's defaults."""
    # Fields of three kinds are left alone: the `none` of TrainingArguments.report_to is a word of its own.
    nullable = {name for name, hint in hints.items() if type(None) in members(hint) and len(members(hint)) == 2}
    absent = object()
    parsed, unused = _FlagParser(dataclass_types, nullable=nullable).parse_known_args(
        arguments, argparse.Namespace(**dict.fromkeys(hints, absent))
    )
    if unused:
        raise ValueError(f"no argument takes {' '.join(unused)!r} of the command line; --help lists the arguments")
    return {name: None if value == [None] else value for name, value in vars(parsed).items() if value is not absent}
