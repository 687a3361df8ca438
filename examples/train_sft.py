"""Supervised fine-tuning of a causal language model on prompts and completions; the loss is on the completions only.

    python examples/train_sft.py --model_name_or_path Qwen/Qwen3-0.6B --dataset_name tatsu-lab/alpaca \
        --prompt_template alpaca --completion_column output --output_dir outputs/sft --learning_rate 1e-5

Every argument of `transformers.TrainingArguments` is a flag too, and `--config run.yaml` reads them from a file. The
output folder is a model folder with its tokenizer, ready for `train_reward_model.py` and `train_ppo.py`, which prepare
prompts by the same code. Packing of several examples into one row is left out: `--train_sampling_strategy
group_by_length` keeps padding small.
"""

import alpaca_ppo  # noqa: F401  before torch: it sets how threads wait

# isort: split
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset
from transformers import AutoTokenizer, DataCollatorForSeq2Seq, PreTrainedTokenizerBase, Trainer, TrainingArguments

from alpaca_ppo.adapters import check_whole_model
from alpaca_ppo.config.parser import parse_args
from alpaca_ppo.data import load_prompt_dataset, prepare_prompts
from alpaca_ppo.generation import resolve_turn_end
from alpaca_ppo.models import load_causal_lm

IGNORED = -100


@dataclass(frozen=True)
class SFTArguments:
    """Which model learns from which demonstrations.

    Raises:
        ValueError: when the model or the dataset is not named, or `max_length` leaves no room.
    """

    model_name_or_path: str = field(default="", metadata={"help": "Causal language model: a hub id or a folder."})
    dataset_name: str = field(default="", metadata={"help": "Demonstrations: a hub id, a folder, or a data file."})
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of a hub dataset."})
    dataset_train_split: str = field(default="train", metadata={"help": "Split to train on."})
    dataset_test_split: str | None = field(default=None, metadata={"help": "Split for --eval_strategy."})
    prompt_column: str = field(default="prompt", metadata={"help": "Column of the prompt: text or messages."})
    prompt_template: str | None = field(default=None, metadata={"help": "Named template or format string instead."})
    completion_column: str = field(default="completion", metadata={"help": "Column of the text to learn."})
    max_length: int = field(
        default=1024, metadata={"help": "Tokens of prompt and completion; longer rows are dropped."}
    )

    def __post_init__(self) -> None:
        for name in ("model_name_or_path", "dataset_name"):
            if not getattr(self, name):
                raise ValueError(f"{name} is not set; give --{name} or put it in the --config file")
        if self.max_length < 2:
            raise ValueError(
                f"max_length is {self.max_length}; it must be at least 2, one token each of prompt and end"
            )


def tokenize(dataset: Dataset, tokenizer: PreTrainedTokenizerBase, arguments: SFTArguments) -> Dataset:
    """Rows of `input_ids`, `labels` (prompt tokens ignored, the end learned) and `length`, none above `max_length`.

    A completion ends with the eos, or, if the prompts are messages, with what ends a turn in the chat template.

    Raises:
        ValueError: when the completion column is missing, a completion is not text, or no row fits.
    """
    column = arguments.completion_column
    if column not in dataset.column_names:
        raise ValueError(f"the dataset has no column {column!r}, only {dataset.column_names}; set --completion_column")
    columns: dict[str, Any] = {"prompt_column": arguments.prompt_column, "prompt_template": arguments.prompt_template}
    prompts = prepare_prompts(dataset, tokenizer, query_len=arguments.max_length - 1, **columns)
    turn_end = resolve_turn_end(tokenizer) if prompts.are_messages else None
    end = tokenizer.eos_token_id if turn_end is None else turn_end
    examples = []
    for item in prompts:
        prompt, completion = item["input_ids"], item["row"][column]
        if not isinstance(completion, str):
            raise ValueError(f"the completion {completion!r} is a {type(completion).__name__}; it must be text")
        answer = tokenizer(completion, add_special_tokens=False)["input_ids"] + [end]
        labels = [IGNORED] * len(prompt) + answer
        if len(labels) <= arguments.max_length:
            examples.append({"input_ids": prompt + answer, "labels": labels, "length": len(labels)})
    if not examples:
        raise ValueError(f"no example fits into max_length ({arguments.max_length}) tokens; raise it")
    return Dataset.from_list(examples)


def main(argv: Sequence[str] | None = None) -> None:
    """Trains with the options in `argv` (default: the command line) and writes the model to its `output_dir`."""
    arguments, training = parse_args([SFTArguments, TrainingArguments], argv)
    check_whole_model("model_name_or_path", arguments.model_name_or_path)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model_name_or_path, trust_remote_code=False)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    named = {"dataset_name": arguments.dataset_name, "config_name": arguments.dataset_config}
    train, test = (
        tokenize(load_prompt_dataset(**named, split=split), tokenizer, arguments) if split else None
        for split in (arguments.dataset_train_split, arguments.dataset_test_split)
    )
    trainer = Trainer(
        model=load_causal_lm(arguments.model_name_or_path),
        args=training,
        train_dataset=train,
        eval_dataset=test,
        data_collator=DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=IGNORED),
        processing_class=tokenizer,
    )
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    trainer.save_model()


if __name__ == "__main__":
    main()
