"""Supervised fine-tuning of a causal language model on prompts and completions; the loss is on the completions only.

Packing is left out; `--train_sampling_strategy group_by_length` keeps padding small.
"""

from collections.abc import Sequence
from typing import Any

from datasets import Dataset
from transformers import DataCollatorForSeq2Seq, PreTrainedTokenizerBase, Trainer, TrainingArguments

from alpaca_ppo.config.names import model_folder
from alpaca_ppo.config.parser import parse_args
from alpaca_ppo.config.supervised_arguments import SFTArguments
from alpaca_ppo.control_tokens import continuing
from alpaca_ppo.data import PromptDataset
from alpaca_ppo.generation import resolve_turn_end
from alpaca_ppo.models import load_causal_lm
from alpaca_ppo.supervised.run import rows_that_fit, train, trainer_data

IGNORED = -100


def tokenize(prompts: PromptDataset, tokenizer: PreTrainedTokenizerBase, arguments: SFTArguments) -> Dataset:
    """Rows of `input_ids`, `labels` and `length`. Labels ignore the prompt and include the end of the completion: the
    eos or, if prompts are messages, what ends a turn in the chat template.

    A completion is text, or a list of turns with `role` and `text`, as in tables of rollouts under `turns`; turns of
    other roles than `policy` are not learned.
    """
    turn_end = resolve_turn_end(tokenizer, arguments.chat_template_kwargs) if prompts.are_messages else None
    end = tokenizer.eos_token_id if turn_end is None else turn_end
    encode, rows = continuing(tokenizer), []
    for item in prompts:
        prompt = item["input_ids"]
        ids, labels = [*prompt], [IGNORED] * len(prompt)
        for is_learned, text in _parts(item["row"][arguments.completion_column]):
            part = encode(text)
            ids += part
            labels += part if is_learned else [IGNORED] * len(part)
        completion = ids[len(prompt) :]
        if completion[-1:] != [end]:
            ids.append(end)
            labels.append(end)
        rows.append({"input_ids": ids, "labels": labels, "length": len(labels)})
    return rows_that_fit(rows, arguments.max_length)


def _parts(completion: Any) -> list[tuple[bool, str]]:
    """The texts of a completion, each with whether it is learned (True) or ignored."""
    if isinstance(completion, str):
        return [(True, completion)]
    turns = completion if isinstance(completion, list) else []
    are_valid = all(isinstance(turn, dict) and {"role", "text"} <= set(turn) for turn in turns)
    if not turns or not are_valid or turns[-1]["role"] != "policy":
        raise ValueError(
            f"the completion {str(completion)[:200]} is a {type(completion).__name__}; it must be text, or a list of "
            'turns such as {"role": "policy", "text": "..."}, of which the last is the policy\'s'
        )
    return [(turn["role"] == "policy", turn["text"]) for turn in turns]


def train_sft(argv: Sequence[str] | None = None) -> None:
    """Trains with the options in `argv` (default: the command line) and writes the model to its `output_dir`."""
    arguments, training = parse_args([SFTArguments, TrainingArguments], argv, prog="alpaca-ppo sft")
    model_name = model_folder("model_name_or_path", arguments.model_name_or_path)
    data = trainer_data(model_name, arguments, training, [arguments.completion_column], tokenize)
    collator = DataCollatorForSeq2Seq(data["processing_class"], label_pad_token_id=IGNORED)
    trainer = Trainer(load_causal_lm(model_name), training, collator, **data)
    train(trainer, "alpaca-ppo train --dataset_name ... --reward_funcs ... --model_name_or_path")
