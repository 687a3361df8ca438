"""What supervised fine-tuning and reward modelling share: their rows, and a run of the `Trainer`."""

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
    """The tokenizer and the datasets of a `Trainer`, as its arguments. Sets in `training` what nobody need set.

    Args:
        model: the name or folder that the run starts from.
        arguments: `SFTArguments` or `RewardModelArguments`.
        training: of the `Trainer`.
        columns: that a row needs beside the prompt.
        tokenize: makes the rows of a dataset from prompts, the tokenizer and `arguments`.
        with_prompts: makes the column of prompts of the name given, where a dataset may lack it.

    Raises:
        ValueError: when the run starts from an adapter, or would overwrite a model; and as `prompts_of`.
    """
    training.disable_tqdm = training.disable_tqdm or not has_screen()
    # Its default warns on a machine without a GPU.
    training.dataloader_pin_memory = training.dataloader_pin_memory and torch.cuda.is_available()
    files = [os.path.join(str(training.output_dir), name) for name in ("config.json", "adapter_config.json")]
    problem = ""
    # transformers would load it onto its base; a new adapter would then replace it, or the base would be trained
    # without being saved.
    if is_adapter(model):
        problem = f"model_name_or_path {model!r} is an adapter; merge it into its base first (merge_and_unload)"
    elif any(map(os.path.isfile, files)) and not training.resume_from_checkpoint:
        problem = f"output_dir is {training.output_dir!r}, which holds a model; choose another folder, or delete it"
    if problem:
        raise ValueError(problem)
    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    data = {"processing_class": tokenizer}
    named = {"dataset_name": arguments.dataset_name, "config_name": arguments.dataset_config}
    for kind, split in (("eval", arguments.dataset_test_split), ("train", arguments.dataset_train_split)):
        if split:
            dataset = with_prompts(load_prompt_dataset(**named, split=split), arguments.prompt_column)
            prompts = prompts_of(dataset, tokenizer, arguments, columns)
            data[f"{kind}_dataset"] = tokenize(prompts, tokenizer, arguments)
    if training.process_index == 0:
        print(*introduction(prompts, tokenizer), sep="\n", flush=True)
    prompts.record_wording(tokenizer)
    return data


class _HeldOut(TrainerCallback):
    """Evaluates the held-out data when the training begins and ends, which moves none of its random numbers."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self.found = trainer, list[dict[str, float]]()

    def on_train_begin(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        with kept_random_states():
            self.found.append(self._trainer.evaluate())

    on_train_end = on_train_begin


def train(trainer: Trainer, next_command: str) -> None:
    """Trains and saves the model, and prints what the training has changed, where the model is, and what comes next.

    Args:
        trainer: of the run.
        next_command: its last argument is the model's folder.
    """
    limit_threads(trainer.accelerator)
    held_out, folder, began = _HeldOut(trainer), str(trainer.args.output_dir), time.perf_counter()
    if trainer.eval_dataset is not None:
        trainer.add_callback(held_out)
    with transformers_bars(shown=has_screen()):
        trained = trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
        trainer.save_model()
    if not trainer.is_world_process_zero():
        return
    # The mean of all steps is what is known of a run that ends before it logs.
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line] or [trained.training_loss]
    changed = [("training loss", losses[:1] + losses[1:][-1:])]
    if held_out.found:
        names = [key for key in ("eval_loss", "eval_accuracy") if key in held_out.found[0]]
        changed = [(key.replace("_", " "), [found[key] for found in held_out.found]) for key in names]
    print(f"done: {trainer.state.global_step} steps in {tqdm.format_interval(time.perf_counter() - began)}")
    for name, values in changed:
        print(f"  {name:13} {' -> '.join(f'{number(value):>10}' for value in values)}")
    print(f"model:       {folder}\nnext:        {next_command} {shlex.quote(folder)}")
