"""Supervised fine-tuning of a causal language model on prompts and completions; the loss is on the completions only.

Packing is left out; `--train_sampling_strategy group_by_length` keeps padding small.
"""

import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset
from transformers import DataCollatorForSeq2Seq, GenerationConfig, PreTrainedTokenizerBase, Trainer, TrainingArguments

from alpaca_ppo.config.checks import without_nulls
from alpaca_ppo.config.names import model_folder
from alpaca_ppo.config.parser import parse_args
from alpaca_ppo.config.script_arguments import SupervisedLoraArguments
from alpaca_ppo.config.supervised_arguments import SFTArguments
from alpaca_ppo.control_tokens import continuing
from alpaca_ppo.data import PromptDataset
from alpaca_ppo.data.prompts import rendered, well_formed_messages
from alpaca_ppo.data.templates import PROBE
from alpaca_ppo.generation.stopping import resolve_stop_tokens, resolve_turn_end, write_stop_tokens
from alpaca_ppo.models import load_causal_lm
from alpaca_ppo.supervised.run import rows_that_fit, split_conversations, train, trainer_data, with_adapter

IGNORED = -100
# The tag of a thought (group 1, its two parts 2 and 3) at the end of a prompt.
_OPENED = re.compile(r"(?i)(([<\[◁])((?:seed:)?(?:think(?:ing)?|thought|reasoning)[>\]▷]))\s*\Z")


def with_prompts(dataset: Dataset, prompt_column: str, completion_column: str = "completion") -> Dataset:
    """The demonstrations. Their completions, which may be in `messages` or `conversations`, become `completion_column`;
    of a whole conversation, what comes before the first answer becomes the prompt.
    """
    names, usual = dataset.column_names, ("messages", "conversations")
    column = next((name for name in (completion_column, *usual) if name in names), None)
    for number, messages in enumerate(map(without_nulls, dataset[column]) if column else ()):
        # Of anything but messages: text and turns are answers, and any other list was meant to be messages.
        other = "" if isinstance(messages, list) and not _are_turns(messages) else "assistant"
        first, end = (messages[i]["role"] if well_formed_messages(messages) else other for i in (0, -1))
        lacks_prompt = first == "assistant" and column in usual and prompt_column not in names
        if "assistant" not in (first, end) or lacks_prompt:
            remedy = "it must be messages (role, content) from prompt to answer"
            raise ValueError(f"row {number}: {column} is {messages!s:.99}; {remedy}")
    dataset = dataset.rename_columns({column: completion_column} if column else {})

    def before_answer(messages: list[dict[str, Any]]) -> int:
        return [message["role"] for message in messages].index("assistant")

    return split_conversations(dataset, [completion_column], prompt_column, before_answer)


def tokenize(prompts: PromptDataset, tokenizer: PreTrainedTokenizerBase, arguments: SFTArguments) -> Dataset:
    """Rows of `input_ids`, `labels` and `length`. Labels ignore the prompt and include the end of the completion: the
    eos or, if prompts are messages, what ends a turn in the chat template.

    A completion is text; after a prompt of messages also messages, of which the assistant's are learned, all as the
    chat template writes them; or a list of turns with `role` and `text`, as in tables of rollouts under `turns`, of
    which those of `policy` are learned.
    """
    turn_end = resolve_turn_end(tokenizer, arguments.chat_template_kwargs) if prompts.are_messages else None
    end = tokenizer.eos_token_id if turn_end is None else turn_end
    encode, rows, rewritten = continuing(tokenizer), [], 0
    for number, item in zip(prompts.numbers, prompts, strict=True):
        row, parts = item["row"], [(False, item["input_ids"])]
        completion = prompts.form.own_keys(row[arguments.completion_column], arguments.completion_column)
        answers = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
        roles = [message["role"] for message in answers] if well_formed_messages(answers) else [""]
        if prompts.are_messages and roles[0] == roles[-1] == "assistant":
            options = {"tokenize": False, **prompts.form.options_of(row)}
            parts, only_last = _message_parts(item, answers, number, tokenizer, options, encode, end)
            rewritten += only_last
        else:
            for is_learned, text in _parts(completion):
                parts.append((is_learned, encode(text, parts[-1][1])))
        if parts[-1][1][-1:] != [end]:
            parts.append((True, [end]))
        ids = [token for _, part in parts for token in part]
        labels = [token if is_learned else IGNORED for is_learned, part in parts for token in part]
        rows.append({"input_ids": ids, "labels": labels, "length": len(ids)})
    if rewritten:
        PartialState().print(
            f"in {rewritten} of {len(rows)} rows the chat template writes the prompt in another way once an answer "
            f"follows, or ends an earlier answer without {tokenizer.decode(end)!r}; only the last answer is learned "
            "there, after the prompt of alpaca-ppo train"
        )
    return rows_that_fit(rows, arguments.max_length)


def _message_parts(
    item: Any, answers: list[Any], number: int, tokenizer: Any, options: Any, encode: Callable[..., list[int]], end: Any
) -> tuple[list[tuple[bool, list[int]]], bool]:
    """The token ids of a prompt and of the messages that answer it, in parts, each with whether it is learned; and
    whether only the last answer is, because of how the template writes earlier ones. `end` ends a turn.
    """
    prompt = item["row"]["prompt"]
    starts = [i for i, message in enumerate(answers) if message["role"] == "assistant"]
    texts = [
        rendered([*prompt, *answers[:i]], tokenizer, {**options, "add_generation_prompt": i < len(answers)}, number)
        for i in [*starts, len(answers)]
    ]
    # The conversation from each earlier answer to the content of the next message, which is not learned.
    cut = [[*prompt, *answers[: i + 1], {**answers[i + 1], "content": PROBE}] for i in starts[:-1]]
    ended = [rendered(messages, tokenizer, options, number).rpartition(PROBE)[0] for messages in cut]
    earlier = [encode(text.removeprefix(before)) for text, before in zip(ended, texts, strict=False)]
    # What follows each prompt: an answer, and messages up to the next one.
    continuations = [_continuation(*two, answers[i]) for two, i in zip(pairwise(texts), starts, strict=True)]
    # An answer without its end cannot be told from what follows it.
    only_last = not all(map(str.startswith, texts[1:], texts)) or any(end not in ids for ids in earlier)
    ids = list(tokenizer(texts[-2], add_special_tokens=False)["input_ids"]) if only_last else item["input_ids"]
    parts = [(False, ids)]
    for text in continuations[-1:] if only_last else continuations:
        ids = encode(text, ids)
        size = ids.index(end) + 1 if end in ids else len(ids)
        parts += [(True, ids[:size]), (False, ids[size:])]
    # Without what the template writes after the last turn.
    return parts[:-1], only_last


def _continuation(prompt: str, text: str, answer: dict[str, Any]) -> str:
    """What `text`, which the chat template writes with `answer`, has beyond `prompt`; if it begins in another way, the
    answer's own text. A thought that `prompt` opens is not opened again; an answer without a thought closes it.
    """
    opened, content = _OPENED.search(prompt), answer.get("content") or ""
    start = prompt if opened is None or text.startswith(prompt) else prompt[: opened.start()]
    rest = text.removeprefix(start) if text.startswith(start) else content
    if opened is None:
        return rest
    if (end := opened.expand(r"\2/\3")) not in rest:
        # Templates leave out thoughts in the text, or those of their own.
        thought, found, _ = content.rpartition(end)
        rest = (thought + end if found else f"{answer.get('reasoning_content') or ''}\n{end}\n\n") + rest
    return rest.removeprefix(opened[0]).removeprefix(opened[1])


def _are_turns(completion: Any) -> bool:
    """Whether it is the turns of a rollout."""
    return isinstance(completion, list) and all(isinstance(t, dict) and {"role", "text"} <= {*t} for t in completion)


def _parts(completion: Any) -> list[tuple[bool, str]]:
    """The texts of a completion, each with whether it is learned (True) or ignored."""
    if isinstance(completion, str):
        return [(True, completion)]
    if not completion or not _are_turns(completion) or completion[-1]["role"] != "policy":
        raise ValueError(
            f"the completion {str(completion)[:200]} is a {type(completion).__name__}; it must be text, or a list of "
            'turns such as {"role": "policy", "text": "..."}, of which the last is the policy\'s, or, after a prompt '
            "of messages, a list of messages that begins and ends with the assistant's"
        )
    return [(turn["role"] == "policy", turn["text"]) for turn in completion]


class _Trainer(Trainer):
    """Saves the `generation_config` of the base, if it has one, with the tokens that end a response."""

    generation_config: GenerationConfig | None = None
    stop_token_ids: Sequence[int] = ()

    def save_model(self, output_dir: str | None = None, **keywords: Any) -> None:
        super().save_model(output_dir, **keywords)
        if self.is_world_process_zero() and self.generation_config is not None:
            write_stop_tokens(Path(output_dir or self.args.output_dir), self.generation_config, self.stop_token_ids)


def train_sft(argv: Sequence[str] | None = None) -> None:
    """Trains with the options in `argv` (default: the command line) and writes the model to its `output_dir`."""
    types = [SFTArguments, SupervisedLoraArguments, TrainingArguments]
    arguments, lora, training = parse_args(types, argv, prog="alpaca-ppo sft")
    model_name = model_folder("model_name_or_path", arguments.model_name_or_path)
    data, counts = trainer_data(model_name, arguments, training, [arguments.completion_column], tokenize, with_prompts)
    model = load_causal_lm(model_name, dtype=getattr(torch, lora.dtype), load_in_4bit=lora.load_in_4bit)
    tokenizer = data["processing_class"]
    # The end of a completion, which is learned.
    end = data["train_dataset"][0]["labels"][-1]
    generation_config = model.generation_config
    if generation_config is not None:
        # The trainer changes and saves the model's, and may refuse to save the base's.
        model.generation_config = GenerationConfig()
    model = with_adapter(model, lora, "CAUSAL_LM")
    trainer = _Trainer(model, training, DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=IGNORED), **data)
    trainer.generation_config = generation_config
    trainer.stop_token_ids = resolve_stop_tokens(tokenizer, generation_config, [end])
    train(trainer, counts, "alpaca-ppo train --dataset_name ... --reward_funcs ... --model_name_or_path")
