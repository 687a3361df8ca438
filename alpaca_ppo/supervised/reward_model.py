"""Pairwise reward modelling (Bradley-Terry): the chosen completion's score is raised over the rejected one's.

The loss of a pair is -log sigmoid(score(chosen) - score(rejected)) (Ouyang et al., arXiv:2203.02155, eq. 1). The score
is read at the last token that is not the pad token. A tokenizer without a pad token pads with eos, so that the score is
read before an eos at the end of a text, here and wherever the model is loaded.
"""

from collections.abc import Sequence
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from torch.nn.functional import logsigmoid
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerBase, Trainer, TrainingArguments
from transformers.trainer_utils import EvalPrediction

from alpaca_ppo.adapters.files import CLASSIFIER_HEADS
from alpaca_ppo.config.checks import template_options
from alpaca_ppo.config.names import model_folder
from alpaca_ppo.config.parser import parse_args
from alpaca_ppo.config.script_arguments import SupervisedLoraArguments
from alpaca_ppo.config.supervised_arguments import RewardModelArguments
from alpaca_ppo.data import PromptDataset
from alpaca_ppo.data.prompts import well_formed_messages
from alpaca_ppo.library_output import has_screen, transformers_bars
from alpaca_ppo.models.loading import four_bit
from alpaca_ppo.supervised.run import rows_that_fit, split_conversations, train, trainer_data, with_adapter

PAIR = ("chosen", "rejected")


def with_prompts(dataset: Dataset, prompt_column: str) -> Dataset:
    """The pairs; of whole conversations, the messages with which both begin become the prompt."""

    def shared(chosen: list[Any], rejected: list[Any]) -> int:
        # The last message is always the completion.
        pairs = list(zip(chosen[:-1], rejected[:-1], strict=False))
        return next((i for i, (one, other) in enumerate(pairs) if one != other), len(pairs))

    return split_conversations(dataset, PAIR, prompt_column, shared)


def tokenize(prompts: PromptDataset, tokenizer: PreTrainedTokenizerBase, arguments: RewardModelArguments) -> Dataset:
    """Rows of `chosen` and `rejected`, token ids with the prompt, and `length`, that of the longer one."""
    pairs = []
    for row in (item["row"] for item in prompts):
        chosen, rejected = (_sequence(tokenizer, row, prompts.form.own_keys(row[name], name)) for name in PAIR)
        pairs.append({"chosen": chosen, "rejected": rejected, "length": max(len(chosen), len(rejected))})
    return rows_that_fit(pairs, arguments.max_length)


def _sequence(tokenizer: PreTrainedTokenizerBase, row: dict[str, Any], completion: Any) -> list[int]:
    prompt = row["prompt"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return list(tokenizer(prompt + completion)["input_ids"])
    answer = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
    if isinstance(prompt, str) or not well_formed_messages(answer):
        problem = f"the completion {str(completion)[:200]} is a {type(completion).__name__}"
        remedy = "it must be text, or, after a prompt of messages, a list of messages with 'role' and 'content'"
        raise ValueError(f"{problem}; {remedy}")
    options: Any = {"tokenize": True, "return_dict": True, **template_options(row)}
    return list(tokenizer.apply_chat_template([*prompt, *answer], **options)["input_ids"])


class RewardTrainer(Trainer):
    """A `Trainer` whose batches hold first the chosen sequences and then the rejected ones, in the same order."""

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        chosen, rejected = model(**inputs).logits.squeeze(-1).float().chunk(2)
        loss = -logsigmoid(chosen - rejected).mean()
        return (loss, chosen - rejected) if return_outputs else loss

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        with torch.no_grad():
            loss, margins = self.compute_loss(model, self._prepare_inputs(inputs), return_outputs=True)
        return loss, margins, torch.ones_like(margins)


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions > 0).mean())}


def train_reward_model(argv: Sequence[str] | None = None) -> None:
    """Trains with the options in `argv` (default: the command line) and writes the reward model to its `output_dir`."""
    types = [RewardModelArguments, SupervisedLoraArguments, TrainingArguments]
    arguments, lora, training = parse_args(types, argv, prog="alpaca-ppo reward")
    # `collate` reads columns that the model does not take.
    training.remove_unused_columns = False
    model_name = model_folder("model_name_or_path", arguments.model_name_or_path, writes_text=False)
    data, counts = trainer_data(model_name, arguments, training, PAIR, tokenize, with_prompts)
    tokenizer = data["processing_class"]
    options: Any = {"num_labels": 1, "pad_token_id": tokenizer.pad_token_id, "dtype": getattr(torch, lora.dtype)}
    if lora.load_in_4bit:
        options["quantization_config"] = four_bit(without=CLASSIFIER_HEADS)
    with transformers_bars(shown=has_screen()):
        model = AutoModelForSequenceClassification.from_pretrained(model_name, trust_remote_code=False, **options)
    model = with_adapter(model, lora, "SEQ_CLS")

    def collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        sequences = [row[column] for column in PAIR for row in rows]
        return dict(tokenizer.pad({"input_ids": sequences}, padding_side="right", return_tensors="pt"))

    trainer = RewardTrainer(model, training, collate, compute_metrics=accuracy, **data)
    option = "--reward_adapter" if lora.use_peft else "--reward_model_name_or_path"
    train(trainer, counts, f"alpaca-ppo train --model_name_or_path ... --dataset_name ... {option}")
