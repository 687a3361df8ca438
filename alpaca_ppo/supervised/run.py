"""What supervised fine-tuning and reward modelling share: their rows, and a run of the `Trainer`."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Trainer, TrainingArguments

from alpaca_ppo.adapters.files import check_whole_model
from alpaca_ppo.config.names import model_folder
from alpaca_ppo.data import PromptDataset, PromptForm, introduction, load_prompt_dataset, prepare_prompts
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


def prompts_of(
    dataset: Dataset, tokenizer: PreTrainedTokenizerBase, arguments: Any, columns: Sequence[str]
) -> PromptDataset:
    """The dataset's prompts that leave room in `max_length`; their rows have `columns`.

    Raises:
        ValueError: when a column is missing, and as `prepare_prompts`.
    """
    if missing := [column for column in columns if column not in dataset.column_names]:
        raise ValueError(f"the dataset lacks {missing}; it has {dataset.column_names}; rename its columns")
    form = PromptForm.of(arguments)
    return prepare_prompts(dataset, tokenizer, query_len=arguments.max_length, form=form, limit="max_length")


def trainer_data(
    arguments: Any, training: TrainingArguments, columns: Sequence[str], tokenize: Callable[..., Dataset]
) -> dict[str, Any]:
    """The tokenizer and the datasets of a `Trainer`, as its arguments. Sets in `training` what nobody need set.

    Args:
        arguments: `SFTArguments` or `RewardModelArguments`.
        training: of the `Trainer`.
        columns: that a row needs beside the prompt.
        tokenize: makes the rows of a dataset from prompts, the tokenizer and `arguments`.
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
    for kind, split in (("eval", arguments.dataset_test_split), ("train", arguments.dataset_train_split)):
        if split:
            prompts = prompts_of(load_prompt_dataset(**named, split=split), tokenizer, arguments, columns)
            data[f"{kind}_dataset"] = tokenize(prompts, tokenizer, arguments)
    if training.process_index == 0:
        print(*introduction(prompts, tokenizer), sep="\n", flush=True)
    prompts.record_wording(tokenizer)
    return data


def train(trainer: Trainer) -> None:
    """Trains, and writes the model to the run's `output_dir`."""
    with transformers_bars(shown=has_screen()):
        trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
        trainer.save_model()
