"""What supervised fine-tuning and reward modelling share: the data of a `Trainer`, and its run."""

import os
import shlex
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset
from peft import get_peft_model
from tqdm import tqdm
from transformers import (
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from alpaca_ppo.adapters.checks import UnreachedAdapters, inject_adapter
from alpaca_ppo.adapters.files import CLASSIFIER_HEADS, is_adapter
from alpaca_ppo.config.checks import without_nulls
from alpaca_ppo.config.script_arguments import LoraArguments
from alpaca_ppo.data import PromptDataset, PromptForm, introduction, load_prompt_dataset, prepare_prompts
from alpaca_ppo.data.prompts import well_formed_messages
from alpaca_ppo.distributed.random_states import kept_random_states
from alpaca_ppo.distributed.threads import limit_threads
from alpaca_ppo.library_output import has_screen, say, transformers_bars
from alpaca_ppo.tracking.console import number


def with_adapter(model: PreTrainedModel, lora: LoraArguments, task_type: str) -> Any:
    """The model to train: `model`, or a new adapter on it. Beside an adapter, the head of a classifier is trained too,
    in float32 whatever the type of the base.
    """
    config = lora.peft_config(task_type)
    if config is None:
        return model
    for name, head in model.named_children():
        if name in CLASSIFIER_HEADS:
            head.float().register_forward_pre_hook(lambda _, states: (states[0].float(),))
    return inject_adapter(get_peft_model, model, config)


def rows_that_fit(rows: Iterable[dict[str, Any]], max_length: int) -> Dataset:
    kept = [row for row in rows if row["length"] <= max_length]
    if not kept:
        raise ValueError(f"no row fits into max_length ({max_length}) tokens; raise it")
    return Dataset.from_list(kept)


def split_conversations(
    dataset: Dataset, columns: Sequence[str], prompt_column: str, prompt_length: Callable[..., int]
) -> Dataset:
    """The dataset; where the `columns` of a row hold whole conversations, their first messages move to `prompt_column`,
    as many as `prompt_length` returns for these conversations. Raises ValueError if only some of them are whole.
    """

    def is_whole(messages: Any) -> bool:
        return well_formed_messages(without_nulls(messages)) and messages[0]["role"] != "assistant"

    def split(number: int, row: dict[str, Any]) -> dict[str, Any]:
        whole = [is_whole(row[column]) for column in columns]
        if not any(whole):
            return {prompt_column: None, **row}
        if not all(whole):
            raise ValueError(f"row {number}: one of {columns} begins with the prompt, one does not; write it in all")
        length = prompt_length(*(without_nulls(row[column]) for column in columns))
        return {**row, prompt_column: row[columns[0]][:length], **{name: row[name][length:] for name in columns}}

    if {*columns} <= {*dataset.column_names} and any(is_whole(row[name]) for row in dataset for name in columns):
        return Dataset.from_list([split(*numbered) for numbered in enumerate(dataset)], on_mixed_types="use_json")
    return dataset


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
    with_prompts: Callable[..., Dataset],
) -> tuple[dict[str, Any], dict[str, float]]:
    """The tokenizer and the datasets of a `Trainer`, as keyword arguments, and how many rows they have and how many
    were dropped. Sets some defaults in `training`, prints what the training prompts look like, and seeds the random
    generators for the model that is made next.

    Args:
        arguments: `SFTArguments` or `RewardModelArguments`.
        columns: the columns that the dataset needs beside the prompt.
        tokenize: makes the rows of a dataset from prompts, the tokenizer and `arguments`.
        with_prompts: adds the column of prompts to a dataset that may lack it; gets the dataset, the column's name, and
            those of `columns` that an option names.

    Raises:
        ValueError: for an adapter, an `output_dir` that holds a model, or a dataset without the columns.
    """
    training.disable_tqdm = training.disable_tqdm or not has_screen()
    # True, the default, warns without a GPU.
    training.dataloader_pin_memory = training.dataloader_pin_memory and torch.cuda.is_available()
    # transformers would load the adapter onto its base. Then a new adapter would replace it, or the base would be
    # trained but not saved.
    if is_adapter(model):
        raise ValueError(f"model_name_or_path {model!r} is an adapter; merge it into its base first (merge_and_unload)")
    folder = str(training.output_dir)
    files = [os.path.join(folder, name) for name in ("config.json", "adapter_config.json")]
    if any(map(os.path.isfile, files)) and not training.resume_from_checkpoint:
        raise ValueError(f"output_dir is {folder!r}, which holds a model; choose another folder, or delete it")
    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    chosen = columns if "completion_column" in vars(arguments) else ()
    data, counts = {"processing_class": tokenizer}, dict[str, float]()

    def load(kind: str, split: str) -> PromptDataset:
        dataset = load_prompt_dataset(arguments.dataset_name, config_name=arguments.dataset_config, split=split)
        dataset = with_prompts(dataset, arguments.prompt_column, *chosen)
        prompts = prompts_of(dataset, tokenizer, arguments, columns)
        rows = data[f"{kind}_dataset"] = tokenize(prompts, tokenizer, arguments)
        lost, most = len(dataset) - len(rows), arguments.max_length
        PartialState().print(f"{kind} data: {len(rows)} rows ({lost} longer than max_length, {most}, are dropped)")
        counts.update({f"{kind}_rows": len(rows), f"{kind}_rows_dropped": lost})
        return prompts

    if arguments.dataset_test_split:
        load("eval", arguments.dataset_test_split)
    prompts = load("train", arguments.dataset_train_split)
    PartialState().print(*introduction(prompts, tokenizer), sep="\n", flush=True)
    prompts.record_wording(tokenizer)
    # The trainer would seed after a head and an adapter are initialized.
    set_seed(training.seed)
    return data, counts


class _HeldOut(TrainerCallback):
    """Evaluates the held-out data when the training begins and ends, without a change to its random numbers."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.metrics: list[dict[str, float]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        with kept_random_states():
            self.metrics.append(self._trainer.evaluate())

    on_train_end = on_train_begin


def train(trainer: Trainer, counts: dict[str, float], next_command: str) -> None:
    """Trains and saves the model, with train_results.json, which also holds `counts`; and prints losses, the folder,
    and `next_command` with the folder.
    """
    limit_threads(trainer.accelerator)
    trainer.add_callback(UnreachedAdapters(trainer.model, say))
    start = time.perf_counter()
    held_out = _HeldOut(trainer)
    if trainer.eval_dataset is not None:
        trainer.add_callback(held_out)
    with transformers_bars(shown=has_screen()):
        trained = trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
        trainer.save_model()
        trainer.save_metrics("train", {**trained.metrics, **counts})
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
