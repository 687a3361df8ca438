"""What supervised fine-tuning and reward modelling share: their rows, and a run of the `Trainer`."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, Trainer, TrainingArguments

from alpaca_ppo.adapters.files import check_whole_model
from alpaca_ppo.config.names import model_folder
from alpaca_ppo.data import load_prompt_dataset
from alpaca_ppo.library_output import has_screen, transformers_bars


def rows_that_fit(rows: Iterable[dict[str, Any]], max_length: int) -> Dataset:
    """The rows whose `length` is at most `max_length`.

    Raises:
        ValueError: when there is none.
    """
    kept = [row for row in rows if row["length"] <= max_length]
    if not kept:
        raise ValueError(f"no row fits into max_length ({max_length}) tokens; raise it")
    return Dataset.from_list(kept)


def trainer_data(arguments: Any, training: TrainingArguments, tokenize: Callable[..., Dataset]) -> dict[str, Any]:
    """The tokenizer and the datasets of a `Trainer`, as its arguments; `tokenize` makes the rows. Sets in `training`
    what nobody need set.
    """
    training.disable_tqdm = training.disable_tqdm or not has_screen()
    # Its default warns on a machine without a GPU.
    training.dataloader_pin_memory = training.dataloader_pin_memory and torch.cuda.is_available()
    arguments.model_name_or_path = model_folder("model_name_or_path", arguments.model_name_or_path)
    check_whole_model("model_name_or_path", arguments.model_name_or_path)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model_name_or_path, trust_remote_code=False)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    data = {"processing_class": tokenizer}
    named = {"dataset_name": arguments.dataset_name, "config_name": arguments.dataset_config}
    for kind, split in (("train", arguments.dataset_train_split), ("eval", arguments.dataset_test_split)):
        if split:
            data[f"{kind}_dataset"] = tokenize(load_prompt_dataset(**named, split=split), tokenizer, arguments)
    return data


def train(trainer: Trainer) -> None:
    """Trains, and writes the model to the run's `output_dir`."""
    with transformers_bars(shown=has_screen()):
        trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
        trainer.save_model()
