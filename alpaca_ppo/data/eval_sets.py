"""The eval sets that the options of a script name."""

import os
from typing import Any

from datasets import Dataset

from alpaca_ppo.data.loading import load_prompt_dataset


def load_eval_datasets(script_args: Any) -> Dataset | dict[str, Dataset] | None:
    """Returns what `PPOTrainer` takes as `eval_dataset`: one dataset, several by name, or None.

    Args:
        script_args: `ScriptArguments`.

    Raises:
        ValueError: for an entry of `eval_datasets` that is not set=dataset, a name that occurs twice, and a dataset
            that cannot be loaded.
    """
    if script_args.eval_datasets:
        found: dict[str, Dataset] = {}
        for entry in script_args.eval_datasets:
            name, _, rest = entry.partition("=")
            if not name or not rest or name in found:
                raise ValueError(
                    f"eval_datasets has {entry!r}, which is not of the form set=dataset with a new name; write "
                    "gsm8k=data/gsm8k.jsonl, gsm8k=openai/gsm8k@test or gsm8k=openai/gsm8k:main@test"
                )
            dataset, split, config = rest, "", ""
            if not os.path.exists(rest):
                dataset, _, split = rest.partition("@")
                if not os.path.exists(dataset):
                    dataset, _, config = dataset.partition(":")
            found[name] = load_prompt_dataset(dataset, split=split or None, config_name=config or None)
        return found
    split = script_args.dataset_test_split
    if script_args.eval_dataset_name:
        return load_prompt_dataset(script_args.eval_dataset_name, split=split)
    if not split:
        return None
    return load_prompt_dataset(script_args.dataset_name, split=split, config_name=script_args.dataset_config)
