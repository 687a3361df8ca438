"""Loads training and eval sets from files, folders or the hub. There is no streaming, because the schedule needs the
number of prompts.
"""

import csv
import json
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import datasets
from datasets import Dataset, DatasetDict, ReadInstruction

from alpaca_ppo.config.names import path_problem

_BUILDERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}


def load_prompt_dataset(dataset_name: str, *, split: str | None = None, config_name: str | None = None) -> Dataset:
    """Returns one split of a dataset, with all columns.

    Args:
        dataset_name: a .jsonl, .json, .csv, .tsv or .parquet file; a folder of these, or one written by `save_to_disk`;
            or a hub id.
        split: a split or a slice of it ("train", "train[:100]", "train[10%:]"); a single file or saved split is called
            "train". None takes the only split.
        config_name: the hub dataset's configuration ("main" for openai/gsm8k).

    Raises:
        ValueError: for a dataset that does not exist or is damaged, and for a split that does not exist or is not the
            only one.
    """
    try:
        splits = _load(dataset_name, config_name)
    # Damaged files raise many kinds of errors in `datasets`, pandas and pyarrow.
    except Exception as error:
        # `datasets` wraps the reason once or twice.
        cause: BaseException = error
        while cause.__cause__ is not None and not isinstance(cause, ValueError | FileNotFoundError | ConnectionError):
            cause = cause.__cause__
        reason = str(cause) if type(cause) is ValueError else f"{type(cause).__name__}: {cause}"
        raise ValueError(f"dataset_name {dataset_name!r} cannot be read: {reason}") from error
    # A format is saved with a dataset.
    return unformatted(_select_split(splits, split, dataset_name))


def load_eval_datasets(script_args: Any) -> Dataset | dict[str, Dataset] | None:
    """Returns the `eval_dataset` of `PPOTrainer` from `ScriptArguments`: one dataset, several by name, or None.

    Raises:
        ValueError: for an entry of `eval_datasets` that is not set=dataset or repeats a name, and for a dataset that
            cannot be loaded.
    """
    if script_args.eval_datasets:
        eval_datasets: dict[str, Dataset] = {}
        for entry in script_args.eval_datasets:
            name, _, source = entry.partition("=")
            if not name or not source or name in eval_datasets:
                remedy = "write set=dataset, each set once: gsm8k=openai/gsm8k:main@test"
                raise ValueError(f"eval_datasets has {entry!r}; {remedy}")
            split, config = "", ""
            # The path of a file may contain @ and :.
            if not os.path.exists(source) and "@" in source:
                source, _, split = source.rpartition("@")
            if not os.path.exists(source):
                source, _, config = source.partition(":")
            eval_datasets[name] = load_prompt_dataset(source, split=split or None, config_name=config or None)
        return eval_datasets
    split = script_args.dataset_test_split
    if script_args.eval_dataset_name:
        return load_prompt_dataset(script_args.eval_dataset_name, split=split)
    if not split:
        return None
    return load_prompt_dataset(script_args.dataset_name, split=split, config_name=script_args.dataset_config)


def unformatted(dataset: Dataset) -> Dataset:
    """`dataset` with all columns as Python's values, whatever its output format; a function that transforms rows
    stays.
    """
    return dataset if dataset.format["type"] == "custom" else dataset.with_format(None)


def columns_of(dataset: Dataset) -> list[str]:
    """The columns of the rows of `dataset`, which a function that transforms rows may make or drop."""
    return [*dataset[:1]] if dataset.format["type"] == "custom" else dataset.column_names


def _load(name: str, config_name: str | None) -> DatasetDict:
    path = Path(name)
    # Unlike Path, os.path raises no OSError for a name that no file can have.
    if os.path.isfile(name):
        if path.suffix not in _BUILDERS:
            raise ValueError(f"it has an unknown suffix; use one of {', '.join(_BUILDERS)}")
        splits = DatasetDict({"train": _read_files([path])})
    elif os.path.isdir(name):
        splits = _load_folder(path, config_name)
    elif path.suffix in _BUILDERS or path.is_absolute() or name.startswith((".", "~")):
        raise ValueError(f"it is neither a file nor a folder:{path_problem(name, what='file')}; check the path")
    else:
        return datasets.load_dataset(name, config_name)
    for rows in splits.values():
        # Else pyarrow would find text that is not UTF-8 only when the row is used.
        rows.data.validate(full=True)
    return splits


def _load_folder(path: Path, config_name: str | None) -> DatasetDict:
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        loaded = datasets.load_from_disk(str(path))
        return loaded if isinstance(loaded, DatasetDict) else DatasetDict({"train": loaded})
    builder = datasets.load_dataset_builder(str(path), config_name)
    files = {split: [Path(name) for name in names] for split, names in (builder.config.data_files or {}).items()}
    if all(file.suffix in _BUILDERS and file.is_file() for part in files.values() for file in part):
        return DatasetDict({split: _read_files(part) for split, part in files.items()})
    return datasets.load_dataset(str(path), config_name)


def _read_files(paths: Sequence[Path]) -> Dataset:
    """Returns the rows of files of one kind: JSON, CSV with commas or tabs, or Parquet."""
    kind = _BUILDERS[paths[0].suffix]
    if kind == "parquet":
        return datasets.load_dataset(kind, data_files={"train": [*map(str, paths)]}, split="train")
    # `load_dataset` would turn JSON's text that looks like a date into a timestamp, and 007 in a CSV file into 7.
    rows = [row for path in paths for row in (_json_rows(path) if kind == "json" else _csv_rows(path))]
    names = list(dict.fromkeys(name for row in rows for name in row))
    if not names:
        raise ValueError(f"{', '.join(map(str, paths))} holds no rows")
    columns = {name: [row.get(name) for row in rows] for name in names}
    if kind == "csv":
        columns = {name: _numbers(cells) for name, cells in columns.items()}
    dataset = Dataset.from_dict(columns, on_mixed_types="use_json")
    # `datasets` turns True among numbers into 1.0, and rounds numbers among other types.
    for name in names:
        if not _equal(dataset[name][:], columns[name]):
            raise ValueError(f"column {name!r} has values of different types that cannot be kept; write it as text")
    return dataset


def _json_rows(path: Path) -> list[dict[str, Any]]:
    """Returns the objects of one file: an array, one per line, or a single one over many lines."""
    text = path.read_text("utf-8-sig")
    if text.lstrip().startswith("["):
        rows = [(f"{path} entry {number}", row) for number, row in enumerate(_parse(text, str(path)))]
    else:
        try:
            rows = [(str(path), json.loads(text))]
        except ValueError:
            lines = [(f"{path} line {number}", line) for number, line in enumerate(text.split("\n"), 1)]
            rows = [(place, _parse(line, place)) for place, line in lines if line.strip()]
    for place, row in rows:
        if not isinstance(row, dict):
            raise ValueError(f"{place} is a {type(row).__name__}; every row must be a JSON object")
    return [row for _, row in rows]


def _parse(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{place} is not valid JSON: {error}") from error


def _equal(a: Any, b: Any) -> bool:
    """Whether JSON values are equal, where NaN equals itself and True is not 1."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(entry, b[key]) for key, entry in a.items())
    return (a == b or a != a and b != b) and isinstance(a, bool) == isinstance(b, bool)


def _csv_rows(path: Path) -> list[dict[str, str | None]]:
    """Returns the rows of one file as text; an empty cell is None."""
    # By default, the module refuses cells of more than 131,072 characters.
    csv.field_size_limit(2**31 - 1)
    found, delimiter = [], "\t" if path.suffix == ".tsv" else ","
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            rows = csv.reader(file, delimiter=delimiter, strict=True)
            columns = next(filter(None, rows), [])
            if repeated := [name for name in columns if columns.count(name) > 1]:
                raise ValueError(f"{path} has several columns {repeated[0]!r}; rename them")
            for cells in filter(None, rows):
                if (n := len(cells)) != len(columns):
                    raise ValueError(f"line {rows.line_num} has {n} cells, but there are {len(columns)} columns")
                found.append({name: cell or None for name, cell in zip(columns, cells, strict=True)})
    except csv.Error as error:
        # The reader knows only where it has stopped. This matches the cells before.
        before = rf'(?:(?:"(?:[^"]|"")*+"|(?!")[^{delimiter}\n]*+)[{delimiter}\n])*+'
        line = next(re.finditer(before, path.read_text("utf-8-sig")))[0].count("\n") + 1
        raise ValueError(f"the quoted cell that begins in {path} line {line} has no end ({error}); close it") from error
    return found


def _numbers(cells: list[str | None]) -> list[Any]:
    """Returns the numbers in `cells`, or the cells if one holds something else or would be written differently."""
    with suppress(ValueError, RecursionError):
        values = [cell if cell is None else json.loads(cell) for cell in cells]
        are_numbers = all(type(value) in (int, float) and abs(value) < 2**63 for value in values if value is not None)
        if are_numbers and [value if value is None else str(value) for value in values] == cells:
            return values
    return cells


def _select_split(splits: DatasetDict, split: str | None, dataset_name: str) -> Dataset:
    """Returns the split or slice `split`; None = the only split."""
    names = [*map(str, splits)]
    if split is None and len(splits) > 1:
        raise ValueError(f"dataset {dataset_name!r} has the splits {names}; set the split to one of them")
    # A saved dataset may have split names that `ReadInstruction` cannot parse.
    if split is None or split in splits:
        return splits[split or names[0]]
    try:
        parts = ReadInstruction.from_spec(split).to_absolute({name: len(rows) for name, rows in splits.items()})
    # `datasets` raises ValueError, AssertionError and others.
    except Exception as error:
        raise ValueError(f"dataset {dataset_name!r} has no split {split!r}; use one of {names} ({error})") from error
    return datasets.concatenate_datasets([splits[part.splitname].select(range(part.from_, part.to)) for part in parts])
