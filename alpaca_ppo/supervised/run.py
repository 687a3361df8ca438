"""What supervised fine-tuning and reward modelling share: the data of a `Trainer`, and its run."""

import os
import shlex
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from datasets import Dataset
from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Trainer, TrainerCallback, TrainingArguments

from alpaca_ppo.adapters.files import is_adapter
from alpaca_ppo.data import PromptDataset, PromptForm, introduction, load_prompt_dataset, prepare_prompts
from alpaca_ppo.distributed.random_states import kept_random_states
from alpaca_ppo.distributed.threads import limit_threads
from alpaca_ppo.library_output import has_screen, transformers_bars
from alpaca_ppo.tracking.console import number


def rows_that_fit(rows: Iterable[dict[str, Any]], max_length: int) -> Dataset:
    kept = [row for row in rows if row["length"] <= max_length]
    if not kept:
        raise ValueError(f"no row fits into max_length ({max_length}) tokens; raise it")
    return Dataset.from_list(kept)


def prompts_of(
    dataset: Dataset, tokenizer: PreTrainedTokenizerBase, arguments: Any, columns: Sequence[str]
) -> PromptDataset:
    """The dataset's prompts of at most `max_length` tokens, or a `ValueError` if it lacks one of `columns`."""
    if missing := [column for column in columns if column not in dataset.column_names]:
        remedy = "set completion_column to one of them" if "completion_column" in vars(arguments) else "rename some"
        raise ValueError(f"the dataset lacks {missing}; it has {dataset.column_names}; {remedy}")
    form = PromptForm.of(arguments)
    return prepare_prompts(dataset, tokenizer, query_len=arguments.max_length, form=form, limit="max_length")


def trainer_data(
    model: str,
    arguments: Any,
    training: TrainingArguments,
    columns: Sequence[str],
    tokenize: Callable[..., Dataset],
    with_prompts: Callable[[Dataset, str], Dataset] = lambda dataset, _: dataset,
) -> dict[str, Any]:
    """The tokenizer and the datasets of a `Trainer`, as keyword arguments. Sets some defaults in `training`, and prints
    what the training prompts look like.

    Args:
        arguments: `SFTArguments` or `RewardModelArguments`.
        columns: the columns that the dataset needs beside the prompt.
        tokenize: makes the rows of a dataset from prompts, the tokenizer and `arguments`.
        with_prompts: adds the column of prompts to a dataset that may lack it.

    Raises:
        ValueError: for an adapter, an `output_dir` that holds a model, or a dataset without the columns.
    """
    training.disable_tqdm = training.disable_tqdm or not has_screen()
    # True, the default, warns without a GPU.
    training.dataloader_pin_memory = training.dataloader_pin_memory and torch.cuda.is_available()
    _check_folders(model, training)
    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token

    def load(split: str) -> PromptDataset:
        dataset = load_prompt_dataset(arguments.dataset_name, config_name=arguments.dataset_config, split=split)
        return prompts_of(with_prompts(dataset, arguments.prompt_column), tokenizer, arguments, columns)

    data = {"processing_class": tokenizer}
    if arguments.dataset_test_split:
        data["eval_dataset"] = tokenize(load(arguments.dataset_test_split), tokenizer, arguments)
    prompts = load(arguments.dataset_train_split)
    data["train_dataset"] = tokenize(prompts, tokenizer, arguments)
    if training.process_index == 0:
        print(*introduction(prompts, tokenizer), sep="\n", flush=True)
    prompts.record_wording(tokenizer)
    return data


def _check_folders(model: str, training: TrainingArguments) -> None:
    # transformers would load the adapter onto its base. Then a new adapter would replace it, or the base would be
    # trained but not saved.
    if is_adapter(model):
        raise ValueError(f"model_name_or_path {model!r} is an adapter; merge it into its base first (merge_and_unload)")
    folder = str(training.output_dir)
    files = [os.path.join(folder, name) for name in ("config.json", "adapter_config.json")]
    if any(map(os.path.isfile, files)) and not training.resume_from_checkpoint:
        raise ValueError(f"output_dir is {folder!r}, which holds a model; choose another folder, or delete it")


class _HeldOut(TrainerCallback):
    """Evaluates the held-out data when the training begins and ends, without a change to its random numbers."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.metrics: list[dict[str, float]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        with kept_random_states():
            self.metrics.append(self._trainer.evaluate())

    on_train_end = on_train_begin


def train(trainer: Trainer, next_command: str) -> None:
    """Trains and saves the model, and prints losses, the folder, and `next_command` with the folder."""
    limit_threads(trainer.accelerator)
    start = time.perf_counter()
    held_out = _HeldOut(trainer)
    if trainer.eval_dataset is not None:
        trainer.add_callback(held_out)
    with transformers_bars(shown=has_screen()):
        trained = trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
        trainer.save_model()
    if not trainer.is_world_process_zero():
        return
    print(f"done: {trainer.state.global_step} steps in {tqdm.format_interval(time.perf_counter() - start)}")
    if held_out.metrics:
        names = [name for name in ("eval_loss", "eval_accuracy") if name in held_out.metrics[0]]
        results = {name.replace("_", " "): [metrics[name] for metrics in held_out.metrics] for name in names}
    else:
        # A run that ends before it logs has only the mean loss of all steps.
        losses = [line["loss"] for line in trainer.state.log_history if "loss" in line] or [trained.training_loss]
        results = {"training loss": losses if len(losses) == 1 else [losses[0], losses[-1]]}
    for name, values in results.items():
        print(f"  {name:13} {' -> '.join(f'{number(value):>10}' for value in values)}")
    folder = str(trainer.args.output_dir)
    print(f"model:       {folder}\nnext:        {next_command} {shlex.quote(folder)}")
