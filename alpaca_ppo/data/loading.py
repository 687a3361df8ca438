"""Loading a dataset of prompts by name: a file, a folder, or a hub id.

Streaming is not supported, because the schedule needs the number of prompts.
"""

from pathlib import Path

import datasets
from datasets import Dataset, DatasetDict, ReadInstruction

_BUILDERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}


def load_prompt_dataset(dataset_name: str, *, split: str | None = None, config_name: str | None = None) -> Dataset:
    """Returns one split of a dataset, with all columns.

    Args:
        dataset_name: a .jsonl, .json, .csv, .tsv or .parquet file; a folder of such files, or one written by
            `save_to_disk`; or a hub id.
        split: a split or a slice of it ("train", "train[:100]", "train[10%:]"). A single file or saved split is called
            "train". None takes the only split.
        config_name: the hub dataset's configuration ("main" for openai/gsm8k).

    Raises:
        ValueError: if no dataset has this name, the split does not exist, or `split` is None and there are several.
    """
    path = Path(dataset_name)
    if path.is_dir() and ((path / "dataset_dict.json").is_file() or (path / "state.json").is_file()):
        loaded = datasets.load_from_disk(dataset_name)
        splits = loaded if isinstance(loaded, DatasetDict) else DatasetDict({"train": loaded})
        return _select_split(splits, split, dataset_name)
    if path.is_file():
        if path.suffix not in _BUILDERS:
            raise ValueError(f"dataset_name {dataset_name!r} has an unknown suffix; use one of {', '.join(_BUILDERS)}")
        options = {"sep": "\t"} if path.suffix == ".tsv" else {}
        splits = datasets.load_dataset(_BUILDERS[path.suffix], data_files={"train": str(path)}, **options)
        return _select_split(splits, split, dataset_name)
    if not path.is_dir() and (path.suffix in _BUILDERS or path.is_absolute() or dataset_name.startswith((".", "~"))):
        raise ValueError(
            f"dataset_name {dataset_name!r} is neither a file nor a folder in {Path.cwd()}; check the path"
        )
    try:
        splits = datasets.load_dataset(dataset_name, config_name)
    # Raised for a folder without data files, an id that is not on the hub, and without a connection.
    except (FileNotFoundError, ConnectionError) as error:
        raise ValueError(
            f"dataset_name {dataset_name!r} is not a folder with data files, and was not found on the hub ({error}); "
            "check the name, or the connection"
        ) from error
    return _select_split(splits, split, dataset_name)


def _select_split(splits: DatasetDict, split: str | None, dataset_name: str) -> Dataset:
    if split is None:
        if len(splits) > 1:
            raise ValueError(f"dataset {dataset_name!r} has the splits {list(splits)}; set the split to one of them")
        return next(iter(splits.values()))
    if split in splits:
        return splits[split]
    try:
        parts = ReadInstruction.from_spec(split).to_absolute({name: len(rows) for name, rows in splits.items()})
    except (ValueError, AssertionError) as error:
        raise ValueError(
            f"dataset {dataset_name!r} has no split {split!r}; use one of {list(splits)} ({error})"
        ) from error
    selected = [splits[part.splitname].select(range(part.from_, part.to)) for part in parts]
    return datasets.concatenate_datasets(selected)
